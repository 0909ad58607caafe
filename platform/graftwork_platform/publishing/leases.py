"""Who may publish an upload: one server at a time, for as long as it says that it lives. Knows no files.

A lease is a row's holder and its end, taken and renewed by single UPDATEs. The end is compared with each server's own clock, so a
clock that is wrong can make two servers work on one upload. That costs work and nothing else: only the holder's transaction can
give the verdict, and what the other one stored has the same names and the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from uuid import UUID, uuid4

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from graftwork_platform.db import Database
from graftwork_platform.ids import show
from graftwork_platform.publishing import records
from graftwork_platform.publishing.records import Lease, LeaseLost

_log = logging.getLogger(__name__)

_RENEWALS = 3  # tries within a lease


@dataclass(frozen=True, slots=True)
class PublishTiming:
    """How servers that share a database share the publishing. In seconds."""

    lease: float = 15.0  # after which a silent server's publication is anyone's
    poll: float = 3.0  # between looks for publications that nobody runs
    retry_pause: float = 2.0  # after a first failure that is not the upload's; doubles with each
    outage_pause: float = 5.0  # after a failure because the store or the database is away, and at least
    outage: float = 300.0  # for which such failures do not count as attempts
    sweep: float = 600.0  # between sweeps


class Leases:
    """The leases of one server's publications. ``now`` is Unix time in seconds."""

    def __init__(self, database: Database, duration: float, now: Callable[[], float]) -> None:
        self._database = database
        self._duration = duration
        self._now = now
        self._held: set[UUID] = set()

    async def take(self, upload_id: UUID) -> Lease | None:
        """The right to publish the upload, which counts as one more attempt; None if another has it or the verdict is there."""
        token = uuid4()  # of each taking its own: a server that lost a lease is not the one that takes it again
        self._held.add(token)  # before: a cancelled caller does not learn that it got it
        now, until = self._millis(), self._millis(self._duration)
        lease = await self._database.run_write(lambda session: records.take_lease(session, upload_id, token, now, until))
        if lease is None:
            self._held.discard(token)
        return lease

    async def keep(self, lease: Lease, work: Coroutine[None, None, None]) -> None:
        """Do ``work`` and renew the lease meanwhile. Raises what ``work`` raises, and `LeaseLost`, the work being cancelled, once
        the lease is another server's.
        """
        working = asyncio.create_task(work, name=f"work on {show('up', lease.upload_id)}")
        renewing = asyncio.create_task(self._renew_until_lost(lease), name=f"renew {show('up', lease.upload_id)}")
        try:
            await asyncio.wait((working, renewing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()  # does nothing to a task that is done
            renewing.cancel()
            await asyncio.gather(working, renewing, return_exceptions=True)
        if working.cancelled():
            raise LeaseLost(lease.upload_id)
        working.result()

    def ended(self, lease: Lease) -> None:
        """The lease's verdict is there, or it was given back or lost."""
        self._held.discard(lease.token)

    async def close(self) -> None:
        """Give back what is still held, so that another server, or this one's next start, need not wait."""
        held, self._held = self._held, set()
        if held:
            await self._database.run_write(lambda session: records.release_leases(session, held))

    async def _renew_until_lost(self, lease: Lease) -> None:
        def renew(session: Session) -> bool:
            return records.renew_lease(session, lease, self._millis(self._duration))

        held = True
        while held:
            await asyncio.sleep(self._duration / _RENEWALS)
            try:
                held = await self._database.run_write(renew)
            except SQLAlchemyError:  # unheard is not lost: the transaction that gives the verdict looks again
                _log.exception("the lease of %s could not be renewed", show("up", lease.upload_id))

    def _millis(self, ahead: float = 0.0) -> int:
        return int((self._now() + ahead) * 1000)
