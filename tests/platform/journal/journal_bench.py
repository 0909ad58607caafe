"""What the journal stands between, made to fail on request: a disk, a database, an engine, and the process itself."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from graftwork_engine.errors import EngineUnavailable
from graftwork_engine.messages import Orphan, Orphans
from graftwork_platform.ids import show, uuid7
from graftwork_platform.journal.ledger import JournalLimits, UsageLedger
from graftwork_platform.journal.recovery import Recovery, RecoveryTimes
from graftwork_platform.models import UsageStatus
from graftwork_platform.usage import UsageRow

TENANT, KEY = uuid7(), uuid7()
TIMES = RecoveryTimes(engine_wait=60.0, stopping_wait=0.2, poll_every=0.01)
"""An engine that is away says so at once, and one that stops nothing is asked 20 times, on a machine of any speed."""


def make_row(**changes: Any) -> UsageRow:
    """A row as it is opened."""
    values: dict[str, Any] = {
        "request_id": uuid7(),
        "client_request_id": None,
        "tenant_id": TENANT,
        "key_id": KEY,
        "model": "support",
        "version_id": None,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 0,
        "status": UsageStatus.ABORTED,
        "created_at": 1_700_000_000_000,
    }
    return UsageRow(**{**values, **changes})


def engine_ids_of(row: UsageRow, count: int = 1) -> list[str]:
    """The engine requests a client request runs as."""
    first = show("req", row.request_id)
    return [first, *(f"{first}-{number}" for number in range(1, count))]


@dataclass
class Disk:
    """Counts fsyncs, remembers what they made durable, and forgets the rest when the power fails."""

    num_syncs: int = 0
    fault: OSError | None = None
    before_sync: Callable[[], None] = lambda: None
    _sizes: dict[int, int] = field(default_factory=dict)
    _names: dict[int, set[str]] = field(default_factory=dict)

    def sync(self, descriptor: int) -> None:
        """In the place of `os.fsync`."""
        self.before_sync()
        if self.fault is not None:
            raise self.fault
        self.num_syncs += 1
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self._names[found.st_ino] = set(os.listdir(descriptor))
        else:
            self._sizes[found.st_ino] = found.st_size

    def lose_power(self, root: Path, kept: float = 0.0) -> None:
        """Forget what is not durable, but for the first part ``kept`` (0 to 1) of each file's tail."""
        for folder in list(root.iterdir()):
            if folder.name not in self._names.get(root.stat().st_ino, set()):
                shutil.rmtree(folder)
                continue
            for path in folder.glob("*.seg"):
                inode = path.stat().st_ino
                if path.name not in self._names.get(folder.stat().st_ino, set()):
                    path.unlink()
                    continue
                durable = self._sizes.get(inode, 0)
                os.truncate(path, durable + int(kept * (path.stat().st_size - durable)))


class TableOfRows:
    """A database that can be away; a row that is there stays as it is."""

    def __init__(self) -> None:
        self.rows: dict[Any, UsageRow] = {}
        self.is_away = False
        self.num_writes = 0

    async def write(self, rows: Sequence[UsageRow]) -> None:
        while self.is_away:
            await asyncio.sleep(0.002)
        self.num_writes += 1
        await asyncio.sleep(0)
        for row in rows:
            self.rows.setdefault(row.request_id, row)


@dataclass
class Engine:
    """Knows how many tokens each engine request has made; a request that is ``stopping`` says so once."""

    counts: dict[str, int] = field(default_factory=dict)
    stopping: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    is_away: bool = False
    num_claims: int = 0

    async def claim_orphans(self, request_ids: Sequence[str], *, wait_s: float) -> Orphans:
        self.num_claims += 1
        if self.is_away:
            raise EngineUnavailable("no engine")
        waiting = [i for i in request_ids if i in self.stopping]
        known = [Orphan(i, self.counts[i]) for i in request_ids if i in self.counts and i not in self.stopping]
        self.stopping.difference_update(waiting)
        return Orphans("e", known, waiting)

    async def settle_orphans(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.settled.add(request_id)
            self.counts.pop(request_id, None)


@dataclass
class Bench:
    """One journal folder and all around it. ``now`` is the ledgers' clock."""

    root: Path
    disk: Disk = field(default_factory=Disk)
    table: TableOfRows = field(default_factory=TableOfRows)
    engine: Engine = field(default_factory=Engine)
    now: float = 1000.0
    times: RecoveryTimes = TIMES

    def ledger(self, **limits: Any) -> UsageLedger:
        """A new process's ledger, not yet started."""
        chosen = JournalLimits(**{"drain": 60.0, **limits})
        return UsageLedger(self.root, self.table.write, chosen, clock=lambda: self.now, sync=self.disk.sync)

    async def started(self, **limits: Any) -> UsageLedger:
        """The same, running."""
        ledger = self.ledger(**limits)
        await ledger.start()
        return ledger

    async def checkpoint(self, ledger: UsageLedger) -> None:
        """Let the time of a checkpoint come, and wait for the writer to have done it."""
        self.now += 1.0
        ledger._wake.set()
        while ledger._next_checkpoint <= self.now:
            await asyncio.sleep(0)
        await settled(ledger)

    async def recover(self, ledger: UsageLedger) -> None:
        """What the background does at a start."""
        await Recovery(ledger, self.engine, self.times).recover()

    async def written(self, ledger: UsageLedger) -> None:
        """Wait for the database to have every row that is durable."""
        while ledger.stats["unwritten_rows"]:
            await asyncio.sleep(0.001)

    def folders(self) -> list[str]:
        """Names of the journals that lie on the disk."""
        return sorted(path.name for path in self.root.iterdir())


async def settled(ledger: UsageLedger) -> None:
    """Wait until the writer waits for its next work."""
    for _ in range(3):
        await ledger._in_thread(lambda: None)
        for _ in range(5):
            await asyncio.sleep(0)


async def kill(ledger: UsageLedger) -> None:
    """End a ledger as SIGKILL would: what the kernel has stays, locks fall, nothing more is written."""
    await ledger._in_thread(lambda: None)
    assert ledger._folder is not None
    for chapter in ledger._chapters():
        chapter.segment.close()
    os.close(ledger._folder._lock)
    for task in ledger._tasks:
        task.cancel()
    await asyncio.gather(*ledger._tasks, return_exceptions=True)
    ledger._thread.shutdown()


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_writes(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """From now on the disk takes ``after`` more bytes, and then says that it is full."""
    real, left = os.write, [after]

    def write(descriptor: int, data: Any) -> int:
        if len(data) > left[0] == 0:
            raise FULL
        taken = min(left[0], len(data))
        left[0] -= taken
        return real(descriptor, bytes(data[:taken]))

    monkeypatch.setattr("graftwork_platform.journal.segments.os.write", write)


def run(work: Callable[[], Awaitable[None]]) -> None:
    """In a loop of its own, for so long and no longer."""

    async def within() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(within())
