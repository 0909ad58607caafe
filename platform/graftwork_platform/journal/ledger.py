"""The ledger of running requests: opened before they run, counted while they do, closed durably before their client is told.

`open` reaches the kernel, so a request is known even if this process is killed at once. One writer makes everything durable: counts
that changed each half second, final rows as they come, many by one fsync. Knows no engine and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from graftwork_platform.ids import show
from graftwork_platform.journal.backlog import Backlog, Chapter, WriteRows
from graftwork_platform.journal.records import MAGIC, Close, Count, Open, RecordTooLong, encode_counts, encode_record
from graftwork_platform.journal.segments import JournalFolder, Segment, Sync
from graftwork_platform.usage import UsageNotRecorded, UsageRow

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """When to write and when to begin a new segment. Times in seconds."""

    checkpoint_every: float = 0.5
    segment_bytes: int = 8 << 20
    segment_age: float = 60.0
    rows_in_memory: int = 20_000  # rows that wait for the database; the rest is read again from the segments
    drain: float = 5.0  # how long a stop waits for the database


class UsageEntry:
    """One running request. Made by `UsageLedger.open`; ended by one `close`."""

    def __init__(self, ledger: UsageLedger, opened: Open, chapter: Chapter) -> None:
        self.opened = opened
        self.chapter = chapter
        self.counts: dict[str, Count] = {}
        self._engine_ids = frozenset(opened.engine_ids)
        self._ledger = ledger
        self._is_closed = False

    def count(self, engine_id: str, output_tokens: int, cached_tokens: int) -> None:
        """Totals so far of one of its engine requests. Costs nothing: the next checkpoint writes them."""
        if engine_id not in self._engine_ids:
            raise AssertionError(f"{engine_id} is no part of this request")
        self.counts[engine_id] = Count(output_tokens, cached_tokens)
        self._ledger.note_change(self, engine_id)

    async def close(self, row: UsageRow) -> None:
        """Return when ``row`` is durable. It is written even if the caller is cancelled while it waits. Call it once.

        Raises `UsageNotRecorded`; the ledger then keeps trying, and should that come to nothing, the last checkpoint counts.
        """
        if self._is_closed or row.request_id != self.opened.row.request_id:
            raise AssertionError("a request is closed once, by its own row")
        self._is_closed = True
        await self._ledger.write_closed(row, self)


@dataclass(slots=True, eq=False)
class _Closing:
    """A final row on its way into the journal. ``done`` is None once its caller has been told that it failed."""

    row: UsageRow
    frame: bytes
    entry: UsageEntry | None
    done: asyncio.Future[None] | None


class UsageLedger:
    """This process's journal. Belongs to one event loop; `start` it first, `close` it last."""

    def __init__(
        self,
        root: Path,
        write_rows: WriteRows,
        limits: JournalLimits = JournalLimits(),
        *,
        clock: Callable[[], float] = time.monotonic,
        sync: Sync = os.fsync,
    ) -> None:
        self.root = root
        self._limits, self._clock, self._sync = limits, clock, sync
        self._backlog = Backlog(write_rows, clock, self._ask_for_segment, limits.rows_in_memory)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._folder: JournalFolder | None = None
        self._active: Chapter | None = None
        self._sealed: deque[Chapter] = deque()
        self._running: set[UsageEntry] = set()
        self._changed: dict[UsageEntry, set[str]] = {}  # with the ids whose counts no checkpoint has yet
        self._closing: list[_Closing] = []
        self._wake = asyncio.Event()
        self._wants_segment = False
        self._is_stopping = False
        self._next_checkpoint = 0.0
        self._failure: str | None = "the journal is not open"
        self._tasks: list[asyncio.Task[None]] = []

    # What others see

    @property
    def failure(self) -> str | None:
        """Why no request can be accounted for at present; None while all is well."""
        return self._failure

    @property
    def stats(self) -> dict[str, float]:
        """A reading; names end in their unit. Unwritten rows are durable here and not yet in the database."""
        return {
            "journal_bytes": float(sum(chapter.segment.size for chapter in self._chapters())),
            "journal_failed": float(self._failure is not None),
            "running_requests": float(len(self._running)),
            "unwritten_rows": float(self._backlog.num_rows),
            "oldest_unwritten_seconds": self._backlog.oldest_age,
        }

    # Life

    async def start(self) -> None:
        """Make this process's folder and begin to write. Raises `OSError`."""
        self._folder = await self._in_thread(lambda: JournalFolder.create(self.root, self._sync))
        await self._start_segment()
        self._failure = None
        self._next_checkpoint = self._clock() + self._limits.checkpoint_every
        self._tasks = [
            asyncio.create_task(self._write_for_ever(), name="write the usage journal"),
            asyncio.create_task(self._backlog.run(), name="write usage rows"),
        ]
        for task in self._tasks:
            task.add_done_callback(_report_end)

    async def close(self) -> None:
        """Give the database a moment to take what is left, and leave the rest to the next start."""
        writer, backlog = self._tasks
        deadline = asyncio.get_running_loop().time() + self._limits.drain
        await self._drain(deadline)  # while there still is a writer, which may have to start segments for it
        self._is_stopping = True
        self._failure = "the server is stopping"
        self._wake.set()
        await writer
        await self._drain(deadline)
        if self._backlog.num_rows:
            _log.warning("%d usage rows stay in the journal until the next start", self._backlog.num_rows)
        backlog.cancel()
        await asyncio.gather(backlog, return_exceptions=True)
        await self._in_thread(self._leave)
        self._thread.shutdown()

    async def _drain(self, deadline: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._closing and not self._is_stopping:
                    await asyncio.sleep(0.005)
                await self._backlog.wait_empty()

    def _leave(self) -> None:
        folder = self._opened_folder()
        for chapter in self._chapters():
            chapter.segment.close()
        if self._running or self._closing or self._backlog.num_rows:
            folder.release()
        else:
            folder.remove()

    # Requests

    def open(self, row: UsageRow, engine_ids: Sequence[str]) -> UsageEntry:
        """Account for a request that is about to run as these engine requests. ``row`` says how it would end if nothing more
        were known: no output, aborted.

        Raises `UsageNotRecorded`: the request must not run.
        """
        chapter = self._active
        if self._failure is not None or chapter is None:
            raise UsageNotRecorded(self._failure)
        opened = Open(row, tuple(engine_ids))
        try:
            chapter.segment.append(encode_record(opened))
        except RecordTooLong as error:
            raise UsageNotRecorded(str(error)) from error
        except OSError as fault:
            self._fail(fault)
            raise UsageNotRecorded(str(fault)) from fault
        entry = UsageEntry(self, opened, chapter)
        chapter.num_entries += 1
        chapter.has_new_opens = True
        self._running.add(entry)
        return entry

    def note_change(self, entry: UsageEntry, engine_id: str) -> None:
        """The next checkpoint writes this count of the entry."""
        self._changed.setdefault(entry, set()).add(engine_id)

    async def record(self, *rows: UsageRow) -> None:
        """Return when rows of requests that are not open here are durable. Raises `UsageNotRecorded`."""
        await asyncio.gather(*(self.write_closed(row, None) for row in rows))

    async def write_closed(self, row: UsageRow, entry: UsageEntry | None) -> None:
        """Return when ``row``, which ends ``entry`` if there is one, is durable. Raises `UsageNotRecorded`."""
        if self._is_stopping or not self._tasks:
            raise UsageNotRecorded(self._failure)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing.append(_Closing(row, encode_record(Close(row)), entry, done))
        self._wake.set()
        await done

    # The writer

    async def _write_for_ever(self) -> None:
        try:
            while not self._is_stopping:
                await self._wait_for_work()
                await self._commit()
            self._next_checkpoint = self._clock()
            await self._commit()
        finally:  # nobody may wait for a writer that is gone
            self._is_stopping = True
            self._failure = self._failure or "the journal's writer has ended"
            self._tell(self._closing, UsageNotRecorded(self._failure))

    async def _wait_for_work(self) -> None:
        """Wait for a final row or for the time of the checkpoint; while the journal cannot be written, for the latter alone."""
        while not self._is_stopping:
            rest = self._next_checkpoint - self._clock()
            if rest <= 0 or (self._closing and self._failure is None):
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(rest):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def _commit(self) -> None:
        """Make durable what there is; on a fault, tell the callers and keep it for the next attempt."""
        is_due = self._clock() >= self._next_checkpoint
        if is_due:
            self._next_checkpoint = self._clock() + self._limits.checkpoint_every
            await self._prune()
        closing, self._closing = self._closing, []
        try:
            if self._must_start_segment(is_due):
                await self._start_segment()
                self._recover_from_failure()
            await self._write(closing, with_counts=is_due)
        except OSError as fault:
            self._fail(fault)
            self._tell(closing, UsageNotRecorded(str(fault)))
            self._closing = closing + self._closing

    async def _write(self, closing: list[_Closing], *, with_counts: bool) -> None:
        chapter = self._opened_chapter()
        frames = [closed.frame for closed in closing]
        changed: dict[UsageEntry, set[str]] = {}
        to_sync = [chapter] if frames else []
        if with_counts:
            changed, self._changed = self._changed, {}
            counts = {name: entry.counts[name] for entry in changed.keys() & self._running for name in changed[entry]}
            if counts:
                frames.append(encode_counts(counts))
            to_sync = [c for c in self._chapters() if (c is chapter and frames) or (c.has_new_opens and c.num_entries)]
        for synced in to_sync:
            synced.has_new_opens = False  # one that comes while the disk works is for the next time
        try:
            await self._in_thread(lambda: _append_and_sync(chapter.segment, b"".join(frames), [c.segment for c in to_sync]))
        except OSError:
            self._change_again(changed)
            for synced in to_sync:
                synced.has_new_opens = True
            raise
        for closed in closing:
            self._closed(closed, chapter)

    def _closed(self, closing: _Closing, chapter: Chapter) -> None:
        if closing.entry is not None:
            self._running.discard(closing.entry)
            self._changed.pop(closing.entry, None)
            closing.entry.chapter.num_entries -= 1
        self._backlog.add(closing.row, chapter)
        if closing.done is not None and not closing.done.done():
            closing.done.set_result(None)

    def _change_again(self, changed: dict[UsageEntry, set[str]]) -> None:
        for entry, engine_ids in changed.items():
            self._changed.setdefault(entry, set()).update(engine_ids)

    def _tell(self, closing: list[_Closing], error: UsageNotRecorded) -> None:
        for closed in closing:
            if closed.done is not None:
                _log.error("usage of %s is not recorded: %s", show("req", closed.row.request_id), error)
                if not closed.done.done():
                    closed.done.set_exception(error)
                closed.done = None

    def _fail(self, fault: OSError) -> None:
        if self._failure is None:
            _log.error("the usage journal cannot be written, so no new requests are taken: %s", fault)
            self._failure = f"the usage journal cannot be written: {fault.strerror or fault}"

    def _recover_from_failure(self) -> None:
        if self._failure is not None and not self._is_stopping:
            _log.warning("the usage journal can be written again")
            self._failure = None

    # Segments

    def _ask_for_segment(self) -> None:
        self._wants_segment = True
        self._next_checkpoint = self._clock()
        self._wake.set()

    def _must_start_segment(self, is_due: bool) -> bool:
        """A new one after any fault, too: what a failed fsync has left is not to be trusted."""
        if self._failure is not None and not self._is_stopping:
            return True
        chapter = self._opened_chapter()
        is_old = chapter.segment.size > len(MAGIC) and self._clock() - chapter.started >= self._limits.segment_age
        is_full = chapter.segment.size - chapter.num_carried >= self._limits.segment_bytes
        return is_due and (self._wants_segment or is_old or is_full)

    async def _start_segment(self) -> None:
        """Go on in a new segment, which takes over the running requests, so that the old one can be deleted soon."""
        carried = sorted(self._running, key=lambda entry: entry.opened.row.request_id)
        counts = {engine_id: count for entry in carried for engine_id, count in entry.counts.items()}
        head = MAGIC + b"".join(encode_record(entry.opened) for entry in carried) + encode_counts(counts)
        changed, self._changed = self._changed, {}
        folder = self._opened_folder()
        try:
            segment = await self._in_thread(lambda: folder.start_segment(head))
        except OSError:
            self._change_again(changed)
            raise
        for entry in carried:
            entry.chapter.num_entries -= 1
        old, self._active = self._active, Chapter(segment, self._clock(), num_entries=len(carried), num_carried=len(head))
        for entry in carried:
            entry.chapter = self._active
        self._wants_segment = False
        if old is not None:
            old.is_sealed = True
            self._sealed.append(old)
            self._backlog.chapter_sealed()

    async def _prune(self) -> None:
        """Delete segments nobody needs, the oldest first: a `Close` is never gone before its `Open`."""
        while self._sealed and self._sealed[0].is_done:
            chapter = self._sealed[0]
            try:
                await self._in_thread(lambda segment=chapter.segment: _remove(segment))  # type: ignore[misc]
            except OSError as fault:
                _log.warning("%s stays for the present: %s", chapter.path, fault)
                return
            self._sealed.popleft()

    def _chapters(self) -> list[Chapter]:
        return [*self._sealed, *([self._active] if self._active is not None else [])]

    def _opened_folder(self) -> JournalFolder:
        if self._folder is None:
            raise AssertionError("the ledger is not started")
        return self._folder

    def _opened_chapter(self) -> Chapter:
        if self._active is None:
            raise AssertionError("the ledger is not started")
        return self._active

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("the task to %s has failed; rows wait for the next start", task.get_name(), exc_info=error)


def _append_and_sync(segment: Segment, data: bytes, to_sync: Sequence[Segment]) -> None:
    if data:
        segment.append(data)
    for synced in to_sync:
        synced.sync()


def _remove(segment: Segment) -> None:
    segment.path.unlink(missing_ok=True)
    segment.close()
