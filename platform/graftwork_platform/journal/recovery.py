"""What dead processes left in their journals becomes usage rows: finished requests as they ended, the others from what is known.

A folder is deleted only once all it says is durable in this process's own journal, so a recovery that is killed is done again, and
the database takes each row once. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar
from uuid import UUID

from graftwork_engine.errors import EngineUnavailable
from graftwork_engine.messages import Orphans
from graftwork_platform.journal.ledger import UsageLedger
from graftwork_platform.journal.records import Checkpoint, Close, Count, Open, Reading, Record
from graftwork_platform.journal.segments import JournalFolder, take_dead
from graftwork_platform.models import UsageStatus
from graftwork_platform.usage import UsageNotRecorded, UsageRow

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_BATCH = 1000
_NOTHING = Count(0, 0)


class OrphanKeeper(Protocol):
    """An engine that knows how far the requests of a dead process came."""

    async def claim_orphans(self, request_ids: Sequence[str], *, wait_s: float) -> Orphans:
        """Final counts, kept until `settle_orphans`. Raises `EngineUnavailable` if no engine answers within ``wait_s``."""
        ...

    async def settle_orphans(self, request_ids: Sequence[str]) -> None:
        """These counts are durable."""
        ...


@dataclass(frozen=True, slots=True)
class RecoveryTimes:
    """All in seconds. An engine that takes longer than ``engine_wait`` is a new one, which knows nothing of old requests."""

    engine_wait: float = 30.0
    stopping_wait: float = 5.0
    poll_every: float = 0.1
    look_every: float = 10.0  # for processes that die while this one lives, or whose lock was held a moment longer


@dataclass(slots=True)
class _Unclosed:
    """A request that was running when its process died, and its last durable counts."""

    opened: Open
    counts: dict[str, Count] = field(default_factory=dict)

    def final_row(self, final_counts: Mapping[str, int]) -> UsageRow:
        """As it ended. Nothing is charged where no output is known of, for then nobody can have had any."""
        row = self.opened.row
        known = [self.counts.get(engine_id, _NOTHING) for engine_id in self.opened.engine_ids]
        output = sum(
            max(count.output_tokens, final_counts.get(engine_id, 0))
            for engine_id, count in zip(self.opened.engine_ids, known, strict=True)
        )
        prompt = row.prompt_tokens if output else 0
        cached = min(prompt, sum(count.cached_tokens for count in known))
        return replace(row, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output, status=UsageStatus.ABORTED)


class _Findings:
    """What journals say, read in the order of their writing."""

    def __init__(self) -> None:
        self.unclosed: dict[UUID, _Unclosed] = {}
        self._by_engine_id: dict[str, _Unclosed] = {}

    @property
    def engine_ids(self) -> list[str]:
        """Of all requests without an end."""
        return list(self._by_engine_id)

    def take_in(self, records: Iterable[Record]) -> list[UsageRow]:
        """Returns the final rows among them."""
        rows = []
        for record in records:
            match record:
                case Open():
                    self._open(record)
                case Checkpoint():
                    for engine_id, count in record.counts.items():
                        if (request := self._by_engine_id.get(engine_id)) is not None:
                            request.counts[engine_id] = count
                case Close():
                    self._close(record.row)
                    rows.append(record.row)
        return rows

    def _open(self, opened: Open) -> None:
        """A request is opened again in each segment it lives to see."""
        request = self.unclosed.setdefault(opened.row.request_id, _Unclosed(opened))
        for engine_id in opened.engine_ids:
            self._by_engine_id[engine_id] = request

    def _close(self, row: UsageRow) -> None:
        if (request := self.unclosed.pop(row.request_id, None)) is not None:
            for engine_id in request.opened.engine_ids:
                self._by_engine_id.pop(engine_id, None)


class Recovery:
    """Takes over the journals beside ``ledger``'s own whose process has ended."""

    def __init__(self, ledger: UsageLedger, engine: OrphanKeeper, times: RecoveryTimes = RecoveryTimes()) -> None:
        self._root, self._ledger, self._engine, self._times = ledger.root, ledger, engine, times
        self._unreadable: set[str] = set()

    async def run(self) -> None:
        """Recover now and then until cancelled."""
        while True:
            try:
                await self.recover()
            except (OSError, UsageNotRecorded) as fault:
                _log.error("usage of an earlier process waits in %s: %s", self._root, fault)
            except Exception:  # noqa: BLE001 — this loop supervises: what nobody foresaw must not make an attempt the last one
                _log.exception("usage of an earlier process waits in %s", self._root)
            await asyncio.sleep(self._times.look_every)

    async def recover(self) -> None:
        """Take over all that dead processes have left. Raises `OSError` or `UsageNotRecorded`; nothing is lost by that."""
        held = take_dead(self._root)  # no thread: if we are cancelled, the locks must not be left with it
        try:
            findings = _Findings()
            for folder in list(held):
                if not await self._read(folder, findings):
                    held.remove(folder)
                    folder.release()
            if findings.unclosed:
                await self._close_unclosed(findings)
            while held:
                await asyncio.to_thread(held[0].remove)
                del held[0]
        finally:
            for folder in held:
                folder.release()

    async def _read(self, folder: JournalFolder, findings: _Findings) -> bool:
        """Make a journal's final rows ours, and gather the rest; False if another version wrote it."""
        for path in folder.segments():
            reading, records = await asyncio.to_thread(_read_segment, path)
            if reading.is_other_format:
                if folder.path.name not in self._unreadable:
                    _log.error("%s has another format than this version's, and is left alone", path)
                    self._unreadable.add(folder.path.name)
                return False
            rows = findings.take_in(records)
            if reading.num_cut:
                _log.warning("%s: the last %d bytes are torn or damaged, and are left out", path, reading.num_cut)
            for batch in _batches(rows):
                await self._ledger.record(*batch)
        return True

    async def _close_unclosed(self, findings: _Findings) -> None:
        """End what was running: with the engine's count where it has one, else with the last durable one."""
        ids = findings.engine_ids
        counts = await self._final_counts(ids)
        rows = [request.final_row(counts) for request in findings.unclosed.values()]
        for batch in _batches(rows):
            await self._ledger.record(*batch)
        _log.warning("%d requests of an earlier process are closed, %d of them by the engine's count", len(rows), len(counts))
        for settled in _batches(ids):
            await self._engine.settle_orphans(settled)

    async def _final_counts(self, engine_ids: Sequence[str]) -> dict[str, int]:
        """What the engine says, once the requests it still knows have stopped or have had their time to."""
        counts: dict[str, int] = {}
        times = self._times
        try:
            async with asyncio.timeout(times.engine_wait + times.stopping_wait):
                waiting = await self._claim(engine_ids, counts)
                for _ in range(round(times.stopping_wait / times.poll_every)):
                    if not waiting:
                        break
                    await asyncio.sleep(times.poll_every)
                    waiting = await self._claim(waiting, counts)
        except (EngineUnavailable, TimeoutError) as error:
            _log.warning("the last durable counts stand for those the engine does not give: %s", error or "it does not answer")
        return counts

    async def _claim(self, engine_ids: Sequence[str], counts: dict[str, int]) -> list[str]:
        """Ask once; returns the ids to ask for again."""
        stopping: list[str] = []
        for batch in _batches(engine_ids):
            answer = await self._engine.claim_orphans(batch, wait_s=self._times.engine_wait)
            counts.update((orphan.request_id, orphan.output_count) for orphan in answer.items)
            stopping += answer.stopping
        return stopping


@asynccontextmanager
async def recovering(recovery: Recovery) -> AsyncIterator[None]:
    """Recover in the background of the block."""
    task = asyncio.create_task(recovery.run(), name="recover usage journals")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _read_segment(path: Path) -> tuple[Reading, list[Record]]:
    reading = Reading(path.read_bytes())
    return reading, list(reading)


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[begin : begin + _MAX_BATCH] for begin in range(0, len(items), _MAX_BATCH))
