"""Reads rows of adapter memory as fp32, whatever their stored type. Refuses to know what a row means.

A BF16 or FP32 row is its elements. An INT8 or E4M3 row is a head of `QUANTISED_ROW_HEAD` bytes, whose first four are the row's fp32
scale s, then one byte an element: value = s * element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftwork_kernels.layout import QUANTISED_ROW_HEAD, ROW_ALIGNMENT, AdapterMemory, RowType

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class RowRun:
    """``count`` rows whose numbers follow each other; where each lies is the business of `AdapterMemory.row_offset`."""

    first_row: int
    count: int
    row_type: int


def row_bytes(row_type: RowType, width: int) -> int:
    """Bytes of a row of ``width`` elements, without the padding to `ROW_ALIGNMENT`."""
    match row_type:
        case RowType.FP32:
            return 4 * width
        case RowType.BF16:
            return 2 * width
        case RowType.INT8 | RowType.E4M3:
            return QUANTISED_ROW_HEAD + width


def read_runs(memory: AdapterMemory, runs: Sequence[RowRun], width: int) -> list[Tensor]:
    """The rows of each run, fp32 [count, width], in the order of ``runs``.

    All runs of one type are gathered at once: a step touches thousands of short runs, and a call costs more than a row.
    """
    rows: dict[int, Tensor] = {}
    for row_type in {run.row_type for run in runs}:
        same = [(index, run) for index, run in enumerate(runs) if run.row_type == row_type]
        offsets = torch.cat([memory.row_offset[run.first_row : run.first_row + run.count] for _, run in same])
        if offsets.numel() != sum(run.count for _, run in same):
            raise ValueError("memory.row_offset: a site record names rows beyond its end")
        decoded = _decode(_gather(memory.pool, offsets, row_bytes(RowType(row_type), width)), RowType(row_type))
        for (index, _), part in zip(same, torch.split(decoded, [run.count for _, run in same]), strict=True):
            rows[index] = part
    return [rows[index] for index in range(len(runs))]


def decode_e4m3(codes: Tensor) -> Tensor:
    """The fp32 values of OCP e4m3fn codes (uint8): bias 7, no infinity, 0x7f and 0xff NaN, subnormals of 2^-9.

    Semantics: (-1)^s * 2^(e-7) * (1 + m/8) for e > 0, (-1)^s * 2^-6 * m/8 for e = 0. By bit operations, as a device that lacks the
    type must.
    """
    bits = codes.to(torch.int32)
    magnitude = bits & 0x7F
    # e and m move to fp32's places at once; adding 120 to the exponent turns bias 7 into bias 127.
    normal = ((magnitude << 20) + (120 << 23)).view(torch.float32)
    # Scaled by hand rather than as fp32 subnormals, which a process may flush to zero.
    value = torch.where(magnitude < 8, magnitude.to(torch.float32) * 2.0**-9, normal)
    value = value.masked_fill(magnitude == 0x7F, float("nan"))
    return torch.where(bits >= 0x80, -value, value)


def _gather(pool: Tensor, offsets: Tensor, num_bytes: int) -> Tensor:
    """The ``num_bytes`` bytes of the pool at each offset: uint8 [rows, num_bytes]."""
    # Seen as overlapping rows, one at every possible offset, the pool needs no more than a select.
    num_places = (pool.numel() - num_bytes) // ROW_ALIGNMENT + 1
    if num_places < 1:
        raise ValueError(f"memory.pool: {pool.numel()} bytes cannot hold a row of {num_bytes}")
    return pool.as_strided((num_places, num_bytes), (ROW_ALIGNMENT, 1)).index_select(0, offsets // ROW_ALIGNMENT)


def _decode(raw: Tensor, row_type: RowType) -> Tensor:
    match row_type:
        case RowType.FP32:
            return raw.view(torch.float32)
        case RowType.BF16:
            return raw.view(torch.bfloat16).to(torch.float32)
        case RowType.INT8:
            elements = raw[:, QUANTISED_ROW_HEAD:].view(torch.int8).to(torch.float32)
        case RowType.E4M3:
            elements = decode_e4m3(raw[:, QUANTISED_ROW_HEAD:])
    # A copy, and not contiguous(): a single row counts as contiguous at any stride, and its bytes could not be seen as fp32.
    scale = raw[:, :_SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return elements * scale
