"""Paged attention of the Triton kernels, interpreted, against attention in fp64 over each request's own keys and values.

Chunks and tiles are made small, so that short contexts have several; whatever no request holds is NaN.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graftwork_kernels.layout import AttentionBatch
from graftwork_kernels.ops import Operators
from graftwork_kernels.triton import attention
from graftwork_kernels.triton.linear import Form

BLOCK, SCALE = 4, 0.3


@pytest.fixture
def triton_ops(make_interpreted, monkeypatch: pytest.MonkeyPatch) -> Operators:
    monkeypatch.setattr(attention, "CHUNK", 16)
    monkeypatch.setattr(attention, "MOST_CHUNKS", 4)
    monkeypatch.setattr(attention, "KEYS", 16)
    monkeypatch.setattr(attention, "WIDE_PREFILL_ROWS", 16)
    return Operators(make_interpreted(Form.TWO))


def step_of(query_len: list[int], context_len: list[int], num_kv_heads: int, dim: int) -> tuple[AttentionBatch, Tensor, Tensor]:
    """The requests' blocks scattered over caches that hold NaN elsewhere, in the tails of last blocks too."""
    most = max(1, -(-max(context_len) // BLOCK))
    table = torch.randperm(most * len(context_len)).view(len(context_len), most).int()
    caches = torch.full((2, table.numel(), num_kv_heads, BLOCK, dim), torch.nan)
    for request, context in enumerate(context_len):
        for position in range(context):
            caches[:, table[request, position // BLOCK], :, position % BLOCK] = torch.randn(2, num_kv_heads, dim)
    starts = torch.tensor([0, *query_len]).cumsum(0)
    batch = AttentionBatch(
        query_start=starts.int(),
        context_len=torch.tensor(context_len).int(),
        block_table=table,
        kv_slot=torch.zeros(int(starts[-1]), dtype=torch.int64),
        max_query_len=max(query_len),
        max_context_len=max(context_len),
    )
    return batch, *caches.unbind()


def exact(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> Tensor:
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[1]
    starts = batch.query_start.tolist()
    for request, context in enumerate(batch.context_len.tolist()):
        blocks = batch.block_table[request].long()
        keys, values = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context].double().repeat_interleave(group, 0)
            for cache in (k_cache, v_cache)
        )
        for row in range(starts[request], starts[request + 1]):
            seen = context - (starts[request + 1] - row) + 1
            weights = (torch.einsum("hd,hsd->hs", q[row].double(), keys[:, :seen]) * SCALE).softmax(-1)
            out[row] = torch.einsum("hs,hsd->hd", weights, values[:, :seen])
    return out


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(4, 2, 16), (3, 3, 24), (8, 1, 6), (6, 2, 64)])
@pytest.mark.parametrize(
    ("query_len", "context_len"),
    [
        ([1, 1, 1], [1, 16, 17]),
        ([1, 1], [64, 97]),  # chunks of sixteen, and of more where there would be more than four
        ([5, 21], [5, 40]),
        ([1, 0, 9, 1], [33, 0, 30, 2]),
    ],
)
def test_any_mix_of_prompts_and_decode_rows(triton_ops, query_len, context_len, num_heads, num_kv_heads, dim):
    batch, k_cache, v_cache = step_of(query_len, context_len, num_kv_heads, dim)
    q = torch.randn(sum(query_len), num_heads, dim)
    out = triton_ops.paged_attention(q, k_cache, v_cache, batch, SCALE)
    torch.testing.assert_close(out.double(), exact(q, k_cache, v_cache, batch), rtol=1e-5, atol=1e-5)


def test_a_row_keeps_every_bit_whatever_its_neighbours(triton_ops, make_interpreted):
    batch, k_cache, v_cache = step_of([1, 6, 1], [70, 40, 3], 2, 16)
    q = torch.randn(8, 4, 16)
    together = triton_ops.paged_attention(q, k_cache, v_cache, batch, SCALE)
    for request in range(3):
        start, end = batch.query_start[request : request + 2].tolist()
        alone = AttentionBatch(
            query_start=torch.tensor([0, end - start]).int(),
            context_len=batch.context_len[request : request + 1],
            block_table=batch.block_table[request : request + 1],
            kv_slot=batch.kv_slot[start:end],
            max_query_len=end - start,
            max_context_len=int(batch.context_len[request]),
        )
        single = make_interpreted(Form.TWO, 1).paged_attention(q[start:end], k_cache, v_cache, alone, SCALE)
        assert torch.equal(single, together[start:end])


def test_large_scores_do_not_overflow(triton_ops):
    batch, k_cache, v_cache = step_of([1, 3], [40, 20], 1, 16)
    q = torch.randn(4, 2, 16) * 300
    out = triton_ops.paged_attention(q, k_cache, v_cache, batch, SCALE)
    torch.testing.assert_close(out.double(), exact(q, k_cache, v_cache, batch), rtol=1e-4, atol=1e-4)
