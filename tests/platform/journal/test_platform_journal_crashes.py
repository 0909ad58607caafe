"""Whatever is killed, and whenever: each request is one row, finished ones as they ended, and no row says more than was made."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from journal_bench import Bench, engine_ids_of, kill, make_row
from property_budget import budget

from graftwork_platform.ids import parse
from graftwork_platform.journal.ledger import UsageEntry, UsageLedger
from graftwork_platform.models import UsageStatus
from graftwork_platform.usage import UsageNotRecorded, UsageRow

T = TypeVar("T")


@dataclass
class Known:
    """A request as the world knows it, to be compared with its row in the end."""

    row: UsageRow
    ids: list[str]
    entry: UsageEntry | None
    made: dict[str, int] = field(default_factory=dict)  # what the engine has generated
    counted: dict[str, int] = field(default_factory=dict)  # what has reached the client
    durable: int = 0  # at the last durable checkpoint
    must_exist: bool = False
    final: UsageRow | None = None
    is_told: bool = False  # `close` has returned

    def check(self, found: UsageRow | None) -> None:
        """Compare with the row in the database."""
        if self.is_told:
            assert found == self.final
        elif found is None:
            assert not self.must_exist
        elif found != self.final:
            assert found.status == UsageStatus.ABORTED
            assert self.durable <= found.output_tokens <= sum(self.made.values())
            assert found.prompt_tokens == (self.row.prompt_tokens if found.output_tokens else 0)
            assert found.cached_tokens <= found.prompt_tokens


class CrashingLedger(RuleBasedStateMachine):
    """A ledger in a world where the process, the machine, the engine, the disk and the database fail at will."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.bench = Bench(self.folder / "journal")
        self.known: list[Known] = []
        self.ledger = self.start()

    def run(self, work: Awaitable[T]) -> T:
        async def within() -> T:
            async with asyncio.timeout(60):
                return await work

        return self.runner.run(within())

    def start(self) -> UsageLedger:
        self.bench.disk.fault = None
        return self.run(self.bench.started(segment_bytes=1500, segment_age=5.0, rows_in_memory=3))

    @property
    def running(self) -> list[Known]:
        return [known for known in self.known if known.entry is not None]

    @rule(num_choices=st.integers(1, 3))
    def open(self, num_choices: int) -> None:
        row = make_row()
        known = Known(row, engine_ids_of(row, num_choices), None)
        with suppress(UsageNotRecorded):
            known.entry = self.ledger.open(row, known.ids)
            self.known.append(known)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 5), on_the_way=st.integers(0, 1))
    def generate(self, data: st.DataObject, tokens: int, on_the_way: int) -> None:
        known = data.draw(st.sampled_from(self.running))
        engine_id = data.draw(st.sampled_from(known.ids))
        known.made[engine_id] = known.made.get(engine_id, 0) + tokens
        known.counted[engine_id] = known.made[engine_id] - on_the_way
        assert known.entry is not None
        known.entry.count(engine_id, known.counted[engine_id], 2)

    @rule()
    def checkpoint(self) -> None:
        self.run(self.bench.checkpoint(self.ledger))
        if self.ledger.failure is None:
            for known in self.running:
                known.durable = sum(known.counted.values())
                known.must_exist = True

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.running), min_size=1, max_size=4, unique_by=id))

        async def close_all() -> None:
            tasks = []
            for known in chosen:
                output = sum(known.counted.values())
                known.final = replace(known.row, output_tokens=output, status=UsageStatus.COMPLETED)
                assert known.entry is not None
                tasks.append(asyncio.create_task(known.entry.close(known.final)))
                known.entry = None
            await asyncio.sleep(0)
            if self.ledger.failure is not None:
                await self.bench.checkpoint(self.ledger)
            for known, result in zip(chosen, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
                assert result is None or isinstance(result, UsageNotRecorded)
                known.is_told = result is None

        self.run(close_all())

    @rule(is_away=st.booleans())
    def database(self, is_away: bool) -> None:
        self.bench.table.is_away = is_away
        self.run(asyncio.sleep(0.01))

    @rule(code=st.sampled_from([None, errno.ENOSPC, errno.EIO]))
    def disk(self, code: int | None) -> None:
        self.bench.disk.fault = None if code is None else OSError(code, os.strerror(code))

    @rule(power_is_lost=st.booleans(), kept=st.floats(0, 1), engine_dies=st.booleans(), half_recovered=st.integers(0, 40))
    def crash(self, power_is_lost: bool, kept: float, engine_dies: bool, half_recovered: int) -> None:
        """Kill the process, perhaps a second time while it recovers, and recover."""
        engine = self.bench.engine
        engine.counts |= {engine_id: made for known in self.running for engine_id, made in known.made.items()}
        if engine_dies or power_is_lost:
            engine.counts.clear()
        engine.stopping = set(engine.counts)
        for known in self.running:
            known.entry = None
            known.must_exist |= not power_is_lost
            if not (engine_dies or power_is_lost):
                known.durable = sum(known.made.values())
        self.run(kill(self.ledger))
        if power_is_lost:
            self.bench.disk.lose_power(self.bench.root, kept)
        if half_recovered:
            self.ledger = self.start()
            self.run(self.recover_a_little(half_recovered))
            self.run(kill(self.ledger))
            if power_is_lost:
                with suppress(FileNotFoundError):  # the last deletion may still be going on
                    self.bench.disk.lose_power(self.bench.root, kept)
        self.ledger = self.start()
        self.run(self.bench.recover(self.ledger))

    async def recover_a_little(self, ticks: int) -> None:
        recovery = asyncio.create_task(self.bench.recover(self.ledger))
        for tick in range(ticks):
            await asyncio.sleep(0.0005 if tick % 8 == 7 else 0)
        recovery.cancel()
        await asyncio.gather(recovery, return_exceptions=True)

    def teardown(self) -> None:
        self.bench.table.is_away = False
        self.crash(power_is_lost=False, kept=1.0, engine_dies=False, half_recovered=0)
        self.run(self.ledger.close())
        assert self.bench.folders() == []
        for known in self.known:
            known.check(self.bench.table.rows.get(known.row.request_id))
        self.runner.close()
        shutil.rmtree(self.folder)


TestCrashingLedger = CrashingLedger.TestCase
TestCrashingLedger.settings = budget(15, steps=25)


PROCESS = textwrap.dedent(
    """
    import asyncio, os, signal, sys, time
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from dataclasses import replace
    from journal_bench import make_row, engine_ids_of
    from graftwork_platform.ids import show
    from graftwork_platform.journal.ledger import JournalLimits, UsageLedger
    from graftwork_platform.models import UsageStatus

    def say(*words):
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole lines, whenever this process is killed

    async def request(ledger, number):
        row = make_row()
        name = show("req", row.request_id)
        entry = ledger.open(row, engine_ids_of(row))
        say("open", name)
        for tokens in range(1, 2 + number % 40):
            say("made", name, tokens)
            entry.count(name, tokens, 0)
            await asyncio.sleep(0.001)
        await entry.close(replace(row, output_tokens=tokens, status=UsageStatus.COMPLETED))
        say("closed", name, tokens)

    async def never(rows):
        await asyncio.Event().wait()

    async def main():
        ledger = UsageLedger(Path(sys.argv[1]), never, JournalLimits(checkpoint_every=0.01, segment_bytes=20_000))
        await ledger.start()
        running = set()
        for number in range(100_000):
            running.add(asyncio.create_task(request(ledger, number)))
            await asyncio.sleep(0.001)
            running = {task for task in running if not task.done()}

    for lifetime in sys.argv[3:]:
        num_closed, pause = lifetime.split(":")
        told, says = os.pipe()
        process = os.fork()  # cheaper than many interpreters
        if process == 0:
            os.dup2(says, 1)
            asyncio.run(main())
        os.close(says)
        left = int(num_closed)
        with open(told, "rb") as lines:
            for line in lines:
                os.write(1, line)
                left -= line.startswith(b"closed")
                if left == 0:
                    left = -1
                    time.sleep(float(pause))
                    os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    """
)


def test_a_process_killed_at_any_moment_loses_nothing_and_invents_nothing(tmp_path: Path) -> None:
    chance = random.Random(7)
    bench = Bench(tmp_path / "journal")
    opened: set[str] = set()
    made: dict[str, int] = {}
    closed: dict[str, int] = {}
    # So many requests are closed first, however long the machine takes for that; the rest of the moment is chance.
    lifetimes = [f"{chance.randrange(4, 120)}:{chance.uniform(0, 0.03):.4f}" for _ in range(6)]
    arguments = [sys.executable, "-c", PROCESS, str(bench.root), str(Path(__file__).parent), *lifetimes]
    for line in subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout.splitlines():
        match line.split():
            case ["open", name]:
                opened.add(name)
            case ["made", name, tokens]:
                made[name] = int(tokens)
            case ["closed", name, tokens]:
                closed[name] = int(tokens)
    assert len(closed) > 20
    assert len(bench.folders()) > 1

    async def recover() -> None:
        ledger = await bench.started(segment_bytes=20_000)
        await bench.recover(ledger)
        await ledger.close()

    asyncio.run(recover())
    rows = bench.table.rows
    assert bench.folders() == []
    assert opened == set(made) | opened >= set(closed)
    for name in opened:
        row = rows[parse("req", name)]
        if name in closed:
            assert (row.output_tokens, row.status) == (closed[name], UsageStatus.COMPLETED)
        else:
            assert row.output_tokens <= made.get(name, 0)
    assert len(rows) - len(opened) <= len(lifetimes), "a request may be open before its process could say so: one a kill"
