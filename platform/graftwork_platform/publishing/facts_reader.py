"""Finds out what versions are that an older server published, or that went through one: from their stored uploads, once for each.

Such a version is never served on a guess: as a plain LoRA, an activated one would apply from the prompt's first token on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from uuid import UUID

from graftwork_adapters.errors import AdapterError
from graftwork_adapters.keys import AdapterDigest, RowTypeName
from graftwork_platform.catalog.facts import VersionFacts
from graftwork_platform.db import Database
from graftwork_platform.errors import ServiceUnavailable
from graftwork_platform.publishing import records

_log = logging.getLogger(__name__)

WAIT_S = 20.0
"""How long a request waits before it is told to come again."""
PAUSE_S = 30.0
"""After a failure, in which requests are told of it at once."""
_RETRY_AFTER = 5

LookAgain = Callable[[AdapterDigest, RowTypeName | None], Awaitable[VersionFacts]]
"""`Publisher.look_again`."""


class FactsReader:
    """Belongs to one event loop."""

    def __init__(self, database: Database, look_again: LookAgain, *, wait: float = WAIT_S, pause: float = PAUSE_S) -> None:
        self._database = database
        self._look_again = look_again
        self._wait = wait
        self._pause = pause
        self._reading: dict[UUID, asyncio.Task[VersionFacts]] = {}
        self._failed: dict[UUID, tuple[float, str]] = {}  # until when on the monotonic clock, and why

    async def learn(self, name: str, version_id: UUID, digest: AdapterDigest, row_type: RowTypeName | None) -> VersionFacts:
        """What the version is, which is kept with it. All who ask at once wait for one reading. Raises `ServiceUnavailable`."""
        until, why = self._failed.get(version_id, (0.0, ""))
        if time.monotonic() < until:
            raise _unavailable(name, why)
        task = self._reading.get(version_id)
        if task is None:
            task = asyncio.create_task(self._read(version_id, digest, row_type), name=f"look at {digest} again")
            self._reading[version_id] = task
            task.add_done_callback(lambda done: self._ended(version_id, done))
        try:
            async with asyncio.timeout(self._wait):
                return await asyncio.shield(task)
        except TimeoutError:
            raise _unavailable(name, "that is still being done") from None
        except (AdapterError, OSError) as error:
            raise _unavailable(name, _words(error)) from error

    async def close(self) -> None:
        """Stop; what was being read is read again when it is next asked for."""
        tasks = list(self._reading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, version_id: UUID, digest: AdapterDigest, row_type: RowTypeName | None) -> VersionFacts:
        facts = await self._look_again(digest, row_type)
        await self._database.run_write(lambda session: records.keep_facts(session, version_id, facts))
        return facts

    def _ended(self, version_id: UUID, task: asyncio.Task[VersionFacts]) -> None:
        self._reading.pop(version_id, None)
        self._failed.pop(version_id, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("%s failed: %s", task.get_name(), error)
        if isinstance(error, (AdapterError, OSError)):
            self._failed[version_id] = (time.monotonic() + self._pause, _words(error))


def _words(error: AdapterError | OSError) -> str:
    """Without paths."""
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)


def _unavailable(name: str, why: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"The model `{name}` cannot be served at the moment: an older server published it, and its upload is read again; {why}",
        code="adapter_unknown",
        retry_after=_RETRY_AFTER,
    )
