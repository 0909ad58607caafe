"""Log probabilities of given tokens and of each row's most probable ones. Refuses to know how a token was drawn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftwork_kernels.triton.vocabulary import (
    FARTHEST,
    OUTSIDE,
    UNSPECIALISED,
    chunks_of,
    key_logit,
    logit_key,
    row_stride,
    scan,
)


@triton.jit(**UNSPECIALISED)
def _logprobs(
    logits, row_stride, num_tokens, token_ids, peak_key, peak_token, peak_total, num_top, logprobs, top_ids, top_logprobs,
    NUM_CHUNKS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row. The best of each chunk are at hand: the best of them is the next of all, and only its chunk is read again.

    NaN comes last, below -infinity, so that every token has a place and none is taken twice.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    chunk = tl.arange(0, LANES)
    in_row = chunk < NUM_CHUNKS
    key = tl.load(peak_key + row * NUM_CHUNKS + chunk, mask=in_row, other=OUTSIDE)
    first = tl.load(peak_token + row * NUM_CHUNKS + chunk, mask=in_row, other=0)
    total = tl.load(peak_total + row * NUM_CHUNKS + chunk, mask=in_row, other=0.0)
    largest = key_logit(tl.max(key, axis=0))
    shift = tl.where(tl.abs(largest) <= FARTHEST, largest, 0.0)
    peak = key_logit(key)
    taken_off = tl.where(tl.abs(peak) <= FARTHEST, peak, 0.0)  # from the logits of the chunk, when they were added up
    part = tl.where(total > 0, total * tl.exp(taken_off - shift), total)  # 0 and NaN as they are
    log_total = shift + tl.log(tl.sum(part, axis=0))

    given = tl.load(token_ids + row)
    logit = tl.load(start + given, mask=(given >= 0) & (given < num_tokens), other=float("nan")).to(tl.float32)
    tl.store(logprobs + row, logit - log_total)

    for rank in range(num_top):
        best = tl.max(key, axis=0)
        token = tl.min(tl.where(key == best, first, num_tokens), axis=0)
        tl.store(top_ids + row * num_top + rank, token.to(tl.int64))
        tl.store(top_logprobs + row * num_top + rank, key_logit(best) - log_total)
        its = token // CHUNK
        others = its * CHUNK + tl.arange(0, CHUNK)
        there = others < num_tokens
        other_key = logit_key(tl.load(start + others, mask=there, other=float("-inf")).to(tl.float32))
        comes_later = there & ((other_key < best) | ((other_key == best) & (others > token)))
        other_key = tl.where(comes_later, other_key, OUTSIDE)
        next_key = tl.max(other_key, axis=0)
        next_token = tl.min(tl.where(other_key == next_key, others, num_tokens), axis=0)
        key = tl.where(chunk == its, next_key, key)
        first = tl.where(chunk == its, next_token, first)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `graftwork_kernels.ops.Operators.token_logprobs`. A token id outside the row has NaN."""
    num_rows, num_tokens = logits.shape
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=logits.device)
    top_logprobs = torch.empty((num_rows, num_top), dtype=torch.float32, device=logits.device)
    if num_rows:
        chunks = chunks_of(num_tokens)
        peaks = scan(logits, chunks, with_total=True)
        _logprobs[(num_rows,)](
            logits, row_stride(logits), num_tokens, token_ids.contiguous(), peaks.key, peaks.token, peaks.total,
            num_top, logprobs, top_ids, top_logprobs,
            NUM_CHUNKS=chunks.count, LANES=chunks.lanes, CHUNK=chunks.size, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return logprobs, top_ids, top_logprobs
