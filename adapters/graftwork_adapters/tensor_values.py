"""Numbers out of a safetensors file and into rows of adapter memory, in numpy. Knows no adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from graftwork_adapters.keys import RowTypeName
from graftwork_adapters.packed import ROW_ALIGNMENT
from graftwork_adapters.safetensors_header import TensorEntry

ROW_HEAD_BYTES = 16
"""Bytes before the elements of an 8-bit row: the row's fp32 scale, little-endian, then zeros."""

BF16_MAX = 3.3895313892515355e38

_E4M3_MAX = 448.0
_INT8_MAX = 127.0
_FILE_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_ELEMENT_BYTES: dict[RowTypeName, int] = {"bfloat16": 2, "float32": 4, "int8": 1, "e4m3": 1}

Matrix = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def read_fp32(path: Path, entry: TensorEntry) -> Matrix:
    """The values of an F32, F16 or BF16 tensor, exactly, as fp32 of its own shape."""
    count = (entry.end - entry.start) // np.dtype(_FILE_DTYPES[entry.dtype]).itemsize
    values = np.fromfile(path, dtype=_FILE_DTYPES[entry.dtype], count=count, offset=entry.start).reshape(entry.shape)
    if entry.dtype == "BF16":
        bits = values.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return values.astype(np.float32, copy=False)


def row_size(row_type: RowTypeName, length: int) -> int:
    """Bytes of a row of ``length`` elements, head and padding included."""
    head = ROW_HEAD_BYTES if _ELEMENT_BYTES[row_type] == 1 else 0
    return -(-(head + length * _ELEMENT_BYTES[row_type]) // ROW_ALIGNMENT) * ROW_ALIGNMENT


def encode_rows(matrix: Matrix, row_type: RowTypeName, out: Bytes) -> None:
    """Write the rows of a finite ``matrix`` [rows, length] into ``out`` [rows, row_size], which is zero before.

    Casts round to nearest even. An 8-bit row is scaled by its own largest magnitude, over 127 (int8) or 448 (e4m3).
    """
    if row_type == "float32":
        elements, start = matrix.astype("<f4").view(np.uint8), 0
    elif row_type == "bfloat16":
        elements, start = to_bf16_bits(matrix).view(np.uint8), 0
    else:
        largest = _INT8_MAX if row_type == "int8" else _E4M3_MAX
        scale = np.abs(matrix).max(axis=1, keepdims=True) / np.float32(largest)
        scaled = np.divide(matrix, scale, out=np.zeros_like(matrix), where=scale > 0).clip(-largest, largest)
        elements = np.rint(scaled).astype(np.int8).view(np.uint8) if row_type == "int8" else to_e4m3_bits(scaled)
        out[:, :4] = scale.astype("<f4").view(np.uint8)
        start = ROW_HEAD_BYTES
    out[:, start : start + elements.shape[1]] = elements


def to_bf16_bits(values: Matrix) -> npt.NDArray[np.uint16]:
    """bfloat16 bits of finite fp32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")


def to_e4m3_bits(values: Matrix) -> Bytes:
    """Bits of OCP FP8 E4M3 (arXiv:2209.05433; no infinities) of values within ±448, rounded to nearest even."""
    magnitude = np.abs(values)
    bits = magnitude.view(np.uint32)
    # Keep 3 of fp32's 23 mantissa bits, then move the exponent's bias from 127 to 7.
    normal = ((bits + (((bits >> 20) & 1) + np.uint32(0x7FFFF))) >> 20) - np.uint32((127 - 7) << 3)
    subnormal = np.rint(magnitude * np.float32(2.0**9))  # below 2^-6 the code counts steps of 2^-9
    code = np.where(magnitude < 2.0**-6, subnormal, normal).astype(np.uint8)
    return code | np.where(np.signbit(values), np.uint8(0x80), np.uint8(0))
