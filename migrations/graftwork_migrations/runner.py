"""Bring a database to a revision, from code or from the command line, without an ini file. Knows no server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from graftwork_platform.db_postgresql import Turn, is_away, migrating_engine, take_turn, why_away
from graftwork_platform.db_sqlite import BUSY_TIMEOUT_MS, make_private
from graftwork_platform.db_url import check_url, describe, is_postgresql, sqlite_path

HEAD = "head"
BASE = "base"

_NEXT_STEPS = (
    (
        ("permission denied", "must be owner"),
        "The role needs to own the database: ALTER DATABASE {database} OWNER TO {user}; and what is in it already: REASSIGN OWNED",
    ),
    (
        ("file is not a database", "malformed"),
        "That file is no SQLite database, or a broken one: restore a backup, or name another",
    ),
    (("already exists",), "Tables of that name are there and not graftwork's: give it a database of its own, empty at first"),
    (("disk is full", "No space left", "disk I/O error"), "Make room on that disk and start again; nothing was changed"),
    (("readonly", "read-only", "unable to open"), "Let the server's user write that file and its folder, or give another database"),
    (("database is locked",), "Another process is using that file: end it, and start again"),
)
"""Words of the databases' messages, and what to do then."""


class NewerDatabase(Exception):
    """The database was made by a newer version of this software; the message names its revision."""


class UnreachableDatabase(Exception):
    """The database cannot be reached; the message says why and what to do."""


class UnusableDatabase(Exception):
    """The database is reached and refuses; the message says why and what to do."""


def upgrade(database_url: str, revision: str = HEAD) -> None:
    """Bring the database, made if need be, up to ``revision``: all steps or none.

    Raises `NewerDatabase` for one whose revision this version does not know, `UnsupportedDatabase` for the URL or for a server that
    is too old, `UnreachableDatabase`, `UnusableDatabase`.
    """
    with _connect(database_url) as connection:
        _refuse_newer(connection)
        command.upgrade(_config(connection), revision)


def downgrade(database_url: str, revision: str) -> None:
    """Take the database back to ``revision``: all steps or none. Data that only newer tables hold is lost."""
    with _connect(database_url) as connection:
        _refuse_newer(connection)
        command.downgrade(_config(connection), revision)


def current(database_url: str) -> str | None:
    """The database's revision; None for one that has no tables yet, or is not there. Changes nothing."""
    path = sqlite_path(check_url(database_url))
    if path is not None and not path.exists():
        return None
    with _connect(database_url, writes=False) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def head() -> str:
    """The newest revision that this version knows."""
    revision = _scripts().get_current_head()
    if revision is None:
        raise AssertionError("there is no revision")
    return revision


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(Path(__file__).parent))


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    return config


def _refuse_newer(connection: Connection) -> None:
    revision = MigrationContext.configure(connection).get_current_revision()
    known = {script.revision for script in _scripts().walk_revisions()}
    if revision is not None and revision not in known:
        raise NewerDatabase(
            f"the database is at revision {revision}, which this version of graftwork does not know: it was made by a newer one. "
            "Install that version again, or restore a backup."
        )


@contextmanager
def _connect(database_url: str, *, writes: bool = True) -> Iterator[Connection]:
    """One transaction. If it ``writes`` it holds the write lock on SQLite, and on PostgreSQL the turn to migrate: of servers that
    start at the same moment one migrates, and the others find it done.
    """
    url = check_url(database_url)
    engine = migrating_engine(url) if is_postgresql(url) else _sqlite_engine(url, writes=writes)
    try:
        with engine.begin() as connection:
            if writes:
                take_turn(connection, Turn.MIGRATE)
            yield connection
    except DBAPIError as error:
        if is_away(error):
            raise UnreachableDatabase(why_away(error, url)) from error
        raise UnusableDatabase(_why_unusable(error, url)) from error


def _why_unusable(error: DBAPIError, url: URL) -> str:
    said = " ".join(str(error.orig).split())
    for words, next_step in _NEXT_STEPS:
        if any(word in said for word in words):
            return f"{describe(url)}: {said}. " + next_step.format(database=url.database, user=url.username)
    return f"{describe(url)} cannot be used: {said}. See its log, or give an empty one with --database-url"


def _sqlite_engine(url: URL, *, writes: bool) -> Engine:
    """Foreign keys are off, since SQLite changes a table by replacing it."""
    path = sqlite_path(url)
    if path is None:
        raise AssertionError(f"{describe(url)} is no SQLite file")
    path.parent.mkdir(parents=True, exist_ok=True)
    make_private(path)
    engine = create_engine(url, poolclass=NullPool)

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        cursor.execute("PRAGMA synchronous=FULL")
        if writes:
            cursor.execute("PRAGMA journal_mode=WAL")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
