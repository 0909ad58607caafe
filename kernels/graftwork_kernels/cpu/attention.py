"""The arguments of rotary.cpp and attention.cpp. Reads no tensor's values: a recorded call finds others in their place."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from graftwork_kernels import reference
from graftwork_kernels.checks import check_contiguous, check_dtype, row_stride
from graftwork_kernels.cpu.issue import Issuer
from graftwork_kernels.layout import AttentionBatch

_CHUNK = 256
"""Tokens of context in one piece of a decode row's attention; `kChunk` of attention.h."""

_SLOTS = 256
"""Pieces of split contexts that there is room for at least. Requests that find none are computed in one piece, to the same bits."""

_PADDING = 32
"""Columns of a partial result are rounded up to it: no machine needs more."""


_KEY_TILE = 64
"""Keys that a tile of queries meets at a time; `kKeyTile` of attention_prefill.h."""

_TILE_QUERIES = 96
"""Queries of such a tile at most; `kTileQueries`."""

_TILE_ROWS = 16
"""Queries are rounded up to it: no machine's `kTileRows` is larger."""


class _RotaryArguments(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("kv_slot", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("v_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("num_positions", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
    )


class _AttentionArguments(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("context_len", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("workspace_floats", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
    )


def rotary_and_write_kv(
    issuer: Issuer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_slot: Tensor,
) -> Tensor:
    """See `graftwork_kernels.ops.Operators.rotary_and_write_kv`."""
    if q.dtype == torch.float16:
        issuer.compute("rotary_and_write_kv in plain torch")
        return reference.rotary_and_write_kv(q, k, v, positions, cos_sin, k_cache, v_cache, kv_slot)
    num_rows, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    for name, tensor in (("positions", positions), ("cos_sin", cos_sin), ("kv_slot", kv_slot)):
        check_contiguous(name, tensor)
    out = issuer.empty(num_rows, num_heads, head_dim, dtype=q.dtype)
    arguments = _RotaryArguments(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        positions=positions.data_ptr(),
        cos_sin=cos_sin.data_ptr(),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        kv_slot=kv_slot.data_ptr(),
        out=out.data_ptr(),
        q_stride=row_stride("q", q),
        k_stride=row_stride("k", k),
        v_stride=row_stride("v", v),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_positions=cos_sin.shape[0],
        num_blocks=num_blocks,
        block_size=block_size,
        is_bf16=q.dtype == torch.bfloat16,
    )
    tensors = (q, k, v, positions, cos_sin, k_cache, v_cache, kv_slot, out)
    issuer.issue("graftwork_rotary_and_write_kv", arguments, tensors, num_rows)
    return out


def paged_attention(issuer: Issuer, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """See `graftwork_kernels.ops.Operators.paged_attention`.

    A row's bits depend on its own position and context alone, and on whether it is its request's only row in the step: not on
    its neighbours, on where its prompt was cut into chunks, or on the number of threads. An infinity or NaN in a value of a
    request's own later rows may make an earlier row of the same step NaN.
    """
    if q.dtype == torch.float16 or q.dtype != k_cache.dtype:
        issuer.compute("paged_attention in plain torch")
        return reference.paged_attention(q, k_cache, v_cache, batch, scale)
    for name, tensor in (("query_start", batch.query_start), ("context_len", batch.context_len)):
        check_dtype(f"batch.{name}", tensor, torch.int32)
        check_contiguous(f"batch.{name}", tensor)
    check_dtype("batch.block_table", batch.block_table, torch.int32)
    if batch.block_table.shape[1] > 1 and batch.block_table.stride(1) != 1:
        raise ValueError("batch.block_table: expected the blocks of a request side by side")
    num_rows, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    num_requests, table_width = batch.block_table.shape
    # Requests may share blocks, so the cache does not bound their chunks: there is room for one request of any length, at least.
    num_slots = max(_SLOTS, -(-table_width * block_size // _CHUNK))
    padded_dim = _rounded_up(head_dim, _PADDING)
    partials = issuer.empty(num_slots, num_heads * (2 + padded_dim), dtype=torch.float32)
    workspace_floats = _workspace_floats(num_heads // num_kv_heads, head_dim)
    workspace = issuer.empty(issuer.num_threads, workspace_floats, dtype=torch.float32)
    out = issuer.empty(num_rows, num_heads, head_dim, dtype=q.dtype)
    arguments = _AttentionArguments(
        q=q.data_ptr(),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        query_start=batch.query_start.data_ptr(),
        context_len=batch.context_len.data_ptr(),
        block_table=batch.block_table.data_ptr(),
        partials=partials.data_ptr(),
        workspace=workspace.data_ptr(),
        out=out.data_ptr(),
        q_stride=row_stride("q", q),
        table_stride=batch.block_table.stride(0),
        table_width=table_width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_blocks=num_blocks,
        block_size=block_size,
        num_slots=num_slots,
        workspace_floats=workspace_floats,
        scale=scale,
        is_bf16=q.dtype == torch.bfloat16,
    )
    tensors = (q, k_cache, v_cache, batch.query_start, batch.context_len, batch.block_table, partials, workspace, out)
    issuer.issue("graftwork_paged_attention", arguments, tensors, num_rows, num_requests)
    return out


def _workspace_floats(group: int, head_dim: int) -> int:
    """Fp32 numbers that one thread works in, on the machine that needs most: `workspace` of attention_decode.h and
    attention_prefill.h. ``group`` query heads share a key head."""
    width = _rounded_up(head_dim, _PADDING)
    copied_keys = 0 if width == head_dim else _CHUNK * width
    decode = group * (width + _CHUNK) + 2 * group * (2 + width) + copied_keys
    height = _rounded_up(max(_TILE_QUERIES, group), _TILE_ROWS)
    prefill = height * (head_dim + width + 2) + _KEY_TILE * (head_dim + width) + _TILE_ROWS * _KEY_TILE
    return _rounded_up(max(decode, prefill), _PADDING)  # threads share no cache line


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
