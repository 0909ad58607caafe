"""Random adapters, steps and models for checks of the GPU kernels, with what they must give in fp64. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graftwork_engine.model.config import ModelConfig, RopeConfig
from graftwork_kernels.layout import (
    NUM_SITE_FIELDS,
    ROW_ALIGNMENT,
    AdapterMemory,
    AttentionBatch,
    LinearSite,
    RowType,
    SiteField,
)
from graftwork_kernels.row_codec import RowRun, read_runs, row_bytes

BLOCK_SIZE = 16
NUM_PROJECTIONS = 7


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    num_layers: int
    vocab: int

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of q, k, v, o, gate, up and down."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = ((self.hidden, q), (self.hidden, kv), (self.hidden, kv), (q, self.hidden))
        return (*attention, *[(self.hidden, self.intermediate)] * 2, (self.intermediate, self.hidden))

    def linears(self, layer: int) -> dict[str, tuple[int, tuple[LinearSite, ...]]]:
        """Input features and sites of the four linears of a layer."""
        found = {}
        for name, projections in (("qkv", (0, 1, 2)), ("o", (3,)), ("gate_up", (4, 5)), ("down", (6,))):
            sites, start = [], 0
            for projection in projections:
                size = self.widths[projection][1]
                sites.append(LinearSite(layer * NUM_PROJECTIONS + projection, start, size))
                start += size
            found[name] = (self.widths[projections[0]][0], tuple(sites))
        return found

    def config(self, max_positions: int) -> ModelConfig:
        """As the engine's model takes it."""
        return ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-5,
            rope=RopeConfig(500000.0),
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            tie_word_embeddings=False,
            max_position_embeddings=max_positions,
            eos_token_ids=(),
        )


LLAMA_8B = Shape(4096, 32, 8, 128, 14336, 32, 128_256)
TINY = Shape(64, 4, 2, 16, 96, 2, 300)


def random_adapters(
    shape: Shape, ranks: Sequence[int], row_type: RowType, device: torch.device, *, scattered: bool
) -> AdapterMemory:
    """An adapter of each rank on all seven projections of every layer. ``scattered``: its rows in any order, NaN between."""
    draw = np.random.default_rng(0)
    sites = torch.full((len(ranks), shape.num_layers * NUM_PROJECTIONS, NUM_SITE_FIELDS), -1, dtype=torch.int64)
    sizes: list[int] = []
    for adapter, rank in enumerate(ranks):
        for site in range(shape.num_layers * NUM_PROJECTIONS):
            num_in, num_out = shape.widths[site % NUM_PROJECTIONS]
            record = sites[adapter, site]
            record[SiteField.RANK], record[SiteField.ROW_TYPE] = rank, row_type
            record[SiteField.A_ROW] = len(sizes)
            record[SiteField.B_ROW] = len(sizes) + rank
            sizes += [row_bytes(row_type, num_in)] * rank + [row_bytes(row_type, num_out)] * rank
    units = -(-np.array(sizes) // ROW_ALIGNMENT) + (1 if scattered else 0)
    order = draw.permutation(len(sizes)) if scattered else np.arange(len(sizes))
    offsets = np.empty(len(sizes), dtype=np.int64)
    offsets[order] = np.concatenate(([0], np.cumsum(units[order])[:-1])) * ROW_ALIGNMENT
    pool = _random_pool(int(units.sum()) * ROW_ALIGNMENT, row_type, device)
    if scattered:
        gaps = torch.from_numpy(offsets + (units - 1) * ROW_ALIGNMENT).to(device)
        pool.view(-1, ROW_ALIGNMENT)[gaps // ROW_ALIGNMENT] = 0xFF
    row_offset = torch.from_numpy(offsets).to(device)
    if row_type in (RowType.INT8, RowType.E4M3):
        pool.view(torch.float32)[row_offset // 4] = 0.02 / (127 if row_type is RowType.INT8 else 448)
    return AdapterMemory(pool, row_offset, sites.to(device))


def _random_pool(num_bytes: int, row_type: RowType, device: torch.device) -> Tensor:
    pool = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    match row_type:
        case RowType.BF16:
            pool.view(torch.bfloat16).normal_(0, 0.02)
        case RowType.FP32:
            pool.view(torch.float32).normal_(0, 0.02)
        case RowType.INT8:
            pool.random_(0, 256)
        case RowType.E4M3:
            pool.random_(0, 256).bitwise_and_(0xF7)  # no NaN, whose lower bits are all set
    return pool


def exact_adapter_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, memory: AdapterMemory, adapters: Sequence[int], sites: tuple[LinearSite, ...]
) -> Tensor:
    """fp64, a row after the other."""
    out = x.double() @ weight.double().T
    records = memory.sites.tolist()
    for row, adapter in enumerate(adapters):
        if adapter < 0:
            continue
        for site in sites:
            record = records[adapter][site.index]
            rank, row_type = record[SiteField.RANK], record[SiteField.ROW_TYPE]
            (a,) = read_runs(memory, [RowRun(record[SiteField.A_ROW], rank, row_type)], x.shape[1])
            (b,) = read_runs(memory, [RowRun(record[SiteField.B_ROW], rank, row_type)], site.size)
            out[row, site.start : site.start + site.size] += x[row].double() @ a.double().T @ b.double()
    return out if bias is None else out + bias.double()


def attention_step(query_len: Sequence[int], context_len: Sequence[int], num_blocks: int, device: torch.device) -> AttentionBatch:
    """Requests whose blocks lie anywhere among ``num_blocks``, no block twice; each row's slot is that of its position."""
    draw = np.random.default_rng(1)
    most = -(-max(context_len) // BLOCK_SIZE)
    table = draw.permutation(num_blocks)[: most * len(context_len)].reshape(len(context_len), most).astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(query_len)))
    slots = [
        int(table[request, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for request, (length, context) in enumerate(zip(query_len, context_len, strict=True))
        for position in range(context - length, context)
    ]
    return AttentionBatch(
        query_start=torch.from_numpy(starts.astype(np.int32)).to(device),
        context_len=torch.tensor(context_len, dtype=torch.int32).to(device),
        block_table=torch.from_numpy(table).to(device),
        kv_slot=torch.tensor(slots, dtype=torch.int64).to(device),
        max_query_len=max(query_len),
        max_context_len=max(context_len),
    )


def exact_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """fp64, a request after the other."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[1]
    starts = batch.query_start.tolist()
    for request, context in enumerate(batch.context_len.tolist()):
        start, end = starts[request], starts[request + 1]
        blocks = batch.block_table[request, : -(-context // BLOCK_SIZE)].long()
        keys, values = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context].double().repeat_interleave(group, 0)
            for cache in (k_cache, v_cache)
        )  # [Hq, S, D]
        scores = torch.einsum("thd,hsd->hts", q[start:end].double(), keys) * scale
        position = torch.arange(context - (end - start), context, device=q.device)
        scores.masked_fill_(torch.arange(context, device=q.device) > position[:, None], -torch.inf)
        out[start:end] = torch.einsum("hts,hsd->thd", scores.softmax(-1), values)
    return out
