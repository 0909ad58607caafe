"""A step planned once for all its linears and attentions: the same bits, by whichever implementations, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from graftwork_kernels import reference
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.candidates import implementation
from graftwork_kernels.choice import METHODS, Choice
from graftwork_kernels.layout import AdapterMemory, AttentionBatch, LinearSite, Weight, empty_adapter_memory
from graftwork_kernels.ops import Operators
from graftwork_kernels.triton.linear import Form
from graftwork_kernels.triton.operators import TritonOperators

SITES = (LinearSite(0, 0, 20), LinearSite(1, 20, 50))
ADAPTERS = [0, 3, -1, 1, 3, 2, 4]
GROUP = 2


def attention_batch(query_len: list[int], context_len: list[int]) -> AttentionBatch:
    starts = torch.tensor([0, *query_len]).cumsum(0)
    return AttentionBatch(
        query_start=starts.int(),
        context_len=torch.tensor(context_len).int(),
        block_table=torch.arange(len(query_len) * 3, dtype=torch.int32).view(len(query_len), 3),
        kv_slot=torch.full((int(starts[-1]),), -1),
        max_query_len=max(query_len, default=0),
        max_context_len=max(context_len, default=0),
    )


REQUESTS = attention_batch([1, 3, 3], [5, 3, 9])


def test_hosts_plan_nothing(host_ops: Operators, many_ranks: AdapterMemory) -> None:
    batch = build_adapter_batch(ADAPTERS)
    adapters, requests = host_ops.plan_step(many_ranks, batch, REQUESTS, GROUP, torch.float32)
    assert adapters is batch
    assert requests is REQUESTS


@pytest.mark.parametrize("form", Form)
def test_a_planned_step_has_the_same_bits(
    make_interpreted: Callable[..., TritonOperators], many_ranks: AdapterMemory, form: Form
) -> None:
    """Over several linears, and for several steps with one memory."""
    ops = Operators(make_interpreted(form))
    weight, q, caches = Weight.plain(torch.randn(70, 70)), torch.randn(7, 4, 8), torch.randn(2, 9, 2, 4, 8)
    for adapters in (ADAPTERS, [2] * 5 + [-1] * 2):
        x, batch = torch.randn(7, 70), build_adapter_batch(adapters)
        planned, requests = ops.plan_step(many_ranks, batch, REQUESTS, GROUP, torch.float32)
        assert planned.tasks is not None
        assert requests.tasks is not None
        alone = ops.adapter_linear(x, weight, None, many_ranks, batch, SITES)
        for _ in range(2):  # what the fused form counts in its tasks is 0 again
            assert torch.equal(ops.adapter_linear(x, weight, None, many_ranks, planned, SITES), alone)
    attended = ops.paged_attention(q, *caches, REQUESTS, 0.3)
    assert torch.equal(ops.paged_attention(q, *caches, requests, 0.3), attended)


@pytest.mark.parametrize(
    ("linear", "attention"),
    [("triton", "triton"), ("triton_fused", "triton"), ("triton_fused", "reference"), ("reference", "triton")],
)
def test_each_part_is_planned_by_who_reads_it(many_ranks: AdapterMemory, linear: str, attention: str) -> None:
    """And gives what the reference does."""
    names = dict.fromkeys(METHODS, "reference") | {"linear": linear, "paged_attention": attention}
    ops = Operators(implementation(Choice(names), None, torch.device("cpu"), 300))
    batch = build_adapter_batch(ADAPTERS)
    adapters, requests = ops.plan_step(many_ranks, batch, REQUESTS, GROUP, torch.float32)
    assert (adapters.tasks is None) == (linear == "reference")
    assert (requests.tasks is None) == (attention == "reference")
    x, weight = torch.randn(7, 70), torch.randn(70, 70)
    expected = reference.adapter_linear(x, Weight.plain(weight), None, many_ranks, batch, SITES, torch.float32)
    given = ops.adapter_linear(x, ops.prepare_weight(weight), None, many_ranks, adapters, SITES)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    q, caches = torch.randn(7, 4, 8), torch.randn(2, 9, 2, 4, 8)
    torch.testing.assert_close(
        ops.paged_attention(q, *caches, requests, 0.3), reference.paged_attention(q, *caches, REQUESTS, 0.3), rtol=1e-4, atol=1e-4
    )


def test_a_step_without_adapters_rows_or_requests(ops: Operators, many_ranks: AdapterMemory) -> None:
    nobody = attention_batch([], [])
    batch = build_adapter_batch([-1, -1])
    adapters, requests = ops.plan_step(empty_adapter_memory(2), batch, nobody, 1, torch.float32)
    assert (adapters, requests) == (batch, nobody)
    adapters, _ = ops.plan_step(many_ranks, build_adapter_batch([]), nobody, 1, torch.float32)
    assert ops.adapter_linear(
        torch.zeros(0, 70), ops.prepare_weight(torch.randn(70, 70)), None, many_ranks, adapters, SITES
    ).shape == (0, 70)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m, a, r: (m, replace(a, permutation=a.permutation[:-1]), r, 1), "batch.permutation: expected shape"),
        (lambda m, a, r: (m, replace(a, num_segments=a.num_segments.long()), r, 1), "batch.num_segments: expected torch.int32"),
        (lambda m, a, r: (m, replace(a, token_adapter=a.token_adapter.view(7, 1)), r, 1), "batch.token_adapter: expected shape"),
        (lambda m, a, r: (replace(m, sites=m.sites[..., :-1]), a, r, 1), "memory.sites: expected shape"),
        (lambda m, a, r: (replace(m, pool=m.pool.view(torch.int8)), a, r, 1), "memory.pool: expected torch.uint8"),
        (lambda m, a, r: (m, a, replace(r, query_start=r.query_start[:-1]), 1), "batch.query_start: expected shape"),
        (lambda m, a, r: (m, a, replace(r, block_table=r.block_table[0]), 1), "batch.block_table: expected shape"),
        (lambda m, a, r: (m, a, r, 0), "group: expected a query head at least"),
    ],
)
def test_what_describes_no_step_is_refused(
    ops: Operators, many_ranks: AdapterMemory, change: Callable[..., tuple], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        ops.plan_step(*change(many_ranks, build_adapter_batch(ADAPTERS), REQUESTS), torch.float32)
