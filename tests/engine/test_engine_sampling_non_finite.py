"""An adapter whose values are too large (public fault: NaN spoils the batch, or the prefix cache for later users)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import TinyEngine, adapter_memory, make_runner, random_adapter

from graftwork_adapters.base_spec import PROJECTIONS
from graftwork_engine.errors import ErrorCode
from graftwork_engine.kv.manager import KVCacheManager
from graftwork_engine.messages import EngineError, OutItem, Sampling
from graftwork_engine.request import Request, RequestId
from graftwork_engine.sched.plan import BASE, RequestResult, ScheduledRequest, StepPlan
from graftwork_kernels.layout import AdapterMemory
from graftwork_kernels.ops import Operators
from scripted_engine import Bench, solo_output

GREEDY = Sampling(max_tokens=6, seed=0, temperature=0.0, logprobs=2)
PROMPT = [5, 90, 17, 33, 61, 2, 44, 8, 71, 29, 13]
GOOD, HUGE, INFINITE, NAN_LATE, CALM = range(5)


@pytest.fixture(scope="module")
def memory() -> AdapterMemory:
    """A sound adapter, two whose B overflows or is infinite, one that breaks only the last layer's last projection,
    and the second with values as they should be."""
    good = random_adapter(1, 3, PROJECTIONS)
    calm = random_adapter(2, 4, ["self_attn.v_proj", "mlp.up_proj"])
    huge = {site: (a * 1e20, b * 1e30) for site, (a, b) in calm.items()}
    infinite = {site: (a, b * float("inf")) for site, (a, b) in random_adapter(3, 2, ["self_attn.k_proj"]).items()}
    last = max(random_adapter(4, 2, ["mlp.down_proj"]))
    a, b = random_adapter(4, 2, ["mlp.down_proj"])[last]
    return adapter_memory([good, huge, infinite, {last: (a, b * float("nan"))}, calm])


def with_fields(**changes: object) -> Sampling:
    return msgspec.structs.replace(GREEDY, **changes)


def assert_failed(items: list[OutItem]) -> None:
    """One item, an error that says what to look at, and no token of rubbish before it."""
    (item,) = items
    assert (item.finish, item.token_ids, item.logprobs) == ("error", [], None)
    assert item.error == EngineError(
        "non_finite_output", "the model's output is not finite; the adapter's values may be too large"
    )  # fmt: skip


@pytest.mark.parametrize("adapter", [HUGE, INFINITE, NAN_LATE])
@pytest.mark.parametrize("chunk", [None, 3, 1])
@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0, "top_p": 0.9}, {"prompt_logprobs": 1}, {"presence_penalty": 1.0}])
def test_it_fails_that_request_only(memory: AdapterMemory, adapter: int, chunk: int | None, changes: dict[str, object]) -> None:
    engine = TinyEngine(memory, chunk=chunk)
    broken = engine.add(PROMPT, with_fields(**changes), adapter)
    neighbour = engine.add(PROMPT[:7], with_fields(temperature=1.0, seed=3), GOOD)
    for item in engine.core.step():  # its first, before anybody could find its blocks, though a chunk draws no token
        engine.items[item.request_id].append(item)
    assert_failed(engine.items[broken])
    engine.run()
    assert_failed(engine.items[broken])
    assert engine.tokens(neighbour) == TinyEngine(memory).generate(PROMPT[:7], with_fields(temperature=1.0, seed=3), GOOD)
    assert engine.core.stats()["kv_blocks_cached"] == 3  # of 7 + 5 computed tokens of the neighbour, none of the broken one


@pytest.mark.parametrize("step_of_broken", ["decode", "prefill"])
def test_neighbours_in_its_batch_keep_every_bit(memory: AdapterMemory, step_of_broken: str) -> None:
    """The same step with a sound and with a broken row at the same place: all others' tokens and logprobs are the same bits."""

    def run(adapter: int) -> list[RequestResult]:
        runner = make_runner(memory, num_blocks=40)
        sampled = with_fields(temperature=1.0, prompt_logprobs=1)
        requests = [Request(RequestId(str(i)), PROMPT[i:], sampled, b"", "", 0.0) for i in range(4)]
        adapters = [GOOD, adapter, BASE, GOOD]
        results: Sequence[RequestResult | int] = []
        for step in range(2):
            parts = []
            for i, request in enumerate(requests):
                if step:
                    request.output_ids.append(7)
                starts_now = step == 0 or (i == 1 and step_of_broken == "prefill")
                start = 0 if starts_now else request.num_tokens - 1
                blocks = list(range(8 * i, 8 * i + 8))
                parts.append(ScheduledRequest(request, start, request.num_tokens - start, blocks, adapters[i], samples=True))
            results = runner.execute(StepPlan(parts))
        return [RequestResult(result) if isinstance(result, int) else result for result in results]

    sound, broken = run(CALM), run(HUGE)
    assert broken[1].failure is not None
    assert broken[1].token_id is None
    assert [broken[i] for i in (0, 2, 3)] == [sound[i] for i in (0, 2, 3)]
    assert sound[1].failure is None


@pytest.mark.parametrize("chunk", [None, 4, 5])
@pytest.mark.parametrize("spoilt_at", [1, 2, 3])
def test_after_a_passing_fault_the_same_prompt_starts_clean(memory: AdapterMemory, chunk: int | None, spoilt_at: int) -> None:
    """The fault passes (a bit that fell over), so the adapter itself is sound; what it left must be found by nobody.

    At the request's ``spoilt_at``-th step one value in the cache of its first block becomes NaN, behind the back of the engine.
    """
    expected = TinyEngine(memory).generate(PROMPT, GREEDY, GOOD)
    engine = TinyEngine(memory, chunk=chunk)
    assert engine.generate([1, 2, 3, 4, 5], GREEDY, GOOD)  # something of others' is in the cache
    cached = engine.core.stats()["kv_blocks_cached"]
    spoilt = engine.add(PROMPT, GREEDY, GOOD)
    for _ in range(spoilt_at):
        engine.items[spoilt] += engine.core.step()
    (running,) = engine.core._scheduler._running
    engine.kv.values[0][running.block_ids[0], :, 1] = float("nan")
    engine.run()
    assert engine.items[spoilt][-1].error is not None
    assert engine.tokens(spoilt) == expected[: len(engine.tokens(spoilt))]
    assert engine.core.stats()["kv_blocks_cached"] == cached
    again = engine.add(PROMPT, GREEDY, GOOD)
    engine.run()
    assert engine.items[again][0].cached_tokens == 0
    assert engine.tokens(again) == expected


def test_those_who_share_its_blocks_fail_too_and_nobody_after_them(memory: AdapterMemory) -> None:
    engine = TinyEngine(memory)
    expected = engine.generate(PROMPT, GREEDY, GOOD)
    sharing = [engine.add(PROMPT, GREEDY, GOOD) for _ in range(3)]
    apart = [engine.add(PROMPT, GREEDY, adapter) for adapter in (BASE + 1, None)]
    first = engine.core.step()
    assert {item.cached_tokens for item in first if item.request_id in sharing} == {8}
    for item in first:
        engine.items[item.request_id].append(item)
    shared = engine.core._scheduler._running[0].block_ids[1]
    engine.kv.keys[1][shared] = float("nan")
    engine.run()
    for name in [*sharing, apart[0]]:
        assert engine.items[name][-1].finish == "error"
        assert engine.tokens(name) == expected[:1]
    assert engine.items[apart[1]][-1].finish == "length"
    assert engine.generate(PROMPT, GREEDY, GOOD) == expected


@pytest.mark.parametrize("adapter", [None, GOOD])
def test_what_was_left_in_free_blocks_reaches_nobody(memory: AdapterMemory, adapter: int | None) -> None:
    """Bits are compared: with memory full of NaN, then of infinity, then of zeros; in chunks, decoding, alone and together."""

    def run(left: float, chunk: int | None) -> list[list[OutItem]]:
        engine = TinyEngine(memory, num_blocks=24, chunk=chunk)
        for cache in (*engine.kv.keys, *engine.kv.values):
            cache.fill_(left)
        names = [engine.add(PROMPT[:n], with_fields(max_tokens=7, prompt_logprobs=1), adapter) for n in (1, 3, 4, 5, 8, 11)]
        engine.run()
        return [engine.items[name] for name in names]

    for chunk in (None, 2, 3):
        clean = run(0.0, chunk)
        assert all(items[-1].finish == "length" for items in clean)
        assert run(float("nan"), chunk) == clean
        assert run(float("inf"), chunk) == clean


def test_blocks_of_a_failed_request_serve_others(memory: AdapterMemory) -> None:
    """Little memory, broken and sound requests in turns: each block is reused many times over."""
    dice = random.Random(1)
    engine = TinyEngine(memory, num_blocks=9, chunk=3)
    lengths = [dice.randint(1, 11) for _ in range(10)]
    alone = [TinyEngine(memory).generate(PROMPT[:n], GREEDY, GOOD) for n in lengths]
    for length, expected in zip(lengths, alone, strict=True):
        broken = engine.add(PROMPT, GREEDY, dice.choice([HUGE, INFINITE, NAN_LATE]))
        sound = engine.add(PROMPT[:length], GREEDY, GOOD)
        engine.run()
        assert_failed(engine.items[broken])
        assert engine.tokens(sound) == expected


def test_prompt_scores_that_are_not_finite_fail_the_request(memory: AdapterMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound hidden states, but a head that overflows for one of the scored rows."""
    engine = TinyEngine(memory)
    model = engine.runner._model
    project = model.logits

    def head(ops: Operators, hidden: torch.Tensor, *_: object) -> torch.Tensor:
        logits = project(ops, hidden)
        if len(logits) == len(PROMPT) - 1:
            logits[4, 9] = float("inf")
        return logits

    monkeypatch.setattr(model, "logits", head)
    scored = engine.add(PROMPT, with_fields(prompt_logprobs=2))
    other = engine.add(PROMPT, GREEDY)
    engine.run()
    assert_failed(engine.items[scored])
    assert engine.items[other][-1].finish == "length"


FAILURE = EngineError(ErrorCode.NON_FINITE, "not finite")


class FaultyRunner:
    """Lets the requests in ``broken`` fail at their next step, having written garbage."""

    def __init__(self, bench: Bench) -> None:
        self._inner = bench.runner
        self.broken: set[str] = set()

    def execute(self, plan: StepPlan) -> list[RequestResult | int]:
        results = self._inner.execute(plan)
        for place, s in enumerate(plan.scheduled):
            if s.request.request_id in self.broken:
                for position in range(s.start + s.num_tokens):
                    self._inner._memory[self._inner._slot(s, position)] = b"garbage"
                results[place] = RequestResult(failure=FAILURE)
        return results


@settings(max_examples=60, deadline=None)
@given(
    st.integers(6, 14),
    st.sampled_from([None, 1, 3]),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.booleans(), st.integers(0, 6)), min_size=1, max_size=9),
)
def test_whenever_a_request_fails_all_books_agree_and_nobody_reads_its_blocks(
    num_blocks: int, chunk: int | None, requests: list[tuple[int, int, bool, int]]
) -> None:
    """Prompts are mostly alike, so that prefixes are shared; the scripted runner complains of a wrong block."""
    bench = Bench(num_blocks=num_blocks, block_size=2, chunk=chunk)
    runner = FaultyRunner(bench)
    bench.core._runner = runner  # type: ignore[assignment]
    for number, (length, max_tokens, is_broken, when) in enumerate(requests):
        # Of a flow of its own, so that those that share its garbage do not stop the test: that is the test above.
        name = f"r{number}"
        flow = "broken" if is_broken else "sound"
        bench.add(name, [3] * length, min(max_tokens, 2 * num_blocks - length), flow=flow)
        for _ in range(when):
            bench.step()
        if is_broken and bench.requests[name].status.value == "running":
            runner.broken.add(name)
            bench.step()
            if bench.finish(name) == "error":
                assert bench.items[name][-1].error == FAILURE
            twin = bench.add(f"twin-{number}", [3] * length, 1, flow="broken")
            bench.run()
            assert bench.output(f"twin-{number}") == solo_output(twin)
    bench.run()
    for name, request in bench.requests.items():
        if name not in runner.broken:
            assert bench.output(name) == solo_output(request)


def test_contents_are_withdrawn_whoever_computed_them() -> None:
    """Two requests computed the same prefix side by side: one has the blocks that are found, the other one is withdrawn."""
    kv = KVCacheManager(8, 2, "base")
    requests = [Request(RequestId(name), [1, 2, 3, 4, 5], GREEDY, b"", "", 0.0) for name in "ab"]
    for request in requests:
        assert kv.extend(request, 5)
    for request in requests:
        kv.register(request, 0, 5)
    assert kv.find_computed(requests[1]) == requests[0].block_ids[:2]
    kv.withdraw(requests[1])
    assert kv.find_computed(requests[0]) == []
    assert kv.discrepancies(requests) == []
    for request in requests:
        kv.free(request)
    assert kv.stats()["kv_blocks_free"] == 8


def test_what_was_registered_before_a_preemption_is_withdrawn_as_well() -> None:
    bench = Bench(num_blocks=6, block_size=2, budget=16)
    runner = FaultyRunner(bench)
    bench.core._runner = runner  # type: ignore[assignment]
    old = bench.add("old", [7] * 4, 5)
    young = bench.add("young", [9] * 5, 4, flow="other")
    bench.step()
    while young.status.value == "running":
        bench.step()
    assert young.status.value == "preempted"
    assert bench.core.stats()["kv_blocks_cached"] > 0
    while young.status.value != "running":
        bench.step()
    runner.broken.add("young")
    bench.step()
    assert bench.finish("young") == "error"
    runner.broken.clear()
    bench.run()
    assert bench.output("old") == solo_output(old)
    twin = bench.add("twin", [9] * 5, 4, flow="other")
    bench.run()
    assert bench.items["twin"][0].cached_tokens == 0
    assert bench.output("twin") == solo_output(twin)
