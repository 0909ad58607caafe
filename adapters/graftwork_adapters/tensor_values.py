"""Numbers out of a safetensors file and into rows of adapter memory, in numpy. Knows no adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
_FILE_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1"}
SERVED_DTYPES = tuple(_FILE_DTYPES)
"""Types of a file's tensors whose values can be read, in safetensors' own names."""

_ELEMENT_BYTES: dict[RowTypeName, int] = {"bfloat16": 2, "float32": 4, "int8": 1, "e4m3": 1}

Matrix = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
RawValues = npt.NDArray[Any]
"""Values as a file holds them: floats, or the bits of a type that numpy does not know."""


def read_fp32(path: Path, entry: TensorEntry) -> Matrix:
    """The values of a tensor of one of `SERVED_DTYPES` as fp32 of its own shape: exactly, F64 rounded to nearest even."""
    return to_fp32(map_values(path, entry), entry.dtype)


def map_values(path: Path, entry: TensorEntry) -> RawValues:
    """A tensor's values as the file holds them, read only as they are touched. Not to be written to."""
    dtype = np.dtype(_FILE_DTYPES[entry.dtype])
    if entry.start == entry.end:  # nothing can be mapped
        return np.empty(entry.shape, dtype)
    return np.asarray(np.memmap(path, dtype, "r", entry.start, entry.shape))


def to_fp32(values: RawValues, dtype: str) -> Matrix:
    """What `map_values` gave, or a part of it, as fp32. F64 beyond fp32's range becomes infinite."""
    if dtype == "BF16":
        bits = values.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    if dtype == "F8_E4M3":
        return _e4m3_values()[values]
    if dtype == "F8_E5M2":  # the upper byte of a float16
        values = (values.astype(np.uint16) << 8).view(np.float16)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # the last for NaN that are to signal
        return values.astype(np.float32, copy=False)


def count_beyond_fp32(values: RawValues) -> int:
    """How many finite F64 values have no finite fp32 value near them."""
    return int(np.count_nonzero(np.isfinite(values) & np.isinf(to_fp32(values, "F64"))))


def _e4m3_values() -> Matrix:
    """The value of each of the 256 codes of OCP FP8 E4M3: 4 bits of exponent with bias 7, 3 of mantissa, NaN where all are set."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    magnitude[(codes & 127) == 127] = np.nan
    values: Matrix = np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
    return values


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


def to_fp8_bits(values: Matrix, dtype: str) -> Bytes:
    """Bits of fp32 values as torch casts them to ``dtype``, "F8_E4M3" or "F8_E5M2": rounded to nearest even.

    What is beyond the range becomes the largest value of the first, which has no infinities, and infinite in the second.
    """
    magnitude = np.abs(values)
    sign = np.where(np.signbit(values), np.uint8(0x80), np.uint8(0))
    if dtype == "F8_E4M3":
        is_nan = np.isnan(magnitude)
        code = to_e4m3_bits(np.where(is_nan, 0, magnitude).clip(0, _E4M3_MAX))
        return np.where(is_nan, np.uint8(0x7F), code).astype(np.uint8) | sign
    bits = magnitude.view(np.uint32)
    # Keep 2 of fp32's 23 mantissa bits, then move the exponent's bias from 127 to 15.
    normal = ((bits + (((bits >> 21) & 1) + np.uint32(0xFFFFF))) >> 21) - np.uint32((127 - 15) << 2)
    with np.errstate(over="ignore", invalid="ignore"):
        subnormal = np.rint(magnitude * np.float32(2.0**16))  # below 2^-14 the code counts steps of 2^-16
    code = np.where(magnitude < 2.0**-14, subnormal, np.minimum(normal, 0x7C)).astype(np.uint8)
    return np.where(np.isnan(magnitude), np.uint8(0x7F), code).astype(np.uint8) | sign


def to_e4m3_bits(values: Matrix) -> Bytes:
    """Bits of OCP FP8 E4M3 (arXiv:2209.05433; no infinities) of values within ±448, rounded to nearest even."""
    magnitude = np.abs(values)
    bits = magnitude.view(np.uint32)
    # Keep 3 of fp32's 23 mantissa bits, then move the exponent's bias from 127 to 7.
    normal = ((bits + (((bits >> 20) & 1) + np.uint32(0x7FFFF))) >> 20) - np.uint32((127 - 7) << 3)
    subnormal = np.rint(magnitude * np.float32(2.0**9))  # below 2^-6 the code counts steps of 2^-9
    code = np.where(magnitude < 2.0**-6, subnormal, normal).astype(np.uint8)
    return code | np.where(np.signbit(values), np.uint8(0x80), np.uint8(0))
