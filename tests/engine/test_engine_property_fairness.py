"""Nobody starves: whatever the limits and the load, waiting is bounded in steps, and flows that always want get alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from property_budget import budget as tries

from graftwork_engine.request import RequestStatus
from graftwork_engine.sched.costs import COST_OF_OUTPUT_TOKEN, COST_OF_PROMPT_TOKEN
from scripted_engine import Bench, ScriptedGate, solo_output


def add_numbered(bench: Bench, flow: str, length: int, max_tokens: int, adapter: str | None = None) -> str:
    name = f"{flow}-{len(bench.requests)}"
    bench.add(name, length, max_tokens, flow=flow, adapter=adapter)
    return name


def num_waiting(bench: Bench, flow: str) -> int:
    return sum(r.flow == flow and r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for r in bench.requests.values())


@tries(40)
@given(
    num_flows=st.integers(2, 4),
    num_seqs=st.integers(1, 5),
    budget=st.integers(2, 20),
    num_blocks=st.integers(6, 40),
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=4, max_size=4),
    adapters=st.lists(st.sampled_from([None, "p", "q"]), min_size=4, max_size=4),
)
def test_flows_that_always_wait_are_served_alike(
    num_flows: int,
    num_seqs: int,
    budget: int,
    num_blocks: int,
    shapes: list[tuple[int, int]],
    adapters: list[str | None],
) -> None:
    """However long their requests are, the tokens that each flow was served differ by less than what can run at once, twice."""
    bench = Bench(
        num_blocks=num_blocks, block_size=2, budget=budget, num_seqs=num_seqs, caching=False, gate=ScriptedGate(num_places=2)
    )
    flows = [f"flow{n}" for n in range(num_flows)]
    for _ in range(100):
        for flow, (length, max_tokens), adapter in zip(flows, shapes, adapters, strict=False):
            while num_waiting(bench, flow) <= num_seqs:  # so that a step cannot empty its line
                add_numbered(bench, flow, length, max_tokens, adapter)
        bench.step()
    started = [r for r in bench.requests.values() if r.num_output_tokens or r.status is RequestStatus.RUNNING]
    served = dict.fromkeys(flows, 0)
    for request in started:
        served[request.flow] += COST_OF_PROMPT_TOKEN * len(request.prompt_ids) + COST_OF_OUTPUT_TOKEN * request.num_output_tokens
    largest = max(COST_OF_PROMPT_TOKEN * length + COST_OF_OUTPUT_TOKEN * max_tokens for length, max_tokens in shapes[:num_flows])
    assert max(served.values()) - min(served.values()) <= 2 * largest * num_seqs, served


@tries(60)
@given(
    num_seqs=st.integers(1, 5),
    budget=st.integers(1, 12),
    chunk=st.sampled_from([None, 1, 3]),
    max_tokens=st.integers(1, 8),
    prompt=st.integers(1, 6),
    delay=st.integers(0, 5),
    same_flow=st.booleans(),
)
def test_an_adapter_without_room_starts_within_bounds_while_another_never_stops_coming(
    num_seqs: int, budget: int, chunk: int | None, max_tokens: int, prompt: int, delay: int, same_flow: bool
) -> None:
    """Fault kinds of vllm#15422 and sglang#15129: those whose adapter is there pass one whose is not, but not for ever."""
    bench = Bench(
        num_blocks=200, budget=budget, num_seqs=num_seqs, chunk=chunk, gate=ScriptedGate(num_places=1, fetch_polls={"b": delay})
    )

    def keep_coming() -> None:
        while num_waiting(bench, "a") < num_seqs + 2:
            add_numbered(bench, "a", prompt, max_tokens, "a")

    keep_coming()
    for _ in range(5):
        keep_coming()
        bench.step()
    late = bench.add("late", prompt, 2, flow="a" if same_flow else "b", adapter="b")
    num_started_before = _num_started(bench)
    request_steps = num_seqs * (prompt + max_tokens)  # all that can run at once, one token a step
    for _ in range(3 * request_steps + delay + 10):
        keep_coming()
        bench.step()
        if late.status is not RequestStatus.WAITING:
            break
    assert late.status is not RequestStatus.WAITING, "it starves"
    waited_for_room = _num_started(bench) - num_started_before
    assert waited_for_room <= 2 * num_seqs + (delay + 3) * num_seqs


def _num_started(bench: Bench) -> int:
    return len({s.request.request_id for plan in bench.runner.plans for s in plan.scheduled if s.request.adapter_key == "a"})


@tries(25)
@given(num_seqs=st.integers(2, 5), extra=st.integers(0, 4), budget=st.integers(8, 30))
def test_residents_go_before_one_that_has_no_room(num_seqs: int, extra: int, budget: int) -> None:
    """Fault kind of vllm#16876: places taken by A and B, the line is C, A, B: A and B do not stand behind C."""
    bench = Bench(num_blocks=200, budget=budget, num_seqs=num_seqs + 2, gate=ScriptedGate(num_places=2))
    long = {name: bench.add(f"long-{name}", 2, 30, adapter=name, flow=name) for name in "ab"}
    while any(request.status is RequestStatus.WAITING for request in long.values()):
        bench.step()
    bench.add("c", 2, 2, adapter="c", flow="c")
    behind = [
        bench.add(f"{name}{n}", 2, 1, adapter=name, flow=name) for n in range(min(num_seqs, 1 + extra) // 2 + 1) for name in "ab"
    ]
    for _ in range(20):
        bench.step()
        if sum(request.status is not RequestStatus.WAITING for request in behind) >= min(len(behind), num_seqs):
            break
    assert bench.requests["c"].status is RequestStatus.WAITING
    assert sum(request.status is not RequestStatus.WAITING for request in behind) >= min(len(behind), num_seqs)
    bench.run()
    for name, request in bench.requests.items():
        assert bench.output(name) == solo_output(request)


@tries(40)
@given(num_choices=st.integers(2, 5), num_blocks=st.integers(8, 30), num_seqs=st.integers(1, 6), prompt=st.integers(1, 9))
def test_choices_of_one_prompt_share_its_blocks_and_nothing_else(
    num_choices: int, num_blocks: int, num_seqs: int, prompt: int
) -> None:
    bench = Bench(num_blocks=num_blocks, block_size=2, budget=16, num_seqs=num_seqs)
    names = [f"choice{n}" for n in range(num_choices)]
    for choice, name in enumerate(names):
        bench.add(name, [3] * prompt, 5, choice=choice, adapter="p")
    bench.run()
    outputs = [bench.output(name) for name in names]
    assert outputs == [solo_output(bench.requests[name]) for name in names]
    assert len({tuple(output) for output in outputs}) == num_choices


def test_one_that_never_loads_holds_nobody_up_and_ends_at_its_time() -> None:
    bench = Bench(num_seqs=1, num_blocks=50, gate=ScriptedGate(num_places=1, fetch_polls={"never": 10**9}))
    stuck = bench.add("stuck", 2, 2, adapter="never", time_limit=50.0)
    for number in range(40):
        bench.add(f"r{number}", 2, 1, adapter="p" if number % 2 else None)
    while bench.core.stats()["requests_waiting"] > 1 or bench.core.stats()["requests_running"]:
        bench.step()
        bench.now += 1
        assert len(bench.runner.plans) < 45
    assert stuck.status is RequestStatus.WAITING
    bench.now += 100
    bench.run()
    error = bench.items["stuck"][-1].error
    assert error is not None
    assert error.code == "timeout"
