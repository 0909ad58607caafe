"""Connections to PostgreSQL, and what its errors mean: try again, or it is away.

A reader's transaction is READ ONLY and sees one snapshot. A writer's is READ COMMITTED: each of its statements sees what others
have committed by then, so rows that a decision rests on are locked (``with_for_update``), and what must happen in one order takes
turns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import IntEnum

import psycopg
from sqlalchemy import Connection, Dialect, Engine, create_engine, event, text
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, QueuePool

from graftwork_platform.db_patience import Patience
from graftwork_platform.db_url import POSTGRESQL, UnsupportedDatabase, describe

_OLDEST = 15
_LOCKS = 0x67726166
"""The first half of the advisory locks' keys, so that other software on the same database is not met."""

_CONNECTING = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",  # milliseconds until a server that no longer acknowledges is given up
    "application_name": "graftwork",
}
# A process that stalls in the middle of a transaction must not keep the others out for ever.
# A commit is on the server's disk whatever its configuration says: the journal gives up its rows then.
_SESSION = (
    "SET lock_timeout = '10s'; SET statement_timeout = '30s'; SET idle_in_transaction_session_timeout = '60s'; "
    "SET synchronous_commit = on"
)

_LOST_A_RACE = ("40001", "40P01", "23505")
"""Serialization failure, deadlock, and a unique value that somebody else took first: work done again sees the other's row."""

_AWAY = ("08", "53300", "57", "55P03", "25P03")
"""Beginnings of the states of a server that is lost, full, stopping, or held up."""


class Turn(IntEnum):
    """What only one transaction at a time may do, on all servers together."""

    MIGRATE = 1
    RECORD_USAGE = 2
    CHANGE_ADMIN_KEY = 3
    CLAIM_SECRETS = 4


def take_turn(session: Session | Connection, turn: Turn) -> None:
    """Wait until no other transaction has this turn, and keep it to the end of this one. SQLite has one writer anyway."""
    connection = session if isinstance(session, Connection) else session.connection()
    if connection.dialect.name == POSTGRESQL:
        connection.execute(text("SELECT pg_advisory_xact_lock(:locks, :turn)"), {"locks": _LOCKS, "turn": turn.value})


def postgresql_engine(url: URL, *, size: int, writes: bool, patience: Patience) -> Engine:
    """At most ``size`` connections, each looked at before use, so that a server that was restarted is survived. A thread waits for
    answers as long as ``patience`` allows.
    """
    engine = create_engine(
        url,
        poolclass=QueuePool,
        pool_size=size,
        max_overflow=0,
        pool_pre_ping=True,
        hide_parameters=True,
        connect_args=connect_options(url),
    )

    @event.listens_for(engine, "do_connect")
    def connect(
        _dialect: Dialect, _entry: ConnectionPoolEntry, args: tuple[str, ...], options: dict[str, str]
    ) -> psycopg.Connection[object]:
        return patience.connect(*args, **options)

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
        driver = _checked(connection, url)
        driver.autocommit = True
        driver.execute(_SESSION)
        driver.autocommit = False
        if not writes:
            driver.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            driver.read_only = True

    return engine


def migrating_engine(url: URL) -> Engine:
    """One connection without limits of time, for changes of the tables."""
    engine = create_engine(url, poolclass=NullPool, hide_parameters=True, connect_args=connect_options(url))

    @event.listens_for(engine, "connect")
    def check(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
        _checked(connection, url)

    return engine


@asynccontextmanager
async def connection_for_notices(url: URL) -> AsyncIterator[psycopg.AsyncConnection]:
    """A connection outside every pool, each of whose statements is a transaction, to LISTEN on."""
    _, options = url.get_dialect()().create_connect_args(url)
    options = {**connect_options(url), "application_name": "graftwork key changes", **options}
    async with await psycopg.AsyncConnection.connect(**options, autocommit=True) as connection:
        yield connection


def connect_options(url: URL) -> dict[str, str]:
    """What is added to the URL's own options: a server that is gone is noticed."""
    return {name: value for name, value in _CONNECTING.items() if name not in url.query}


def lost_a_race(error: DBAPIError) -> bool:
    """True if the same work may succeed when it is done again from the start."""
    return _state(error) in _LOST_A_RACE


def is_away(error: DBAPIError) -> bool:
    """True if the server cannot be reached, or does not answer in time."""
    if error.connection_invalidated:
        return True
    if not isinstance(error.orig, psycopg.OperationalError):
        return False
    state = _state(error)
    return state is None or state.startswith(_AWAY)


def why_away(error: DBAPIError, url: URL) -> str:
    """A connection that failed, told to an operator: what is wrong and what to do next."""
    said = " ".join(str(error.orig).split())
    where = describe(url)
    if "password" in said or "authentication" in said:
        return f"{where} refuses the user or the password of --database-url: {said}"
    if "does not exist" in said:
        return f"{where} is not there: {said}. Make it first: createdb {url.database}"
    return f"{where} does not answer: {said}. See that PostgreSQL runs there and takes connections from this machine"


def _checked(connection: DBAPIConnection, url: URL) -> psycopg.Connection[object]:
    if not isinstance(connection, psycopg.Connection):
        raise AssertionError(f"{type(connection)} is no PostgreSQL connection")
    major = connection.info.server_version // 10_000
    if major < _OLDEST:
        raise UnsupportedDatabase(f"{describe(url)} is PostgreSQL {major}: version {_OLDEST} or newer is needed, upgrade it first")
    if (encoding := connection.info.parameter_status("server_encoding")) != "UTF8":
        raise UnsupportedDatabase(f"{describe(url)} is encoded in {encoding}: make one with createdb --encoding UTF8 -T template0")
    return connection


def _state(error: DBAPIError) -> str | None:
    return error.orig.sqlstate if isinstance(error.orig, psycopg.Error) else None
