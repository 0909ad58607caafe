"""Paged attention in Triton: decode rows split along their context, prompts in tiles of queries, any mix of both.

A task has one head of the cache and all the query heads of its group, so that a key is read once for all of them. A decode row (the
one row of its request) is cut along its context into chunks that its own length decides; their parts are joined in order. A
prompt's tile goes through its context alone. Either cut is the row's own, so its bits do not depend on the step. As many programs
as a device holds at once take tasks in turn, and read on the device how many there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftwork_kernels.checks import check_contiguous
from graftwork_kernels.layout import AttentionBatch, AttentionTasks
from graftwork_kernels.triton.rounding import rounded

CHUNK = 512
"""Tokens of a context in one chunk, as long as that gives no more than `MOST_CHUNKS`."""

MOST_CHUNKS = 16
"""Of one row: a longer context has longer chunks, so that what they leave behind needs no more room."""

KEYS, WIDE_KEYS = 64, 16
"""Tokens of the context multiplied at a time; fp32 takes several times the registers. Chunks are multiples of the first."""

DECODE_ROWS = 16
"""Query heads in a decode task at least: what a tensor core takes."""

PREFILL_ROWS, WIDE_PREFILL_ROWS = 64, 32
"""Queries times heads of their group in a prompt's tile; 64 in fp32 spill."""


def plan_attention(batch: AttentionBatch, group: int, is_wide: bool) -> AttentionTasks:
    """The tasks of ``batch`` for groups of ``group`` query heads, in new memory; one launch a step. ``is_wide``: in fp32."""
    queries = max(1, (WIDE_PREFILL_ROWS if is_wide else PREFILL_ROWS) // group)
    num_requests, device = batch.context_len.shape[0], batch.context_len.device
    # Two pieces of memory: in one, how the second is aligned would go with the number of requests, and variants of kernels with it.
    first_chunk, first_tile = (torch.empty(num_requests + 1, dtype=torch.int32, device=device) for _ in range(2))
    _count_tasks[(1,)](
        batch.query_start, batch.context_len, first_chunk, first_tile, num_requests,
        REQUESTS=triton.next_power_of_2(max(num_requests, 1)), QUERIES=queries, CHUNK=CHUNK, MOST_CHUNKS=MOST_CHUNKS,
        MULTIPLE=KEYS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return AttentionTasks(first_chunk, first_tile, queries)


@triton.jit
def _chunk_len(context, CHUNK: tl.constexpr, MOST_CHUNKS: tl.constexpr, MULTIPLE: tl.constexpr):
    """Tokens in a chunk of a context of this length."""
    share = (context + MOST_CHUNKS - 1) // MOST_CHUNKS
    return tl.maximum((share + MULTIPLE - 1) // MULTIPLE * MULTIPLE, CHUNK)


@triton.jit(do_not_specialize=["num_requests"])
def _count_tasks(
    query_start, context_len, first_chunk, first_tile, num_requests,
    REQUESTS: tl.constexpr, QUERIES: tl.constexpr, CHUNK: tl.constexpr, MOST_CHUNKS: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    request = tl.arange(0, REQUESTS)
    there = request < num_requests
    start = tl.load(query_start + request, mask=there, other=0)
    length = tl.load(query_start + request + 1, mask=there, other=0) - start
    context = tl.load(context_len + request, mask=there, other=0)
    chunk = _chunk_len(context, CHUNK, MOST_CHUNKS, MULTIPLE)
    chunks = tl.where(length == 1, (context + chunk - 1) // chunk, 0)
    tiles = tl.where(length > 1, (length + QUERIES - 1) // QUERIES, 0)
    tl.store(first_chunk + request + 1, tl.cumsum(chunks, axis=0), mask=there)
    tl.store(first_tile + request + 1, tl.cumsum(tiles, axis=0), mask=there)
    tl.store(first_chunk, 0)
    tl.store(first_tile, 0)


@triton.jit
def _find(first_task, task, num_requests, REQUESTS: tl.constexpr):
    """The request that a task belongs to, and the task's number in it."""
    request = tl.arange(0, REQUESTS)
    end = tl.load(first_task + request + 1, mask=request < num_requests, other=2147483647)
    found = tl.sum((end <= task).to(tl.int32), axis=0)
    return found, task - tl.load(first_task + found)


@triton.jit
def _attend(
    queries, position, k_cache, v_cache, table, kv_head, num_kv_heads, first, last, scale,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_POWER: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Of queries [ROWS, D] over tokens first .. last of a context, causal: the largest score and the sum of exp(score - largest),
    [ROWS] each, and the values weighted so [ROWS, D].
    """
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    values = tl.zeros((ROWS, DIM_POWER), dtype=tl.float32)
    dim = tl.arange(0, DIM_POWER)
    for begin in range(first, last, KEYS):
        token = begin + tl.arange(0, KEYS)
        there = token < last
        block = tl.load(table + token // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        slot = ((block * num_kv_heads + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE) * DIM
        mask = there[:, None] & (dim < DIM)[None, :]
        keys = tl.load(k_cache + slot[:, None] + dim[None, :], mask=mask, other=0.0)
        seen = tl.load(v_cache + slot[:, None] + dim[None, :], mask=mask, other=0.0)
        if WIDE:
            keys = keys.to(tl.float32)
            seen = seen.to(tl.float32)
        score = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * scale
        score = tl.where(there[None, :] & (token[None, :] <= position[:, None]), score, float("-inf"))
        newest = tl.maximum(largest, tl.max(score, axis=1))
        shift = tl.where(newest == float("-inf"), 0.0, newest)  # of a row that has seen nothing yet
        weight = tl.exp(score - shift[:, None])
        kept = tl.exp(largest - shift)
        total = total * kept + tl.sum(weight, axis=1)
        values = tl.dot(weight.to(seen.dtype), seen, values * kept[:, None], input_precision="tf32x3")
        largest = newest
    return largest, total, values


@triton.jit(do_not_specialize=["num_requests"])
def _decode(
    q, k_cache, v_cache, query_start, context_len, block_table, table_stride, first_chunk, out, parts, part_largest, part_total,
    num_requests, num_heads, num_kv_heads, scale,
    REQUESTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_POWER: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, MOST_CHUNKS: tl.constexpr, MULTIPLE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Tasks (request that decodes, chunk of its context, head of the cache). A row of one chunk is written at once."""
    num_tasks = tl.load(first_chunk + num_requests) * num_kv_heads
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        kv_head = task % num_kv_heads
        request, number = _find(first_chunk, task // num_kv_heads, num_requests, REQUESTS)
        context = tl.load(context_len + request)
        chunk = _chunk_len(context, CHUNK, MOST_CHUNKS, MULTIPLE)
        first = number * chunk
        member = tl.arange(0, ROWS)
        known = member < GROUP
        head = kv_head * GROUP + member
        dim = tl.arange(0, DIM_POWER)
        there = known[:, None] & (dim < DIM)[None, :]
        at = (tl.load(query_start + request).to(tl.int64) * num_heads + head)[:, None] * DIM + dim[None, :]
        queries = tl.load(q + at, mask=there, other=0.0)
        if WIDE:
            queries = queries.to(tl.float32)
        largest, total, values = _attend(
            queries, tl.zeros((ROWS,), dtype=tl.int32) + (context - 1), k_cache, v_cache,
            block_table + request.to(tl.int64) * table_stride, kv_head, num_kv_heads, first, tl.minimum(first + chunk, context),
            scale, BLOCK_SIZE, DIM, DIM_POWER, KEYS, ROWS, WIDE,
        )  # fmt: skip
        if context > chunk:
            part = (request.to(tl.int64) * num_heads + head) * MOST_CHUNKS + number
            tl.store(parts + part[:, None] * DIM + dim[None, :], values, mask=there)
            tl.store(part_largest + part, largest, mask=known)
            tl.store(part_total + part, total, mask=known)
        else:
            tl.store(out + at, rounded(values / total[:, None], out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def _join(
    query_start, context_len, out, parts, part_largest, part_total, num_rows, num_requests, num_heads,
    DIM: tl.constexpr, DIM_POWER: tl.constexpr, CHUNK: tl.constexpr, MOST_CHUNKS: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    """Program (request, head): the parts of a decode row, in the order of its context. One more clears the rows of no request."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_POWER)
    there = dim < DIM
    if request < num_requests:
        start = tl.load(query_start + request)
        context = tl.load(context_len + request)
        chunk = _chunk_len(context, CHUNK, MOST_CHUNKS, MULTIPLE)
        if (tl.load(query_start + request + 1) - start == 1) & (context > chunk):
            first_part = (request.to(tl.int64) * num_heads + head) * MOST_CHUNKS
            number = tl.arange(0, MOST_CHUNKS)
            exists = number * chunk < context
            largest = tl.load(part_largest + first_part + number, mask=exists, other=float("-inf"))
            weight = tl.exp(largest - tl.max(largest, axis=0))
            total = tl.sum(weight * tl.load(part_total + first_part + number, mask=exists, other=0.0), axis=0)
            at = parts + (first_part + number)[:, None] * DIM + dim[None, :]
            values = tl.load(at, mask=exists[:, None] & there[None, :], other=0.0)
            joined = tl.sum(values * weight[:, None], axis=0) / total
            row = start.to(tl.int64) * num_heads + head
            tl.store(out + row * DIM + dim, rounded(joined, out.dtype.element_ty), mask=there)
    else:
        nothing = tl.zeros((DIM_POWER,), dtype=out.dtype.element_ty)
        for row in range(tl.load(query_start)):
            tl.store(out + (row * num_heads + head) * DIM + dim, nothing, mask=there)
        for row in range(tl.load(query_start + num_requests), num_rows):
            tl.store(out + (row * num_heads + head) * DIM + dim, nothing, mask=there)


@triton.jit(do_not_specialize=["num_requests"])
def _prefill(
    q, k_cache, v_cache, query_start, context_len, block_table, table_stride, first_tile, out,
    num_requests, num_heads, num_kv_heads, scale,
    REQUESTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_POWER: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Tasks (request with several rows, tile of its queries, head of the cache)."""
    num_tasks = tl.load(first_tile + num_requests) * num_kv_heads
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        kv_head = task % num_kv_heads
        request, number = _find(first_tile, task // num_kv_heads, num_requests, REQUESTS)
        start = tl.load(query_start + request)
        length = tl.load(query_start + request + 1) - start
        context = tl.load(context_len + request)
        member = tl.arange(0, ROWS)
        query = number * QUERIES + member // GROUP
        known = (member < QUERIES * GROUP) & (query < length)
        head = kv_head * GROUP + member % GROUP
        position = tl.where(known, context - length + query, -1)
        dim = tl.arange(0, DIM_POWER)
        there = known[:, None] & (dim < DIM)[None, :]
        at = ((start + query).to(tl.int64) * num_heads + head)[:, None] * DIM + dim[None, :]
        queries = tl.load(q + at, mask=there, other=0.0)
        if WIDE:
            queries = queries.to(tl.float32)
        seen_by_last = tl.minimum(context - length + (number + 1) * QUERIES, context)
        _, total, values = _attend(
            queries, position, k_cache, v_cache, block_table + request.to(tl.int64) * table_stride, kv_head, num_kv_heads,
            0, seen_by_last, scale, BLOCK_SIZE, DIM, DIM_POWER, KEYS, ROWS, WIDE,
        )  # fmt: skip
        tl.store(out + at, rounded(values / total[:, None], out.dtype.element_ty), mask=there)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, *, num_programs: int, is_wide: bool
) -> Tensor:
    """See `graftwork_kernels.ops.Operators`; ``is_wide``: multiply in fp32, whatever the type."""
    q = q.contiguous()
    num_rows, num_heads, dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    num_requests = batch.context_len.shape[0]
    if not num_rows or not num_requests:
        return torch.zeros_like(q)
    read = {"query_start": batch.query_start, "context_len": batch.context_len, "k_cache": k_cache, "v_cache": v_cache}
    for name, tensor in read.items():
        check_contiguous(name, tensor)
    if batch.block_table.stride(1) != 1:
        raise ValueError(f"batch.block_table: expected the blocks of a request side by side, got {batch.block_table.stride()}")
    out = torch.empty_like(q)
    group = num_heads // num_kv_heads
    is_wide = is_wide or q.dtype == torch.float32
    tasks = batch.tasks or plan_attention(batch, group, is_wide)
    where = (batch.query_start, batch.context_len, batch.block_table, batch.block_table.stride(0))
    sizes = {"DIM": dim, "DIM_POWER": max(16, triton.next_power_of_2(dim)), "enable_fp_fusion": True}
    chunks = {"CHUNK": CHUNK, "MOST_CHUNKS": MOST_CHUNKS, "MULTIPLE": KEYS}
    both = {
        "REQUESTS": triton.next_power_of_2(num_requests), "GROUP": group, "BLOCK_SIZE": block_size, "WIDE": is_wide,
        "KEYS": WIDE_KEYS if is_wide else KEYS, "num_warps": 8 if is_wide else 4, "num_stages": 1 if is_wide else 2,
    }  # fmt: skip
    heads = (num_requests, num_heads, num_kv_heads, scale)
    parts = q.new_empty((num_requests, num_heads, MOST_CHUNKS, dim), dtype=torch.float32)
    part_largest, part_total = q.new_empty((2, num_requests, num_heads, MOST_CHUNKS), dtype=torch.float32)
    _decode[(num_programs,)](
        q, k_cache, v_cache, *where, tasks.first_chunk, out, parts, part_largest, part_total, *heads,
        ROWS=max(DECODE_ROWS, triton.next_power_of_2(group)), **both, **chunks, **sizes,
    )  # fmt: skip
    if batch.max_query_len > 1:
        _prefill[(num_programs,)](
            q, k_cache, v_cache, *where, tasks.first_tile, out, *heads,
            QUERIES=tasks.queries, ROWS=max(16, triton.next_power_of_2(tasks.queries * group)), **both, **sizes,
        )  # fmt: skip
    _join[(num_requests + 1, num_heads)](
        batch.query_start, batch.context_len, out, parts, part_largest, part_total, num_rows, num_requests, num_heads,
        **chunks, **sizes,
    )  # fmt: skip
    return out
