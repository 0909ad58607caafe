"""Which database a URL names. Knows no connection, and never shows a password."""

from __future__ import annotations

from pathlib import Path

from psycopg import ProgrammingError
from psycopg.conninfo import make_conninfo
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

POSTGRESQL = "postgresql"

_POSTGRESQL_NAMES = ("postgresql", "postgres", "postgresql+psycopg")
_SERVED = "give sqlite:///PATH, a file on a local disk, or postgresql://USER:PASSWORD@HOST:PORT/DATABASE"


class UnsupportedDatabase(Exception):
    """A database that this server cannot use; the message says which it can."""


def check_url(url: str) -> URL:
    """The parsed URL, PostgreSQL's with its driver. Raises `UnsupportedDatabase` unless it is a SQLite file, whose path has ``%3F``
    for ``?``, or a PostgreSQL database.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # whose message may quote a part of the password
        raise UnsupportedDatabase(
            f"the database's URL cannot be read: {_SERVED}. Write @ : / ? # and % in a password as %40 %3A %2F %3F %23 %25"
        ) from None
    if parsed.drivername in _POSTGRESQL_NAMES:
        try:
            make_conninfo("", **dict.fromkeys(parsed.query, ""))
        except ProgrammingError as error:
            raise UnsupportedDatabase(f"{describe(parsed)}: {error}") from None
        if not parsed.database:
            raise UnsupportedDatabase(f"{describe(parsed)} names no database: {_SERVED}")
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        raise UnsupportedDatabase(f"{describe(parsed)} is not served: {_SERVED}")
    if "?" in url:  # all behind it would silently be left out of the path
        raise UnsupportedDatabase("the database's URL has a query: write a ? in its path as %3F")
    return parsed


def is_postgresql(url: URL) -> bool:
    """True for PostgreSQL, false for SQLite, of a URL that `check_url` has passed."""
    return url.get_backend_name() == POSTGRESQL


def sqlite_path(url: URL) -> Path | None:
    """The file of a URL that `check_url` has passed; None for PostgreSQL."""
    return None if is_postgresql(url) else Path(url.database or "")


def describe(url: URL) -> str:
    """How a database is called in messages: no user, no password, no options."""
    kind = url.drivername.partition("+")[0]
    if kind == "sqlite":
        return f"sqlite:///{url.database or ''}"
    host = url.host or url.query.get("host") or "localhost"
    port = f":{url.port}" if url.port else ""
    return f"{kind}://{host}{port}/{url.database or ''}"
