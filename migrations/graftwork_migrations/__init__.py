"""Alembic's revisions of the platform's tables. Refuses to know anything but the models."""
