"""Turning queries and keys, writing to and attending over the paged KV cache in plain torch.

Decode rows are cut into fixed chunks of their own context and computed together, so that a short context pays nothing for a long
neighbour and no row's arithmetic depends on another's. Prefill runs one request at a time, a tile of query rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graftwork_kernels.layout import AttentionBatch
from graftwork_kernels.reference.elementwise import rotate

_DECODE_CHUNK = 128
"""Tokens of context in one piece of a decode row's attention."""

_DECODE_BYTES = 1 << 20
"""Bytes of keys, as fp32, gathered at a time: they should still be in cache when they are multiplied."""

_PREFILL_TILE = 128
"""Query rows computed at once: bounds the score matrix and skips the keys that lie in every row's future."""


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
    """See `graftwork_kernels.ops.Operators.rotary_and_write_kv`."""
    _write_kv(rotate(k, positions, cos_sin), v, k_cache, v_cache, kv_slot)
    return rotate(q, positions, cos_sin)


def _write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slot: Tensor) -> None:
    written = kv_slot >= 0
    if not bool(written.all()):
        k, v, kv_slot = k[written], v[written], kv_slot[written]
    block_size = k_cache.shape[2]
    block, offset = kv_slot // block_size, kv_slot % block_size
    k_cache[block, :, offset] = k
    v_cache[block, :, offset] = v


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """See `graftwork_kernels.ops.Operators.paged_attention`."""
    out = torch.zeros_like(q)
    query_len = batch.query_start.diff()
    decoding = (query_len == 1).nonzero().squeeze(1)  # requests
    if decoding.numel():
        rows = batch.query_start[decoding].to(torch.int64)
        context_len, block_table = batch.context_len[decoding].to(torch.int64), batch.block_table[decoding]
        out[rows] = _attend_decode(q[rows], k_cache, v_cache, context_len, block_table, scale)
    for request in (query_len > 1).nonzero().squeeze(1).tolist():
        start, end = batch.query_start[request : request + 2].tolist()
        length, blocks = int(batch.context_len[request]), batch.block_table[request]
        out[start:end] = _attend_prefill(q[start:end], k_cache, v_cache, length, blocks, scale)
    return out


def plan_attention(batch: AttentionBatch, group: int, dtype: torch.dtype) -> AttentionBatch:  # noqa: ARG001 - the implementations' signature
    """See `graftwork_kernels.ops.Operators.plan_step`: nothing is planned."""
    return batch


def _attend_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, context_len: Tensor, block_table: Tensor, scale: float) -> Tensor:
    """One query row a request: q [n, Hq, D], context_len int64 [n], block_table [n, max_blocks]."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    blocks_per_chunk = max(1, _DECODE_CHUNK // block_size)
    chunk = blocks_per_chunk * block_size

    # Chunks of all rows, flat: which row each belongs to, which of its chunks it is, how many of its tokens exist.
    num_chunks = (context_len + chunk - 1) // chunk  # [n]
    row = torch.repeat_interleave(torch.arange(num_rows, device=q.device), num_chunks)  # [N]
    number = torch.arange(row.numel(), device=q.device) - (num_chunks.cumsum(0) - num_chunks)[row]  # [N]
    filled = (context_len[row] - number * chunk).clamp_max(chunk)  # [N]
    # A chunk's last blocks may not exist. The row's own first block stands in: another tenant's block is never read.
    column = number.unsqueeze(1) * blocks_per_chunk + torch.arange(blocks_per_chunk, device=q.device)  # [N, blocks]
    exists = column * block_size < context_len[row].unsqueeze(1)
    blocks = block_table[row.unsqueeze(1), torch.where(exists, column, 0)]

    queries = q.to(torch.float32) * scale
    chunk_max, chunk_sum = torch.empty(2, row.numel(), num_heads, device=q.device)
    partial = torch.empty(row.numel(), num_heads, head_dim, device=q.device)
    chunks_at_once = max(1, _DECODE_BYTES // (num_kv_heads * chunk * head_dim * 4))
    for start in range(0, row.numel(), chunks_at_once):
        part = slice(start, start + chunks_at_once)
        chunk_max[part], chunk_sum[part], partial[part] = _attend_chunks(
            queries[row[part]], _gather_heads(k_cache, blocks[part]), _gather_heads(v_cache, blocks[part]), filled[part]
        )

    # Rescale every chunk to its row's maximum and add them up in order.
    by_row = torch.full((num_rows, int(num_chunks.max()), num_heads), -torch.inf, device=q.device)
    by_row[row, number] = chunk_max
    row_max = by_row.amax(1)  # [n, Hq]
    rescale = (chunk_max - row_max[row]).exp_()
    numerator = torch.zeros_like(q, dtype=torch.float32).index_add_(0, row, partial * rescale.unsqueeze(-1))
    denominator = torch.zeros_like(row_max).index_add_(0, row, chunk_sum * rescale)
    return (numerator / denominator.unsqueeze(-1)).to(q.dtype)


def _attend_chunks(q: Tensor, keys: Tensor, values: Tensor, filled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of scaled q [n, Hq, D] over the first ``filled`` [n] tokens of one chunk each; keys, values [n * Hk, chunk, D].

    Returns the scores' maximum and the sum of exp(score - maximum), [n, Hq] each, and the values weighted so, [n, Hq, D].
    """
    num_chunks, num_heads, head_dim = q.shape
    num_kv_heads, chunk = keys.shape[0] // num_chunks, keys.shape[1]
    beyond = torch.arange(chunk, device=q.device) >= filled.unsqueeze(1)  # [n, chunk]
    _clear_beyond(values, beyond, filled < chunk, num_kv_heads)
    scores = torch.bmm(q.view(-1, num_heads // num_kv_heads, head_dim), keys.mT).view(num_chunks, num_heads, chunk)
    scores.masked_fill_(beyond.unsqueeze(1), -torch.inf)
    largest = scores.amax(-1)  # finite: every chunk holds a token
    weights = (scores - largest.unsqueeze(-1)).exp_()
    weighted = torch.bmm(weights.view(keys.shape[0], -1, chunk), values).view(q.shape)
    return largest, weights.sum(-1), weighted


def _attend_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, context_len: int, block_table: Tensor, scale: float) -> Tensor:
    """The query rows of one request: q [L, Hq, D], the last L of its ``context_len`` positions."""
    num_blocks = -(-context_len // k_cache.shape[2])
    blocks = block_table[:num_blocks].unsqueeze(0)
    keys = _gather_heads(k_cache, blocks)[:, :context_len]  # [Hk, S, D]
    values = _gather_heads(v_cache, blocks)[:, :context_len]
    queries = q.to(torch.float32).transpose(0, 1)  # [Hq, L, D]

    num_rows, offset = q.shape[0], context_len - q.shape[0]
    out = torch.empty_like(q)
    for start in range(0, num_rows, _PREFILL_TILE):
        end = min(start + _PREFILL_TILE, num_rows)
        visible = offset + end  # keys that the tile's last row sees
        position = torch.arange(offset + start, visible, device=q.device).unsqueeze(1)
        mask = torch.arange(visible, device=q.device) <= position  # [rows, S]
        tile = scaled_dot_product_attention(
            queries[None, :, start:end],
            keys[None, :, :visible],
            values[None, :, :visible],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        out[start:end] = tile[0].transpose(0, 1)
    return out


def _gather_heads(cache: Tensor, blocks: Tensor) -> Tensor:
    """The tokens of ``blocks`` [n, b], each head's side by side: fp32 [n * Hk, b * block_size, D]."""
    num_kv_heads, block_size, head_dim = cache.shape[1:]
    heads = torch.arange(num_kv_heads, device=cache.device).view(1, -1, 1)
    pieces = (blocks.to(torch.int64).unsqueeze(1) * num_kv_heads + heads).flatten()  # [n * Hk * b]
    gathered = cache.view(-1, block_size * head_dim).index_select(0, pieces).to(torch.float32)
    return gathered.view(-1, blocks.shape[1] * block_size, head_dim)


def _clear_beyond(values: Tensor, beyond: Tensor, is_partial: Tensor, num_kv_heads: int) -> None:
    """Zero the values past a row's context: what a freed block left there may be NaN, and 0 * NaN is not 0."""
    partial = is_partial.nonzero().squeeze(1)
    by_chunk = values.view(-1, num_kv_heads, *values.shape[1:])
    by_chunk[partial] = by_chunk[partial].masked_fill_(beyond[partial, None, :, None], 0.0)
