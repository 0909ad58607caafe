"""Norms, gates, and rotary with the KV write: a program per row, or per head of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftwork_kernels.checks import check_contiguous, row_stride
from graftwork_kernels.triton.rounding import rounded

MOST_COLUMNS = 1024
"""Columns of a gate that one program takes."""


@triton.jit
def _normed(total, weight, width, eps, column, there, OUT: tl.constexpr):
    """weight * cast(total / rms), the product rounded in the weight's type."""
    mean = tl.sum(total * total, axis=0) / width
    normed = rounded(total * tl.rsqrt(mean + eps), OUT)
    factor = tl.load(weight + column, mask=there, other=0.0)
    return rounded(normed.to(tl.float32) * factor.to(tl.float32), OUT)


@triton.jit
def _rms_norm(x, weight, out, width, eps, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width
    total = tl.load(x + row * width + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, _normed(total, weight, width, eps, column, there, out.dtype.element_ty), mask=there)


@triton.jit
def _add_rms_norm(x, residual, weight, out, total_out, width, eps, HAS_RESIDUAL: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width
    total = tl.load(x + row * width + column, mask=there, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * width + column, mask=there, other=0.0)
    tl.store(total_out + row * width + column, total, mask=there)
    tl.store(out + row * width + column, _normed(total, weight, width, eps, column, there, out.dtype.element_ty), mask=there)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `graftwork_kernels.ops.Operators`."""
    check_contiguous("weight", weight)
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    if x.numel():
        _rms_norm[(x.numel() // width,)](x, weight, out, width, eps, **_sizes(width))
    return out


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `graftwork_kernels.ops.Operators`."""
    check_contiguous("weight", weight)
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out, total = torch.empty_like(x, dtype=weight.dtype), torch.empty_like(x, dtype=torch.float32)
    width = x.shape[-1]
    if x.numel():
        _add_rms_norm[(x.numel() // width,)](
            x, residual, weight, out, total, width, eps,
            HAS_RESIDUAL=residual is not None, **_sizes(width),
        )  # fmt: skip
    return out, total


def _sizes(width: int) -> dict[str, int | bool]:
    """Of a row that one program takes: a head's norm has too little for four warps, a wide row too much."""
    padded = triton.next_power_of_2(width)
    return {"WIDTH": padded, "num_warps": min(8, max(1, padded // 512)), "enable_fp_fusion": True}


@triton.jit
def _gate(gate_up, out, width, GELU: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=there, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        acted = gate / (1.0 + tl.exp(-2.0 * inner))  # (1 + tanh(z)) / 2 is the logistic function of 2 z
    else:
        acted = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * width + column, rounded(acted * up, out.dtype.element_ty), mask=there)


def silu_and_mul(gate_up: Tensor, out_dtype: torch.dtype) -> Tensor:
    """See `graftwork_kernels.ops.Operators`."""
    return _gated(gate_up, out_dtype, is_gelu=False)


def gelu_and_mul(gate_up: Tensor, out_dtype: torch.dtype) -> Tensor:
    """See `graftwork_kernels.ops.Operators`."""
    return _gated(gate_up, out_dtype, is_gelu=True)


def _gated(gate_up: Tensor, out_dtype: torch.dtype, *, is_gelu: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width), dtype=out_dtype)
    if out.numel():
        grid = (out.numel() // width, triton.cdiv(width, MOST_COLUMNS))
        columns = min(MOST_COLUMNS, triton.next_power_of_2(width))
        _gate[grid](gate_up, out, width, GELU=is_gelu, COLUMNS=columns, enable_fp_fusion=True)
    return out


@triton.jit
def _rotary_and_write(
    q, q_stride, k, k_stride, v, v_stride, positions, cos_sin, k_cache, v_cache, kv_slot, out,
    num_q_heads, num_kv_heads, block_size,
    HALF: tl.constexpr, HALF_POWER: tl.constexpr,
):  # fmt: skip
    """One head of one row: queries first, then keys with their values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    number = tl.arange(0, HALF_POWER)
    there = number < HALF
    position = tl.load(positions + row)
    cos = tl.load(cos_sin + position * 2 * HALF + number, mask=there, other=0.0)
    sin = tl.load(cos_sin + position * 2 * HALF + HALF + number, mask=there, other=0.0)
    if head < num_q_heads:
        at = q + row * q_stride + head * 2 * HALF + number
        a = tl.load(at, mask=there, other=0.0).to(tl.float32)
        b = tl.load(at + HALF, mask=there, other=0.0).to(tl.float32)
        to = out + (row * num_q_heads + head) * 2 * HALF + number
        tl.store(to, rounded(a * cos - b * sin, out.dtype.element_ty), mask=there)
        tl.store(to + HALF, rounded(b * cos + a * sin, out.dtype.element_ty), mask=there)
    else:
        slot = tl.load(kv_slot + row)
        if slot >= 0:
            kv_head = head - num_q_heads
            at = k + row * k_stride + kv_head * 2 * HALF + number
            a = tl.load(at, mask=there, other=0.0).to(tl.float32)
            b = tl.load(at + HALF, mask=there, other=0.0).to(tl.float32)
            place = ((slot // block_size * num_kv_heads + kv_head) * block_size + slot % block_size) * 2 * HALF + number
            tl.store(k_cache + place, rounded(a * cos - b * sin, k_cache.dtype.element_ty), mask=there)
            tl.store(k_cache + place + HALF, rounded(b * cos + a * sin, k_cache.dtype.element_ty), mask=there)
            value = v + row * v_stride + kv_head * 2 * HALF + number
            tl.store(v_cache + place, tl.load(value, mask=there, other=0.0), mask=there)
            tl.store(v_cache + place + HALF, tl.load(value + HALF, mask=there, other=0.0), mask=there)


def rotary_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_slot: Tensor,
) -> Tensor:
    """See `graftwork_kernels.ops.Operators`."""
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    read = {"positions": positions, "cos_sin": cos_sin, "k_cache": k_cache, "v_cache": v_cache, "kv_slot": kv_slot}
    for name, tensor in read.items():
        check_contiguous(name, tensor)
    strides = row_stride("q", q), row_stride("k", k), row_stride("v", v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_rows:
        _rotary_and_write[(num_rows, num_q_heads + num_kv_heads)](
            q, strides[0], k, strides[1], v, strides[2], positions, cos_sin, k_cache, v_cache, kv_slot, out,
            num_q_heads, num_kv_heads, block_size,
            HALF=head_dim // 2, HALF_POWER=triton.next_power_of_2(head_dim // 2), num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out
