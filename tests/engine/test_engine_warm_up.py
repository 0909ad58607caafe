"""The steps that are run before the first request: what they cover, and that they fit whatever a server allows."""

from __future__ import annotations

import pytest
from tiny_model import BLOCK, adapter_memory, make_runner, random_adapter

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


def test_every_power_of_rows_and_requests_is_there_with_prompts_and_without() -> None:
    shapes = {(len(plan.scheduled), plan.num_tokens) for plan in warm_up_plans(StepLimits(2048, 256, 4096, 16))}
    for power in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        assert {(power, power), (power, 2 * power), (1, power)} <= shapes
    assert {(1, 512), (1, 1024), (1, 2048), (256, 2048)} <= shapes


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
