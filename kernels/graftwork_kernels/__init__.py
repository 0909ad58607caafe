"""Arithmetic. Refuses to know requests and files."""
