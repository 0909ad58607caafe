"""Rounding a result to the type that it is stored in."""

from __future__ import annotations

import triton
import triton.language as tl

_CUTS_OFF = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter's conversion to bf16 drops the lower bits; a GPU's rounds to the nearest, ties to even."""


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """fp32 to the nearest of ``DTYPE``, ties to even."""
    by_bits: tl.constexpr = _CUTS_OFF and DTYPE == tl.bfloat16  # noqa: SIM300 - a type, not a constant
    if by_bits:
        bits = value.to(tl.int32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        upper = tl.where(value == value, nearest, bits | 0x400000) >> 16  # what is added could make a number of NaN
        return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(DTYPE)
