"""A step's adapter work as lists that every linear of the step reads: tiles of rows, and which tiles of ranks each of them has.

    permutation   r7 r1 r4 │ r0 r5 │ r2 r3 r6              rows, grouped by adapter, those of the base last
    tiles         (A, 0, 3, 2)  (B, 3, 2, 1)  (-1, 5, 3, 0)    adapter, first place, rows, tiles of ranks
    shrinks       (0, 0) (0, 1)  (1, 0)                     tile, tile of ranks

Lists and lengths lie on the device and are made there, so one captured graph serves any mix of adapters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftwork_kernels.layout import NO_ADAPTER, AdapterBatch, AdapterMemory, AdapterTasks
from graftwork_kernels.triton.adapter_rows import FIELDS, RANK

TILE_ROWS = 16
"""Rows of x in one tile: what a tensor core takes at least."""

TILE_RANKS = 16
"""Ranks in one task of the first half, for the same reason."""

NUM_SHRINKS, NUM_ADAPTER_TILES, NUM_TILES = range(3)
"""Places in ``counts``."""


_SITES_AT_ONCE = 256
_TILES_AT_ONCE = 64


def plan_tasks(batch: AdapterBatch, memory: AdapterMemory, tasks: AdapterTasks) -> None:
    """Write the tasks of ``batch``, which has a row at least; two launches a step."""
    num_rows = batch.token_adapter.shape[0]
    num_adapters, num_sites = memory.sites.shape[:2]
    most_segments = min(num_rows, num_adapters)
    rank_tiles = torch.empty(max(most_segments, 1), dtype=torch.int32, device=batch.token_adapter.device)
    if most_segments:
        _count_rank_tiles[(most_segments,)](
            batch.segment_adapter, batch.num_segments, memory.sites, rank_tiles, num_sites,
            SITES=_SITES_AT_ONCE, TILE_RANKS=TILE_RANKS, num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
    # A program for each segment there can be, and one more for the rows of the base.
    _write_tasks[(most_segments + 1,)](
        batch.segment_start, batch.segment_adapter, batch.num_segments, rank_tiles, tasks.tiles, tasks.shrinks, tasks.counts,
        num_rows, SEGMENTS=triton.next_power_of_2(max(most_segments, 1)), TILES=_TILES_AT_ONCE, TILE_ROWS=TILE_ROWS,
        BASE=NO_ADAPTER, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _count_rank_tiles(
    segment_adapter, num_segments, records, rank_tiles, num_sites, SITES: tl.constexpr, TILE_RANKS: tl.constexpr
):  # fmt: skip
    """rank_tiles[segment]: tiles of the largest rank that the segment's adapter has at any site."""
    segment = tl.program_id(0)
    if segment < tl.load(num_segments):
        first_record = tl.load(segment_adapter + segment).to(tl.int64) * num_sites
        most = tl.zeros((SITES,), dtype=tl.int64)
        for first in range(0, num_sites, SITES):
            site = first + tl.arange(0, SITES)
            rank = tl.load(records + (first_record + site) * FIELDS + RANK, mask=site < num_sites, other=0)
            most = tl.maximum(most, rank)
        rank = tl.max(most, axis=0).to(tl.int32)
        tl.store(rank_tiles + segment, tl.maximum((rank + TILE_RANKS - 1) // TILE_RANKS, 1))


@triton.jit(do_not_specialize=["num_rows"])
def _write_tasks(
    segment_start, segment_adapter, num_segments, segment_rank_tiles, tiles, shrinks, counts, num_rows,
    SEGMENTS: tl.constexpr, TILES: tl.constexpr, TILE_ROWS: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """A program counts what lies before its segment, and writes what its segment has behind that."""
    own = tl.program_id(0)
    number = tl.load(num_segments)
    if own <= number:
        segment = tl.arange(0, SEGMENTS)
        there = segment < number
        start = tl.load(segment_start + segment, mask=there, other=0)
        end = tl.load(segment_start + segment + 1, mask=there, other=0)
        rank_tiles = tl.load(segment_rank_tiles + segment, mask=there, other=0)
        row_tiles = (end - start + TILE_ROWS - 1) // TILE_ROWS
        before = there & (segment < own)
        first_tile = tl.sum(tl.where(before, row_tiles, 0), axis=0)
        first_shrink = tl.sum(tl.where(before, row_tiles * rank_tiles, 0), axis=0)
        is_base = own == number  # its rows lie behind all segments
        begin = tl.load(segment_start + own)  # of the first beyond the last: the end of the last
        length = tl.where(is_base, num_rows, tl.load(segment_start + own + 1, mask=own < number, other=0)) - begin
        adapter = tl.load(segment_adapter + own, mask=own < number, other=BASE)
        own_rank_tiles = tl.load(segment_rank_tiles + own, mask=own < number, other=0)
        num_tiles = (length + TILE_ROWS - 1) // TILE_ROWS
        if is_base:
            tl.store(counts, first_shrink)
            tl.store(counts + 1, first_tile)
            tl.store(counts + 2, first_tile + num_tiles)
        for done in range(0, num_tiles, TILES):
            tile = done + tl.arange(0, TILES)
            exists = tile < num_tiles
            place = tiles + (first_tile + tile) * 4
            tl.store(place, tl.zeros((TILES,), dtype=tl.int32) + adapter, mask=exists)
            tl.store(place + 1, begin + tile * TILE_ROWS, mask=exists)
            tl.store(place + 2, tl.minimum(length - tile * TILE_ROWS, TILE_ROWS), mask=exists)
            tl.store(place + 3, tl.zeros((TILES,), dtype=tl.int32) + own_rank_tiles, mask=exists)
            for part in range(own_rank_tiles):
                entry = shrinks + (first_shrink + tile * own_rank_tiles + part) * 2
                tl.store(entry, first_tile + tile, mask=exists)
                tl.store(entry + 1, tl.zeros((TILES,), dtype=tl.int32) + part, mask=exists)
