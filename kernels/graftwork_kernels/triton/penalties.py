"""What is done to logits before a token is drawn: biases, penalties, and the search for rows that are not finite."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftwork_kernels.layout import LogitBias, Penalties
from graftwork_kernels.triton.vocabulary import FARTHEST, UNSPECIALISED, chunks_of, row_stride

ENTRIES = 1024
"""Of a row's list that a program takes at a time."""

BIAS_PROGRAMS = 1
PENALTY_PROGRAMS = 4
"""Programs that share one row's list: a few hundred biases at most, but every token of a long prompt."""


@triton.jit
def _listed(row, row_start, token_id, begin, num_tokens, ENTRIES: tl.constexpr):
    """Entries of a row from ``begin`` on, their tokens, and which of them there are. One outside the row is left out."""
    entry = begin + tl.arange(0, ENTRIES)
    there = entry < tl.load(row_start + row + 1)
    token = tl.load(token_id + entry, mask=there, other=0)
    return entry, token, there & (token >= 0) & (token < num_tokens)


@triton.jit(**UNSPECIALISED)
def _add_bias(logits, row_stride, num_tokens, row_start, token_id, value, ENTRIES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(row_start + row) + tl.program_id(1) * ENTRIES
    for begin in range(first, tl.load(row_start + row + 1), tl.num_programs(1) * ENTRIES):
        entry, token, there = _listed(row, row_start, token_id, begin, num_tokens, ENTRIES)
        at = logits + row * row_stride + token
        logit = tl.load(at, mask=there, other=0.0)
        tl.store(at, logit + tl.load(value + entry, mask=there, other=0.0), mask=there)


@triton.jit(**UNSPECIALISED)
def _penalise(
    logits, row_stride, num_tokens, row_start, token_id, output_count, repetition, frequency, presence, ENTRIES: tl.constexpr
):
    """Launched without fusion, so that each product is rounded before it is taken off."""
    row = tl.program_id(0).to(tl.int64)
    repeated = tl.load(repetition + row)
    often = tl.load(frequency + row)
    once = tl.load(presence + row)
    first = tl.load(row_start + row) + tl.program_id(1) * ENTRIES
    for begin in range(first, tl.load(row_start + row + 1), tl.num_programs(1) * ENTRIES):
        entry, token, there = _listed(row, row_start, token_id, begin, num_tokens, ENTRIES)
        at = logits + row * row_stride + token
        logit = tl.load(at, mask=there, other=0.0)
        count = tl.load(output_count + entry, mask=there, other=0)
        logit = tl.where(logit > 0, tl.div_rn(logit, repeated), logit * repeated)
        logit = logit - often * count.to(tl.float32)
        logit = logit - once * (count > 0).to(tl.float32)
        tl.store(at, logit, mask=there)


@triton.jit(**UNSPECIALISED)
def _chunk_most(logits, row_stride, num_tokens, most, CHUNK: tl.constexpr):
    """A chunk's largest logit; infinity where it holds NaN."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row * row_stride + token, mask=token < num_tokens, other=float("-inf"))
    tl.store(most + row * tl.num_programs(1) + chunk, tl.max(tl.where(logit == logit, logit, float("inf")), axis=0))


@triton.jit
def _is_finite(most, finite, NUM_CHUNKS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, LANES)
    largest = tl.max(tl.load(most + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf")), axis=0)
    tl.store(finite + row, (tl.abs(largest) <= FARTHEST).to(tl.uint8))


def apply_logit_bias(logits: Tensor, bias: LogitBias) -> None:
    """See `graftwork_kernels.ops.Operators.apply_logit_bias`. An entry outside the logits changes nothing."""
    num_rows, num_tokens = logits.shape
    stride = row_stride(logits)
    if num_rows:
        _add_bias[(num_rows, BIAS_PROGRAMS)](
            logits, stride, num_tokens, bias.row_start.contiguous(), bias.token_id.contiguous(), bias.value.contiguous(),
            ENTRIES=ENTRIES, enable_fp_fusion=False,
        )  # fmt: skip


def apply_penalties(logits: Tensor, penalties: Penalties) -> None:
    """See `graftwork_kernels.ops.Operators.apply_penalties`. An entry outside the logits changes nothing."""
    num_rows, num_tokens = logits.shape
    stride = row_stride(logits)
    lists = (penalties.row_start, penalties.token_id, penalties.output_count)
    columns = (penalties.repetition, penalties.frequency, penalties.presence)
    if num_rows:
        _penalise[(num_rows, PENALTY_PROGRAMS)](
            logits, stride, num_tokens, *(tensor.contiguous() for tensor in lists + columns),
            ENTRIES=ENTRIES, enable_fp_fusion=False,
        )  # fmt: skip


def finite_rows(logits: Tensor) -> Tensor:
    """See `graftwork_kernels.ops.Operators.finite_rows`."""
    num_rows, num_tokens = logits.shape
    stride = row_stride(logits)
    finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        chunks = chunks_of(num_tokens)
        most = torch.empty((num_rows, chunks.count), dtype=torch.float32, device=logits.device)
        _chunk_most[(num_rows, chunks.count)](
            logits, stride, num_tokens, most, CHUNK=chunks.size, num_warps=8, enable_fp_fusion=False
        )
        _is_finite[(num_rows,)](
            most, finite.view(torch.uint8), NUM_CHUNKS=chunks.count, LANES=chunks.lanes, num_warps=1, enable_fp_fusion=False
        )
    return finite
