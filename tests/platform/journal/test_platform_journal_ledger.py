"""The ledger: what is durable when, how few fsyncs that takes, and what happens when the disk or the database says no.

This file is long because each promise of the ledger has a test of its own, and all are played on one bench.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from journal_bench import Bench, engine_ids_of, fail_writes, kill, make_row, run, settled

from graftwork_platform.journal.ledger import UsageEntry, UsageLedger
from graftwork_platform.journal.records import MAGIC, MAX_PAYLOAD, Checkpoint, Close, Count, Open, Reading, Record
from graftwork_platform.models import UsageStatus
from graftwork_platform.usage import UsageNotRecorded, UsageRow


def open_one(ledger: UsageLedger, **changes: Any) -> tuple[UsageRow, UsageEntry]:
    row = make_row(**changes)
    return row, ledger.open(row, engine_ids_of(row))


def ended(row: UsageRow, output_tokens: int = 5) -> UsageRow:
    return make_row(request_id=row.request_id, output_tokens=output_tokens, status=UsageStatus.COMPLETED)


def on_disk(bench: Bench) -> list[Record]:
    """All that the segments say, in order."""
    return list(itertools.chain(*(Reading(path.read_bytes()) for path in sorted(bench.root.glob("*/*.seg")))))


@contextmanager
def slow_sync(bench: Bench) -> Iterator[Callable[[], bool]]:
    """The disk's next sync lasts until the end of the block; the block is told whether it has begun."""
    syncing, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        syncing.set()
        assert may_end.wait(30), "the block waits for the disk"

    bench.disk.before_sync = wait
    try:
        yield syncing.is_set
    finally:
        bench.disk.before_sync = lambda: None
        may_end.set()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_an_open_reaches_the_kernel_at_once_and_the_disk_with_the_next_checkpoint(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        syncs = bench.disk.num_syncs
        row, entry = open_one(ledger)
        assert on_disk(bench) == [Open(row, tuple(engine_ids_of(row)))]
        assert bench.disk.num_syncs == syncs
        entry.count(engine_ids_of(row)[0], 3, 1)
        entry.count(engine_ids_of(row)[0], 4, 1)
        assert len(on_disk(bench)) == 1
        await bench.checkpoint(ledger)
        assert on_disk(bench)[1:] == [Checkpoint({engine_ids_of(row)[0]: Count(4, 1)})]
        assert bench.disk.num_syncs == syncs + 1
        await bench.checkpoint(ledger)
        assert bench.disk.num_syncs == syncs + 1, "nothing changed, nothing is written"
        await kill(ledger)

    run(work)


def test_a_close_returns_once_it_is_durable_and_the_row_reaches_the_database(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, entry = open_one(ledger)
        done_at_sync: list[bool] = []
        bench.disk.before_sync = lambda: done_at_sync.append(closing.done())
        closing = asyncio.create_task(entry.close(ended(row)))
        await closing
        assert done_at_sync == [False]
        await bench.written(ledger)
        assert bench.table.rows == {row.request_id: ended(row)}
        assert ledger.stats["unwritten_rows"] == ledger.stats["running_requests"] == 0
        with pytest.raises(AssertionError):
            await entry.close(ended(row))
        _, other = open_one(ledger)
        with pytest.raises(AssertionError):
            await other.close(ended(row))
        await kill(ledger)

    run(work)


def test_a_row_goes_to_the_database_without_waiting_for_a_checkpoint(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started(checkpoint_every=1000.0)
        row, entry = open_one(ledger)
        await entry.close(ended(row))
        await bench.written(ledger)
        assert bench.table.rows == {row.request_id: ended(row)}
        await ledger.close()

    run(work)


def test_many_closes_share_few_fsyncs(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        entries = [open_one(ledger) for _ in range(64)]
        before = bench.disk.num_syncs
        await asyncio.gather(*(entry.close(ended(row)) for row, entry in entries))
        assert bench.disk.num_syncs - before <= 2
        before = bench.disk.num_syncs
        (first, first_entry), *more = [open_one(ledger) for _ in range(64)]
        with slow_sync(bench) as is_syncing:
            closing = [asyncio.create_task(first_entry.close(ended(first)))]
            await until(is_syncing)
            for row, entry in more:  # each comes by itself, all of them while the disk works
                closing.append(asyncio.create_task(entry.close(ended(row))))
                await asyncio.sleep(0)
        await asyncio.gather(*closing)
        assert bench.disk.num_syncs - before <= 3
        await ledger.close()
        assert len(bench.table.rows) == 128

    run(work)


def test_the_event_loop_goes_on_while_the_disk_works(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, entry = open_one(ledger)
        with slow_sync(bench) as is_syncing:
            closing = asyncio.create_task(entry.close(ended(row)))
            await until(is_syncing)
            open_one(ledger)
            await asyncio.sleep(0)
            assert not closing.done()
        await closing
        await kill(ledger)

    run(work)


def test_a_cancelled_caller_does_not_cancel_its_row(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, entry = open_one(ledger)
        closing = asyncio.create_task(entry.close(ended(row)))
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert closing.cancelled()
        await ledger.close()
        assert bench.table.rows == {row.request_id: ended(row)}

    run(work)


def test_after_a_clean_stop_nothing_is_left(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, entry = open_one(ledger)
        await entry.close(ended(row))
        await ledger.close()
        assert bench.folders() == []
        with pytest.raises(UsageNotRecorded, match="stopping"):
            open_one(ledger)
        with pytest.raises(UsageNotRecorded):
            await ledger.record(make_row())

    run(work)


def test_a_stop_while_the_database_is_away_leaves_the_rows_to_the_next_start(bench: Bench) -> None:
    async def work() -> None:
        bench.table.is_away = True
        ledger = await bench.started(drain=0.05)
        row, entry = open_one(ledger)
        await entry.close(ended(row))
        assert ledger.stats["unwritten_rows"] == 1
        bench.now += 3.0
        assert ledger.stats["oldest_unwritten_seconds"] == 3.0
        await ledger.close()
        assert len(bench.folders()) == 1
        bench.table.is_away = False
        second = await bench.started()
        await bench.recover(second)
        await second.close()
        assert bench.table.rows == {row.request_id: ended(row)}
        assert bench.folders() == []

    run(work)


def test_segments_end_by_size_and_age_and_go_once_the_database_has_their_rows(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started(segment_bytes=3000, segment_age=100.0)
        long_row, long_entry = open_one(ledger)
        long_entry.count(engine_ids_of(long_row)[0], 9, 0)
        for _ in range(30):
            row, entry = open_one(ledger)
            await entry.close(ended(row))
        await bench.written(ledger)
        for _ in range(2):
            await bench.checkpoint(ledger)
        segments = sorted(bench.root.glob("*/*.seg"))
        assert [path.name for path in segments] == ["0000000002.seg"]
        assert on_disk(bench) == [
            Open(long_row, tuple(engine_ids_of(long_row))),
            Checkpoint({engine_ids_of(long_row)[0]: Count(9, 0)}),
        ]
        bench.now += 100.0
        await bench.checkpoint(ledger)
        await bench.checkpoint(ledger)
        assert [path.name for path in bench.root.glob("*/*.seg")] == ["0000000003.seg"]
        await long_entry.close(ended(long_row))
        await ledger.close()
        assert len(bench.table.rows) == 31

    run(work)


def test_an_idle_ledger_writes_nothing(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started(segment_age=10.0)
        syncs = bench.disk.num_syncs
        for _ in range(30):
            await bench.checkpoint(ledger)
        assert bench.disk.num_syncs == syncs
        assert [path.read_bytes() for path in bench.root.glob("*/*.seg")] == [MAGIC]
        await ledger.close()

    run(work)


def test_a_request_opened_while_a_segment_is_started_is_made_durable_too(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, _ = open_one(ledger)
        late: list[tuple[UsageRow, UsageEntry]] = []
        loop = asyncio.get_running_loop()

        def open_late() -> None:
            bench.disk.before_sync = lambda: None
            asyncio.run_coroutine_threadsafe(open_in_loop(), loop).result()

        async def open_in_loop() -> None:
            late.append(open_one(ledger))

        ledger._ask_for_segment()
        bench.disk.before_sync = open_late
        await bench.checkpoint(ledger)
        assert late
        await bench.checkpoint(ledger)  # deletes the old segment, unless it is still needed
        await kill(ledger)
        bench.disk.lose_power(bench.root)
        found = {record.row.request_id for record in on_disk(bench) if isinstance(record, Open)}
        assert found == {row.request_id, late[0][0].request_id}

    run(work)


def test_rows_beyond_memory_are_read_again_from_their_segments(bench: Bench) -> None:
    async def work() -> None:
        bench.table.is_away = True
        ledger = await bench.started(rows_in_memory=10, segment_bytes=4000)
        rows = []
        for _ in range(100):
            row, entry = open_one(ledger)
            rows.append(row)
            await entry.close(ended(row))
            if len(rows) % 10 == 0:
                await bench.checkpoint(ledger)
        assert len(ledger._backlog._waiting) <= 10
        assert len(list(bench.root.glob("*/*.seg"))) > 2
        assert ledger.stats["unwritten_rows"] == 100
        bench.table.is_away = False
        while ledger.stats["unwritten_rows"]:
            await asyncio.sleep(0.002)
        assert bench.table.rows == {row.request_id: ended(row) for row in rows}
        await bench.checkpoint(ledger)
        await bench.checkpoint(ledger)
        assert len(list(bench.root.glob("*/*.seg"))) == 1
        await ledger.close()
        assert bench.folders() == []

    run(work)


@pytest.mark.parametrize("after", [0, 1, 60])
def test_a_full_disk_refuses_new_requests_and_leaves_no_torn_record(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, entry = open_one(ledger)
        with monkeypatch.context() as full:
            fail_writes(full, after)
            with pytest.raises(UsageNotRecorded, match="No space left"):
                open_one(ledger)
            assert ledger.failure is not None
            assert ledger.stats["journal_failed"] == 1.0
            with pytest.raises(UsageNotRecorded):
                open_one(ledger)
            closing = asyncio.create_task(entry.close(ended(row)))
            await bench.checkpoint(ledger)
            with pytest.raises(UsageNotRecorded):
                await closing
        assert on_disk(bench) == [Open(row, tuple(engine_ids_of(row)))]
        await bench.checkpoint(ledger)
        assert ledger.failure is None
        second, second_entry = open_one(ledger)
        await second_entry.close(ended(second))
        await ledger.close()
        assert bench.table.rows == {row.request_id: ended(row), second.request_id: ended(second)}

    run(work)


def test_after_a_failed_fsync_the_segment_is_not_trusted_again(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, entry = open_one(ledger)
        other, other_entry = open_one(ledger)
        other_entry.count(engine_ids_of(other)[0], 4, 0)
        bench.disk.fault = OSError(errno.EIO, "I/O error")
        with pytest.raises(UsageNotRecorded, match="I/O error"):
            await entry.close(ended(row))
        with pytest.raises(UsageNotRecorded):
            open_one(ledger)
        bench.disk.fault = None
        await bench.checkpoint(ledger)
        await kill(ledger)
        bench.disk.lose_power(bench.root)
        newest = list(Reading(sorted(bench.root.glob("*/*.seg"))[-1].read_bytes()))
        assert [type(record) for record in newest] == [Open, Open, Checkpoint, Close]

    run(work)


def test_a_journal_that_cannot_be_made_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("in the way")

    async def work() -> None:
        with pytest.raises(OSError, match="journal"):
            await Bench(tmp_path / "journal").started()

    run(work)


def test_counts_of_a_stranger_are_refused(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        _, entry = open_one(ledger)
        with pytest.raises(AssertionError):
            entry.count("req_other", 1, 0)
        await settled(ledger)
        await kill(ledger)

    run(work)


def test_a_checkpoint_holds_what_has_changed_and_a_new_segment_everything(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started(segment_age=1000.0)
        row = make_row()
        ids = engine_ids_of(row, 3)
        entry = ledger.open(row, ids)
        for engine_id in ids:
            entry.count(engine_id, 1, 0)
        await bench.checkpoint(ledger)
        entry.count(ids[1], 2, 0)
        await bench.checkpoint(ledger)
        assert on_disk(bench)[-1] == Checkpoint({ids[1]: Count(2, 0)})
        entry.count(ids[2], 3, 0)
        ledger._ask_for_segment()
        await bench.checkpoint(ledger)
        await bench.checkpoint(ledger)
        everything = {ids[0]: Count(1, 0), ids[1]: Count(2, 0), ids[2]: Count(3, 0)}
        assert on_disk(bench) == [Open(row, tuple(ids)), Checkpoint(everything)]
        await kill(ledger)

    run(work)


def test_counts_of_a_checkpoint_that_failed_are_written_with_the_next(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, entry = open_one(ledger)
        [engine_id] = engine_ids_of(row)
        await bench.checkpoint(ledger)
        entry.count(engine_id, 4, 1)
        bench.disk.fault = OSError(errno.EIO, "I/O error")
        await bench.checkpoint(ledger)
        assert ledger.failure is not None
        bench.disk.fault = None
        await bench.checkpoint(ledger)
        await kill(ledger)
        bench.disk.lose_power(bench.root)
        assert on_disk(bench)[-1] == Checkpoint({engine_id: Count(4, 1)})

    run(work)


def test_a_request_too_large_for_a_record_must_not_run(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        with pytest.raises(UsageNotRecorded, match="can be read again"):
            ledger.open(make_row(), ["x" * MAX_PAYLOAD])
        assert ledger.failure is None, "the next one can"
        assert on_disk(bench) == []
        row, entry = open_one(ledger)
        await entry.close(ended(row))
        await ledger.close()

    run(work)


def test_what_a_segment_carries_over_does_not_make_it_full(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started(segment_bytes=4000)
        row = make_row()
        ids = engine_ids_of(row, 200)
        ledger.open(row, ids)
        await bench.checkpoint(ledger)
        for _ in range(3):
            await bench.checkpoint(ledger)
        assert [path.name for path in bench.root.glob("*/*.seg")] == ["0000000002.seg"]
        await kill(ledger)

    run(work)
