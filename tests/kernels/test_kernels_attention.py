"""Paged attention against full attention over each request's own, unpaged keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graftwork_kernels import ops
from graftwork_kernels.layout import AttentionBatch

HEAD_DIM = 16
SCALE = 0.25


@dataclass
class PagedRequests:
    """Requests whose whole keys and values are known, and a cache with scattered blocks that holds them up to any length."""

    keys: list[Tensor]  # [S, Hk, D] each
    values: list[Tensor]
    queries: list[Tensor]  # [S, Hq, D]
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor

    def step(self, chunks: list[tuple[int, int]]) -> tuple[Tensor, AttentionBatch]:
        """Write and attend the positions start .. end of each request (equal: the request has no rows)."""
        block_size = self.k_cache.shape[2]
        query_start = torch.tensor([0] + [end - start for start, end in chunks]).cumsum(0)
        slots = [
            int(self.block_table[request, position // block_size]) * block_size + position % block_size
            for request, (start, end) in enumerate(chunks)
            for position in range(start, end)
        ]
        batch = AttentionBatch(
            query_start=query_start.to(torch.int32),
            context_len=torch.tensor([end for _, end in chunks], dtype=torch.int32),
            block_table=self.block_table,
            kv_slot=torch.tensor(slots, dtype=torch.int64),
            max_query_len=max(end - start for start, end in chunks),
            max_context_len=max(end for _, end in chunks),
        )
        q, k, v = (
            torch.cat([whole[start:end] for whole, (start, end) in zip(tensors, chunks, strict=True)])
            for tensors in (self.queries, self.keys, self.values)
        )
        ops.write_kv(k, v, self.k_cache, self.v_cache, batch.kv_slot)
        return ops.paged_attention(q, self.k_cache, self.v_cache, batch, SCALE), batch

    def expected(self, chunks: list[tuple[int, int]]) -> Tensor:
        rows = [self._full(request)[start:end] for request, (start, end) in enumerate(chunks)]
        return torch.cat(rows)

    def _full(self, request: int) -> Tensor:
        """Causal attention over the whole request in fp64, without blocks, chunks or shared heads."""
        q, k, v = (tensors[request].double() for tensors in (self.queries, self.keys, self.values))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * SCALE
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def paged_requests(
    lengths: list[int], *, num_heads: int = 6, num_kv_heads: int = 2, block_size: int = 4, dtype: torch.dtype = torch.float32
) -> PagedRequests:
    num_blocks = [-(-length // block_size) for length in lengths]
    total = sum(num_blocks) + 3
    free = torch.randperm(total, dtype=torch.int32)
    block_table = torch.full((len(lengths), max(num_blocks)), -1, dtype=torch.int32)
    for request, (count, end) in enumerate(zip(num_blocks, torch.tensor(num_blocks).cumsum(0).tolist(), strict=True)):
        block_table[request, :count] = free[end - count : end]
    # What was never written is NaN: reading it cannot go unseen.
    k_cache, v_cache = torch.full((2, total, num_kv_heads, block_size, HEAD_DIM), float("nan"), dtype=dtype)
    keys, values = ([torch.randn(length, num_kv_heads, HEAD_DIM).to(dtype) for length in lengths] for _ in range(2))
    queries = [(torch.randn(length, num_heads, HEAD_DIM) * 2).to(dtype) for length in lengths]
    return PagedRequests(keys, values, queries, k_cache, v_cache, block_table)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_chunk_split(num_kv_heads, block_size):
    for chunk in range(1, 19):
        requests = paged_requests([18], num_kv_heads=num_kv_heads, block_size=block_size)
        for start in range(0, 18, chunk):
            chunks = [(start, min(start + chunk, 18))]
            assert_close(requests.step(chunks)[0], requests.expected(chunks))


def test_decode_and_prefill_rows_mixed():
    requests = paged_requests([40, 7, 300, 1, 9, 150, 5])
    for chunks in (
        [(0, 39), (0, 3), (0, 299), (0, 1), (0, 0), (0, 149), (0, 1)],
        [(39, 40), (3, 7), (299, 300), (1, 1), (0, 9), (149, 150), (1, 2)],
    ):
        assert_close(requests.step(chunks)[0], requests.expected(chunks))


@pytest.mark.parametrize("length", [127, 128, 129, 256, 257])
@pytest.mark.parametrize("block_size", [16, 48, 200])
def test_contexts_around_a_chunk_boundary(length, block_size):
    requests = paged_requests([length, 3], block_size=block_size)
    requests.step([(0, length - 1), (0, 2)])
    chunks = [(length - 1, length), (2, 3)]
    assert_close(requests.step(chunks)[0], requests.expected(chunks))


def test_more_keys_than_are_gathered_at_once():
    requests = paged_requests([1500, 3000], num_kv_heads=6, block_size=16)
    requests.k_cache.normal_()
    requests.v_cache.normal_()
    for request, length in enumerate((1500, 3000)):
        for cache, tensors in ((requests.k_cache, requests.keys), (requests.v_cache, requests.values)):
            blocks = requests.block_table[request, : -(-length // 16)]
            tensors[request] = cache[blocks].transpose(1, 2).reshape(-1, 6, HEAD_DIM)[:length].clone()
    chunks = [(1499, 1500), (2999, 3000)]
    actual, _ = requests.step(chunks)
    for request, (_, end) in enumerate(chunks):
        q, k, v = requests.queries[request][-1].double(), requests.keys[request].double(), requests.values[request].double()
        weights = (torch.einsum("hd,jhd->hj", q, k) * SCALE).softmax(-1)
        assert end == len(k)
        assert_close(actual[request], torch.einsum("hj,jhd->hd", weights, v))


def test_prefill_longer_than_a_tile():
    requests = paged_requests([300], block_size=16)
    for chunks in ([(0, 10)], [(10, 300)]):
        assert_close(requests.step(chunks)[0], requests.expected(chunks))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_schedule(data):
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=5))
    requests = paged_requests(lengths, block_size=data.draw(st.sampled_from([1, 2, 5, 16])))
    done = [0] * len(lengths)
    while done != lengths:
        ends = [data.draw(st.integers(start, length)) for start, length in zip(done, lengths, strict=True)]
        if ends == done:
            ends = lengths
        chunks = list(zip(done, ends, strict=True))
        assert_close(requests.step(chunks)[0], requests.expected(chunks))
        done = ends


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_round_once(dtype):
    requests = paged_requests([140, 20], dtype=dtype)
    requests.step([(0, 139), (0, 5)])
    chunks = [(139, 140), (5, 20)]
    actual, exact = requests.step(chunks)[0], requests.expected(chunks)
    assert actual.dtype == dtype
    assert ((actual.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_a_row_keeps_every_bit_whatever_its_neighbours(num_kv_heads):
    lengths = [200, 30, 129, 12, 64]
    together = paged_requests(lengths, num_kv_heads=num_kv_heads)
    prefill = [(0, length - 1) for length in lengths]
    decode = [(length - 1, length) for length in lengths]
    together_prefill, _ = together.step(prefill)
    together_decode, _ = together.step(decode)
    bounds = torch.tensor([0] + [end for _, end in prefill]).cumsum(0).tolist()
    for request in range(len(lengths)):
        alone = replace(
            together,
            keys=[together.keys[request]],
            values=[together.values[request]],
            queries=[together.queries[request]],
            block_table=together.block_table[request : request + 1],
        )
        assert torch.equal(alone.step([prefill[request]])[0], together_prefill[bounds[request] : bounds[request + 1]])
        assert torch.equal(alone.step([decode[request]])[0][0], together_decode[request])
        mixed = [decode[other] if other in (request, 0) else prefill[other] for other in range(len(lengths))]
        row = sum(end - start for start, end in mixed[:request])
        assert torch.equal(together.step(mixed)[0][row], together_decode[request])


def test_rows_beyond_the_last_request_are_zero():
    requests = paged_requests([5, 4])
    _, batch = requests.step([(0, 5), (0, 1)])
    q = torch.cat((requests.queries[0], requests.queries[1][:3]))
    out = ops.paged_attention(q, requests.k_cache, requests.v_cache, batch, SCALE)
    assert_close(out[:6], requests.expected([(0, 5), (0, 1)]))
    assert not out[6:].any()


def test_write_kv_touches_the_named_slots_alone():
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    k_cache, v_cache = torch.zeros(5, 2, 3, 4), torch.zeros(5, 2, 3, 4)
    ops.write_kv(k, v, k_cache, v_cache, torch.tensor([7, -1, 12]))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        expected = torch.zeros_like(cache)
        expected[2, :, 1], expected[4, :, 0] = rows[0], rows[2]
        assert torch.equal(cache, expected)
    ops.write_kv(k, v, k_cache, v_cache, torch.tensor([-1, -1, -1]))
    assert torch.equal(k_cache[2, :, 1], k[0])
    assert not k_cache[0].any()


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("q", {"q": torch.zeros(1, 6, 8)}),
        ("q", {"q": torch.zeros(1, 5, HEAD_DIM)}),
        ("q", {"q": torch.zeros(1, 6 * HEAD_DIM)}),
        ("k_cache", {"k_cache": torch.zeros(4, 2, 4, HEAD_DIM, dtype=torch.int8)}),
        ("k_cache", {"k_cache": torch.zeros(4, 4, 2, HEAD_DIM).transpose(1, 2)}),
        ("v_cache", {"v_cache": torch.zeros(5, 2, 4, HEAD_DIM)}),
    ],
)
def test_a_wrong_attention_argument_is_named(argument, change):
    requests = paged_requests([1])
    _, batch = requests.step([(0, 1)])
    arguments = {
        "q": torch.zeros(1, 6, HEAD_DIM),
        "k_cache": torch.zeros(4, 2, 4, HEAD_DIM),
        "v_cache": torch.zeros(4, 2, 4, HEAD_DIM),
        "batch": batch,
        "scale": SCALE,
    }
    with pytest.raises(ValueError, match=f"^{argument}:"):
        ops.paged_attention(**(arguments | change))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("k", {"k": torch.zeros(2, 3, 4)}),
        ("v", {"v": torch.zeros(2, 2, 4).bfloat16()}),
        ("kv_slot", {"kv_slot": torch.zeros(2, dtype=torch.int32)}),
    ],
)
def test_a_wrong_write_argument_is_named(argument, change):
    arguments = {
        "k": torch.zeros(2, 2, 4),
        "v": torch.zeros(2, 2, 4),
        "k_cache": torch.zeros(3, 2, 5, 4),
        "v_cache": torch.zeros(3, 2, 5, 4),
        "kv_slot": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=f"^{argument}:"):
        ops.write_kv(**(arguments | change))
