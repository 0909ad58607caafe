"""Paged attention against full attention over each request's own, unpaged keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graftwork_kernels.cpu import attention
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.layout import AttentionBatch
from graftwork_kernels.ops import Operators

HEAD_DIM = 16
SCALE = 0.25


@pytest.fixture
def ops(host_ops: Operators) -> Operators:
    """The interpreter takes minutes for these; its kernels have tests of shorter contexts."""
    return host_ops


@dataclass
class PagedRequests:
    """Requests whose whole keys and values are known, and a cache with scattered blocks that holds them up to any length."""

    keys: list[Tensor]  # [S, Hk, D] each
    values: list[Tensor]
    queries: list[Tensor]  # [S, Hq, D]
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor

    def step(self, ops: Operators, chunks: list[tuple[int, int]]) -> tuple[Tensor, AttentionBatch]:
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
        head_dim = q.shape[2]
        unturned = torch.cat((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), dim=1)
        positions = torch.zeros(len(q), dtype=torch.int64)
        ops.rotary_and_write_kv(q, k, v, positions, unturned, self.k_cache, self.v_cache, batch.kv_slot)
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
    lengths: list[int],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = HEAD_DIM,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
) -> PagedRequests:
    num_blocks = [-(-length // block_size) for length in lengths]
    total = sum(num_blocks) + 3
    free = torch.randperm(total, dtype=torch.int32)
    block_table = torch.full((len(lengths), max(num_blocks)), -1, dtype=torch.int32)
    for request, (count, end) in enumerate(zip(num_blocks, torch.tensor(num_blocks).cumsum(0).tolist(), strict=True)):
        block_table[request, :count] = free[end - count : end]
    # What was never written is NaN: reading it cannot go unseen.
    k_cache, v_cache = torch.full((2, total, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    keys, values = ([torch.randn(length, num_kv_heads, head_dim).to(dtype) for length in lengths] for _ in range(2))
    queries = [(torch.randn(length, num_heads, head_dim) * 2).to(dtype) for length in lengths]
    return PagedRequests(keys, values, queries, k_cache, v_cache, block_table)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def check(actual: Tensor, expected: Tensor) -> None:
    """Within fp32 rounding, and for bf16 one rounding of the result."""
    eps = torch.finfo(actual.dtype).eps / 2 if actual.dtype != torch.float32 else 1e-5
    assert ((actual.double() - expected).abs() <= eps * expected.abs() + 1e-5).all()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_chunk_split(ops, num_kv_heads, block_size):
    for chunk in range(1, 19):
        requests = paged_requests([18], num_kv_heads=num_kv_heads, block_size=block_size)
        for start in range(0, 18, chunk):
            chunks = [(start, min(start + chunk, 18))]
            assert_close(requests.step(ops, chunks)[0], requests.expected(chunks))


def test_decode_and_prefill_rows_mixed(ops):
    requests = paged_requests([40, 7, 300, 1, 9, 150, 5])
    for chunks in (
        [(0, 39), (0, 3), (0, 299), (0, 1), (0, 0), (0, 149), (0, 1)],
        [(39, 40), (3, 7), (299, 300), (1, 1), (0, 9), (149, 150), (1, 2)],
    ):
        assert_close(requests.step(ops, chunks)[0], requests.expected(chunks))


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257, 513])
@pytest.mark.parametrize("block_size", [16, 48, 200])
def test_contexts_around_a_chunk_boundary(ops, length, block_size):
    requests = paged_requests([length, 3], block_size=block_size)
    requests.step(ops, [(0, length - 1), (0, 2)])
    chunks = [(length - 1, length), (2, 3)]
    assert_close(requests.step(ops, chunks)[0], requests.expected(chunks))


def test_more_keys_than_are_gathered_at_once(ops):
    requests = paged_requests([1500, 3000], num_kv_heads=6, block_size=16)
    requests.k_cache.normal_()
    requests.v_cache.normal_()
    for request, length in enumerate((1500, 3000)):
        for cache, tensors in ((requests.k_cache, requests.keys), (requests.v_cache, requests.values)):
            blocks = requests.block_table[request, : -(-length // 16)]
            tensors[request] = cache[blocks].transpose(1, 2).reshape(-1, 6, HEAD_DIM)[:length].clone()
    chunks = [(1499, 1500), (2999, 3000)]
    actual, _ = requests.step(ops, chunks)
    for request, (_, end) in enumerate(chunks):
        q, k, v = requests.queries[request][-1].double(), requests.keys[request].double(), requests.values[request].double()
        weights = (torch.einsum("hd,jhd->hj", q, k) * SCALE).softmax(-1)
        assert end == len(k)
        assert_close(actual[request], torch.einsum("hj,jhd->hd", weights, v))


def test_prefill_longer_than_a_tile(ops):
    requests = paged_requests([300], block_size=16)
    for chunks in ([(0, 10)], [(10, 300)]):
        assert_close(requests.step(ops, chunks)[0], requests.expected(chunks))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_schedule(ops, data):
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=5))
    requests = paged_requests(lengths, block_size=data.draw(st.sampled_from([1, 2, 5, 16])))
    done = [0] * len(lengths)
    while done != lengths:
        ends = [data.draw(st.integers(start, length)) for start, length in zip(done, lengths, strict=True)]
        if ends == done:
            ends = lengths
        chunks = list(zip(done, ends, strict=True))
        assert_close(requests.step(ops, chunks)[0], requests.expected(chunks))
        done = ends


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_round_once(ops, dtype):
    requests = paged_requests([140, 20], dtype=dtype)
    requests.step(ops, [(0, 139), (0, 5)])
    chunks = [(139, 140), (5, 20)]
    actual, exact = requests.step(ops, chunks)[0], requests.expected(chunks)
    assert actual.dtype == dtype
    assert ((actual.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_a_row_keeps_every_bit_whatever_its_neighbours(ops, num_kv_heads):
    lengths = [200, 30, 129, 12, 64]
    together = paged_requests(lengths, num_kv_heads=num_kv_heads)
    prefill = [(0, length - 1) for length in lengths]
    decode = [(length - 1, length) for length in lengths]
    together_prefill, _ = together.step(ops, prefill)
    together_decode, _ = together.step(ops, decode)
    bounds = torch.tensor([0] + [end for _, end in prefill]).cumsum(0).tolist()
    for request in range(len(lengths)):
        alone = replace(
            together,
            keys=[together.keys[request]],
            values=[together.values[request]],
            queries=[together.queries[request]],
            block_table=together.block_table[request : request + 1],
        )
        assert torch.equal(alone.step(ops, [prefill[request]])[0], together_prefill[bounds[request] : bounds[request + 1]])
        assert torch.equal(alone.step(ops, [decode[request]])[0][0], together_decode[request])
        mixed = [decode[other] if other in (request, 0) else prefill[other] for other in range(len(lengths))]
        row = sum(end - start for start, end in mixed[:request])
        assert torch.equal(together.step(ops, mixed)[0][row], together_decode[request])


def test_rows_beyond_the_last_request_are_zero(ops):
    requests = paged_requests([5, 4])
    _, batch = requests.step(ops, [(0, 5), (0, 1)])
    q = torch.cat((requests.queries[0], requests.queries[1][:3]))
    out = ops.paged_attention(q, requests.k_cache, requests.v_cache, batch, SCALE)
    assert_close(out[:6], requests.expected([(0, 5), (0, 1)]))
    assert not out[6:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [2, 8, 16, 24, 64, 80, 96, 128])
def test_any_head_dimension(ops, dtype, head_dim):
    requests = paged_requests([300, 70, 9], head_dim=head_dim, num_heads=3, num_kv_heads=1, block_size=16, dtype=dtype)
    for chunks in ([(0, 299), (0, 65), (0, 9)], [(299, 300), (65, 70), (9, 9)]):
        check(requests.step(ops, chunks)[0], requests.expected(chunks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (5, 5), (9, 3), (4, 1), (8, 1), (16, 2), (100, 1)])
def test_any_number_of_heads_to_a_key(ops, dtype, num_heads, num_kv_heads):
    requests = paged_requests([270, 20], num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype)
    for chunks in ([(0, 269), (0, 11)], [(269, 270), (11, 20)]):
        check(requests.step(ops, chunks)[0], requests.expected(chunks))


def test_large_scores_do_not_overflow(ops):
    requests = paged_requests([300, 20])
    requests.queries = [queries * 100 for queries in requests.queries]
    for chunks in ([(0, 299), (0, 19)], [(299, 300), (19, 20)]):
        actual = requests.step(ops, chunks)[0]
        assert actual.isfinite().all()
        assert_close(actual, requests.expected(chunks), 1e-3)


@pytest.fixture
def teams(cpu_library: Library) -> list[Operators]:
    """The compiled operators with one, two and three threads."""
    return [Operators(CpuOperators(Immediate(cpu_library, num_threads))) for num_threads in (1, 2, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_a_bit(teams, dtype):
    lengths = [600, 30, 1025, 257, 64]
    requests = paged_requests(lengths, dtype=dtype)
    for chunks in ([(0, length - 1) for length in lengths], [(length - 1, length) for length in lengths]):
        first, *others = [requests.step(team, chunks)[0] for team in teams]
        check(first, requests.expected(chunks))
        assert all(torch.equal(first, other) for other in others)


def test_more_chunks_than_slots(teams):
    """Two requests share their blocks: together their chunks outnumber what there is room for, and one is not split."""
    requests = paged_requests([40000], num_heads=1, num_kv_heads=1, head_dim=2, block_size=64)
    one, two, _ = teams
    _, batch = requests.step(one, [(39998, 40000)])
    requests.k_cache.normal_()
    requests.v_cache.normal_()
    q = requests.queries[0][:1]
    alone = one.paged_attention(q, requests.k_cache, requests.v_cache, decode_batch(batch, 1), SCALE)
    shared = two.paged_attention(q.repeat(3, 1, 1), requests.k_cache, requests.v_cache, decode_batch(batch, 3), SCALE)
    assert all(torch.equal(row, alone[0]) for row in shared)


def decode_batch(batch: AttentionBatch, num_rows: int) -> AttentionBatch:
    """Requests of one row each over the one context of ``batch``."""
    return replace(
        batch,
        query_start=torch.arange(num_rows + 1, dtype=torch.int32),
        context_len=batch.context_len.repeat(num_rows),
        block_table=batch.block_table.repeat(num_rows, 1),
        max_query_len=1,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [1, 6])
def test_where_a_prompt_is_cut_does_not_change_a_bit(teams, dtype, num_kv_heads):
    requests = paged_requests([300], num_kv_heads=num_kv_heads, dtype=dtype)
    whole = requests.step(teams[0], [(0, 300)])[0]
    for ends in ([150, 300], [7, 70, 135, 298, 300], [64, 128, 300]):
        pieces = [requests.step(teams[1], [(start, end)])[0] for start, end in zip([0, *ends], ends, strict=False)]
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("chunk", [(0, 1), (0, 9), (5, 9), (8, 9)])
@pytest.mark.parametrize("block", [-1, 6, 2**31 - 1])
def test_a_block_beyond_the_cache_is_refused(ops, chunk, block):
    requests = paged_requests([9])
    _, batch = requests.step(ops, [(0, 9)])
    start, end = chunk
    changed = batch.block_table.clone()
    changed[0, (end - 1) // 4] = block
    batch = replace(
        batch, block_table=changed, query_start=torch.tensor([0, end - start]).int(), context_len=torch.tensor([end]).int()
    )
    with pytest.raises(IndexError):
        ops.paged_attention(requests.queries[0][start:end], requests.k_cache, requests.v_cache, batch, SCALE)


@pytest.mark.parametrize(
    "change",
    [
        {"context_len": torch.tensor([13]).int()},  # the table has room for 12
        {"context_len": torch.tensor([8]).int()},  # fewer than the rows
        {"context_len": torch.tensor([-1]).int()},
        {"query_start": torch.tensor([0, 10]).int()},  # rows that the step does not have
        {"query_start": torch.tensor([3, 1]).int()},
        {"query_start": torch.tensor([-1, 8]).int()},
    ],
)
def test_lengths_that_lead_outside_memory_are_refused(teams, change):
    requests = paged_requests([9])
    for team in teams:
        _, batch = requests.step(team, [(0, 9)])
        with pytest.raises(IndexError, match=r"^batch:"):
            team.paged_attention(requests.queries[0], requests.k_cache, requests.v_cache, replace(batch, **change), SCALE)


def test_a_thread_without_room_to_work_in_writes_nothing(cpu_library, monkeypatch):
    requests = paged_requests([9])
    teams = [Operators(CpuOperators(Immediate(cpu_library, num_threads))) for num_threads in (1, 2)]
    _, batch = requests.step(teams[0], [(0, 9)])
    monkeypatch.setattr(attention, "_workspace_floats", lambda *_: 64)
    for team in teams:
        with pytest.raises(IndexError, match="more memory to work in"):
            team.paged_attention(requests.queries[0], requests.k_cache, requests.v_cache, batch, SCALE)


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
def test_a_wrong_attention_argument_is_named(ops, argument, change):
    requests = paged_requests([1])
    _, batch = requests.step(ops, [(0, 1)])
    arguments = {
        "q": torch.zeros(1, 6, HEAD_DIM),
        "k_cache": torch.zeros(4, 2, 4, HEAD_DIM),
        "v_cache": torch.zeros(4, 2, 4, HEAD_DIM),
        "batch": batch,
        "scale": SCALE,
    }
    with pytest.raises(ValueError, match=f"^{argument}:"):
        ops.paged_attention(**(arguments | change))
