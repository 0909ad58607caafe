"""A PostgreSQL server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running server."""

    url: str  # postgresql+psycopg://… of its maintenance database

    def new_database(self, template: str | None = None) -> str:
        """Make a database, a copy of the one named ``template`` if given; its URL."""
        raise RuntimeError("being written")


@contextmanager
def running(folder: Path) -> Iterator[PostgresServer]:
    """Serve from ``folder`` until the block ends."""
    raise RuntimeError("being written")
    yield
