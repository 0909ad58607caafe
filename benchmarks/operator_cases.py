"""The operators' cases, in a model's own shapes: what runs, and what it must read and compute. Times nothing.

A case covers all layers of a step, each with memory of its own, so that it reads memory as a step does and not the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graftwork_engine.model.config import ModelConfig
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import (
    NUM_SITE_FIELDS,
    ROW_ALIGNMENT,
    AdapterBatch,
    AdapterMemory,
    AttentionBatch,
    LinearSite,
    RowType,
    SamplingBatch,
    SiteField,
    Weight,
    empty_adapter_memory,
)
from graftwork_kernels.ops import Operators
from graftwork_kernels.row_codec import row_bytes
from timing import AddedBar, Bar, Case, RatioBar

BATCHES = (1, 4, 8, 32, 64)
ROWS, CONTEXT, PROMPT, BLOCK = 32, 256, 2048, 16
RANK = 16
MIXED_RANKS = (8, 16, 32, 64)
EVEN_RANK = sum(MIXED_RANKS) // len(MIXED_RANKS)
"""Adapters of this rank have as many bytes as equally many of the mixed ranks."""

ELEMENT = 2
"""Bytes of a bf16."""

All = Mapping[str, Operators]

AdapterLinear = Callable[[Tensor, Weight, None, AdapterMemory, AdapterBatch, tuple[LinearSite, ...]], Tensor]
"""`Operators.adapter_linear`, without a bias."""


@dataclass(frozen=True)
class Packed:
    """A layer's linear: its input, and the outputs of the projections that it packs."""

    in_features: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Shapes:
    """Of one model. ``packed`` are the linears of each layer."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    packed: tuple[Packed, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> Shapes:
        """From a model's configuration."""
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        packed = Packed(hidden, (query, kv, kv)), Packed(query, (hidden,)), Packed(hidden, (inner, inner)), Packed(inner, (hidden,))
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        return cls(config.num_layers, hidden, config.vocab_size, *heads, inner, packed)

    @property
    def layer_weights(self) -> int:
        """Elements of all layers' linears."""
        return self.layers * sum(p.in_features * sum(p.sizes) for p in self.packed)

    @property
    def adapter_width(self) -> int:
        """Elements of an adapter on all projections, for each rank."""
        return self.layers * sum(p.in_features + size for p in self.packed for size in p.sizes)

    def attention_flops(self, prompt: int) -> float:
        """Causal attention of a whole prompt in all layers: two products of half a square for each head."""
        return 4.0 * self.layers * self.heads * self.head_dim * prompt * (prompt + 1) / 2


def linear_cases(shapes: Shapes, ops: All, batches: Sequence[int] = BATCHES) -> Iterator[Case]:
    """All linears of a decode step, the head among them."""
    weights = weights_of(shapes, head=True)
    wide = [weight.float() for weight in weights]
    ready = {name: [one.prepare_weight(weight.clone()) for weight in weights] for name, one in ops.items()}
    elements = sum(weight.numel() for weight in weights)
    for batch in batches:
        x = {weight.shape[1]: random_rows(batch, weight.shape[1]) for weight in weights}
        x_wide = {size: rows.float() for size, rows in x.items()}
        candidates: dict[str, Callable[[], object]] = {name: partial(_linears, one, x, ready[name]) for name, one in ops.items()}
        candidates["torch bf16"] = partial(_torch_linears, x, weights)
        candidates["torch fp32"] = partial(_torch_linears, x_wide, wide)
        yield Case(f"linears of a step, batch {batch}", candidates, ELEMENT * elements, 2.0 * batch * elements)


def adapter_cases(shapes: Shapes, ops: All) -> Iterator[Case]:
    """The layers' linears with adapters: 1, 8 and 32 of one rank over 32 rows, then mixed ranks and one rank of as many bytes."""
    plain = weights_of(shapes, head=False)
    ready = {name: [one.prepare_weight(weight.clone()) for weight in plain] for name, one in ops.items()}
    x = {packed.in_features: random_rows(ROWS, packed.in_features) for packed in shapes.packed}
    ours, own = ops["cpu"], ready["cpu"]
    none = adapter_linears(ours.adapter_linear, own, x, shapes, empty_adapter_memory(shapes.layers * sites_of(shapes)), [-1] * ROWS)
    base_bytes = ELEMENT * shapes.layer_weights
    even = adapter_memory(shapes, [RANK] * ROWS)
    for count in (1, 8, 32):
        rows = [row % count for row in range(ROWS)]
        runs = {name: adapter_linears(one.adapter_linear, ready[name], x, shapes, even, rows) for name, one in ops.items()}
        added = float(ELEMENT * count * RANK * shapes.adapter_width)
        bar: Bar = AddedBar("cpu", "base rows", added, 1.6, 2.0)
        name = f"linears with {count} adapters of rank {RANK}, batch {ROWS}"
        yield Case(name, {**runs, "base rows": none}, base_bytes + added, bars=(bar,))
    del even
    rows = list(range(ROWS))
    mixed = adapter_memory(shapes, [MIXED_RANKS[i % len(MIXED_RANKS)] for i in rows])
    one_rank = adapter_memory(shapes, [EVEN_RANK] * ROWS)
    candidates = {
        "cpu": adapter_linears(ours.adapter_linear, own, x, shapes, mixed, rows),
        "one rank": adapter_linears(ours.adapter_linear, own, x, shapes, one_rank, rows),
        "base rows": none,
    }
    ratios = (
        RatioBar("speed of what adapters add beside one rank", "one rank", "cpu", 0.97, "at least", without="base rows"),
        RatioBar("speed of all beside one rank", "one rank", "cpu"),
    )
    num_bytes = base_bytes + ELEMENT * ROWS * EVEN_RANK * shapes.adapter_width
    yield Case("linears with 32 adapters of ranks 8, 16, 32, 64", candidates, num_bytes, bars=ratios)


def attention_cases(shapes: Shapes, ops: All) -> Iterator[Case]:
    """Paged attention of all layers: a decode step of 32 requests, and a whole prompt."""
    element = ELEMENT * shapes.kv_heads * shapes.head_dim
    for name, requests, rows, context in (
        (f"attention, {ROWS} rows over {CONTEXT} tokens", ROWS, 1, CONTEXT),
        (f"attention, prompt of {PROMPT}", 1, PROMPT, PROMPT),
    ):
        blocks = requests * context // BLOCK
        caches = [random_rows(2, blocks, shapes.kv_heads, BLOCK, shapes.head_dim) for _ in range(shapes.layers)]
        q = random_rows(requests * rows, shapes.heads, shapes.head_dim)
        batch = attention_batch(requests, rows, context)
        candidates: dict[str, Callable[[], object]] = {
            which: partial(_attention, one, q, caches, batch) for which, one in ops.items()
        }
        flops = (
            shapes.attention_flops(PROMPT)
            if rows > 1
            else 4.0 * shapes.layers * shapes.heads * shapes.head_dim * requests * context
        )
        yield Case(name, candidates, 2.0 * element * requests * context * shapes.layers, flops)


def small_cases(shapes: Shapes, ops: All) -> Iterator[Case]:
    """What costs a step little: norms, activations and rotary positions of all layers, and drawing tokens."""
    hidden, gate_up = random_rows(ROWS, shapes.hidden), random_rows(ROWS, 2 * shapes.inner)
    residual, weight = torch.randn(ROWS, shapes.hidden), random_rows(shapes.hidden)
    heads = [random_rows(ROWS, count, shapes.head_dim) for count in (shapes.heads, shapes.kv_heads, shapes.kv_heads)]
    positions, table = torch.full((ROWS,), CONTEXT - 1), torch.randn(CONTEXT, shapes.head_dim)
    caches = random_rows(2, ROWS, shapes.kv_heads, BLOCK, shapes.head_dim)
    slots, logits = torch.arange(ROWS) * BLOCK, torch.randn(ROWS, shapes.vocab)
    work: dict[str, Callable[[Operators], object]] = {
        "norms": lambda one: [one.add_rms_norm(hidden, residual, weight, 1e-5) for _ in range(2 * shapes.layers + 1)],
        "activations": lambda one: [one.silu_and_mul(gate_up) for _ in range(shapes.layers)],
        "rotary positions and KV writes": lambda one: [
            one.rotary_and_write_kv(heads[0], heads[1], heads[2], positions, table, caches[0], caches[1], slots)
            for _ in range(shapes.layers)
        ],
    }
    for name, run in work.items():
        yield Case(f"{name} of a step, batch {ROWS}", {which: partial(run, one) for which, one in ops.items()})
    for name, temperature in (("greedy", 0.0), ("top-k 50, top-p 0.9", 0.8)):
        batch = sampling_batch(temperature)
        draws: dict[str, Callable[[], object]] = {which: partial(one.sample, logits, batch) for which, one in ops.items()}
        yield Case(f"drawing {ROWS} tokens, {name}", draws, 4.0 * logits.numel())


def attention_batch(requests: int, rows: int, context: int) -> AttentionBatch:
    """Requests whose blocks lie one after the other, each with its last ``rows`` tokens in the step."""
    return AttentionBatch(
        query_start=torch.arange(requests + 1, dtype=torch.int32) * rows,
        context_len=torch.full((requests,), context, dtype=torch.int32),
        block_table=torch.arange(requests * context // BLOCK, dtype=torch.int32).view(requests, -1),
        kv_slot=torch.full((requests * rows,), -1),
        max_query_len=rows,
        max_context_len=context,
    )


def sampling_batch(temperature: float) -> SamplingBatch:
    """The same for all rows; filters only where tokens are drawn at random."""
    filtered = temperature > 0
    return SamplingBatch(
        temperature=torch.full((ROWS,), temperature),
        top_k=torch.full((ROWS,), 50 * filtered, dtype=torch.int32),
        top_p=torch.full((ROWS,), 0.9 if filtered else 1.0),
        min_p=torch.zeros(ROWS),
        seed=torch.arange(ROWS),
        choice=torch.zeros(ROWS, dtype=torch.int32),
        position=torch.zeros(ROWS, dtype=torch.int32),
    )


def adapter_memory(
    shapes: Shapes, ranks: Sequence[int], row_type: RowType = RowType.BF16, scaled: Collection[int] = ()
) -> AdapterMemory:
    """Random adapters on all projections, one for each rank, their rows of ``row_type`` one after the other; those ``scaled`` have
    an output scale at each, as DoRA does.
    """
    widths = [(p.in_features, size) for _ in range(shapes.layers) for p in shapes.packed for size in p.sizes]
    sites = torch.full((len(ranks), len(widths), NUM_SITE_FIELDS), -1, dtype=torch.int64)
    lengths: list[int] = []
    vectors: list[tuple[int, int]] = []
    for adapter, rank in enumerate(ranks):
        for site, (num_in, num_out) in enumerate(widths):
            sites[adapter, site, SiteField.A_ROW] = len(lengths)
            sites[adapter, site, SiteField.B_ROW] = len(lengths) + rank
            sites[adapter, site, SiteField.RANK] = rank
            sites[adapter, site, SiteField.ROW_TYPE] = row_type
            lengths += [row_bytes(row_type, num_in)] * rank + [row_bytes(row_type, num_out)] * rank
            if adapter in scaled:
                sites[adapter, site, SiteField.SCALE_ROW] = len(lengths)
                vectors.append((len(lengths), num_out))
                lengths.append(row_bytes(RowType.FP32, num_out))
    taken = torch.tensor([-(-length // ROW_ALIGNMENT) * ROW_ALIGNMENT for length in lengths])
    ends = taken.cumsum(0)
    offsets = ends - taken
    pool = _random_pool(int(ends[-1]), offsets, row_type)
    for row, num_out in vectors:
        pool[offsets[row] :].view(torch.float32)[:num_out] = torch.rand(num_out) + 0.5
    return AdapterMemory(pool, offsets, sites)


def _random_pool(num_bytes: int, offsets: Tensor, row_type: RowType) -> Tensor:
    """A pool of random elements; an 8-bit row's scale makes them as large as those of other types."""
    if row_type is RowType.BF16:
        return torch.empty(num_bytes // ELEMENT, dtype=torch.bfloat16).normal_(0, 0.02).view(torch.uint8)
    if row_type is RowType.FP32:
        return torch.empty(num_bytes // 4).normal_(0, 0.02).view(torch.uint8)
    pool = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    if row_type is RowType.E4M3:
        pool[(pool & 0x7F) == 0x7F] = 0  # these are NaN
    pool.view(torch.float32)[offsets // 4] = 0.02 / (73.0 if row_type is RowType.INT8 else 120.0)
    return pool


def _linears(ops: Operators, x: Mapping[int, Tensor], weights: Sequence[Weight]) -> None:
    for weight in weights:
        ops.linear(x[weight.in_features], weight)


def _torch_linears(x: Mapping[int, Tensor], weights: Sequence[Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(x[weight.shape[1]], weight)


def _attention(ops: Operators, q: Tensor, caches: Sequence[Tensor], batch: AttentionBatch) -> None:
    for cache in caches:
        ops.paged_attention(q, cache[0], cache[1], batch, q.shape[-1] ** -0.5)


def sites_of(shapes: Shapes) -> int:
    """Projections of a layer."""
    return sum(len(packed.sizes) for packed in shapes.packed)


def adapter_linears(
    run: AdapterLinear,
    weights: Sequence[Weight],
    x: Mapping[int, Tensor],
    shapes: Shapes,
    memory: AdapterMemory,
    rows: Sequence[int],
) -> Callable[[], object]:
    """All layers' linears by ``run``, row i with adapter ``rows[i]``."""
    batch = build_adapter_batch(rows)
    calls, number = [], 0
    for weight, packed in zip(weights, shapes.packed * shapes.layers, strict=True):
        starts = [sum(packed.sizes[:i]) for i in range(len(packed.sizes))]
        sites = tuple(LinearSite(number + i, start, size) for i, (start, size) in enumerate(zip(starts, packed.sizes, strict=True)))
        number += len(sites)
        calls.append((weight, x[packed.in_features], sites))
    return lambda: [run(rows, weight, None, memory, batch, sites) for weight, rows, sites in calls]


def weights_of(shapes: Shapes, *, head: bool) -> list[Tensor]:
    """Of all layers' linears, at random."""
    layer = [(sum(packed.sizes), packed.in_features) for packed in shapes.packed]
    sizes = layer * shapes.layers + ([(shapes.vocab, shapes.hidden)] if head else [])
    return [random_rows(*size) / math.sqrt(size[1]) for size in sizes]


def random_rows(*shape: int) -> Tensor:
    """bf16 ones."""
    return torch.empty(shape, dtype=torch.bfloat16).normal_()
