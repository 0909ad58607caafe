"""Cheap checks of what a caller passes to an operator: types and shapes, never values on the device."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_float(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless ``tensor`` is fp32, bf16 or fp16."""
    if tensor.dtype not in FLOAT_TYPES:
        raise ValueError(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")


def check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``tensor`` has ``dtype``."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")


def check_shape(name: str, tensor: Tensor, *expected: int | None) -> None:
    """Raise ValueError unless ``tensor`` has the ``expected`` sizes, None standing for any."""
    shape = tensor.shape
    if len(shape) != len(expected) or any(want is not None and want != got for want, got in zip(expected, shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(f"{name}: expected shape ({wanted}), got {tuple(shape)}")


def check_last_dim(name: str, tensor: Tensor, size: int) -> None:
    """Raise ValueError unless the last dimension of ``tensor`` has ``size``."""
    if tensor.dim() == 0 or tensor.shape[-1] != size:
        raise ValueError(f"{name}: expected a last dimension of {size}, got {tuple(tensor.shape)}")


def check_even_last_dim(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last dimension of ``tensor`` can be halved."""
    if tensor.dim() == 0 or tensor.shape[-1] % 2:
        raise ValueError(f"{name}: expected an even last dimension, got {tuple(tensor.shape)}")
