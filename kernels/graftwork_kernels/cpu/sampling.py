"""Drawing tokens, what is done to logits before, and log probabilities, as commands. Refuses to know what a request asked for."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from graftwork_kernels import reference
from graftwork_kernels.cpu.issue import Issuer
from graftwork_kernels.layout import LogitBias, Penalties, SamplingBatch

_BLOCK = 512
_PIECE = 16 * _BLOCK
"""Tokens of a row that are weighed, and scanned, at once: `kBlock` and `kPiece` of vocabulary.h."""


class _Logits(ctypes.Structure):
    _fields_ = (("logits", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("num_tokens", ctypes.c_int64))


class _Entries(ctypes.Structure):
    _fields_ = (("row_start", ctypes.c_void_p), ("token_id", ctypes.c_void_p), ("num_entries", ctypes.c_int64))


class _FiniteArguments(ctypes.Structure):
    _fields_ = (("logits", _Logits), ("finite", ctypes.c_void_p))


class _BiasArguments(ctypes.Structure):
    _fields_ = (("logits", _Logits), ("entries", _Entries), ("value", ctypes.c_void_p))


class _PenaltyArguments(ctypes.Structure):
    _fields_ = (
        ("logits", _Logits),
        ("entries", _Entries),
        ("output_count", ctypes.c_void_p),
        ("repetition", ctypes.c_void_p),
        ("frequency", ctypes.c_void_p),
        ("presence", ctypes.c_void_p),
    )


class _UniformArguments(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("seed", "choice", "position", "uniform"))


class _SampleArguments(ctypes.Structure):
    _fields_ = (
        ("logits", _Logits),
        *((name, ctypes.c_void_p) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position", "tokens")),
        *((name, ctypes.c_void_p) for name in ("peaks", "block_sums", "thread_rows")),
    )


class _LogprobArguments(ctypes.Structure):
    _fields_ = (
        ("logits", _Logits),
        ("token_ids", ctypes.c_void_p),
        ("num_top", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("logprobs", "top_ids", "top_logprobs")),
        *((name, ctypes.c_void_p) for name in ("thread_rows", "block_sums")),
        ("is_bf16", ctypes.c_int64),
    )


def finite_rows(issuer: Issuer, logits: Tensor) -> Tensor:
    """See `graftwork_kernels.ops.Operators.finite_rows`."""
    num_rows = logits.shape[0]
    finite = issuer.empty(num_rows, dtype=torch.bool)
    arguments = _FiniteArguments(_rows(logits), finite.data_ptr())
    issuer.issue("graftwork_finite_rows", arguments, [logits, finite], num_rows)
    return finite


def apply_logit_bias(issuer: Issuer, logits: Tensor, bias: LogitBias) -> None:
    """See `graftwork_kernels.ops.Operators.apply_logit_bias`. An entry outside the logits is an IndexError."""
    row_start, token_id, value = (tensor.contiguous() for tensor in (bias.row_start, bias.token_id, bias.value))
    arguments = _BiasArguments(_rows(logits), _entries(row_start, token_id), value.data_ptr())
    issuer.issue("graftwork_logit_bias", arguments, [logits, row_start, token_id, value], logits.shape[0])


def apply_penalties(issuer: Issuer, logits: Tensor, penalties: Penalties) -> None:
    """See `graftwork_kernels.ops.Operators.apply_penalties`. An entry outside the logits is an IndexError."""
    row_start, token_id = penalties.row_start.contiguous(), penalties.token_id.contiguous()
    named = (penalties.output_count, penalties.repetition, penalties.frequency, penalties.presence)
    columns = [column.contiguous() for column in named]
    arguments = _PenaltyArguments(_rows(logits), _entries(row_start, token_id), *(column.data_ptr() for column in columns))
    issuer.issue("graftwork_penalties", arguments, [logits, row_start, token_id, *columns], logits.shape[0])


def philox_uniform(issuer: Issuer, seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """See `graftwork_kernels.ops.Operators.philox_uniform`."""
    inputs = [_column(seed, torch.int64), _column(choice, torch.int32), _column(position, torch.int32)]
    uniform = issuer.empty(*seed.shape, dtype=torch.float32)
    tensors = [*inputs, uniform]
    arguments = _UniformArguments(*(tensor.data_ptr() for tensor in tensors))
    issuer.issue("graftwork_uniform", arguments, tensors, seed.numel())
    return uniform


def sample(issuer: Issuer, logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See `graftwork_kernels.ops.Operators.sample`."""
    num_rows, num_tokens = logits.shape
    columns = [
        _column(batch.temperature, torch.float32),
        _column(batch.top_k, torch.int32),
        _column(batch.top_p, torch.float32),
        _column(batch.min_p, torch.float32),
        _column(batch.seed, torch.int64),
        _column(batch.choice, torch.int32),
        _column(batch.position, torch.int32),
    ]
    tokens = issuer.empty(num_rows, dtype=torch.int64)
    tensors = [
        *columns,
        tokens,
        issuer.empty(num_rows, -(-num_tokens // _PIECE), dtype=torch.int64),
        issuer.empty(num_rows, -(-num_tokens // _BLOCK), dtype=torch.float32),
        issuer.empty(issuer.num_threads, 3 * num_tokens, dtype=torch.float32),
    ]
    arguments = _SampleArguments(_rows(logits), *(tensor.data_ptr() for tensor in tensors))
    issuer.issue("graftwork_sample", arguments, [logits, *tensors], num_rows)
    return tokens


def token_logprobs(issuer: Issuer, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `graftwork_kernels.ops.Operators.token_logprobs`. A token id outside the row is an IndexError."""
    if logits.dtype not in (torch.bfloat16, torch.float32):
        issuer.compute("token_logprobs in plain torch")
        return reference.token_logprobs(logits, token_ids, num_top)
    num_rows, num_tokens = logits.shape
    token_ids = token_ids.contiguous()
    logprobs = issuer.empty(num_rows, dtype=torch.float32)
    top_ids = issuer.empty(num_rows, num_top, dtype=torch.int64)
    top_logprobs = issuer.empty(num_rows, num_top, dtype=torch.float32)
    scratch = [
        issuer.empty(issuer.num_threads, 3 * num_tokens, dtype=torch.float32),
        issuer.empty(issuer.num_threads, -(-num_tokens // _BLOCK), dtype=torch.float32),
    ]
    outputs = [logprobs, top_ids, top_logprobs]
    arguments = _LogprobArguments(
        _rows(logits),
        token_ids.data_ptr(),
        num_top,
        *(tensor.data_ptr() for tensor in [*outputs, *scratch]),
        logits.dtype == torch.bfloat16,
    )
    issuer.issue("graftwork_logprobs", arguments, [logits, token_ids, *outputs, *scratch], num_rows)
    return logprobs, top_ids, top_logprobs


def _rows(logits: Tensor) -> _Logits:
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError("logits: expected the elements of a row side by side")
    return _Logits(logits.data_ptr(), logits.stride(0), logits.shape[1])


def _entries(row_start: Tensor, token_id: Tensor) -> _Entries:
    return _Entries(row_start.data_ptr(), token_id.data_ptr(), token_id.numel())


def _column(column: Tensor, dtype: torch.dtype) -> Tensor:
    """One entry a row, side by side; as it is where it is so already, since asking costs less than converting."""
    return column if column.dtype == dtype and column.is_contiguous() else column.to(dtype).contiguous()
