"""The database: short sessions on worker threads. Knows no tables."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from graftwork_platform.db_postgresql import is_away, lost_a_race, postgresql_engine, why_away
from graftwork_platform.db_sqlite import make_private, sqlite_engine
from graftwork_platform.db_url import check_url, sqlite_path
from graftwork_platform.errors import ServiceUnavailable

T = TypeVar("T")

_log = logging.getLogger(__name__)

_READERS = 4
_WRITERS = 2  # on PostgreSQL; a SQLite file has one
_TRIES = 8
_FIRST_PAUSE_S = 0.005
"""Before the second try; each further one waits up to twice as long, so that those who met once do not meet again."""


class DatabaseUnavailable(ServiceUnavailable, SQLAlchemyError):
    """The database cannot be reached, or holds this transaction up for too long; ``__cause__`` says more than a client may know."""

    def __init__(self) -> None:
        super().__init__("The server's database does not answer at the moment.", code="database_unavailable", retry_after=1)

    def __str__(self) -> str:
        return self.message


class Database:
    """Sessions on one database. Thread-safe; `close` when done.

    A session lives for one unit of work: it begins with a transaction, commits when the block ends and rolls back when the block
    raises. Objects read in it stay readable afterwards. SQLite has one writer, and every other waits; on PostgreSQL several write
    at once, in several servers, see `db_postgresql`.
    """

    def __init__(self, url: str, *, readers: int = _READERS) -> None:
        """``readers`` connections at most are open for reading. Raises `UnsupportedDatabase`; connects at the first use."""
        self.url = check_url(url)
        self._path = sqlite_path(self.url)
        if self._path is not None:
            make_private(self._path)
        writers = _WRITERS if self._path is None else 1
        engine = postgresql_engine if self._path is None else sqlite_engine
        self._readers = engine(self.url, size=readers, writes=False)
        self._writers = engine(self.url, size=writers, writes=True)
        self._reader_threads = ThreadPoolExecutor(readers, thread_name_prefix="db-read")
        self._writer_threads = ThreadPoolExecutor(writers, thread_name_prefix="db-write")

    @property
    def is_shared(self) -> bool:
        """True if other servers may use it at the same time."""
        return self._path is None

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one snapshot and cannot write. Raises `DatabaseUnavailable`."""
        with self._telling(), Session(self._readers, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that can write; on SQLite it holds the write lock from its first statement. Raises `DatabaseUnavailable`."""
        with self._telling(), Session(self._writers, expire_on_commit=False) as session, session.begin():
            yield session

    async def run_read(self, work: Callable[[Session], T]) -> T:
        """``work`` in a reading session on a worker thread."""

        def run() -> T:
            with self.read() as session:
                return work(session)

        return await asyncio.get_running_loop().run_in_executor(self._reader_threads, run)

    async def run_write(self, work: Callable[[Session], T]) -> T:
        """``work`` in a writing session on a writer thread; its result is durable when this returns.

        Work that lost a race against another server's is done again from the start, so it looks before it decides and changes
        nothing outside its session but what it may change twice. Once begun, it is carried through even if the caller is cancelled.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writer_threads, self.write_now, work)

    def write_now(self, work: Callable[[Session], T]) -> T:
        """As `run_write`, on the caller's own thread."""
        for tried in range(1, _TRIES):
            try:
                with self.write() as session:
                    return work(session)
            except DBAPIError as error:
                if not lost_a_race(error):
                    raise
            time.sleep(random.uniform(0, _FIRST_PAUSE_S * 2**tried))
        with self.write() as session:
            return work(session)

    def close(self) -> None:
        """Finish running work and close every connection."""
        self._reader_threads.shutdown()
        self._writer_threads.shutdown()
        self._readers.dispose()
        self._writers.dispose()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            if not is_away(error):
                raise
            _log.warning("%s", why_away(error, self.url))
            raise DatabaseUnavailable from error
