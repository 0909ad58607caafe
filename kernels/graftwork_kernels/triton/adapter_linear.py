"""What adapters add to a linear: h = x Aᵀ summed by fixed chunks of K, then y = c ⊙ (p + h Bᵀ) + bias, p the base's product.

    shrink task   (tile of rows, tile of ranks, site, chunk of K)  ─▶  h [chunk, place, site, rank] fp32
    expand task   (tile of rows, site, block of columns)           ─▶  out; h's chunks are added up in ascending order

Two launches, one for each half; or one, in which whoever finishes the last shrink task of a (tile, site) expands all its columns.
All are persistent: as many programs as a device holds at once take tasks in turn, and read on the device how many there are.
Nothing is padded to a largest rank. What a row gets depends on its own values, its adapter and the fixed chunks alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graftwork_kernels.triton.adapter_rows import (
    A_ROW,
    B_ROW,
    BIAS_ROW,
    FIELDS,
    NUM_ROW_TYPES,
    RANK,
    ROW_TYPE,
    SCALE_ROW,
    load_elements,
    load_scales,
    load_vector,
    row_offsets,
)
from graftwork_kernels.triton.rounding import rounded

MOST_CHUNKS_AT_ONCE = tl.constexpr(8)
"""Chunks of h that one thread of the second half has asked for and not yet been given."""


@triton.jit
def _multiply(left, right, total, WIDE: tl.constexpr):
    """total + left @ right, in fp32 if ``WIDE``; else in bf16, and what is fp32 as the sum of two halves: 16 bits of it stay."""
    if WIDE:
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="tf32x3")
    else:
        high_left, high_right = left.to(tl.bfloat16), right.to(tl.bfloat16)
        total = tl.dot(high_left, high_right, total)
        if left.dtype == tl.float32:
            total = tl.dot((left - high_left.to(tl.float32)).to(tl.bfloat16), high_right, total)
        if right.dtype == tl.float32:
            total = tl.dot(high_left, (right - high_right.to(tl.float32)).to(tl.bfloat16), total)
    return total


@triton.jit
def _shrink_rows(
    x, x_stride, row, in_rows, pool, offset, known, first, last,
    KIND: tl.constexpr, WIDE: tl.constexpr, HAS_E4M3: tl.constexpr,
    BLOCK_K: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_RANKS: tl.constexpr,
):  # fmt: skip
    """[rows, ranks] of x Aᵀ over features first .. last."""
    total = tl.zeros((TILE_ROWS, TILE_RANKS), dtype=tl.float32)
    for begin in range(first, last, BLOCK_K):
        column = begin + tl.arange(0, BLOCK_K)
        there = column < last
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=in_rows[:, None] & there[None, :], other=0.0)
        a = load_elements(pool, offset, column, known[:, None] & there[None, :], KIND, WIDE, HAS_E4M3)
        total = _multiply(values, tl.trans(a), total, WIDE)
    return total * load_scales(pool, offset, known, KIND)[None, :]


@triton.jit
def _shrink_task(
    x, x_stride, permutation, tile, rank_tile, site, chunk, pool, row_offset, records, site_table, h,
    num_in, num_record_sites, num_rows,
    NUM_SITES: tl.constexpr, MAX_RANK: tl.constexpr, WIDE: tl.constexpr, HAS_E4M3: tl.constexpr,
    K_CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_RANKS: tl.constexpr,
):  # fmt: skip
    adapter, first_place, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    record = records + (adapter.to(tl.int64) * num_record_sites + tl.load(site_table + site * 3)) * FIELDS
    rank = tl.load(record + RANK).to(tl.int32)
    if rank_tile * TILE_RANKS < rank:
        ranks = rank_tile * TILE_RANKS + tl.arange(0, TILE_RANKS)
        known = ranks < rank
        offset = row_offsets(row_offset, tl.load(record + A_ROW), ranks, known)
        member = tl.arange(0, TILE_ROWS)
        in_rows = member < count
        row = tl.load(permutation + first_place + member, mask=in_rows, other=0)
        first = chunk * K_CHUNK
        last = tl.minimum(first + K_CHUNK, num_in)
        row_type = tl.load(record + ROW_TYPE)
        total = tl.zeros((TILE_ROWS, TILE_RANKS), dtype=tl.float32)
        for kind in tl.static_range(NUM_ROW_TYPES):
            if row_type == kind:
                total = _shrink_rows(
                    x, x_stride, row, in_rows, pool, offset, known, first, last,
                    kind, WIDE, HAS_E4M3, BLOCK_K, TILE_ROWS, TILE_RANKS,
                )  # fmt: skip
        place = ((chunk * num_rows + first_place + member).to(tl.int64) * NUM_SITES + site) * MAX_RANK
        tl.store(h + place[:, None] + ranks[None, :], total, mask=in_rows[:, None] & known[None, :])


@triton.jit
def _expand_ranks(
    total, h, place, chunk_stride, in_rows, pool, row_offset, first_row, rank, column, in_columns,
    KIND: tl.constexpr, WIDE: tl.constexpr, HAS_E4M3: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_RANKS: tl.constexpr,
):  # fmt: skip
    """total [rows, columns] + h Bᵀ, by tiles of ranks; an element of h is the sum of its chunks in ascending order."""
    # In rounds of a few chunks, as even as can be: each that is on its way has registers.
    # Rounded up by hand: tl.cdiv makes no constant of constants in triton 3.6.
    rounds: tl.constexpr = (NUM_CHUNKS + MOST_CHUNKS_AT_ONCE - 1) // MOST_CHUNKS_AT_ONCE
    at_once: tl.constexpr = (NUM_CHUNKS + rounds - 1) // rounds
    num_even: tl.constexpr = NUM_CHUNKS // at_once * at_once
    for begin in tl.range(0, rank, TILE_RANKS, num_stages=1):  # mostly once or twice: nothing to keep on its way
        ranks = begin + tl.arange(0, TILE_RANKS)
        known = ranks < rank
        offset = row_offsets(row_offset, first_row, ranks, known)
        b = load_elements(pool, offset, column, known[:, None] & in_columns[None, :], KIND, WIDE, HAS_E4M3)
        factor = tl.zeros((TILE_ROWS, TILE_RANKS), dtype=tl.float32)
        there = in_rows[:, None] & known[None, :]
        part = h + place[:, None] + ranks[None, :]
        for first in tl.range(0, num_even, at_once, num_stages=1):
            for chunk in tl.static_range(at_once):  # unrolled, so that these are on their way at once
                # Past the first-level cache, which may hold what another multiprocessor has written over meanwhile.
                factor += tl.load(part + (first + chunk) * chunk_stride, mask=there, other=0.0, cache_modifier=".cg")
        for chunk in tl.static_range(num_even, NUM_CHUNKS):
            factor += tl.load(part + chunk * chunk_stride, mask=there, other=0.0, cache_modifier=".cg")
        factor = factor * load_scales(pool, offset, known, KIND)[None, :]
        total = _multiply(factor, b, total, WIDE)
    return total


@triton.jit
def _expand_task(
    product, product_stride, out, out_stride, bias, permutation, tile, site, block,
    pool, row_offset, records, site_table, h, num_record_sites, num_rows,
    NUM_SITES: tl.constexpr, MAX_RANK: tl.constexpr, WIDE: tl.constexpr, HAS_E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr, ALIGN: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_RANKS: tl.constexpr,
):  # fmt: skip
    """One block of columns of one site for one tile of rows: read p, add, scale, add the bias, write."""
    adapter, first_place, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    start = tl.multiple_of(tl.load(site_table + site * 3 + 1), ALIGN)
    member = tl.arange(0, TILE_ROWS)
    in_rows = member < count
    row = tl.load(permutation + first_place + member, mask=in_rows, other=0)
    column = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    in_columns = column < tl.multiple_of(tl.load(site_table + site * 3 + 2), ALIGN)
    there = in_rows[:, None] & in_columns[None, :]
    total = tl.load(product + row[:, None] * product_stride + start + column[None, :], mask=there, other=0.0).to(tl.float32)
    # A tile of the base has no record, so nothing of it is read.
    has = adapter >= 0
    record = records + (adapter.to(tl.int64) * num_record_sites + tl.load(site_table + site * 3)) * FIELDS
    rank = tl.load(record + RANK, mask=has, other=0).to(tl.int32)
    row_type = tl.load(record + ROW_TYPE, mask=has, other=0)
    first_row = tl.load(record + B_ROW, mask=has, other=0)
    scale_row = tl.load(record + SCALE_ROW, mask=has, other=-1)
    bias_row = tl.load(record + BIAS_ROW, mask=has, other=-1)
    place = ((first_place + member).to(tl.int64) * NUM_SITES + site) * MAX_RANK
    chunk_stride = num_rows.to(tl.int64) * NUM_SITES * MAX_RANK
    if rank > 0:
        for kind in tl.static_range(NUM_ROW_TYPES):
            if row_type == kind:
                total = _expand_ranks(
                    total, h, place, chunk_stride, in_rows, pool, row_offset, first_row, rank, column, in_columns,
                    kind, WIDE, HAS_E4M3, NUM_CHUNKS, TILE_ROWS, TILE_RANKS,
                )  # fmt: skip
    if scale_row >= 0:
        total = total * load_vector(pool, row_offset, scale_row, column, in_columns)[None, :]
    if bias_row >= 0:
        total = total + load_vector(pool, row_offset, bias_row, column, in_columns)[None, :]
    else:
        if HAS_BIAS:
            total = total + tl.load(bias + start + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * out_stride + start + column[None, :], rounded(total, out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def shrink(
    x, x_stride, permutation, tiles, shrinks, counts, pool, row_offset, records, site_table, h, num_in, num_record_sites, num_rows,
    NUM_SITES: tl.constexpr, MAX_RANK: tl.constexpr, WIDE: tl.constexpr, HAS_E4M3: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, K_CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_RANKS: tl.constexpr,
):  # fmt: skip
    """The first launch of two. ``site_table`` int32 [sites, 3]: number in a record table, first column, columns."""
    num_tasks = tl.load(counts) * NUM_SITES * NUM_CHUNKS
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        entry = shrinks + task // (NUM_CHUNKS * NUM_SITES) * 2
        _shrink_task(
            x, x_stride, permutation, tiles + tl.load(entry) * 4, tl.load(entry + 1), task // NUM_CHUNKS % NUM_SITES,
            task % NUM_CHUNKS,
            pool, row_offset, records, site_table, h, num_in, num_record_sites, num_rows,
            NUM_SITES, MAX_RANK, WIDE, HAS_E4M3, K_CHUNK, BLOCK_K, TILE_ROWS, TILE_RANKS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def expand(
    product, product_stride, out, out_stride, bias, permutation, tiles, num_tiles, pool, row_offset, records, site_table, h,
    num_record_sites, num_rows,
    NUM_SITES: tl.constexpr, NUM_BLOCKS: tl.constexpr, MAX_RANK: tl.constexpr, WIDE: tl.constexpr, HAS_E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALIGN: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_RANKS: tl.constexpr,
):  # fmt: skip
    """The second launch of two. ``num_tiles`` points to how many tiles have something to be done, of `AdapterTasks.counts`."""
    num_tasks = tl.load(num_tiles) * NUM_SITES * NUM_BLOCKS
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        block = task % NUM_BLOCKS
        site = task // NUM_BLOCKS % NUM_SITES
        if block * BLOCK_COLUMNS < tl.load(site_table + site * 3 + 2):
            _expand_task(
                product, product_stride, out, out_stride, bias, permutation, tiles + task // (NUM_BLOCKS * NUM_SITES) * 4,
                site, block,
                pool, row_offset, records, site_table, h, num_record_sites, num_rows,
                NUM_SITES, MAX_RANK, WIDE, HAS_E4M3, HAS_BIAS, ALIGN, NUM_CHUNKS, BLOCK_COLUMNS, TILE_ROWS, TILE_RANKS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def fused(
    x, x_stride, product, product_stride, out, out_stride, bias, permutation, tiles, shrinks, counts, num_tiles, arrivals,
    pool, row_offset, records, site_table, h, num_in, num_record_sites, num_rows,
    NUM_SITES: tl.constexpr, MAX_RANK: tl.constexpr, WIDE: tl.constexpr, HAS_E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr, ALIGN: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, K_CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_RANKS: tl.constexpr,
):  # fmt: skip
    """Both halves in one launch: shrink tasks, then tiles of the base where there is something to be done for them.

    A shrink task's results are written before its arrival is counted, and read after the last arrival was seen.
    """
    num_shrinks = tl.load(counts) * NUM_SITES * NUM_CHUNKS
    num_tasks = num_shrinks + (tl.load(num_tiles) - tl.load(counts + 1)) * NUM_SITES
    # What is the same for all tasks is worked out in each: registers are what this form lacks.
    for task in tl.range(tl.program_id(0), num_tasks, tl.num_programs(0), disable_licm=True):
        is_shrink = task < num_shrinks
        base_task = task - num_shrinks
        entry = shrinks + tl.where(is_shrink, task // (NUM_CHUNKS * NUM_SITES), 0) * 2
        number = tl.where(is_shrink, tl.load(entry, mask=is_shrink, other=0), tl.load(counts + 1) + base_task // NUM_SITES)
        site = tl.where(is_shrink, task // NUM_CHUNKS % NUM_SITES, base_task % NUM_SITES)
        tile = tiles + number * 4
        is_last = task >= num_shrinks
        if is_shrink:
            _shrink_task(
                x, x_stride, permutation, tile, tl.load(entry + 1), site, task % NUM_CHUNKS,
                pool, row_offset, records, site_table, h, num_in, num_record_sites, num_rows,
                NUM_SITES, MAX_RANK, WIDE, HAS_E4M3, K_CHUNK, BLOCK_K, TILE_ROWS, TILE_RANKS,
            )  # fmt: skip
            tl.debug_barrier()  # every thread's results, before one thread counts them
            arrival = arrivals + number * NUM_SITES + site
            is_last = tl.atomic_add(arrival, 1, sem="acq_rel") == tl.load(tile + 3) * NUM_CHUNKS - 1
            if is_last:
                tl.store(arrival, 0)
        if is_last:
            size = tl.load(site_table + site * 3 + 2)
            for block in range((size + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS):
                _expand_task(
                    product, product_stride, out, out_stride, bias, permutation, tile, site, block,
                    pool, row_offset, records, site_table, h, num_record_sites, num_rows,
                    NUM_SITES, MAX_RANK, WIDE, HAS_E4M3, HAS_BIAS, ALIGN, NUM_CHUNKS, BLOCK_COLUMNS, TILE_ROWS, TILE_RANKS,
                )  # fmt: skip
