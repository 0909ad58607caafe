"""Drawing tokens: the inverse of each row's distribution, in ascending id order. Refuses to know where a filter cuts."""

from __future__ import annotations

from dataclasses import fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftwork_kernels.layout import SamplingBatch
from graftwork_kernels.triton.philox import uniform
from graftwork_kernels.triton.select import find_cuts
from graftwork_kernels.triton.vocabulary import (
    FARTHEST,
    OUTSIDE,
    UNSPECIALISED,
    chunks_of,
    key_logit,
    logit_key,
    row_largest,
    row_stride,
    scan,
)


@triton.jit
def _weights(logit, token, largest, heat, least, last_key, last_token):
    """e^((logit - largest) / temperature) of the tokens that all filters leave, 0 of the others; NaN weighs nothing."""
    # The largest comes off before the division, so that a temperature near 0 cannot overflow.
    weight = tl.exp(tl.div_rn(logit - largest, heat))
    key = logit_key(logit)
    stays = (key > last_key) | ((key == last_key) & (token <= last_token))
    return tl.where(stays & (weight >= least), weight, 0.0)


@triton.jit(**UNSPECIALISED)
def _weigh(
    logits, row_stride, num_tokens, temperature, min_p, peak_key, cut_key, cut_token, sums,
    NUM_CHUNKS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """sums[row, chunk]: what its tokens weigh, of a row that is drawn."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat > 0:
        largest = row_largest(peak_key, row, NUM_CHUNKS, LANES)
        if tl.abs(largest) <= FARTHEST:
            last_key = tl.load(cut_key + row)
            # Of a chunk whose largest is cut off nothing is read.
            limit = tl.where(tl.load(peak_key + row * NUM_CHUNKS + chunk) >= last_key, num_tokens, 0)
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            logit = tl.load(logits + row * row_stride + token, mask=token < limit, other=float("-inf"))
            weight = _weights(logit, token, largest, heat, tl.load(min_p + row), last_key, tl.load(cut_token + row))
            tl.store(sums + row * NUM_CHUNKS + chunk, tl.sum(weight, axis=0))


@triton.jit(**UNSPECIALISED)
def _draw(
    logits, row_stride, num_tokens, temperature, min_p, seed, choice, position, peak_key, peak_token, cut_key, cut_token, sums,
    tokens,
    NUM_CHUNKS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """tokens[row]: the lowest id of the largest logit, or the token of the row's noise.

    A running sum may waver by a rounding where nothing is added, so only tokens that weigh something are looked at; where none goes
    beyond the target, it is the last of them. The noise is at most 1 - 2^-24, so the target lies below the total.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, LANES)
    in_row = chunk < NUM_CHUNKS
    key = tl.load(peak_key + row * NUM_CHUNKS + chunk, mask=in_row, other=OUTSIDE)
    best = tl.max(key, axis=0)
    first = tl.load(peak_token + row * NUM_CHUNKS + chunk, mask=in_row, other=0)
    drawn = tl.min(tl.where(key == best, first, num_tokens), axis=0)
    heat = tl.load(temperature + row)
    if heat > 0:
        largest = key_logit(best)
        if tl.abs(largest) <= FARTHEST:
            amount = tl.load(sums + row * NUM_CHUNKS + chunk, mask=in_row, other=0.0)
            noise = uniform(tl.load(seed + row), tl.load(choice + row), tl.load(position + row))
            target = noise * tl.sum(amount, axis=0)
            last_chunk = tl.max(tl.where(amount > 0, chunk, 0), axis=0)
            is_beyond = (amount > 0) & (tl.cumsum(amount, axis=0) > target)
            its = tl.min(tl.where(is_beyond, chunk, last_chunk), axis=0)
            before = tl.sum(tl.where(chunk < its, amount, 0.0), axis=0)

            token = its * CHUNK + tl.arange(0, CHUNK)
            logit = tl.load(logits + row * row_stride + token, mask=token < num_tokens, other=float("-inf"))
            last_key = tl.load(cut_key + row)
            weight = _weights(logit, token, largest, heat, tl.load(min_p + row), last_key, tl.load(cut_token + row))
            last_token = tl.max(tl.where(weight > 0, token, -1), axis=0)
            is_beyond = (weight > 0) & (before + tl.cumsum(weight, axis=0) > target)
            found = tl.min(tl.where(is_beyond, token, last_token), axis=0)
            drawn = tl.where(found >= 0, found, drawn)
    tl.store(tokens + row, drawn.to(tl.int64))


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See `graftwork_kernels.ops.Operators.sample`. Launches depend on the shape of the logits alone."""
    num_rows, num_tokens = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    batch = SamplingBatch(*(getattr(batch, field.name).contiguous() for field in fields(batch)))
    chunks = chunks_of(num_tokens)
    peaks = scan(logits, chunks, with_total=False)
    cuts = find_cuts(logits, batch, peaks, chunks)
    sums = torch.empty(peaks.key.shape, dtype=torch.float32, device=logits.device)
    stride = row_stride(logits)
    shape = {"NUM_CHUNKS": chunks.count, "LANES": chunks.lanes, "CHUNK": chunks.size}
    _weigh[(num_rows, chunks.count)](
        logits, stride, num_tokens, batch.temperature, batch.min_p, peaks.key, cuts.key, cuts.token, sums,
        **shape, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _draw[(num_rows,)](
        logits, stride, num_tokens, batch.temperature, batch.min_p, batch.seed, batch.choice, batch.position,
        peaks.key, peaks.token, cuts.key, cuts.token, sums, tokens, **shape, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens
