"""The steps that are run before the first request: what they cover, and that they fit whatever a server allows."""

from __future__ import annotations

import pytest
from tiny_model import BLOCK, adapter_memory, make_runner, random_adapter

from graftwork_engine.sched.plan import StepPlan
from graftwork_engine.warm_up import GREEDIEST, WISHES, StepLimits, warm_up, warm_up_plans

LIMITS = [
    StepLimits(1, 1, 1, 16),
    StepLimits(24, 9, 64, 4),
    StepLimits(100, 7, 5, 3),
    StepLimits(8, 64, 33, 16),
    StepLimits(2048, 256, 4096, 16),
]


@pytest.mark.parametrize("limits", LIMITS)
def test_every_plan_keeps_the_limits(limits: StepLimits) -> None:
    for plan in [*warm_up_plans(limits), limits.largest(GREEDIEST)]:
        assert 0 < plan.num_tokens <= limits.num_rows
        assert len(plan.scheduled) <= limits.num_requests
        for s in plan.scheduled:
            assert 0 < s.num_tokens <= limits.longest
            assert (len(s.block_ids) - 1) * limits.block_size < s.num_tokens <= len(s.block_ids) * limits.block_size


def variants(plan: StepPlan) -> tuple[int, int, bool]:
    """The powers of two that its kernels are compiled for, and whether it has a prompt."""
    rows, requests = (1 << (number - 1).bit_length() for number in (plan.num_tokens, len(plan.scheduled)))
    return rows, requests, any(s.num_tokens > 1 for s in plan.scheduled)


@pytest.mark.parametrize("limits", [*LIMITS, StepLimits(256, 256, 99, 16), StepLimits(300, 300, 9, 16), StepLimits(64, 48, 9, 16)])
def test_no_step_has_a_variant_that_was_not_there(limits: StepLimits) -> None:
    met = [variants(plan) for plan in warm_up_plans(limits)]
    requests_with_prompts = {requests for _, requests, has_prompt in met if has_prompt}
    for requests in range(1, min(limits.num_requests, limits.num_rows) + 1):
        most = min(limits.num_rows, requests * limits.longest)
        for rows in {requests, requests + 1, 2 * requests, most} & set(range(requests, most + 1)):
            of_rows, of_requests, has_prompt = variants(limits.plan(requests, rows))
            assert of_rows in {each for each, _, _ in met}
            assert of_requests in {each for _, each, _ in met}
            assert not has_prompt or of_requests in requests_with_prompts


def test_every_wish_is_there() -> None:
    wishes = [s.request.sampling for plan in warm_up_plans(StepLimits(64, 8, 64, 16)) for s in plan.scheduled]
    assert all(wish in wishes for wish in WISHES)


@pytest.mark.parametrize("limits", [StepLimits(24, 9, 60, BLOCK), StepLimits(1, 1, 2, BLOCK)])
def test_a_warm_engine_serves_as_a_cold_one(limits: StepLimits) -> None:
    memory = adapter_memory([random_adapter(0, 3, ["self_attn.q_proj"])])
    runner = make_runner(memory)
    assert warm_up(runner, limits) == len(list(warm_up_plans(limits)))
    plan = limits.plan(1, 1)
    assert runner.execute(plan) == make_runner(memory).execute(plan)
