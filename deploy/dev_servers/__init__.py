"""Servers that stand behind a server in production, started on loopback for development and tests. Never part of the wheel."""
