"""The database: short sessions, read in parallel and written by one thread. Knows no tables but their metadata.

SQLite runs in WAL mode with ``synchronous=FULL``: a commit that has returned survives a power cut. Writers begin with
``BEGIN IMMEDIATE``, so a transaction that reads before it writes can never fail half way for want of the lock.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

T = TypeVar("T")

BUSY_TIMEOUT_MS = 10_000


class UnsupportedDatabase(Exception):
    """A database URL that this server cannot use; the message says which it can."""


class Database:
    """Sessions on one database. Thread-safe; `close` when done.

    A session lives for one unit of work: it begins with a transaction, commits when the block ends and rolls back when the block
    raises. Objects read in it stay readable afterwards.
    """

    def __init__(self, url: str, *, readers: int = 2) -> None:
        """``readers`` connections at most are open for reading, and one for writing."""
        self.url = check_url(url)
        make_private(sqlite_path(self.url))
        self._readers = _engine(self.url, size=readers, writes=False)
        self._writer = _engine(self.url, size=1, writes=True)
        self._reader_threads = ThreadPoolExecutor(readers, thread_name_prefix="db-read")
        self._writer_thread = ThreadPoolExecutor(1, thread_name_prefix="db-write")

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one snapshot and cannot write."""
        with Session(self._readers, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that holds the write lock from its first statement. Waits for other writers."""
        with Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    async def run_read(self, work: Callable[[Session], T]) -> T:
        """``work`` in a reading session on a worker thread."""

        def run() -> T:
            with self.read() as session:
                return work(session)

        return await asyncio.get_running_loop().run_in_executor(self._reader_threads, run)

    async def run_write(self, work: Callable[[Session], T]) -> T:
        """``work`` in a writing session on the one writer thread; its result is durable when this returns.

        Once begun, the work is carried through even if the caller is cancelled.
        """

        def run() -> T:
            with self.write() as session:
                return work(session)

        return await asyncio.get_running_loop().run_in_executor(self._writer_thread, run)

    def close(self) -> None:
        """Finish running work and close every connection."""
        self._reader_threads.shutdown()
        self._writer_thread.shutdown()
        self._readers.dispose()
        self._writer.dispose()


def check_url(url: str) -> URL:
    """The parsed URL; raises `UnsupportedDatabase` unless it is a SQLite file and its path has ``%3F`` for ``?``."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        raise UnsupportedDatabase(f"{parsed.render_as_string()} is not served: give sqlite:///PATH, a file on a local disk")
    if "?" in url:  # all behind it would silently be left out of the path
        raise UnsupportedDatabase("the database's URL has a query: write a ? in its path as %3F")
    return parsed


def sqlite_path(url: URL) -> Path:
    """The file of a URL that `check_url` has passed."""
    return Path(url.database or "")


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


def _engine(url: URL, *, size: int, writes: bool) -> Engine:
    engine = create_engine(url, poolclass=QueuePool, pool_size=size, max_overflow=0)

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
