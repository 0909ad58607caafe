"""Connections to a SQLite file.

WAL mode with ``synchronous=FULL``: a commit that has returned survives a power cut. Writers begin with ``BEGIN IMMEDIATE``, so a
transaction that reads before it writes can never fail half way for want of the lock.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

BUSY_TIMEOUT_MS = 10_000


def make_private(path: Path) -> None:
    """Make the file, unless it is there, for its owner alone whatever the umask. SQLite gives its WAL the same mode.

    A file that is there is not even opened: closing it again would drop the locks of this process's other connections.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def sqlite_engine(url: URL, *, size: int, writes: bool) -> Engine:
    """At most ``size`` connections to a file that `make_private` has made. They can only read unless they are for ``writes``."""
    engine = create_engine(url, poolclass=QueuePool, pool_size=size, max_overflow=0, hide_parameters=True)

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
        if not isinstance(connection, sqlite3.Connection):
            raise AssertionError(f"{type(connection)} is no SQLite connection")
        connection.isolation_level = None  # transactions are begun below, not by the driver's guess
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        if not writes:
            connection.execute("PRAGMA query_only=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
