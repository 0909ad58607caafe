"""Rows on their way from the journal to the database: in memory while they are few, else read again from their segments."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graftwork_platform.journal.records import Close, Reading
from graftwork_platform.journal.segments import Segment
from graftwork_platform.usage import UsageRow

_log = logging.getLogger(__name__)

_MAX_BATCH = 500
_RETRY_S = 5.0

WriteRows = Callable[[Sequence[UsageRow]], Awaitable[None]]
"""Returns when the rows are in the database, however long that takes; rows that are there already change nothing."""


@dataclass(slots=True, eq=False)
class Chapter:
    """A segment, and what still needs it: requests whose `Open` is there, and closed rows the database does not have."""

    segment: Segment
    started: float
    num_entries: int = 0
    num_carried: int = 0  # bytes of it that repeat what earlier segments say of running requests
    num_unwritten: int = 0
    is_sealed: bool = False
    has_new_opens: bool = False  # not yet durable
    is_spilled: bool = False  # some of its unwritten rows are no longer in memory

    @property
    def path(self) -> Path:
        """The segment's file."""
        return self.segment.path

    @property
    def is_done(self) -> bool:
        """True once the segment may be deleted."""
        return self.is_sealed and self.num_entries == 0 and self.num_unwritten == 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    row: UsageRow
    chapter: Chapter
    since: float


class Backlog:
    """Writes rows in the order of their closing. Belongs to one event loop; `run` does the work."""

    def __init__(self, write: WriteRows, clock: Callable[[], float], seal: Callable[[], None], max_in_memory: int) -> None:
        """``seal`` asks for a new segment, so that the spilled one can be read."""
        self._write, self._clock, self._seal, self._max_in_memory = write, clock, seal, max_in_memory
        self._waiting: deque[_Waiting] = deque()
        self._writing: Sequence[_Waiting] = ()
        self._spilled: deque[Chapter] = deque()
        self._changed = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.num_rows = 0

    @property
    def oldest_age(self) -> float:
        """How long the oldest row has been waiting, in seconds; for rows no longer in memory since their segment began."""
        since = [group[0].since for group in (self._writing, self._waiting) if group] + [c.started for c in self._spilled]
        return max(0.0, self._clock() - min(since)) if since else 0.0

    def add(self, row: UsageRow, chapter: Chapter) -> None:
        """Take over a row that is durable in ``chapter``."""
        self.num_rows += 1
        chapter.num_unwritten += 1
        self._is_empty.clear()
        if len(self._waiting) < self._max_in_memory:
            self._waiting.append(_Waiting(row, chapter, self._clock()))
        elif not chapter.is_spilled:
            chapter.is_spilled = True
            self._spilled.append(chapter)
            _log.warning("the database is behind by %d usage rows; further ones stay on disk until it has caught up", self.num_rows)
        self._changed.set()

    async def wait_empty(self) -> None:
        """Return once the database has every row."""
        await self._is_empty.wait()

    def chapter_sealed(self) -> None:
        """A segment was completed: if it is a spilled one, it can be read."""
        self._changed.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            self._changed.clear()
            if self._waiting:
                await self._write_waiting()
            elif self._spilled and self._spilled[0].is_sealed:
                await self._write_spilled(self._spilled[0])
            else:
                if self._spilled:
                    self._seal()
                await self._changed.wait()

    async def _write_waiting(self) -> None:
        batch = self._writing = [self._waiting.popleft() for _ in range(min(_MAX_BATCH, len(self._waiting)))]
        await self._write([waiting.row for waiting in batch])
        self._writing = ()
        for waiting in batch:
            self._written(waiting.chapter, 1)

    async def _write_spilled(self, chapter: Chapter) -> None:
        """Write all rows of a segment. None of them is in memory: this is only called when nothing is."""
        try:
            rows = await asyncio.to_thread(_closed_rows, chapter.path)
        except OSError as fault:
            _log.error("cannot read usage rows back from %s, trying again in %.0f s: %s", chapter.path, _RETRY_S, fault)
            await asyncio.sleep(_RETRY_S)
            return
        for begin in range(0, len(rows), _MAX_BATCH):
            await self._write(rows[begin : begin + _MAX_BATCH])
        self._spilled.popleft()
        chapter.is_spilled = False
        self._written(chapter, chapter.num_unwritten)

    def _written(self, chapter: Chapter, count: int) -> None:
        chapter.num_unwritten -= count
        self.num_rows -= count
        if self.num_rows == 0:
            self._is_empty.set()


def _closed_rows(path: Path) -> list[UsageRow]:
    return [record.row for record in Reading(path.read_bytes()) if isinstance(record, Close)]
