"""Norms and gated activations as commands. Refuses to know which layer they belong to."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from graftwork_kernels import reference
from graftwork_kernels.cpu.issue import Issuer

_NATIVE = (torch.bfloat16, torch.float32)


class _NormArguments(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("total", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("residual_row_stride", ctypes.c_int64),
        ("residual_head_stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("x_is_bf16", ctypes.c_int32),
        ("weight_is_bf16", ctypes.c_int32),
    )


class _ActivationArguments(ctypes.Structure):
    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("is_gelu", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("out_is_bf16", ctypes.c_int32),
    )


def rms_norm(issuer: Issuer, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `graftwork_kernels.ops.Operators.rms_norm`. In bf16, a normalised value may be the other neighbour of the exact one."""
    if x.dtype not in _NATIVE or x.dim() not in (2, 3):
        issuer.compute("rms_norm in plain torch")
        return reference.rms_norm(x, weight, eps)
    normed = issuer.empty(*x.shape, dtype=x.dtype)
    _norm(issuer, x, None, weight, eps, normed, None)
    return normed


def add_rms_norm(issuer: Issuer, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `graftwork_kernels.ops.Operators.add_rms_norm`, and `rms_norm`."""
    if x.dtype not in _NATIVE or weight.dtype not in _NATIVE or x.dim() not in (2, 3):
        issuer.compute("add_rms_norm in plain torch")
        return reference.add_rms_norm(x, residual, weight, eps)
    normed, total = issuer.empty(*x.shape, dtype=weight.dtype), issuer.empty(*x.shape, dtype=torch.float32)
    _norm(issuer, x, residual, weight, eps, normed, total)
    return normed, total


def silu_and_mul(issuer: Issuer, gate_up: Tensor, out_dtype: torch.dtype) -> Tensor:
    """See `graftwork_kernels.ops.Operators.silu_and_mul`."""
    if not _can_activate(gate_up, out_dtype):
        issuer.compute("silu_and_mul in plain torch")
        return reference.silu_and_mul(gate_up, out_dtype)
    return _activate(issuer, gate_up, out_dtype, is_gelu=False)


def gelu_and_mul(issuer: Issuer, gate_up: Tensor, out_dtype: torch.dtype) -> Tensor:
    """See `graftwork_kernels.ops.Operators.gelu_and_mul`."""
    if not _can_activate(gate_up, out_dtype):
        issuer.compute("gelu_and_mul in plain torch")
        return reference.gelu_and_mul(gate_up, out_dtype)
    return _activate(issuer, gate_up, out_dtype, is_gelu=True)


def _norm(
    issuer: Issuer, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, normed: Tensor, total: Tensor | None
) -> None:
    row_stride, head_stride = _strides("x", x)
    residual_strides = (0, 0) if residual is None else _strides("residual", residual)
    _check_dense("weight", weight)
    arguments = _NormArguments(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        normed.data_ptr(),
        None if total is None else total.data_ptr(),
        x.shape[1] if x.dim() == 3 else 1,
        x.shape[-1],
        row_stride,
        head_stride,
        *residual_strides,
        eps,
        x.dtype == torch.bfloat16,
        weight.dtype == torch.bfloat16,
    )
    tensors = [tensor for tensor in (x, residual, weight, normed, total) if tensor is not None]
    issuer.issue("graftwork_norm", arguments, tensors, x.shape[0])


def _can_activate(gate_up: Tensor, out_dtype: torch.dtype) -> bool:
    return gate_up.dim() == 2 and gate_up.dtype in _NATIVE and out_dtype in (gate_up.dtype, torch.bfloat16)


def _activate(issuer: Issuer, gate_up: Tensor, out_dtype: torch.dtype, *, is_gelu: bool) -> Tensor:
    row_stride, _ = _strides("gate_up", gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = issuer.empty(num_rows, width, dtype=out_dtype)
    is_bf16, out_is_bf16 = gate_up.dtype == torch.bfloat16, out_dtype == torch.bfloat16
    arguments = _ActivationArguments(gate_up.data_ptr(), out.data_ptr(), width, row_stride, is_gelu, is_bf16, out_is_bf16)
    issuer.issue("graftwork_activation", arguments, [gate_up, out], num_rows)
    return out


def _strides(name: str, rows: Tensor) -> tuple[int, int]:
    """Elements from a row to the next, and from a head of [T, heads, D] to the next."""
    _check_dense(name, rows)
    return rows.stride(0), rows.stride(1) if rows.dim() == 3 else 0


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}: expected the elements of a row side by side")
