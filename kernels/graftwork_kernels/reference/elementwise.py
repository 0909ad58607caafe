"""Norms, rotary embedding and gated activations in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `graftwork_kernels.ops.rms_norm`."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(weight.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `graftwork_kernels.ops.add_rms_norm`."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `graftwork_kernels.ops.rotary`."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `graftwork_kernels.ops.silu_and_mul`."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """See `graftwork_kernels.ops.gelu_and_mul`."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
