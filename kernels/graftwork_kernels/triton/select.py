"""Where top-k and top-p cut the rows of a step, found without sorting them. Refuses to know what is drawn from the rest.

A cut is the last token that stays, by (logit descending, id ascending). A wide row is searched in three launches:

    tally   (row, chunk)  counts and weighs its tokens down to each of 16 levels below the row's largest logit
    collect (row, chunk)  copies those of the band between two levels in which the cut lies, if they are few
    cut     (row)         splits the range of keys in 16 again and again until one key is left, over the copies; over the row
                          where there are none

The levels are set by the row itself: by how far the least of its chunks' peaks lies below the largest. What they are decides how
long the search takes, never what it finds. Rows that neither filter touches leave each of the three at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftwork_kernels.layout import SamplingBatch
from graftwork_kernels.triton.vocabulary import (
    FARTHEST,
    OUTSIDE,
    UNSPECIALISED,
    Chunks,
    Peaks,
    key_logit,
    logit_key,
    row_largest,
    row_stride,
)

CAPACITY = 4096
"""Tokens of a band that are copied; a wider band is searched where it lies."""

SEARCH_BLOCK = 1024
"""Tokens that a search holds against its thresholds at a time."""

LEVELS = tl.constexpr(16)
LEVEL_STEP = tl.constexpr(0.125)  # of the distance from the largest peak to the least
THRESHOLDS = tl.constexpr(16)
LOWEST_KEY = tl.constexpr(-0x7F800000)  # of -infinity


@dataclass(frozen=True, slots=True)
class Cuts:
    """The last token of each row that stays, int32 [R]: larger keys than ``key`` stay, and of its equals the ids up to ``token``.
    Everything does where ``key`` is that of no token.
    """

    key: Tensor
    token: Tensor


@triton.jit
def _filters(row, num_tokens, temperature, top_k, top_p):
    """Whether top-k and top-p have a say in a row."""
    is_drawn = tl.load(temperature + row) > 0
    wanted = tl.load(top_k + row)
    return is_drawn & (wanted > 0) & (wanted < num_tokens), is_drawn & (tl.load(top_p + row) < 1.0)


@triton.jit
def _spread(peak_key, row, largest, NUM_CHUNKS: tl.constexpr, LANES: tl.constexpr):
    """How far the least of a row's peaks lies below the largest; of those that are numbers."""
    chunk = tl.arange(0, LANES)
    peak = key_logit(tl.load(peak_key + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=OUTSIDE))
    return largest - tl.min(tl.where((chunk < NUM_CHUNKS) & (tl.abs(peak) <= FARTHEST), peak, largest), axis=0)


@triton.jit(**UNSPECIALISED)
def _tally(
    logits, row_stride, num_tokens, temperature, top_k, top_p, peak_key, counts, masses,
    NUM_CHUNKS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """counts[row, chunk, level] of the tokens no farther below the largest than each level; masses, where top-p decides alone.

    The last level takes all whose distance is finite: the others weigh nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    has_top_k, has_top_p = _filters(row, num_tokens, temperature, top_k, top_p)
    if has_top_k | has_top_p:
        largest = row_largest(peak_key, row, NUM_CHUNKS, LANES)
        if tl.abs(largest) <= FARTHEST:
            spread = _spread(peak_key, row, largest, NUM_CHUNKS, LANES)
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            logit = tl.load(logits + row * row_stride + token, mask=token < num_tokens, other=float("-inf"))
            distance = largest - logit  # infinite or NaN for what is no number, and then within no level
            place = (row * NUM_CHUNKS + chunk) * LEVELS
            for level in tl.static_range(LEVELS - 1):
                near = distance <= tl.minimum(spread * ((level + 1) * LEVEL_STEP), FARTHEST)
                tl.store(counts + place + level, tl.sum(near.to(tl.int32), axis=0))
            tl.store(counts + place + (LEVELS - 1), tl.sum((distance <= FARTHEST).to(tl.int32), axis=0))
            if has_top_p & (has_top_k == 0):
                weight = tl.exp(tl.div_rn(-distance, tl.load(temperature + row)))
                for depth in tl.static_range(LEVELS - 1):
                    within = distance <= tl.minimum(spread * ((depth + 1) * LEVEL_STEP), FARTHEST)
                    tl.store(masses + place + depth, tl.sum(tl.where(within, weight, 0.0), axis=0))
                tl.store(masses + place + (LEVELS - 1), tl.sum(tl.where(distance <= FARTHEST, weight, 0.0), axis=0))


@triton.jit
def _level_distance(spread, level):
    """How far below the largest a level lies; the same bits as in `_tally`."""
    distance = tl.minimum(spread * ((level + 1).to(tl.float32) * LEVEL_STEP), FARTHEST)
    return tl.where(level == LEVELS - 1, FARTHEST, distance)


@triton.jit
def _band(counts, masses, row, spread, wanted, share, has_top_k, has_top_p, NUM_CHUNKS: tl.constexpr, LANES: tl.constexpr):
    """In which band the first cut lies: it is beyond the distance ``nearest`` and not beyond ``farthest``. With them what lies
    before it, what is needed, and its tokens in each chunk, [lanes].

    With both filters the band begins at the top: the second cut may lie anywhere above the first.
    """
    level = tl.arange(0, LEVELS)
    chunk = tl.arange(0, LANES)
    place = (row * NUM_CHUNKS + chunk[:, None]) * LEVELS + level[None, :]
    there = (chunk < NUM_CHUNKS)[:, None]
    count = tl.load(counts + place, mask=there, other=0)
    num_weighed = tl.where(has_top_k, 0, NUM_CHUNKS)
    mass = tl.load(masses + place, mask=(chunk < num_weighed)[:, None], other=0.0)
    amounts = tl.where(has_top_k, tl.sum(count, axis=0).to(tl.float32), tl.sum(mass, axis=0))
    needed = tl.where(has_top_k, wanted.to(tl.float32), share * tl.max(amounts, axis=0))
    last = tl.minimum(tl.sum((amounts < needed).to(tl.int32), axis=0), LEVELS - 1)
    above = tl.where(has_top_k & has_top_p, -1, last - 1)  # the level where the band begins
    before = tl.sum(tl.where(level == above, amounts, 0.0), axis=0)
    nearest = tl.where(above < 0, -1.0, _level_distance(spread, above))
    sign = (level == last).to(tl.int32) - (level == above).to(tl.int32)
    return nearest, _level_distance(spread, last), before, needed, tl.sum(count * sign[None, :], axis=1)


@triton.jit(**UNSPECIALISED)
def _collect(
    logits, row_stride, num_tokens, temperature, top_k, top_p, peak_key, counts, masses, bands, band_sizes, candidates,
    candidate_ids,
    NUM_CHUNKS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """candidates[row, …] and candidate_ids, by ascending id: the band's tokens, if no more than CAPACITY; and the band itself.

    It is kept and not found again: another kernel might add up the masses in another order, and find the next band.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    has_top_k, has_top_p = _filters(row, num_tokens, temperature, top_k, top_p)
    if has_top_k | has_top_p:
        largest = row_largest(peak_key, row, NUM_CHUNKS, LANES)
        if tl.abs(largest) <= FARTHEST:
            spread = _spread(peak_key, row, largest, NUM_CHUNKS, LANES)
            nearest, farthest, before, needed, members = _band(
                counts, masses, row, spread, tl.load(top_k + row), tl.load(top_p + row), has_top_k, has_top_p, NUM_CHUNKS, LANES
            )
            size = tl.sum(members, axis=0)
            if chunk == 0:
                band = bands + row * 4
                tl.store(band, nearest)
                tl.store(band + 1, farthest)
                tl.store(band + 2, before)
                tl.store(band + 3, needed)
                tl.store(band_sizes + row, size)
            number = tl.arange(0, LANES)
            own = tl.sum(tl.where(number == chunk, members, 0), axis=0)
            if (own > 0) & (size <= CAPACITY):
                earlier = tl.sum(tl.where(number < chunk, members, 0), axis=0)
                token = chunk * CHUNK + tl.arange(0, CHUNK)
                logit = tl.load(logits + row * row_stride + token, mask=token < num_tokens, other=float("-inf"))
                distance = largest - logit
                inside = (distance > nearest) & (distance <= farthest)
                place = row * CAPACITY + earlier + tl.cumsum(inside.to(tl.int32), axis=0) - 1
                tl.store(candidates + place, logit, mask=inside)
                tl.store(candidate_ids + place, token, mask=inside)


@triton.jit
def _load_amounts(source, place, count, largest, heat, nearest, farthest, last_key, last_place, WEIGHED: tl.constexpr):
    """Keys of tokens at ``place``, and what each amounts to: 1 or its weight; 0 outside the band and beyond an earlier cut."""
    logit = tl.load(source + place, mask=place < count, other=float("-inf"))
    key = logit_key(logit)
    distance = largest - logit
    stays = (distance > nearest) & (distance <= farthest) & ((key > last_key) | ((key == last_key) & (place <= last_place)))
    if WEIGHED:
        amount = tl.where(stays, tl.exp(tl.div_rn(-distance, heat)), 0.0)
    else:
        amount = stays.to(tl.float32)
    return key, amount


@triton.jit
def _search(
    source, count, largest, heat, nearest, farthest, before, needed, share, last_key, last_place,
    WEIGHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last of the first tokens that, with ``before``, amount to ``needed``: its key and its place in the source.

    A negative ``needed`` is not known yet: it is ``share`` of all. At least one token is taken; all are where they do not suffice,
    as when the sum of the band, added up again in another order, misses by a rounding what was found to lie in it.
    All sums of a step have one tree, so that they grow with what they hold, whatever is rounded, and the range stays a range.
    """
    index = tl.arange(0, THRESHOLDS)
    low = tl.full([], LOWEST_KEY, tl.int64)  # tokens from here on suffice
    high = logit_key(largest).to(tl.int64) + 1  # those from here on do not, and amount to `above`
    above = tl.full([], 0.0, tl.float32)
    while high - low > 1:
        step = (high - low + (THRESHOLDS - 1)) // THRESHOLDS
        threshold = tl.minimum(low + step * index, high).to(tl.int32)
        amounts = tl.full([THRESHOLDS], 0.0, tl.float32)
        for begin in range(0, count, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            key, amount = _load_amounts(source, place, count, largest, heat, nearest, farthest, last_key, last_place, WEIGHED)
            amounts += tl.sum(tl.where(key[None, :] >= threshold[:, None], amount[None, :], 0.0), axis=1)
        whole = tl.max(amounts, axis=0)
        needed = tl.minimum(tl.where(needed < 0, share * whole, needed), before + whole)
        suffices = (amounts > 0) & (before + amounts >= needed)
        number = tl.maximum(tl.sum(suffices.to(tl.int32), axis=0), 1)
        end = low + step * number
        above = tl.where(end < high, tl.sum(tl.where(index == number, amounts, 0.0), axis=0), above)
        high = tl.minimum(end, high)
        low = end - step

    found = low.to(tl.int32)
    missing = needed - before - above
    if WEIGHED:
        missing = tl.div_rn(missing, tl.exp(tl.div_rn(key_logit(found) - largest, heat)))
    num_equal = tl.minimum(tl.maximum(tl.ceil(missing), 1.0), 1e9).to(tl.int32)
    seen = tl.full([], 0, tl.int32)
    last = tl.full([], -1, tl.int32)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        key, amount = _load_amounts(source, place, count, largest, heat, nearest, farthest, last_key, last_place, WEIGHED)
        equal = (key == found) & (amount > 0)
        rank = seen + tl.cumsum(equal.to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(equal & (rank <= num_equal), place, -1), axis=0))
        seen += tl.sum(equal.to(tl.int32), axis=0)
    return found, last


@triton.jit(**UNSPECIALISED)
def _cut(
    logits, row_stride, num_tokens, temperature, top_k, top_p, peak_key, bands, band_sizes, candidates, candidate_ids,
    cut_key, cut_token,
    TALLIED: tl.constexpr, NUM_CHUNKS: tl.constexpr, LANES: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row into `Cuts`."""
    row = tl.program_id(0).to(tl.int64)
    has_top_k, has_top_p = _filters(row, num_tokens, temperature, top_k, top_p)
    last_key = tl.full([], OUTSIDE, tl.int32)
    last_token = tl.full([], -1, tl.int32)
    if has_top_k | has_top_p:
        largest = row_largest(peak_key, row, NUM_CHUNKS, LANES)
        if tl.abs(largest) <= FARTHEST:
            heat = tl.load(temperature + row)
            wanted = tl.load(top_k + row)
            share = tl.load(top_p + row)
            if TALLIED:
                band = bands + row * 4
                nearest, farthest, before, needed = tl.load(band), tl.load(band + 1), tl.load(band + 2), tl.load(band + 3)
                size = tl.load(band_sizes + row)
                is_collected = size <= CAPACITY
                source = tl.where(is_collected, candidates + row * CAPACITY, logits + row * row_stride)
                count = tl.where(is_collected, size, num_tokens)
            else:
                nearest = tl.full([], -1.0, tl.float32)
                farthest = tl.full([], FARTHEST, tl.float32)
                before = tl.full([], 0.0, tl.float32)
                needed = tl.where(has_top_k, wanted.to(tl.float32), -1.0)
                source = logits + row * row_stride
                count = num_tokens
            if has_top_k:
                last_key, last_token = _search(
                    source, count, largest, heat, nearest, farthest, before, needed, share, last_key, last_token, False, BLOCK
                )
            if has_top_p:
                needed = tl.where(has_top_k, -1.0, needed)  # a share of what top-k left
                last_key, last_token = _search(
                    source, count, largest, heat, nearest, farthest, before, needed, share, last_key, last_token, True, BLOCK
                )
            if TALLIED:
                place = tl.where(is_collected, tl.maximum(last_token, 0), 0)
                token = tl.load(candidate_ids + row * CAPACITY + place)
                last_token = tl.where(is_collected & (last_token >= 0), token, last_token)
    tl.store(cut_key + row, last_key)
    tl.store(cut_token + row, last_token)


def find_cuts(logits: Tensor, batch: SamplingBatch, peaks: Peaks, chunks: Chunks) -> Cuts:
    """The cuts of logits fp32 [R, V], R ≥ 1, with the columns of ``batch`` contiguous."""
    num_rows, num_tokens = logits.shape
    is_wide = chunks.count > 1
    num_searched = num_rows if is_wide else 0
    found = (
        logits.new_empty((num_searched, 4)),  # bands
        logits.new_empty(num_searched, dtype=torch.int32),  # and their sizes
        logits.new_empty((num_searched, CAPACITY)),  # candidates
        logits.new_empty((num_searched, CAPACITY), dtype=torch.int32),  # and their ids
    )
    cuts = Cuts(logits.new_empty(num_rows, dtype=torch.int32), logits.new_empty(num_rows, dtype=torch.int32))
    rows = (logits, row_stride(logits), num_tokens, batch.temperature, batch.top_k, batch.top_p, peaks.key)
    shape = {"NUM_CHUNKS": chunks.count, "LANES": chunks.lanes, "enable_fp_fusion": False}
    if is_wide:
        grid = (num_rows, chunks.count)
        counts = logits.new_empty((*grid, LEVELS.value), dtype=torch.int32)
        masses = logits.new_empty((*grid, LEVELS.value))
        _tally[grid](*rows, counts, masses, **shape, CHUNK=chunks.size, num_warps=8)
        _collect[grid](*rows, counts, masses, *found, **shape, CHUNK=chunks.size, CAPACITY=CAPACITY, num_warps=8)
    block = min(SEARCH_BLOCK, chunks.size)
    _cut[(num_rows,)](*rows, *found, cuts.key, cuts.token, **shape, TALLIED=is_wide, CAPACITY=CAPACITY, BLOCK=block, num_warps=16)
    return cuts
