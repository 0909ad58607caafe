"""The arrays of a step against a plain rebuild from the plan: whatever joined, left or grew before, nothing of it shows."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from tiny_model import CONFIG, REFERENCE
from torch import Tensor

from graftwork_engine.batch import BatchBuilder, StepBatch, StepCapacity
from graftwork_engine.messages import Sampling
from graftwork_engine.request import Request, RequestId
from graftwork_engine.sched.plan import BASE, ScheduledRequest, StepPlan
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import empty_adapter_memory

BLOCK = 3
CAPACITY = StepCapacity(num_rows=40, num_requests=7, num_blocks=8)


def make_builder() -> BatchBuilder:
    return BatchBuilder(REFERENCE, empty_adapter_memory(CONFIG.num_sites), BLOCK, CAPACITY)


def make_request(dice: random.Random) -> Request:
    controls = {
        "logprobs": dice.choice([None, None, None, 0, 2]),
        "prompt_logprobs": dice.choice([None, None, None, 1]),
        "presence_penalty": dice.choice([0.0, 0.0, 0.0, 0.5]),
        "repetition_penalty": dice.choice([1.0, 1.0, 1.0, 1.5]),
        "logit_bias": dice.choice([{}, {}, {}, {5: 1.5, 2: -1.0}]),
        "min_tokens": dice.choice([0, 0, 2]),
        "stop_token_ids": dice.choice([(), (7,)]),
    }
    sampling = Sampling(
        max_tokens=9,
        seed=dice.getrandbits(64),
        choice=dice.randrange(4),
        temperature=dice.choice([0.0, 0.5, 1.25]),
        top_k=dice.randrange(9),
        top_p=dice.choice([0.25, 1.0]),
        min_p=dice.choice([0.0, 0.125]),
        **(controls if dice.random() < 0.5 else {}),
    )
    prompt = [dice.randrange(50) for _ in range(dice.randint(1, 9))]
    return Request(RequestId("r"), prompt, sampling, b"", "", 0.0, adapter_start=dice.choice([0, 0, 0, 4, 11]))


@dataclass
class Line:
    """Requests that run by the rules of a scheduler, thrown together at random."""

    dice: random.Random
    running: list[Request] = field(default_factory=list)
    set_aside: list[Request] = field(default_factory=list)

    def change_company(self) -> None:
        """Some leave for good, some give their blocks back and come again later, others join."""
        for request in list(self.running):
            if request.num_output_tokens == 9 or self.dice.random() < 0.05:
                self.running.remove(request)
            elif self.dice.random() < 0.05:
                self.running.remove(request)
                request.num_computed_tokens = 0
                self.set_aside.append(request)
        while len(self.running) < CAPACITY.num_requests and self.dice.random() < 0.4:
            again = bool(self.set_aside) and self.dice.random() < 0.7
            request = self.set_aside.pop() if again else make_request(self.dice)
            request.block_ids = []  # another list, as the manager of blocks gives it
            request.adapter_index = self.dice.randint(BASE, 3)
            self.running.append(request)

    def plan(self) -> StepPlan:
        """A beginning of the line, each with some of the tokens it has not computed."""
        budget, scheduled = self.dice.randint(1, CAPACITY.num_rows), []
        for request in self.running:
            start, left = request.num_computed_tokens, request.num_tokens - request.num_computed_tokens
            num_tokens = min(left, budget, self.dice.randint(1, 12))
            if not num_tokens:
                break
            budget -= num_tokens
            while len(request.block_ids) * BLOCK < start + num_tokens + self.dice.choice([0, 0, BLOCK]):
                request.block_ids.append(self.dice.randrange(1, 99))
            scheduled.append(
                ScheduledRequest(request, start, num_tokens, request.block_ids, request.adapter_index, num_tokens == left)
            )
        return StepPlan(scheduled)

    def update(self, plan: StepPlan) -> None:
        for s in plan.scheduled:
            s.request.num_computed_tokens = s.start + s.num_tokens
            if s.samples:
                s.request.output_ids.append(self.dice.randrange(50))


def assert_is_rebuild(batch: StepBatch, plan: StepPlan) -> None:
    """Every tensor, row by row from the plan alone."""
    token_ids, positions, adapters, slots, query_start = [], [], [], [], [0]
    sample_rows, prompt_rows, prompt_targets = [], [], []
    for s in plan.scheduled:
        tokens = s.request.prompt_ids + s.request.output_ids
        for position in range(s.start, s.start + s.num_tokens):
            if s.request.sampling.prompt_logprobs is not None and not s.request.output_ids and position + 1 < len(tokens):
                prompt_rows.append(len(token_ids))
                prompt_targets.append(tokens[position + 1])
            token_ids.append(tokens[position])
            positions.append(position)
            adapters.append(s.adapter_index if position >= s.request.adapter_start else BASE)
            slots.append(s.block_ids[position // BLOCK] * BLOCK + position % BLOCK)
        query_start.append(len(token_ids))
        if s.samples:
            sample_rows.append(len(token_ids) - 1)
    attention = batch.forward.attention
    assert batch.token_ids.tolist() == token_ids
    assert batch.forward.positions.tolist() == positions
    assert attention.kv_slot.tolist() == slots
    assert attention.query_start.tolist() == query_start
    assert attention.context_len.tolist() == [s.start + s.num_tokens for s in plan.scheduled]
    assert attention.max_query_len == max(s.num_tokens for s in plan.scheduled)
    assert attention.max_context_len == max(s.start + s.num_tokens for s in plan.scheduled)
    for name, due in msgspec.structs.asdict(Groups.of(adapters)).items():
        assert getattr(batch.forward.adapters, name).tolist() == due, name
    for s, row in zip(plan.scheduled, attention.block_table.tolist(), strict=True):
        needed = -(-(s.start + s.num_tokens) // BLOCK)
        assert row[:needed] == s.block_ids[:needed]
        own = s.block_ids + [0] * (CAPACITY.num_blocks - len(s.block_ids))
        assert all(block in (0, mine) for block, mine in zip(row, own, strict=True)), "another's block shows"
    assert batch.sample_rows.tolist() == sample_rows
    assert (batch.prompt_rows.tolist(), batch.prompt_targets.tolist()) == (prompt_rows, prompt_targets)
    assert_sampling([s.request for s in plan.scheduled if s.samples], batch)


class Groups(msgspec.Struct):
    """`AdapterBatch` as lists."""

    token_adapter: list[int]
    permutation: list[int]
    segment_start: list[int]
    segment_adapter: list[int]
    num_segments: list[int]

    @classmethod
    def of(cls, adapters: list[int]) -> Groups:
        present = sorted(set(adapters) - {BASE})
        order = [row for adapter in [*present, BASE] for row, other in enumerate(adapters) if other == adapter]
        num_grouped = len(adapters) - adapters.count(BASE)
        starts = [sum(1 <= other + 1 <= adapter for other in adapters) for adapter in present]
        return cls(
            adapters,
            order,
            starts + [num_grouped] * (len(adapters) + 1 - len(present)),
            present + [BASE] * (len(adapters) - len(present)),
            [len(present)],
        )


def split(entries: Tensor, row_start: Tensor) -> list[list[int]]:
    return [entries[first:last].tolist() for first, last in pairwise(row_start.tolist())]


def assert_sampling(drawers: list[Request], batch: StepBatch) -> None:
    for name in ("temperature", "top_k", "top_p", "min_p", "choice"):
        assert getattr(batch.sampling, name).tolist() == [getattr(r.sampling, name) for r in drawers], name
    assert batch.sampling.seed.numpy().view(np.uint64).tolist() == [r.sampling.seed for r in drawers]
    assert batch.sampling.position.tolist() == [r.num_output_tokens for r in drawers]
    assert batch.num_top_logprobs == {i: r.sampling.logprobs for i, r in enumerate(drawers) if r.sampling.logprobs is not None}
    biases, counts = [r.token_bias() for r in drawers], [recount(r) for r in drawers]
    assert (batch.logit_bias is None) == all(bias is None for bias in biases)
    if batch.logit_bias is not None:
        lists = split(batch.logit_bias.token_id, batch.logit_bias.row_start)
        assert lists == [[] if bias is None else list(bias.token_ids) for bias in biases]
    assert (batch.penalties is None) == (not any(wants_penalties(r) for r in drawers))
    if batch.penalties is not None:
        token_ids, output_counts = (
            split(entries, batch.penalties.row_start) for entries in (batch.penalties.token_id, batch.penalties.output_count)
        )
        assert [dict(zip(*pair, strict=True)) for pair in zip(token_ids, output_counts, strict=True)] == counts
        assert list(map(len, token_ids)) == list(map(len, counts)), "a token is listed twice"
        for name in ("repetition", "presence", "frequency"):
            assert getattr(batch.penalties, name).tolist() == [getattr(r.sampling, f"{name}_penalty") for r in drawers]


def wants_penalties(request: Request) -> bool:
    return request.sampling.repetition_penalty != 1.0 or request.sampling.presence_penalty != 0.0


def recount(request: Request) -> dict[int, int]:
    """What `Penalties` must list of a request, from its tokens alone."""
    listed = request.prompt_ids if request.sampling.repetition_penalty != 1.0 else []
    found = Counter(request.output_ids)
    return {token: found[token] for token in [*listed, *found]} if wants_penalties(request) else {}


@pytest.mark.parametrize("seed", range(12))
def test_any_company_is_what_a_rebuild_makes_of_it(seed: int) -> None:
    line, builder = Line(random.Random(seed)), make_builder()
    addresses = set()
    for _ in range(120):
        line.change_company()
        plan = line.plan()
        if plan.scheduled:
            batch = builder.build(plan)
            assert_is_rebuild(batch, plan)
            attention = batch.forward.attention
            addresses.add((batch.token_ids.data_ptr(), attention.block_table.data_ptr(), attention.query_start.data_ptr()))
            if line.dice.random() < 0.1:
                assert_is_rebuild(builder.build(plan), plan)  # a step that failed is built again
            line.update(plan)
    assert len(addresses) == 1, "whoever recorded the forward pass reads another place"


def test_a_request_that_runs_anew_with_the_same_blocks_brings_its_new_adapter() -> None:
    request, builder = make_request(random.Random(3)), make_builder()
    request.adapter_start = 0
    for adapter in (2, 1):
        plan = StepPlan([ScheduledRequest(request, 0, 1, [4, 5, 6], adapter, len(request.prompt_ids) == 1)])
        assert builder.build(plan).forward.adapters.token_adapter.tolist() == [adapter]


def test_one_request_may_stand_twice_in_a_plan() -> None:
    builder, blocks = make_builder(), [7, 3, 5]
    request = Request(RequestId("r"), [1, 2, 3, 4, 5, 6], Sampling(4, 0), b"", "", 0.0)
    for _ in range(2):
        parts = [ScheduledRequest(request, 0, 4, blocks, BASE, False), ScheduledRequest(request, 4, 2, blocks, BASE, True)]
        assert_is_rebuild(builder.build(StepPlan(parts)), StepPlan(parts))


def test_a_wide_neighbour_that_left_leaves_no_block_behind() -> None:
    """The one that sits in its place next, after both were gone, sees nothing of it."""
    builder = make_builder()
    wide, narrow = (Request(RequestId(name), [1] * 20, Sampling(4, 0), b"", "", 0.0) for name in "wn")

    def table(*requests: tuple[Request, list[int], int]) -> list[list[int]]:
        parts = [ScheduledRequest(request, 0, count, blocks, BASE, False) for request, blocks, count in requests]
        return builder.build(StepPlan(parts)).forward.attention.block_table.tolist()

    few, many = [9], [1, 2, 3, 4, 5, 6]
    assert table((narrow, few, 3), (wide, many, 18)) == [[9] + [0] * 7, [1, 2, 3, 4, 5, 6, 0, 0]]
    assert table((narrow, few, 3)) == [[9] + [0] * 7]
    assert table((narrow, few, 3), (narrow, [8], 2)) == [[9] + [0] * 7, [8] + [0] * 7]
    assert table((wide, many, 18)) == [[1, 2, 3, 4, 5, 6, 0, 0]]
    assert table((narrow, few, 2)) == [[9] + [0] * 7]


@pytest.mark.parametrize(("num_requests", "num_tokens", "start"), [(1, 41, 0), (8, 1, 0), (1, 1, 24)])
def test_a_plan_beyond_the_capacity_is_refused(num_requests: int, num_tokens: int, start: int) -> None:
    request = Request(RequestId("r"), [1] * 50, Sampling(1, 0), b"", "", 0.0)
    plan = StepPlan([ScheduledRequest(request, start, num_tokens, list(range(20)), BASE, False)] * num_requests)
    with pytest.raises(ValueError, match="exceeds StepCapacity"):
        make_builder().build(plan)


def test_adapters_are_grouped_again_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    sorts = []
    sort = np.argsort
    monkeypatch.setattr(np, "argsort", lambda *args, **kwargs: sorts.append(1) or sort(*args, **kwargs))
    builder = make_builder()
    requests = [Request(RequestId(str(i)), [1, 2], Sampling(9, 0), b"", "", 0.0, adapter_index=i) for i in range(3)]
    for _ in range(4):
        plan = StepPlan([ScheduledRequest(r, r.num_tokens - 1, 1, r.block_ids, r.adapter_index, True) for r in requests])
        for r in requests:
            r.block_ids += [0] * (3 - len(r.block_ids))
        batch = builder.build(plan)
        assert batch.forward.adapters.permutation.tolist() == build_adapter_batch([0, 1, 2]).permutation.tolist()
        for r in requests:
            r.output_ids.append(3)
    assert len(sorts) == 1 + 4, "one, and one for each of those that the test itself makes"
