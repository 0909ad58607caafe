"""Keeps a ring equal to a PostgreSQL database whose keys other servers change too. Knows no requests.

The database itself announces every change of a key or tenant (triggers) on `CHANGES`. Announcements arrive in the order of their
commits, and so do the beats that this process sends to itself through the same queue: when a beat has come back, every change
that was committed before it was sent has arrived too, and once those are read, the ring is current up to then (`KeyRing.hear`).
A channel that is silent, for whatever reason, therefore makes the ring doubt itself; nothing has to be noticed for that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from uuid import UUID

import psycopg
from psycopg import sql
from sqlalchemy.exc import SQLAlchemyError

from graftwork_platform.db import Database
from graftwork_platform.db_postgresql import connection_for_notices
from graftwork_platform.errors import ServiceUnavailable
from graftwork_platform.keys.ring import SILENCE_S, KeyEntry, KeyRing, Reread
from graftwork_platform.keys.rows import ALL_WITHIN_S, all_entries, entries_of, entry_called

_log = logging.getLogger(__name__)

CHANGES = "graftwork_keys"
"""The channel of the triggers; payloads are ``key:UUID``, ``tenant:UUID`` or ``all``."""

_BEAT_S = 0.25
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_REREAD_WITHIN_S = 4.0
_REREADS = 2  # at the same time, of the database's four readers
_MOST_IDS = 500
"""More changes at once than this, and everything is read."""


@dataclass(slots=True)
class _Changes:
    """What was announced and not read yet."""

    everything: bool = False
    keys: set[UUID] = field(default_factory=set)
    tenants: set[UUID] = field(default_factory=set)

    def __bool__(self) -> bool:
        return self.everything or bool(self.keys) or bool(self.tenants)

    def add(self, payload: str) -> None:
        kind, _, text = payload.partition(":")
        wanted = {"key": self.keys, "tenant": self.tenants}.get(kind)
        try:
            if wanted is None:
                self.everything = True
            else:
                wanted.add(UUID(text))
        except ValueError:  # a newer version's word: whatever it says, reading everything covers it
            self.everything = True
        self.everything = self.everything or len(self.keys) + len(self.tenants) > _MOST_IDS


def reread_from(database: Database, *, within: float = _REREAD_WITHIN_S) -> Reread:
    """Reads one key for a request that cannot wait for the channel; gives up after ``within`` seconds.

    Few at a time, so that a flood of keys that are none leaves connections to those whose keys are known.
    """
    places = asyncio.Semaphore(_REREADS)

    async def reread(public_id: str) -> KeyEntry | None:
        try:
            async with asyncio.timeout(within), places:
                return await database.run_read(lambda session: entry_called(session, public_id), within=within)
        except (TimeoutError, SQLAlchemyError) as error:
            raise ServiceUnavailable("API keys cannot be checked at the moment; try again.", code="keys_unavailable") from error

    return reread


class KeyChannel:
    """`run` beside the requests, on the loop that owns the ring."""

    def __init__(self, database: Database, ring: KeyRing, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is the ring's."""
        self._database, self._ring, self._clock = database, ring, clock

    async def run(self) -> None:
        """Listen until cancelled. After a failure it listens again, and reads every key again."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                async with connection_for_notices(self._database.url) as connection:
                    await self._follow(connection)
            except (psycopg.Error, SQLAlchemyError, OSError) as error:
                _log.warning("changes of keys are not heard, each request reads its key: %s", " ".join(str(error).split()))
            pause = _FIRST_PAUSE_S if self._ring.is_current else min(_LONGEST_PAUSE_S, pause * 2)
            await asyncio.sleep(pause)

    async def _follow(self, connection: psycopg.AsyncConnection) -> None:
        beats = f"graftwork_beat_{secrets.token_hex(8)}"
        for channel in (CHANGES, beats):
            with _impatience(connection):
                await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        changes = _Changes(everything=True)  # what was missed while nobody listened
        while True:
            sent = self._clock()
            await self._beat(connection, beats, changes)
            await self._read(changes)
            self._ring.hear(sent)
            while (left := sent + _BEAT_S - self._clock()) > 0:
                changes = _Changes()
                async for notice in connection.notifies(timeout=left, stop_after=1):
                    changes.add(notice.payload)
                await self._read(changes)
            changes = _Changes()

    async def _beat(self, connection: psycopg.AsyncConnection, beats: str, changes: _Changes) -> None:
        """Returns when a beat has come back; what was announced before it is in ``changes``."""
        with _impatience(connection):
            await connection.execute("SELECT pg_notify(%s, '')", [beats])
            back = False
            while not back:
                async for notice in connection.notifies(stop_after=1):  # to its end, or what came with the first is lost
                    if notice.channel == beats:
                        back = True
                    else:
                        changes.add(notice.payload)

    async def _read(self, changes: _Changes) -> None:
        if not changes:
            return
        with self._ring.reading() as read:
            if changes.everything:
                read.replace_all(await self._database.run_read(all_entries, within=ALL_WITHIN_S))
            else:
                keys, tenants = changes.keys, changes.tenants
                read.replace(keys, tenants, await self._database.run_read(lambda session: entries_of(session, keys, tenants)))


@contextmanager
def _impatience(connection: psycopg.AsyncConnection) -> Iterator[None]:
    """Hang up on a server that does not answer within the block: the wait for it then ends with `psycopg.OperationalError`."""

    def hang_up() -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    timer = asyncio.get_running_loop().call_later(SILENCE_S, hang_up)
    try:
        yield
    finally:
        timer.cancel()
