"""Rows of logits in chunks that the vocabulary's size alone fixes: their order and their peaks. Refuses to know what is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Tokens of a row that one program takes. A row's sums are made of its chunks' sums, so their bits do not depend on the batch."""

UNSPECIALISED = {
    "do_not_specialize": ("row_stride", "num_tokens", "num_top", "count"),
    "do_not_specialize_on_alignment": (
        *("logits", "token_ids", "temperature", "top_k", "top_p", "min_p", "seed", "choice", "position"),
        *("row_start", "token_id", "value", "output_count", "repetition", "frequency", "presence"),
    ),
}
"""Arguments of kernels that are compiled for any value. The alignment of logits decides how wide they are loaded, and with that in
which order a program sums them: a row has to have the same bits wherever it lies. The others would only multiply the variants.
"""

FARTHEST = tl.constexpr(3.4028234663852886e38)  # the largest finite fp32
NAN_KEY = tl.constexpr(-0x7F800001)  # just below that of -infinity
OUTSIDE = tl.constexpr(-0x80000000)  # key of no token


@dataclass(frozen=True, slots=True)
class Chunks:
    """How a row of a vocabulary is cut: ``count`` chunks of ``size`` tokens; ``lanes`` is a power of two that holds them all."""

    size: int
    count: int
    lanes: int


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of every chunk of every row, [R, chunks]: ``key`` of its largest logit and ``token``, the lowest id that has it, int32;
    ``total`` fp32, the sum of e^(logit - largest), None where nobody asked for it.
    """

    key: Tensor
    token: Tensor
    total: Tensor | None


@triton.jit
def logit_key(logit):
    """int32 in the order of the logits: equal for equals, both zeros among them, and `NAN_KEY` for NaN."""
    bits = logit.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(logit == logit, tl.where(bits < 0, -magnitude, magnitude), NAN_KEY)


@triton.jit
def key_logit(key):
    """The logit that has a key."""
    magnitude = tl.abs(key).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -magnitude, magnitude)


@triton.jit
def row_largest(peak_key, row, NUM_CHUNKS: tl.constexpr, LANES: tl.constexpr):
    """The largest logit of a row; NaN where it has nothing else."""
    chunk = tl.arange(0, LANES)
    return key_logit(tl.max(tl.load(peak_key + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=OUTSIDE), axis=0))


@triton.jit(**UNSPECIALISED)
def _scan(
    logits, row_stride, num_tokens, peak_key, peak_token, peak_total,
    WITH_TOTAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk of one row into `Peaks`."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    there = token < num_tokens
    logit = tl.load(logits + row * row_stride + token, mask=there, other=float("-inf")).to(tl.float32)
    key = tl.where(there, logit_key(logit), OUTSIDE)
    best = tl.max(key, axis=0)
    place = row * tl.num_programs(1) + chunk
    tl.store(peak_key + place, best)
    tl.store(peak_token + place, tl.min(tl.where(key == best, token, num_tokens), axis=0))
    if WITH_TOTAL:
        largest = key_logit(best)
        # Nothing comes off where the largest is infinite or NaN: the sum is then 0, infinite or NaN, as the logits say.
        shift = tl.where(tl.abs(largest) <= FARTHEST, largest, 0.0)
        tl.store(peak_total + place, tl.sum(tl.exp(logit - shift), axis=0))


def chunks_of(num_tokens: int) -> Chunks:
    """How rows of ``num_tokens`` are cut."""
    size = min(CHUNK, max(16, triton.next_power_of_2(num_tokens)))
    count = triton.cdiv(num_tokens, size)
    return Chunks(size, count, max(16, triton.next_power_of_2(count)))


def row_stride(logits: Tensor) -> int:
    """Elements from one row to the next; those of a row must lie side by side."""
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError("logits: expected the elements of a row side by side")
    return logits.stride(0)


def scan(logits: Tensor, chunks: Chunks, *, with_total: bool) -> Peaks:
    """The peaks of logits [R, V], R ≥ 1."""
    num_rows, num_tokens = logits.shape
    shape = (num_rows, chunks.count)
    key = torch.empty(shape, dtype=torch.int32, device=logits.device)
    token = torch.empty_like(key)
    total = torch.empty(shape, dtype=torch.float32, device=logits.device) if with_total else None
    _scan[shape](
        logits, row_stride(logits), num_tokens, key, token, total,
        WITH_TOTAL=with_total, CHUNK=chunks.size, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return Peaks(key, token, total)
