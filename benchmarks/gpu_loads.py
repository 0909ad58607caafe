"""Random adapters, steps and models for checks of the GPU kernels, with what they must give in fp64. Measures nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
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
from graftwork_kernels.row_codec import RowRun, decode_e4m3, read_runs, row_bytes

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


def fresh_draw() -> np.random.Generator:
    """Numbers that torch's seed decides."""
    return np.random.default_rng(int(torch.randint(2**62, ())))


def random_adapters(
    shape: Shape,
    ranks: Sequence[int],
    row_type: RowType,
    device: torch.device,
    *,
    layers: int | None = None,
    scattered: bool = False,
) -> AdapterMemory:
    """An adapter of each rank on all seven projections of the first ``layers`` layers, all if None. What one adds to a row of
    unit variance has unit variance, as has the base's product where its weights have 1 / in.

    ``scattered``: its rows lie in any order with NaN between, and every second adapter has output scales and biases of its own.
    """
    num_sites, used = shape.num_layers * NUM_PROJECTIONS, (layers or shape.num_layers) * NUM_PROJECTIONS
    sites = np.full((len(ranks), num_sites, NUM_SITE_FIELDS), -1, dtype=np.int64)
    sites[:, :, SiteField.RANK] = 0
    sizes: list[npt.NDArray[np.int64]] = []
    deviations: list[npt.NDArray[np.float64]] = []
    first = 0
    every = np.arange(used)
    for adapter, rank in enumerate(ranks):
        sites[adapter, :used, SiteField.RANK], sites[adapter, :used, SiteField.ROW_TYPE] = rank, row_type
        sites[adapter, :used, SiteField.A_ROW] = first + every * 2 * rank
        sites[adapter, :used, SiteField.B_ROW] = first + every * 2 * rank + rank
        first += 2 * rank * used
        widths = [size for widths in shape.widths for size in widths]
        sizes.append(np.tile(np.repeat([row_bytes(row_type, width) for width in widths], rank), used // NUM_PROJECTIONS))
        deviation = [value for num_in, _ in shape.widths for value in (num_in**-0.5, rank**-0.5)]
        deviations.append(np.tile(np.repeat(deviation, rank), used // NUM_PROJECTIONS))
    if scattered:
        for adapter, site in product(range(1, len(ranks), 2), range(used)):
            sites[adapter, site, SiteField.SCALE_ROW], sites[adapter, site, SiteField.BIAS_ROW] = first, first + 1
            first += 2
            sizes.append(np.full(2, 4 * shape.widths[site % NUM_PROJECTIONS][1]))
            deviations.append(np.zeros(2))
    rows = _Rows(np.concatenate(sizes), np.concatenate(deviations), gap=1 if scattered else 0)
    pool = _random_pool(rows, row_type, device)
    if scattered:
        _spoil_gaps(pool, rows)
        for field, middle in ((SiteField.SCALE_ROW, 1.0), (SiteField.BIAS_ROW, 0.0)):
            for adapter, site in np.argwhere(sites[:, :, field] >= 0).tolist():
                at, size = int(rows.offsets[sites[adapter, site, field]]), shape.widths[site % NUM_PROJECTIONS][1]
                pool[at : at + 4 * size] = (middle + 0.5 * torch.randn(size, device=device)).view(torch.uint8)
    return AdapterMemory(pool, torch.from_numpy(rows.offsets).to(device), torch.from_numpy(sites).to(device))


class _Rows:
    """Where rows of these sizes lie, in units of `ROW_ALIGNMENT`; with a gap they lie in any order."""

    def __init__(self, sizes: npt.NDArray[np.int64], deviations: npt.NDArray[np.float64], gap: int) -> None:
        self.sizes, self.deviations = sizes, deviations
        self.units = -(-sizes // ROW_ALIGNMENT) + gap
        self.order = fresh_draw().permutation(len(sizes)) if gap else np.arange(len(sizes))
        self.offsets = np.empty(len(sizes), dtype=np.int64)
        self.offsets[self.order] = np.concatenate(([0], np.cumsum(self.units[self.order])[:-1])) * ROW_ALIGNMENT


def _random_pool(rows: _Rows, row_type: RowType, device: torch.device) -> Tensor:
    num_units = int(rows.units.sum())
    pool = torch.empty(num_units * ROW_ALIGNMENT, dtype=torch.uint8, device=device)
    if row_type in (RowType.INT8, RowType.E4M3):
        pool.random_(0, 256)
        if row_type is RowType.E4M3:
            pool.sub_((pool & 0x7F == 0x7F).to(torch.uint8))  # NaN alone: its neighbour is the largest number
        codes = torch.arange(256, dtype=torch.uint8)
        values = codes.view(torch.int8).double() if row_type is RowType.INT8 else decode_e4m3(codes).double()
        of_codes = float(values[values.isfinite()].square().mean().sqrt())
        heads = torch.from_numpy(rows.offsets // 4).to(device)
        pool.view(torch.float32)[heads] = torch.from_numpy(rows.deviations / of_codes).float().to(device)
    else:
        values = pool.view(torch.bfloat16 if row_type is RowType.BF16 else torch.float32)
        values.normal_()
        of_row, units = (torch.from_numpy(column[rows.order]).to(device) for column in (rows.deviations, rows.units))
        of_unit = of_row.float().repeat_interleave(units, output_size=num_units)
        values.view(num_units, -1).mul_(of_unit[:, None])
    return pool


def _spoil_gaps(pool: Tensor, rows: _Rows) -> None:
    """Everything that is no row's: NaN in all types but int8, whose scale is."""
    for offset, size, units in zip(rows.offsets.tolist(), rows.sizes.tolist(), rows.units.tolist(), strict=True):
        pool[offset + size : offset + units * ROW_ALIGNMENT] = 0xFF


class AdapterChanges:
    """What happens to adapters between steps: one is overwritten, moved, evicted or loaded again. bf16, on all layers, in order."""

    def __init__(self, memory: AdapterMemory) -> None:
        self._memory = memory
        self._records = memory.sites.clone()
        starts = memory.row_offset[memory.sites[:, 0, SiteField.A_ROW]].tolist()
        self._places = list(zip(starts, [*starts[1:], memory.pool.numel()], strict=True))
        self._held = list(range(len(starts)))  # which rows each record has
        self.number = len(starts)
        self.resident = set(self._held)

    def evict(self, adapter: int) -> None:
        """Its record goes, and its rows hold NaN."""
        self.resident.discard(adapter)
        self._memory.sites[adapter].fill_(-1)
        self._memory.sites[adapter, :, SiteField.RANK] = 0
        start, end = self._places[self._held[adapter]]
        self._memory.pool[start:end] = 0xFF

    def load(self, adapter: int) -> None:
        """New rows in its place, whether it was there or not."""
        self.resident.add(adapter)
        start, end = self._places[self._held[adapter]]
        self._memory.pool[start:end].view(torch.bfloat16).normal_(0, 0.02)
        self._memory.sites[adapter].copy_(self._records[self._held[adapter]])

    def swap(self, one: int, other: int) -> None:
        """Two resident adapters change places, and with them their ranks."""
        self._held[one], self._held[other] = self._held[other], self._held[one]
        for adapter in (one, other):
            self._memory.sites[adapter].copy_(self._records[self._held[adapter]])


def random_weight(num_out: int, num_in: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A matrix that keeps the variance of its input."""
    return (torch.randn(num_out, num_in, device=device) / math.sqrt(num_in)).to(dtype)


def exact_adapter_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, memory: AdapterMemory, adapters: Sequence[int], sites: tuple[LinearSite, ...]
) -> Tensor:
    """fp64, an adapter after the other."""
    out = x.double() @ weight.double().T
    shift = torch.zeros_like(out) if bias is None else bias.double().expand_as(out).clone()
    records = memory.sites.tolist()
    for adapter in {adapter for adapter in adapters if adapter >= 0}:
        rows = torch.tensor([row for row, its in enumerate(adapters) if its == adapter], device=x.device)
        for site in sites:
            record, columns = records[adapter][site.index], slice(site.start, site.start + site.size)
            if record[SiteField.RANK]:
                a, b = (
                    read_runs(memory, [RowRun(record[field], record[SiteField.RANK], record[SiteField.ROW_TYPE])], width)[0]
                    for field, width in ((SiteField.A_ROW, x.shape[1]), (SiteField.B_ROW, site.size))
                )
                out[rows, columns] += x[rows].double() @ a.double().T @ b.double()
            scale, own = (
                None if record[field] < 0 else read_runs(memory, [RowRun(record[field], 1, RowType.FP32)], site.size)[0].double()
                for field in (SiteField.SCALE_ROW, SiteField.BIAS_ROW)
            )
            if scale is not None:
                out[rows, columns] *= scale
            if own is not None:
                shift[rows, columns] = own
    return out + shift


def attention_step(
    query_len: Sequence[int], context_len: Sequence[int], num_blocks: int, device: torch.device, *, first_row: int = 0
) -> AttentionBatch:
    """Requests whose blocks lie anywhere among ``num_blocks``, no block twice; each row's slot is that of its position. Rows before
    ``first_row`` are nobody's.
    """
    most = -(-max(context_len) // BLOCK_SIZE)
    blocks = fresh_draw().permutation(num_blocks)[: most * len(context_len)]
    # As wide as a server's, whatever the contexts: a multiple of 16, as most lengths are.
    table = np.zeros((len(context_len), -(-most // 16) * 16), dtype=np.int32)
    table[:, :most] = blocks.reshape(len(context_len), most)
    starts = np.concatenate(([0], np.cumsum(query_len))) + first_row
    slots = [-1] * first_row + [
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


def attention_values(
    shape: Shape, batch: AttentionBatch, num_rows: int, num_blocks: int, scale: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a step; NaN wherever no request's context is.

    The last key of a context draws as much attention as all others together, so that a context of another length is seen however
    long it is.
    """
    size = (num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    q = torch.randn(num_rows, shape.num_heads, shape.head_dim, device=device).to(dtype)
    keys, values = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    known = torch.zeros(num_blocks, BLOCK_SIZE, dtype=torch.bool)
    starts, table, group = batch.query_start.tolist(), batch.block_table.tolist(), shape.num_heads // shape.num_kv_heads
    for request, context in enumerate(batch.context_len.tolist()):
        for block in range(-(-context // BLOCK_SIZE)):
            known[table[request][block], : context - block * BLOCK_SIZE] = True
        if starts[request + 1] > starts[request]:
            leader = q[starts[request + 1] - 1, ::group].double()  # of each group of heads
            wanted = math.log(context + 1) / scale / leader.square().sum(-1, keepdim=True)
            block, place = table[request][(context - 1) // BLOCK_SIZE], (context - 1) % BLOCK_SIZE
            keys[block, :, place] = (leader * wanted).to(dtype)
    for cache in (keys, values):
        cache.masked_fill_(~known.to(device)[:, None, :, None], math.nan)
    return q, keys, values


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
