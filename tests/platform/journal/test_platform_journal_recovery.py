"""What a dead process left: every request ends as one row, by the best count there is, wherever the recovery is killed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from journal_bench import TIMES, Bench, engine_ids_of, kill, make_row, run

from graftwork_platform.journal.ledger import UsageEntry, UsageLedger
from graftwork_platform.journal.recovery import Recovery, RecoveryTimes, recovering
from graftwork_platform.journal.segments import JournalFolder
from graftwork_platform.models import UsageStatus
from graftwork_platform.usage import UsageNotRecorded, UsageRow


def open_one(ledger: UsageLedger, engine_requests: int = 1, **changes: Any) -> tuple[UsageRow, UsageEntry, list[str]]:
    row = make_row(**changes)
    ids = engine_ids_of(row, engine_requests)
    return row, ledger.open(row, ids), ids


def ended(row: UsageRow, output_tokens: int = 5) -> UsageRow:
    return make_row(request_id=row.request_id, output_tokens=output_tokens, status=UsageStatus.COMPLETED)


async def recovered(bench: Bench) -> dict[Any, UsageRow]:
    """The database after a second process has started and stopped."""
    ledger = await bench.started()
    await bench.recover(ledger)
    await ledger.close()
    assert bench.folders() == []
    return bench.table.rows


def test_the_engines_count_is_billed_and_then_settled(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, entry, ids = open_one(ledger, 3)
        entry.count(ids[0], 4, 2)
        entry.count(ids[2], 1, 1)
        await bench.checkpoint(ledger)
        entry.count(ids[0], 6, 2)
        await kill(ledger)
        bench.engine.counts = {ids[0]: 7, ids[1]: 2}
        bench.engine.stopping = {ids[1]}
        rows = await recovered(bench)
        assert rows == {row.request_id: make_row(request_id=row.request_id, output_tokens=7 + 2 + 1, cached_tokens=3)}
        assert bench.engine.settled == set(ids)
        assert bench.engine.num_claims == 2

    run(work)


def test_without_an_engine_the_last_durable_count_is_billed(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, entry, [engine_id] = open_one(ledger)
        entry.count(engine_id, 4, 0)
        await bench.checkpoint(ledger)
        entry.count(engine_id, 9, 0)
        await kill(ledger)
        bench.engine.is_away = True
        rows = await recovered(bench)
        assert rows[row.request_id].output_tokens == 4
        assert rows[row.request_id].status == UsageStatus.ABORTED

    run(work)


def test_an_engine_that_never_stops_a_request_is_not_waited_for(bench: Bench) -> None:
    class Stuck(type(bench.engine)):  # type: ignore[misc]
        async def claim_orphans(self, request_ids: Any, *, wait_s: float) -> Any:
            self.stopping = set(request_ids)
            return await super().claim_orphans(request_ids, wait_s=wait_s)

    async def work() -> None:
        ledger = await bench.started()
        row, entry, [engine_id] = open_one(ledger)
        entry.count(engine_id, 4, 0)
        await bench.checkpoint(ledger)
        await kill(ledger)
        bench.engine = Stuck(counts={engine_id: 9})
        assert (await recovered(bench))[row.request_id].output_tokens == 4

    run(work)


def test_a_silent_engine_is_not_waited_for(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, _, _ = open_one(ledger)
        await kill(ledger)

        async def never(request_ids: Any, *, wait_s: float) -> Any:
            await asyncio.Event().wait()

        bench.engine.claim_orphans = never  # type: ignore[method-assign]
        bench.times = replace(TIMES, engine_wait=0.2)
        assert (await recovered(bench))[row.request_id].output_tokens == 0

    run(work)


def test_who_is_not_known_to_have_got_a_token_pays_nothing(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, entry, [engine_id] = open_one(ledger)
        entry.count(engine_id, 0, 6)
        await bench.checkpoint(ledger)
        other, other_entry, [other_id] = open_one(ledger, prompt_tokens=3)
        other_entry.count(other_id, 1, 8)
        await bench.checkpoint(ledger)
        await kill(ledger)
        rows = await recovered(bench)
        assert rows[row.request_id] == make_row(request_id=row.request_id, prompt_tokens=0)
        assert (rows[other.request_id].prompt_tokens, rows[other.request_id].cached_tokens) == (3, 3)

    run(work)


def test_finished_requests_survive_the_loss_of_power(bench: Bench) -> None:
    async def work() -> None:
        bench.table.is_away = True
        ledger = await bench.started()
        row, entry, _ = open_one(ledger)
        await entry.close(ended(row))
        open_one(ledger)  # never durable, so it never was
        await kill(ledger)
        bench.disk.lose_power(bench.root, kept=0.7)
        bench.table.is_away = False
        assert await recovered(bench) == {row.request_id: ended(row)}
        assert bench.engine.num_claims == 0

    run(work)


def test_a_damaged_tail_is_reported_and_the_rest_is_used(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        bench.table.is_away = True
        ledger = await bench.started()
        rows = [open_one(ledger) for _ in range(2)]
        for row, entry, _ in rows:
            await entry.close(ended(row))
        await kill(ledger)
        [path] = bench.root.glob("*/*.seg")
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
        bench.table.is_away = False
        table = await recovered(bench)
        assert table[rows[0][0].request_id] == ended(rows[0][0])
        assert table[rows[1][0].request_id].status == UsageStatus.ABORTED

    with caplog.at_level(logging.WARNING):
        run(work)
    assert "torn or damaged" in caplog.text


def test_another_versions_journal_is_left_alone_and_reported_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        folder = JournalFolder.create(bench.root)
        folder.start_segment(b"graftwork usage journal 9\n").close()
        folder.release()
        ledger = await bench.started()
        recovery = Recovery(ledger, bench.engine, TIMES)
        await recovery.recover()
        await recovery.recover()
        await ledger.close()
        assert bench.folders() == [folder.path.name]

    run(work)
    assert caplog.text.count("another format") == 1


class Killed(Exception):
    """The process ends here."""


KILL_POINTS = [
    "before record 0",
    "after record 0",
    "before claim_orphans 0",
    "after claim_orphans 0",
    "before record 1",
    "after record 1",
    "before settle_orphans 0",
    "after settle_orphans 0",
    "before unlink 0",
    "after unlink 0",
    "after unlink 1",
    "before rmdir 0",
    "after rmdir 0",
]


@pytest.mark.parametrize("power_lost", [False, True])
@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_recovery_killed_anywhere_is_done_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, point: str, power_lost: bool
) -> None:
    killed: list[str] = []

    def meet(name: str) -> None:
        if name == point:
            killed.append(name)
            raise Killed

    def around(function: Any, name: str, *, is_async: bool) -> Any:
        calls = iter(range(1000))

        async def call(*arguments: Any, **options: Any) -> Any:
            number = next(calls)
            meet(f"before {name} {number}")
            result = await function(*arguments, **options)
            meet(f"after {name} {number}")
            return result

        def call_now(*arguments: Any, **options: Any) -> Any:
            number = next(calls)
            meet(f"before {name} {number}")
            result = function(*arguments, **options)
            meet(f"after {name} {number}")
            return result

        return call if is_async else call_now

    async def work() -> None:
        bench.table.is_away = True
        ledger = await bench.started()
        closed, closed_entry, _ = open_one(ledger)
        await closed_entry.close(ended(closed))
        running, entry, [engine_id] = open_one(ledger)
        entry.count(engine_id, 3, 1)
        await bench.checkpoint(ledger)
        await kill(ledger)
        bench.engine.counts = {engine_id: 8}

        second = await bench.started()
        with monkeypatch.context() as patch:
            patch.setattr(second, "record", around(second.record, "record", is_async=True))
            patch.setattr(bench.engine, "claim_orphans", around(bench.engine.claim_orphans, "claim_orphans", is_async=True))
            patch.setattr(bench.engine, "settle_orphans", around(bench.engine.settle_orphans, "settle_orphans", is_async=True))
            patch.setattr(Path, "unlink", around(Path.unlink, "unlink", is_async=False))
            patch.setattr(Path, "rmdir", around(Path.rmdir, "rmdir", is_async=False))
            with pytest.raises(Killed):
                await bench.recover(second)
        assert killed == [point]
        await kill(second)
        if power_lost:
            bench.disk.lose_power(bench.root)
        bench.table.is_away = False
        rows = await recovered(bench)
        assert rows[closed.request_id] == ended(closed)
        expected = make_row(request_id=running.request_id, output_tokens=8, cached_tokens=1)
        assert rows[running.request_id] == expected
        assert len(rows) == 2

    run(work)


def test_a_deletion_that_the_disk_forgot_changes_no_row(bench: Bench, tmp_path: Path) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, entry, [engine_id] = open_one(ledger)
        entry.count(engine_id, 3, 0)
        await bench.checkpoint(ledger)
        await kill(ledger)
        shutil.copytree(bench.root, tmp_path / "copy")
        bench.engine.counts = {engine_id: 8}
        first = dict(await recovered(bench))
        shutil.copytree(tmp_path / "copy", bench.root, dirs_exist_ok=True)
        assert await recovered(bench) == first
        assert first[row.request_id].output_tokens == 8

    run(work)


def test_two_recoveries_at_once_share_nothing(bench: Bench) -> None:
    async def work() -> None:
        dead = []
        for _ in range(4):
            ledger = await bench.started()
            for _ in range(3):
                row, entry, [engine_id] = open_one(ledger)
                entry.count(engine_id, 2, 0)
                dead.append(row)
            await bench.checkpoint(ledger)
            await kill(ledger)
        ledgers = [await bench.started() for _ in range(2)]
        await asyncio.gather(*(bench.recover(ledger) for ledger in ledgers for _ in range(2)))
        for ledger in ledgers:
            await ledger.close()
        assert {row_id: row.output_tokens for row_id, row in bench.table.rows.items()} == {row.request_id: 2 for row in dead}
        assert bench.folders() == []

    run(work)


def test_the_journal_of_a_process_that_dies_later_is_found_too(bench: Bench) -> None:
    async def work() -> None:
        first, second = await bench.started(), await bench.started()
        row, entry, [engine_id] = open_one(first)
        entry.count(engine_id, 2, 0)
        await bench.checkpoint(first)
        times = replace(TIMES, look_every=0.01)
        async with recovering(Recovery(second, bench.engine, times)):
            await asyncio.sleep(0.05)
            assert bench.table.rows == {}
            await kill(first)
            while row.request_id not in bench.table.rows:
                await asyncio.sleep(0.01)
        await second.close()
        assert bench.folders() == []

    run(work)


def test_a_recovery_that_cannot_write_leaves_everything_where_it_is(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        row, entry, [engine_id] = open_one(ledger)
        entry.count(engine_id, 2, 0)
        await bench.checkpoint(ledger)
        await kill(ledger)
        second = await bench.started()
        bench.disk.fault = OSError(errno.ENOSPC, "No space left on device")
        with pytest.raises(UsageNotRecorded):
            await bench.recover(second)
        assert bench.engine.settled == set()
        assert len(bench.folders()) == 2
        bench.disk.fault = None
        await bench.checkpoint(second)
        await bench.recover(second)
        await second.close()
        assert bench.table.rows[row.request_id].output_tokens == 2
        assert bench.folders() == []

    run(work)


def test_the_background_goes_on_after_a_fault(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        ledger = await bench.started()
        recovery = Recovery(ledger, bench.engine, RecoveryTimes(look_every=0.001))
        faults: list[Exception] = [OSError(errno.EIO, "I/O error"), UsageNotRecorded("full"), AssertionError("nobody foresaw it")]
        calls = asyncio.Event()

        async def recover() -> None:
            if faults:
                raise faults.pop()
            calls.set()

        monkeypatch.setattr(recovery, "recover", recover)
        async with recovering(recovery):
            await calls.wait()
        with contextlib.suppress(UsageNotRecorded):
            await ledger.close()

    run(work)
