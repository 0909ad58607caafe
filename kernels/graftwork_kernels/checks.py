"""Cheap checks of what a caller passes to an operator: types and shapes, never values on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from graftwork_kernels.layout import NUM_SITE_FIELDS, AdapterBatch, AdapterMemory, AttentionBatch, Weight

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


def check_logits(logits: Tensor) -> None:
    """Raise ValueError unless ``logits`` are fp32 rows over a vocabulary of a token at least."""
    check_dtype("logits", logits, torch.float32)
    check_vocabulary(logits)


def check_vocabulary(logits: Tensor) -> None:
    """Raise ValueError unless ``logits`` are rows over a vocabulary of a token at least."""
    check_shape("logits", logits, None, None)
    if logits.shape[1] == 0:
        raise ValueError(f"logits: expected a token at least, got {tuple(logits.shape)}")


def check_entries(name: str, row_start: Tensor, token_id: Tensor, num_rows: int) -> None:
    """Raise ValueError unless these are lists of tokens for each row, laid end to end."""
    check_dtype(f"{name}.row_start", row_start, torch.int32)
    check_shape(f"{name}.row_start", row_start, num_rows + 1)
    check_dtype(f"{name}.token_id", token_id, torch.int32)
    check_shape(f"{name}.token_id", token_id, None)


def check_norm(x: Tensor, weight: Tensor, weight_dtype: torch.dtype) -> None:
    """Raise ValueError unless ``weight`` norms the last dimension of ``x`` and has ``weight_dtype``."""
    check_float("x", x)
    check_float("weight", weight)
    check_dtype("weight", weight, weight_dtype)
    check_shape("weight", weight, None)
    check_last_dim("x", x, weight.shape[0])


def check_caches(k_cache: Tensor, v_cache: Tensor) -> tuple[int, int]:
    """Heads and head dimension of a pair of caches; raises ValueError unless they are two of one kind."""
    check_float("k_cache", k_cache)
    check_shape("k_cache", k_cache, None, None, None, None)
    check_dtype("v_cache", v_cache, k_cache.dtype)
    check_shape("v_cache", v_cache, *k_cache.shape)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not cache.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor")
    return k_cache.shape[1], k_cache.shape[3]


def check_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> None:
    """Raise ValueError unless ``x`` can be multiplied with ``weight``, and ``bias`` added to the product."""
    check_float("x", x)
    if weight.dtype != x.dtype:
        raise ValueError(f"weight: expected {x.dtype}, got {weight.dtype}")
    check_shape("x", x, None, weight.in_features)
    if bias is not None:
        check_float("bias", bias)
        check_shape("bias", bias, weight.out_features)


def check_adapters(memory: AdapterMemory, batch: AdapterBatch, num_rows: int) -> None:
    """Raise ValueError unless ``batch`` is of ``num_rows`` rows, and both have the types that `graftwork_kernels.layout` says."""
    check_shape("batch.token_adapter", batch.token_adapter, num_rows)
    check_shape("batch.permutation", batch.permutation, num_rows)
    check_shape("batch.segment_start", batch.segment_start, num_rows + 1)
    check_shape("batch.segment_adapter", batch.segment_adapter, num_rows)
    check_shape("batch.num_segments", batch.num_segments, 1)
    check_dtype("batch.permutation", batch.permutation, torch.int64)
    for name in ("token_adapter", "segment_start", "segment_adapter", "num_segments"):
        check_dtype(f"batch.{name}", getattr(batch, name), torch.int32)
    check_dtype("memory.pool", memory.pool, torch.uint8)
    check_dtype("memory.row_offset", memory.row_offset, torch.int64)
    check_dtype("memory.sites", memory.sites, torch.int64)
    check_shape("memory.sites", memory.sites, None, None, NUM_SITE_FIELDS)


def check_requests(batch: AttentionBatch) -> None:
    """Raise ValueError unless ``batch`` describes as many requests everywhere."""
    num_requests = batch.context_len.numel()
    check_shape("batch.query_start", batch.query_start, num_requests + 1)
    check_shape("batch.block_table", batch.block_table, num_requests, None)


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the elements of ``tensor`` lie side by side, in order."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor")


def row_stride(name: str, heads: Tensor) -> int:
    """Elements between two rows of [T, H, D]; raises ValueError where the heads of a row lie apart."""
    if heads.stride(2) != 1 or (heads.shape[1] > 1 and heads.stride(1) != heads.shape[2]):
        raise ValueError(f"{name}: expected the heads of a row side by side, got strides {heads.stride()}")
    return heads.stride(0)
