"""Norms, rotary embedding and gated activations in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `graftwork_kernels.ops.Operators.rms_norm`."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(weight.dtype)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `graftwork_kernels.ops.Operators.add_rms_norm`."""
    total = x.to(torch.float32) if residual is None else x + residual
    return rms_norm(total, weight, eps), total


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Heads [T, H, D] turned to ``positions``, in new memory."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_and_mul(gate_up: Tensor, out_dtype: torch.dtype) -> Tensor:
    """See `graftwork_kernels.ops.Operators.silu_and_mul`."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (silu(gate) * up).to(out_dtype)


def gelu_and_mul(gate_up: Tensor, out_dtype: torch.dtype) -> Tensor:
    """See `graftwork_kernels.ops.Operators.gelu_and_mul`."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") * up).to(out_dtype)
