"""The database: short sessions on worker threads. Knows no tables."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from graftwork_platform.db_patience import Patience
from graftwork_platform.db_postgresql import is_away, lost_a_race, postgresql_engine, why_away
from graftwork_platform.db_sqlite import make_private, sqlite_engine
from graftwork_platform.db_url import check_url, describe, sqlite_path
from graftwork_platform.errors import ServiceUnavailable

T = TypeVar("T")

_log = logging.getLogger(__name__)

_READERS = 4
_WRITERS = 2  # on PostgreSQL; a SQLite file has one
_READ_WITHIN_S = 5.0
_WRITE_WITHIN_S = 30.0
_CLOSE_WITHIN_S = 5.0
_LAST_WORD_S = 0.5  # in which a thread that has waited long enough says so itself
_QUIET_S = 1.0
"""An absence is told no more often: every request meets it."""

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
    at once, in several servers, see `db_postgresql`. That one may freeze, so
    work on it has limits of time.
    """

    def __init__(self, url: str, *, readers: int = _READERS) -> None:
        """``readers`` connections at most are open for reading. Raises `UnsupportedDatabase`; connects at the first use."""
        self.url = check_url(url)
        self._path = sqlite_path(self.url)
        if self._path is not None:
            make_private(self._path)
        writers = _WRITERS if self._path is None else 1
        self._patience = Patience()
        self._quiet_until = -math.inf
        self._readers = self._engine(readers, writes=False)
        self._writers = self._engine(writers, writes=True)
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

    async def run_read(self, work: Callable[[Session], T], *, within: float = _READ_WITHIN_S) -> T:
        """``work`` in a reading session on a worker thread; `DatabaseUnavailable` if that takes longer than ``within`` seconds
        on PostgreSQL, the wait for a thread included.
        """

        def run() -> T:
            with self.read() as session:
                return work(session)

        return await self._run(self._reader_threads, run, within)

    async def run_write(self, work: Callable[[Session], T], *, within: float = _WRITE_WITHIN_S) -> T:
        """``work`` in a writing session on a writer thread; its result is durable when this returns.

        Work that lost a race against another server's is done again from the start, so it looks before it decides and changes
        nothing outside its session but what it may change twice. Once begun, it is carried through even if the caller is cancelled.
        `DatabaseUnavailable` says that PostgreSQL did not confirm it within ``within`` seconds: as a rule it is not done then, but
        a commit whose answer was lost is.
        """
        return await self._run(self._writer_threads, lambda: self.write_now(work), within)

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

    def hurry(self, within: float) -> None:
        """From now on nothing waits for PostgreSQL longer than ``within`` seconds in all: the server is stopping."""
        self._patience.end(within)

    def close(self) -> None:
        """Finish running work, unless PostgreSQL leaves it waiting, and close every connection."""
        self.hurry(_CLOSE_WITHIN_S)
        self._reader_threads.shutdown()
        self._writer_threads.shutdown()
        self._readers.dispose()
        self._writers.dispose()

    def _engine(self, size: int, *, writes: bool) -> Engine:
        if self._path is None:
            return postgresql_engine(self.url, size=size, writes=writes, patience=self._patience)
        return sqlite_engine(self.url, size=size, writes=writes)

    async def _run(self, threads: Executor, work: Callable[[], T], within: float) -> T:
        loop = asyncio.get_running_loop()
        if self._path is not None:
            return await loop.run_in_executor(threads, work)
        left = self._patience.left(within)
        until = time.monotonic() + left

        def limited() -> T:
            with self._patience.lasting(until - time.monotonic()):
                return work()

        try:
            async with asyncio.timeout(left + _LAST_WORD_S) as limit:
                return await loop.run_in_executor(threads, limited)
        except TimeoutError as error:
            if not limit.expired():
                raise
            self._tell(f"{describe(self.url)} did not answer within {within:g} s")
            raise DatabaseUnavailable from error

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            if not is_away(error):
                raise
            self._tell(why_away(error, self.url))
            raise DatabaseUnavailable from error

    def _tell(self, what: str) -> None:
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET_S
            _log.warning("%s", what)
