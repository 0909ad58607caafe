"""How Triton kernels read an adapter's rows: any row type, true ranks, rows wherever they lie in the pool."""

from __future__ import annotations

import triton
import triton.language as tl

from graftwork_kernels.layout import NUM_SITE_FIELDS, QUANTISED_ROW_HEAD, RowType, SiteField

NUM_ROW_TYPES = tl.constexpr(len(RowType))
_BF16 = tl.constexpr(int(RowType.BF16))
_FP32 = tl.constexpr(int(RowType.FP32))
_INT8 = tl.constexpr(int(RowType.INT8))
_HEAD = tl.constexpr(QUANTISED_ROW_HEAD)

FIELDS = tl.constexpr(NUM_SITE_FIELDS)
A_ROW = tl.constexpr(int(SiteField.A_ROW))
B_ROW = tl.constexpr(int(SiteField.B_ROW))
RANK = tl.constexpr(int(SiteField.RANK))
ROW_TYPE = tl.constexpr(int(SiteField.ROW_TYPE))
SCALE_ROW = tl.constexpr(int(SiteField.SCALE_ROW))
BIAS_ROW = tl.constexpr(int(SiteField.BIAS_ROW))


@triton.jit
def row_offsets(row_offset, first_row, number, known):
    """Byte offsets of an adapter's rows ``first_row + number``, of those that are ``known`` to be there."""
    offset = tl.load(row_offset + first_row + number, mask=known, other=0)
    return tl.multiple_of(offset, 64)  # layout.ROW_ALIGNMENT, so that elements are read 16 bytes at a time


@triton.jit
def load_elements(pool, offset, column, mask, KIND: tl.constexpr, WIDE: tl.constexpr, HAS_E4M3: tl.constexpr):
    """Elements [rows, columns] of rows of type ``KIND`` without their scale: fp32 if ``WIDE`` or stored so, else bf16, in which any
    8-bit element is exact. ``HAS_E4M3``: the GPU converts that type itself.
    """
    if KIND == _BF16:
        rows = (pool + offset).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        element = tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)
    elif KIND == _FP32:
        rows = (pool + offset).to(tl.pointer_type(tl.float32), bitcast=True)
        element = tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)
    elif KIND == _INT8:
        rows = (pool + offset + _HEAD).to(tl.pointer_type(tl.int8), bitcast=True)
        element = tl.load(rows[:, None] + column[None, :], mask=mask, other=0).to(tl.float32)
    else:
        element = decode_e4m3(tl.load((pool + offset + _HEAD)[:, None] + column[None, :], mask=mask, other=0), HAS_E4M3)
    return element.to(tl.float32) if WIDE or KIND == _FP32 else element.to(tl.bfloat16)


@triton.jit
def load_scales(pool, offset, known, KIND: tl.constexpr):
    """The factor of each row: that in its head where rows are quantised, else 1."""
    has_head: tl.constexpr = KIND >= _INT8
    if has_head:
        scale = tl.load((pool + offset).to(tl.pointer_type(tl.float32), bitcast=True), mask=known, other=0.0)
    else:
        scale = tl.where(known, 1.0, 0.0)
    return scale


@triton.jit
def load_vector(pool, row_offset, row, column, mask):
    """Elements of one fp32 row: an output scale or a bias."""
    offset = tl.multiple_of(tl.load(row_offset + row), 64)
    return tl.load((pool + offset).to(tl.pointer_type(tl.float32), bitcast=True) + column, mask=mask, other=0.0)


@triton.jit
def decode_e4m3(code, HAS_E4M3: tl.constexpr):
    """OCP e4m3fn codes (uint8) in fp32, by the GPU's own conversion or by moving bits, of which both know NaN and subnormals."""
    if HAS_E4M3:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)  # by way of fp16, which holds all of them
    else:
        bits = code.to(tl.int32)
        magnitude = bits & 0x7F
        # Exponent and mantissa move to their places, and 120 turns bias 7 into bias 127; a subnormal is a multiple of 2^-9.
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        value = tl.where(magnitude == 0x7F, float("nan"), value)
        value = tl.where(bits >= 0x80, -value, value)
    return value
