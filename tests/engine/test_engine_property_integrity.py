"""The engine's recount: it finds each way in which its books can be off, runs while the engine is idle, and never ends it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest

from graftwork_engine.idle_recount import IdleRecount
from graftwork_engine.kv.hashing import BlockKey
from graftwork_engine.loop import EngineLoop
from graftwork_engine.messages import Abort, Add, Sampling, Stats
from graftwork_engine.request import RequestStatus
from scripted_engine import Bench, ScriptedGate


@pytest.fixture
def bench() -> Bench:
    """A request that runs with an adapter, one that waits for its own, and the cached blocks of one that ended."""
    bench = Bench(gate=ScriptedGate(fetch_polls={"q": 10**9}))
    bench.add("ended", 9, 1)
    bench.run()
    bench.add("running", 5, 9, adapter="p")
    bench.add("waiting", 5, 9, adapter="q")
    while not bench.items["running"]:
        bench.step()
    return bench


def _pool(bench: Bench):
    return bench.kv._pool


def _cached_block(bench: Bench) -> int:
    return next(iter(_pool(bench)._cached))


def _move_key(bench: Bench) -> None:
    pool, block = _pool(bench), _cached_block(bench)
    pool._block_of[pool._key[block]] = bench.requests["running"].block_ids[0]


CORRUPTIONS: list[tuple[str, Callable[[Bench], object], str]] = [
    ("a block lost by its request", lambda b: b.requests["running"].block_ids.pop(), "has 1 references and 0 holders"),
    (
        "a block held twice",
        lambda b: b.requests["running"].block_ids.append(b.requests["running"].block_ids[0]),
        "1 references and 2 holders",
    ),
    (
        "a block of one that waits",
        lambda b: b.requests["waiting"].block_ids.append(0),
        "request waiting has blocks and does not run",
    ),
    (
        "a block free and used",
        lambda b: _pool(b)._free.append(b.requests["running"].block_ids[0]),
        "is listed as free and has references",
    ),
    ("a block free twice", lambda b: _pool(b)._free.append(_pool(b)._free[0]), "1 blocks are listed as free more than once"),
    ("a block lost", lambda b: _pool(b)._free.pop(), "has no references and is listed neither as free nor as cached"),
    ("a cached block lost", lambda b: _pool(b)._cached.popitem(), "has no references and is listed neither as free nor as cached"),
    (
        "a used block cached",
        lambda b: _pool(b)._cached.update({b.requests["running"].block_ids[-1]: None}),
        "is listed as cached and has references",
    ),
    ("a key that leads elsewhere", _move_key, "a key leads to block {block}, which does not have it"),
    (
        "a key that leads nowhere",
        lambda b: _pool(b)._block_of.pop(_pool(b)._key[_cached_block(b)]),
        "has a key that does not lead to it",
    ),
    (
        "a stranger's key",
        lambda b: _pool(b)._block_of.update({BlockKey(b"x"): 0}),
        "a key leads to block 0, which does not have it",
    ),
    ("a host reference lost", lambda b: b.gate.drop("q"), "are held, {{'q': 1}} should be"),
    ("a device reference lost", lambda b: b.gate.release("p"), "are referenced, {{'p': 1}} should be"),
    (
        "a device reference in the books",
        lambda b: b.scheduler._adapters._device.update({"p": 1}),
        "adapter p has 2 device references and 1 req",
    ),
    (
        "a host reference in the books",
        lambda b: b.scheduler._adapters._host.clear(),
        "adapter q has 0 host references and 1 requests",
    ),
    ("a running request lost", lambda b: b.scheduler._running.clear(), "0 requests are listed as running and 1 are"),
    (
        "a waiting request lost",
        lambda b: b.scheduler._waiting.remove(b.requests["waiting"]),
        "0 requests are listed as waiting and 1 are",
    ),
    (
        "a request in the wrong state",
        lambda b: setattr(b.requests["waiting"], "status", RequestStatus.RUNNING),
        "listed as running and 2 are",
    ),
    (
        "a wait for room left over",
        lambda b: b.scheduler._needed_room_since.update({"gone": 1}),
        "a request that ended is still waiting for room",
    ),
]


@pytest.mark.parametrize(("corrupt", "finding"), [pytest.param(*rest, id=name) for name, *rest in CORRUPTIONS])
def test_each_way_to_be_off_is_found_and_named(bench: Bench, corrupt: Callable[[Bench], object], finding: str) -> None:
    assert bench.core.check_integrity() == []
    block = bench.requests["running"].block_ids[0]
    corrupt(bench)
    wanted = finding.format(block=block)
    assert any(wanted in found for found in bench.core.check_integrity()), bench.core.check_integrity()


def test_the_gate_is_recounted_with_what_requests_hold() -> None:
    asked: list[tuple[dict[str, int], dict[str, int]]] = []

    class Gate(ScriptedGate):
        def discrepancies(self, holds: Mapping[str, int], references: Mapping[str, int]) -> list[str]:
            asked.append((dict(holds), dict(references)))
            return ["page 3 belongs to nobody"]

    bench = Bench(gate=Gate(fetch_polls={"q": 10**9}))
    for name, adapter in (("a", "p"), ("b", "p"), ("c", "q"), ("d", None)):
        bench.add(name, 2, 9, adapter=adapter)
    while bench.requests["b"].status is not RequestStatus.RUNNING:
        bench.core.step()
    assert bench.core.check_integrity() == ["page 3 belongs to nobody"]
    assert asked == [({"q": 1}, {"p": 2})]


class TestIdleRecount:
    def test_one_check_for_each_idle_period(self) -> None:
        runs: list[float] = []
        recount = IdleRecount(lambda: runs.append(0) or [], lambda: 0.0)
        for _ in range(3):
            recount.run_if_due()
        assert len(runs) == 1
        for _ in range(5):
            recount.touch()
        recount.run_if_due()
        recount.run_if_due()
        assert recount.stats() == {"integrity_checks_total": 2, "integrity_faults_total": 0}

    def test_a_check_that_takes_long_is_made_seldom(self) -> None:
        now = 100.0

        def check() -> list[str]:
            nonlocal now
            now += 2.0
            return []

        recount = IdleRecount(check, lambda: now)
        started = now
        while now < started + 1000:
            now += 0.5
            recount.touch()
            recount.run_if_due()
        assert 0.04 < recount.stats()["integrity_checks_total"] * 2.0 / (now - started) <= 0.05

    def test_a_finding_is_counted_and_logged_once_while_it_lasts(self, caplog: pytest.LogCaptureFixture) -> None:
        findings = iter([["a", "b"], ["b"], ["b", "c"], [], ["b"]])
        recount = IdleRecount(lambda: next(findings), lambda: 0.0)
        counts = []
        for _ in range(5):
            recount.touch()
            recount.run_if_due()
            counts.append(recount.stats()["integrity_faults_total"])
        assert counts == [2, 2, 3, 3, 4]
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert errors == [f"an idle engine's books are off: {what}" for what in "abcb"]

    def test_a_check_that_raises_is_a_finding(self, caplog: pytest.LogCaptureFixture) -> None:
        def check() -> list[str]:
            raise KeyError("broken beyond counting")

        recount = IdleRecount(check, lambda: 0.0)
        recount.run_if_due()
        assert recount.stats() == {"integrity_checks_total": 1, "integrity_faults_total": 1}
        assert "the recount failed with KeyError" in caplog.text


class Server:
    """The inbox, and what was sent."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


@pytest.fixture
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("IDLE_S", 0.02), ("BLOCKED_S", 0.002), ("STATS_S", 0.01)):
        monkeypatch.setattr(f"graftwork_engine.loop.{name}", seconds)


def add(name: str, max_tokens: int, adapter: str | None = None) -> Add:
    return Add("epoch", name, [1, 2, 3], Sampling(max_tokens, 7), b"salt", "flow", adapter_key=adapter)


def test_the_loop_recounts_when_it_is_idle_and_a_fault_does_not_end_it(short_rests: None, caplog: pytest.LogCaptureFixture) -> None:
    bench, server = Bench(gate=ScriptedGate(fetch_polls={"never": 10**9}), num_blocks=600), Server()
    calls: list[bool] = []
    recount = bench.core.check_integrity
    bench.core.check_integrity = lambda: calls.append(bench.core.has_work) or recount()  # type: ignore[method-assign]
    loop = EngineLoop(SimpleNamespace(core=bench.core, stats=bench.core.stats), server, "epoch")
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        _until(lambda: len(calls) == 1)
        server.inbox.put(add("a", 500))
        server.inbox.put(add("b", 500, adapter="never"))
        _until(lambda: bench.core.stats()["output_tokens_total"] == 500)
        time.sleep(0.1)  # one request waits, nothing runs: that is not idle
        assert len(calls) == 1
        server.inbox.put(Abort("b", 0))
        _until(lambda: len(calls) == 2)
        _until(lambda: _counters(server) == (2, 0))
        bench.kv._pool._free.pop()
        time.sleep(0.1)
        assert len(calls) == 2, "nothing has happened since"
        server.inbox.put(add("c", 2))
        _until(lambda: len(calls) == 3)
        _until(lambda: _counters(server) == (3, 1))
        assert "listed neither as free nor as cached" in caplog.text
        server.inbox.put(add("d", 2))
        _until(lambda: bench.core.stats()["output_tokens_total"] == 504)
        assert not any(calls), "never while there is work"
    finally:
        loop.stop()
        thread.join(timeout=60)
    assert not thread.is_alive()


def _counters(server: Server) -> tuple[float, float]:
    last = [message.values for message in server.sent if isinstance(message, Stats)][-1]
    return last["integrity_checks_total"], last["integrity_faults_total"]


def test_loads_that_outlive_their_requests_are_taken_in_before_the_recount(short_rests: None) -> None:
    """Nobody else does it in an idle engine: what an aborted request had fetched would stay for as long as no other comes."""
    gate = ScriptedGate(fetch_polls={"slow": 3})
    bench, server = Bench(gate=gate), Server()
    loop = EngineLoop(SimpleNamespace(core=bench.core, stats=bench.core.stats), server, "epoch")
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        server.inbox.put(add("a", 2, adapter="slow"))
        server.inbox.put(Abort("a", 0))
        give_up = time.monotonic() + 60
        while "slow" not in gate._on_host or gate._fetching:
            assert time.monotonic() < give_up
            server.inbox.put(None)  # a background load has finished
            time.sleep(0.03)
    finally:
        loop.stop()
        thread.join(timeout=60)
