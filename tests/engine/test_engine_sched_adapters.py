"""The scheduler and adapter memory: who waits, who passes, who fails, and that every reference comes back."""

from __future__ import annotations

import pytest

from graftwork_engine.request import RequestStatus
from graftwork_engine.sched.plan import AdapterFailure
from graftwork_engine.sched.scheduler import MAX_PASSED_OVER
from scripted_engine import Bench, ScriptedGate, solo_output, trace_line

GONE = AdapterFailure("adapter_missing", "adapter p is not in the store")


def order_of_starts(bench: Bench) -> list[str]:
    return list(dict.fromkeys(s.request.request_id for plan in bench.runner.plans for s in plan.scheduled))


def test_only_who_waits_for_an_adapter_waits() -> None:
    bench = Bench(budget=16, gate=ScriptedGate(fetch_polls={"slow": 5}))
    bench.add("slow", 4, 2, adapter="slow")
    bench.add("base", 4, 2)
    bench.add("quick", 4, 2, adapter="quick")
    bench.run()
    assert order_of_starts(bench) == ["base", "quick", "slow"]
    assert bench.output("slow") == solo_output(bench.requests["slow"])


def test_a_step_with_nothing_to_run_runs_nothing() -> None:
    bench = Bench(gate=ScriptedGate(fetch_polls={"p": 3}))
    bench.add("a", 4, 1, adapter="p")
    for _ in range(4):
        assert bench.step() == []
        assert bench.core.last_num_tokens == 0
        assert bench.core.has_work
    assert bench.runner.plans == []
    assert bench.core.stats()["steps_total"] == 0
    bench.run()
    assert bench.finish("a") == "length"


def test_requests_of_one_tenant_pass_each_other_too() -> None:
    bench = Bench(budget=16, num_seqs=2, gate=ScriptedGate(fetch_polls={"slow": 5}))
    for number in range(3):
        bench.add(f"slow{number}", 2, 1, adapter="slow")
    for number in range(3):
        bench.add(f"base{number}", 2, 1)
    bench.run()
    assert order_of_starts(bench) == ["base0", "base1", "base2", "slow0", "slow1", "slow2"]


def test_references_follow_the_status() -> None:
    bench = Bench(budget=16, gate=ScriptedGate(fetch_polls={"p": 1}))
    request = bench.add("a", 4, 3, adapter="p")
    assert (bench.gate.holds["p"], bench.gate.references["p"]) == (1, 0)
    while request.status is RequestStatus.WAITING:
        bench.step()
    assert (bench.gate.holds["p"], bench.gate.references["p"]) == (0, 1)
    bench.run()
    assert (bench.gate.holds["p"], bench.gate.references["p"]) == (0, 0)


def test_a_preempted_request_holds_its_adapter_on_the_host_and_takes_it_again() -> None:
    gate = ScriptedGate(num_places=2)
    bench = Bench(num_blocks=4, block_size=2, budget=8, gate=gate)
    bench.add("a", 2, 5, adapter="p")
    bench.add("b", 2, 5, adapter="q")
    while bench.requests["b"].status is not RequestStatus.PREEMPTED:
        bench.step()
    assert gate.references == {"p": 1, "q": 0}
    assert gate.holds == {"p": 0, "q": 1}
    bench.run()
    for name, request in bench.requests.items():
        assert bench.output(name) == solo_output(request)


def test_a_request_never_lets_go_before_it_holds_elsewhere() -> None:
    calls: list[str] = []

    class RecordingGate(ScriptedGate):
        def hold(self, key: str) -> None:
            calls.append(f"hold {key}")
            super().hold(key)

        def drop(self, key: str) -> None:
            calls.append(f"drop {key}")
            super().drop(key)

        def acquire(self, key: str) -> int | None:
            index = super().acquire(key)
            calls.extend([] if index is None else [f"acquire {key}"])
            return index

        def release(self, key: str) -> None:
            calls.append(f"release {key}")
            super().release(key)

    bench = Bench(num_blocks=4, block_size=2, budget=8, gate=RecordingGate())
    bench.add("a", 2, 4, adapter="p")
    bench.add("b", 2, 4, adapter="q")
    while bench.requests["b"].status is not RequestStatus.PREEMPTED:
        bench.step()
    bench.run()
    worth = {"hold": 1, "acquire": 1, "drop": -1, "release": -1}
    for key in "pq":
        changes = [worth[call.split()[0]] for call in calls if call.endswith(key)]
        references = [sum(changes[: number + 1]) for number in range(len(changes))]
        assert min(references[:-1]) == 1
        assert max(references) == 2
        assert references[-1] == 0


def test_the_index_may_differ_after_a_preemption() -> None:
    gate = ScriptedGate(num_places=2)
    bench = Bench(num_blocks=6, block_size=2, budget=8, gate=gate)
    bench.add("a", 2, 9, adapter="p")
    bench.add("b", 2, 9, adapter="q")
    while bench.requests["b"].status is not RequestStatus.PREEMPTED:
        bench.step()
    gate.resident["q"] = 7
    bench.run()
    assert trace_line(bench.runner.plans[-1]).startswith("b[")
    assert "@7" in trace_line(bench.runner.plans[-1])
    assert bench.output("b") == solo_output(bench.requests["b"])


def test_a_failed_adapter_fails_its_requests_and_nobody_else() -> None:
    bench = Bench(budget=16, gate=ScriptedGate(fetch_polls={"p": 2}, failures={"p": GONE}))
    for name in ("p1", "p2"):
        bench.add(name, 4, 2, adapter="p")
    bench.add("other", 4, 2, adapter="q")
    bench.run()
    for name in ("p1", "p2"):
        (item,) = bench.items[name]
        assert item.finish == "error"
        assert item.error is not None
        assert (item.error.code, item.error.message) == (GONE.code, GONE.message)
    assert bench.output("other") == solo_output(bench.requests["other"])


def test_a_failure_is_not_held_against_later_requests() -> None:
    bench = Bench(gate=ScriptedGate(failures={"p": GONE}))
    bench.add("first", 4, 2, adapter="p")
    bench.run()
    bench.gate.failures.clear()
    bench.add("second", 4, 2, adapter="p")
    bench.run()
    assert bench.finish("first") == "error"
    assert bench.finish("second") == "length"


@pytest.mark.parametrize("steps", range(6))
def test_abort_while_the_adapter_is_on_its_way(steps: int) -> None:
    bench = Bench(gate=ScriptedGate(fetch_polls={"p": 3}))
    bench.add("a", 4, 9, adapter="p")
    for _ in range(steps):
        bench.step()
    bench.core.abort("a")
    bench.check_idle()


def test_time_limit_while_the_adapter_is_on_its_way() -> None:
    bench = Bench(gate=ScriptedGate(fetch_polls={"p": 10**9}))
    bench.add("a", 4, 9, adapter="p", time_limit=3)
    bench.step()
    bench.now += 3
    bench.run()
    (item,) = bench.items["a"]
    assert item.error is not None
    assert item.error.code == "timeout"


def test_blocks_that_do_not_suffice_leave_the_reference_on_the_host() -> None:
    bench = Bench(num_blocks=4, block_size=2, budget=8)
    bench.add("a", 6, 2)
    bench.step()
    bench.add("b", 6, 2, adapter="p")
    bench.step()
    bench.step()
    assert bench.requests["a"].status is RequestStatus.FINISHED
    bench.run()
    assert bench.finish("b") == "length"


def test_more_adapters_than_places() -> None:
    bench = Bench(budget=32, num_seqs=8, num_blocks=64, gate=ScriptedGate(num_places=3))
    for number in range(24):
        bench.add(f"r{number}", 5, 4, adapter=f"p{number % 12}", flow=f"f{number % 5}")
    bench.run()
    for name, request in bench.requests.items():
        assert bench.output(name) == solo_output(request)


def test_residents_pass_one_that_needs_room_but_not_for_ever() -> None:
    bench = Bench(budget=32, num_seqs=4, num_blocks=64, gate=ScriptedGate(num_places=2))
    for number in range(4):
        bench.add(f"r{number}", 2, 3 + number, adapter="pq"[number % 2])
    for _ in range(3):
        bench.step()
    bench.add("needs room", 2, 1, adapter="x")
    num_added = 4
    while not bench.items["needs room"]:
        while bench.core.stats()["requests_waiting"] < 6:  # p and q never run out of requests, of this tenant and of another
            flow = ["tenant", "other"][num_added % 3 == 0]
            bench.add(f"r{num_added}", 2, 3 + num_added % 4, adapter="pq"[num_added % 2], flow=flow)
            num_added += 1
        bench.step()
        assert len(bench.runner.plans) < 30, "it starves"
    starts = order_of_starts(bench)
    passed = starts.index("needs room") - 4
    assert passed >= bench.limits.max_num_seqs, "those whose adapter is there go first"
    assert passed <= 2 * bench.limits.max_num_seqs, "but only so many"


def test_base_requests_go_on_while_adapters_make_room() -> None:
    bench = Bench(budget=32, num_seqs=3, num_blocks=64, gate=ScriptedGate(num_places=1))
    bench.add("long", 2, 40, adapter="p")
    while not bench.items["long"]:
        bench.step()
    bench.add("needs room", 2, 1, adapter="x")
    for number in range(5):
        bench.add(f"p{number}", 2, 1, adapter="p")
    for number in range(5):
        bench.add(f"base{number}", 2, 1)
    bench.run()
    starts = order_of_starts(bench)
    assert starts.index("base4") < starts.index("needs room")
    assert starts[:5] == ["long", "p0", "p1", "p2", "p3"], "three may pass, and whoever starts in the same step as the third"
    assert starts.index("needs room") < starts.index("p4")


def test_a_slow_fetch_holds_nobody_up() -> None:
    bench = Bench(budget=32, num_seqs=2, num_blocks=64, gate=ScriptedGate(num_places=2, fetch_polls={"slow": 30}))
    bench.add("slow", 2, 1, adapter="slow")
    for number in range(20):
        bench.add(f"r{number}", 2, 1, adapter="p")
    bench.run()
    assert order_of_starts(bench)[-1] == "slow"


def test_a_step_looks_at_a_bounded_number_of_those_that_wait() -> None:
    class CountingGate(ScriptedGate):
        num_asked = 0

        def acquire(self, key: str) -> int | None:
            self.num_asked += 1
            return super().acquire(key)

    num_waiting = 2 * MAX_PASSED_OVER + 10
    gate = CountingGate(fetch_polls={f"p{number}": 12 for number in range(num_waiting)})
    bench = Bench(budget=64, num_seqs=64, num_blocks=200, gate=gate)
    for number in range(num_waiting):
        bench.add(f"r{number}", 1, 1, adapter=f"p{number}")
    bench.add("base", 1, 1)
    for step in range(6):
        before = gate.num_asked
        bench.core.step()
        assert gate.num_asked - before <= MAX_PASSED_OVER
        assert (bench.requests["base"].status is RequestStatus.FINISHED) == (step >= 2), "a pass takes three steps"
    for number in range(num_waiting - 20):
        bench.core.abort(f"r{number}")
    bench.items["base"] = []
    bench.run()
    assert all(request.status is RequestStatus.FINISHED for request in bench.requests.values())
