"""The work lists that the device makes of a step, against the same made by hand."""

from __future__ import annotations

import math

import pytest
import torch

from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import NUM_SITE_FIELDS, AdapterMemory, AttentionBatch, SiteField
from graftwork_kernels.triton.adapter_tasks import NUM_ADAPTER_TILES, NUM_SHRINKS, NUM_TILES, TILE_RANKS, TILE_ROWS
from graftwork_kernels.triton.attention import CHUNK, KEYS, MOST_CHUNKS, PREFILL_ROWS, WIDE_PREFILL_ROWS, plan_attention
from graftwork_kernels.triton.linear import AdapterLauncher, Form

RANKS = (5, 16, 17, 0, 300, 64)
"""The largest of each adapter: less than a tile, a whole one, a little more, none at all, many."""

NUM_SITES = 300
"""More than are looked at at once."""


def memory_of_ranks() -> AdapterMemory:
    """Records alone; the largest rank stands at another site for each adapter."""
    sites = torch.full((len(RANKS), NUM_SITES, NUM_SITE_FIELDS), -1, dtype=torch.int64)
    sites[:, :, SiteField.RANK] = 0
    for adapter, rank in enumerate(RANKS):
        sites[adapter, (adapter * 97 + 1) % NUM_SITES, SiteField.RANK] = rank
        sites[adapter, 7, SiteField.RANK] = rank // 2
    return AdapterMemory(torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), sites)


def expected_lists(token_adapter: list[int]) -> tuple[list[list[int]], list[list[int]], list[int]]:
    batch = build_adapter_batch(token_adapter)
    runs = [
        (int(batch.segment_adapter[number]), int(batch.segment_start[number]), int(batch.segment_start[number + 1]))
        for number in range(int(batch.num_segments))
    ]
    grouped = runs[-1][2] if runs else 0
    tiles, shrinks = [], []
    for adapter, start, end in [*runs, (-1, grouped, len(token_adapter))]:
        rank_tiles = max(1, -(-RANKS[adapter] // TILE_RANKS)) if adapter >= 0 else 0
        for first in range(start, end, TILE_ROWS):
            shrinks += [[len(tiles), number] for number in range(rank_tiles)]
            tiles.append([adapter, first, min(TILE_ROWS, end - first), rank_tiles])
    return tiles, shrinks, [len(shrinks), sum(tile[0] >= 0 for tile in tiles), len(tiles)]


@pytest.mark.parametrize(
    "token_adapter",
    [
        [-1],
        [3],
        [0] * 16,
        [0] * 17 + [-1] * 33,
        [-1] * 40,
        [4, 1, -1, 4, 2, 3, 5, 0, -1, 4],
        [5] * 1100 + [2] * 3,  # more tiles than are written at once
        [number % 7 - 1 for number in range(133)],
    ],
    ids=len,
)
def test_adapter_tasks_are_those_made_by_hand(token_adapter):
    batch = build_adapter_batch(token_adapter)
    tasks = AdapterLauncher(3, max(RANKS), Form.TWO, is_exact=True, is_wide=True, has_e4m3=False).plan(memory_of_ranks(), batch)
    tiles, shrinks, counts = expected_lists(token_adapter)
    assert tasks.counts.tolist() == counts
    assert tasks.tiles[: counts[NUM_TILES]].tolist() == tiles
    assert tasks.shrinks[: counts[NUM_SHRINKS]].tolist() == shrinks
    assert [tile[0] for tile in tiles[: counts[NUM_ADAPTER_TILES]]].count(-1) == 0


def attention_batch(query_len: list[int], context_len: list[int]) -> AttentionBatch:
    starts = torch.tensor([0, *query_len]).cumsum(0)
    return AttentionBatch(
        query_start=starts.int(),
        context_len=torch.tensor(context_len).int(),
        block_table=torch.zeros(len(query_len), 1, dtype=torch.int32),
        kv_slot=torch.zeros(int(starts[-1]), dtype=torch.int64),
        max_query_len=max(query_len),
        max_context_len=max(context_len),
    )


@pytest.mark.parametrize("is_wide", [False, True])
def test_attention_tasks_are_those_made_by_hand(is_wide):
    """A padded request without rows, contexts around a chunk, one whose chunks grow, prompts around a tile."""
    group = 4
    queries = (WIDE_PREFILL_ROWS if is_wide else PREFILL_ROWS) // group
    longest = CHUNK * MOST_CHUNKS + 1
    query_len = [1, 0, 1, 1, queries, 1, queries + 1, 2, 1]
    context_len = [1, 0, CHUNK, CHUNK + 1, 100, longest, 900, 2, 10 * longest]
    tasks = plan_attention(attention_batch(query_len, context_len), group, is_wide)

    def chunks(context: int) -> int:
        share = math.ceil(context / MOST_CHUNKS)
        return math.ceil(context / max(CHUNK, math.ceil(share / KEYS) * KEYS))

    expected_chunks = [chunks(context) if length == 1 else 0 for length, context in zip(query_len, context_len, strict=True)]
    expected_tiles = [-(-length // queries) if length > 1 else 0 for length in query_len]
    assert tasks.first_chunk.diff().tolist() == expected_chunks
    assert tasks.first_tile.diff().tolist() == expected_tiles
    assert tasks.queries == queries
    assert tasks.first_chunk[0] == tasks.first_tile[0] == 0
    assert max(expected_chunks) <= MOST_CHUNKS
