"""Inputs of every operator in the shapes that one engine will run, to measure implementations on. Knows sizes, and no model.

Each shape is a kind of step: decoding with a few streams, with some, with many, and one chunk of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.implementation import Implementation
from graftwork_kernels.layout import (
    NUM_SITE_FIELDS,
    ROW_ALIGNMENT,
    AdapterBatch,
    AdapterMemory,
    AttentionBatch,
    LinearSite,
    LogitBias,
    Penalties,
    RowType,
    SamplingBatch,
    SiteField,
)
from graftwork_kernels.row_codec import row_bytes

Outputs = tuple[Tensor, ...]
Start = Callable[[Implementation], Mapping["Shape", Callable[[], Outputs]]]
"""Lay out an operator's inputs for an implementation; what comes back runs it once, on each shape, and gives its results."""

DECODE_ROWS = {1: 0.25, 8: 0.25, 32: 0.3}
"""Streams that decode together, and the share of an engine's time that such steps take."""

PREFILL_SHARE = 0.2
"""The share of steps that are a chunk of a prompt. A client waits for each token of its answer, and once for its whole prompt."""

_CONTEXT = 256
_RANK = 16
_NUM_ADAPTERS = 4
_MAX_HEAD_ROWS = 4096
_MAX_WEIGHT = 1 << 23
"""Rows of the output head, and elements of any one weight, that are measured: the rest of a large one is more of the same."""

_NUM_BIASED, _NUM_PENALISED, _NUM_TOP = 64, 256, 5


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a model and its engine's settings fix of every step."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    max_rows: int
    max_requests: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of step: ``num_requests`` requests with ``query_len`` rows each. ``share`` of an engine's time goes to it."""

    name: str
    num_requests: int
    query_len: int
    share: float

    @property
    def num_rows(self) -> int:
        """All rows together."""
        return self.num_requests * self.query_len


def shapes_of(sizes: StepSizes, *, prefills: bool = True) -> list[Shape]:
    """Every kind of step; an engine for few requests has fewer kinds."""
    shares: dict[int, float] = {}
    for rows, share in DECODE_ROWS.items():
        possible = min(rows, sizes.max_requests, sizes.max_rows)
        shares[possible] = shares.get(possible, 0.0) + share
    shapes = [Shape(f"decode {rows}", rows, 1, share) for rows, share in shares.items()]
    if prefills and sizes.max_rows > 1:
        shapes.append(Shape(f"prefill {sizes.max_rows}", 1, sizes.max_rows, PREFILL_SHARE))
    return shapes


def between(shapes: list[Shape]) -> list[Shape]:
    """One more kind of step, as many times larger than many streams as a chunk of a prompt is than it; none if there is no room.

    It has no share of time: it only tells more closely from how many rows on something is best.
    """
    *_, streams, chunk = sorted([0, *(shape.num_rows for shape in shapes)])
    rows = math.isqrt(streams * chunk)
    return [Shape(f"prefill {rows}", 1, rows, 0.0)] if streams < rows < chunk else []


class Probes:
    """Builds the inputs of one operator at a time, the same on any ``device``. ``splits_linear``: linears are measured `between`
    too."""

    def __init__(self, sizes: StepSizes, device: torch.device, *, splits_linear: bool = False) -> None:
        self._sizes, self._device = sizes, device
        self._shapes = shapes_of(sizes)
        more = between(self._shapes) if splits_linear else []
        self._linear_shapes = sorted([*self._shapes, *more], key=lambda shape: shape.num_rows)
        self._sampled = shapes_of(sizes, prefills=False)  # a prompt's last row alone is drawn from
        self._most = max(shape.num_rows for shape in self._shapes)
        self._random = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[tuple[str, Start]]:
        """Each operator's name with its inputs, which are made as the iteration comes to it."""
        makers = {
            "linear": self._linear,
            "paged_attention": self._paged_attention,
            "rotary_and_write_kv": self._rotary_and_write_kv,
            "rms_norm": self._rms_norm,
            "add_rms_norm": self._add_rms_norm,
            "silu_and_mul": lambda: self._activation("silu_and_mul"),
            "gelu_and_mul": lambda: self._activation("gelu_and_mul"),
            "finite_rows": self._finite_rows,
            "apply_logit_bias": self._apply_logit_bias,
            "apply_penalties": self._apply_penalties,
            "sample": self._sample,
            "philox_uniform": self._philox_uniform,
            "token_logprobs": self._token_logprobs,
        }
        for operator, make in makers.items():
            yield operator, make()

    def _randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self._random).to(self._device, dtype or self._sizes.dtype)

    def _randint(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, shape, generator=self._random).to(self._device, dtype)

    def _linear(self) -> Start:
        """A layer's linears, each row with one of a few adapters, the head over what is drawn from, and the embedding."""
        sizes = self._sizes
        query, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        widths = [
            (sizes.hidden_size, query + 2 * kv),
            (query, sizes.hidden_size),
            (sizes.hidden_size, 2 * sizes.intermediate_size),
            (sizes.intermediate_size, sizes.hidden_size),
        ]
        widths = [(width_in, min(width_out, max(1, _MAX_WEIGHT // width_in))) for width_in, width_out in widths]
        head_rows = min(sizes.vocab_size, _MAX_HEAD_ROWS)
        matrices = [self._randn(out, width) / width**0.5 for width, out in [*widths, (sizes.hidden_size, head_rows)]]
        inputs = [self._randn(self._most, width) for width, _ in widths]
        token_ids = self._randint(head_rows, self._most)
        memory = self._adapter_memory(widths)
        unplanned = {shape: _adapter_batch(shape, self._device) for shape in self._linear_shapes}

        def start(implementation: Implementation) -> Mapping[Shape, Callable[[], Outputs]]:
            batches = {shape: implementation.plan_adapters(memory, batch) for shape, batch in unplanned.items()}
            *weights, head = [implementation.prepare_weight(matrix) for matrix in matrices]

            def once(shape: Shape) -> Outputs:
                rows, results = shape.num_rows, []
                for site, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
                    sites = (LinearSite(site, 0, weight.out_features),)
                    results.append(
                        implementation.adapter_linear(x[:rows], weight, None, memory, batches[shape], sites, torch.float32)
                    )
                logits = implementation.linear(inputs[0][: shape.num_requests], head, None, torch.float32)
                return (*results, logits, implementation.embedding(token_ids[:rows], head))

            return _each(self._linear_shapes, once)

        return start

    def _adapter_memory(self, widths: list[tuple[int, int]]) -> AdapterMemory:
        """Adapters with a delta for each linear: A [r, in], then B transposed, row after row."""
        row_type = RowType.FP32 if self._sizes.dtype == torch.float32 else RowType.BF16
        dtype = torch.float32 if row_type is RowType.FP32 else torch.bfloat16
        sites = torch.full((_NUM_ADAPTERS, len(widths), NUM_SITE_FIELDS), -1, dtype=torch.int64)
        sites[:, :, SiteField.RANK] = _RANK
        sites[:, :, SiteField.ROW_TYPE] = row_type
        pieces: list[Tensor] = []
        offsets: list[int] = []
        end = 0
        for adapter in range(_NUM_ADAPTERS):
            for site, widths_of_site in enumerate(widths):
                for first_row, width in zip((SiteField.A_ROW, SiteField.B_ROW), widths_of_site, strict=True):
                    sites[adapter, site, first_row] = len(offsets)
                    stride = -(-row_bytes(row_type, width) // ROW_ALIGNMENT) * ROW_ALIGNMENT
                    rows = torch.zeros((_RANK, stride // dtype.itemsize), dtype=dtype)
                    # What is added is a part of the product's size that no rounding hides.
                    values = torch.randn((_RANK, width), generator=self._random) / 4
                    rows[:, :width] = values / width**0.5 if first_row is SiteField.A_ROW else values
                    pieces.append(rows.view(torch.uint8).flatten())
                    offsets += range(end, end + _RANK * stride, stride)
                    end += _RANK * stride
        memory = torch.cat(pieces), torch.tensor(offsets), sites
        return AdapterMemory(*(tensor.to(self._device) for tensor in memory))

    def _caches(self) -> tuple[Tensor, Tensor]:
        """Blocks enough for a context, and for every row of a step to have a place of its own."""
        sizes = self._sizes
        num_blocks = -(-max(self._most, _CONTEXT) // sizes.block_size)
        shape = (num_blocks, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
        return self._randn(*shape), self._randn(*shape)

    def _packed_qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of as many rows as a step has, parts of one packed tensor, as they come out of a linear."""
        sizes = self._sizes
        heads = [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads]
        q, k, v = torch.split_with_sizes(self._randn(self._most, sum(heads), sizes.head_dim), heads, dim=1)
        return q, k, v

    def _rotary_and_write_kv(self) -> Start:
        q, k, v = self._packed_qkv()
        keys, values = self._caches()
        angles = torch.rand(self._most, self._sizes.head_dim // 2, generator=self._random)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self._device)
        positions = torch.arange(self._most, device=self._device)
        slots = torch.randperm(self._most, generator=self._random).to(self._device)

        def start(implementation: Implementation) -> Mapping[Shape, Callable[[], Outputs]]:
            mine = keys.clone(), values.clone()

            def once(shape: Shape) -> Outputs:
                n = shape.num_rows
                turned = implementation.rotary_and_write_kv(q[:n], k[:n], v[:n], positions[:n], cos_sin, *mine, slots[:n])
                return turned, *mine

            return _each(self._shapes, once)

        return start

    def _paged_attention(self) -> Start:
        q, _, _ = self._packed_qkv()
        q = q.contiguous()
        keys, values = self._caches()
        unplanned = {shape: _attention_batch(shape, keys.shape[0], self._sizes.block_size, self._device) for shape in self._shapes}
        scale = self._sizes.head_dim**-0.5
        group = self._sizes.num_heads // self._sizes.num_kv_heads

        def start(implementation: Implementation) -> Mapping[Shape, Callable[[], Outputs]]:
            batches = {shape: implementation.plan_attention(batch, group, q.dtype) for shape, batch in unplanned.items()}

            def once(shape: Shape) -> Outputs:
                return (implementation.paged_attention(q[: shape.num_rows], keys, values, batches[shape], scale),)

            return _each(self._shapes, once)

        return start

    def _rms_norm(self) -> Start:
        x = self._randn(self._most, self._sizes.hidden_size)
        weight = self._randn(self._sizes.hidden_size)
        return self._start(self._shapes, lambda used, shape: (used.rms_norm(x[: shape.num_rows], weight, 1e-5),))

    def _add_rms_norm(self) -> Start:
        x, residual = self._randn(2, self._most, self._sizes.hidden_size, dtype=torch.float32)
        weight = self._randn(self._sizes.hidden_size)
        return self._start(
            self._shapes, lambda used, shape: used.add_rms_norm(x[: shape.num_rows], residual[: shape.num_rows], weight, 1e-5)
        )

    def _activation(self, operator: str) -> Start:
        gate_up = self._randn(self._most, 2 * self._sizes.intermediate_size, dtype=torch.float32)

        def once(used: Implementation, shape: Shape) -> Outputs:
            function = used.silu_and_mul if operator == "silu_and_mul" else used.gelu_and_mul
            return (function(gate_up[: shape.num_rows], self._sizes.dtype),)

        return self._start(self._shapes, once)

    @cached_property
    def _logits(self) -> Tensor:
        """As wide apart as a model's that knows what it says, so that single tokens have most of the mass."""
        rows = max(shape.num_rows for shape in self._sampled)
        return 8 * self._randn(rows, self._sizes.vocab_size, dtype=torch.float32)

    def _finite_rows(self) -> Start:
        logits = self._logits.clone()
        logits[-1, 0] = torch.nan
        return self._start(self._sampled, lambda used, shape: (used.finite_rows(logits[: shape.num_rows]),))

    def _entries(self, shape: Shape, entries_each: int) -> tuple[Tensor, Tensor]:
        """`row_start` and `token_id`: as many distinct tokens for each row, all over the vocabulary."""
        each = min(entries_each, self._sizes.vocab_size)
        spread = torch.arange(each) * (self._sizes.vocab_size // each)
        tokens = (spread + torch.arange(shape.num_rows).unsqueeze(1)) % self._sizes.vocab_size
        row_start = torch.arange(0, (shape.num_rows + 1) * each, each, dtype=torch.int32, device=self._device)
        return row_start, tokens.flatten().to(self._device, torch.int32)

    def _apply_logit_bias(self) -> Start:
        logits, biases = self._logits, {}
        for shape in self._sampled:
            row_start, token_id = self._entries(shape, _NUM_BIASED)
            biases[shape] = LogitBias(row_start, token_id, self._randn(token_id.numel(), dtype=torch.float32))

        def start(implementation: Implementation) -> Mapping[Shape, Callable[[], Outputs]]:
            mine = {shape: logits[: shape.num_rows].clone() for shape in self._sampled}

            def once(shape: Shape) -> Outputs:
                implementation.apply_logit_bias(mine[shape], biases[shape])
                return (mine[shape],)

            return _each(self._sampled, once)

        return start

    def _apply_penalties(self) -> Start:
        logits, penalties = self._logits, {}
        for shape in self._sampled:
            row_start, token_id = self._entries(shape, _NUM_PENALISED)
            counts = self._randint(3, token_id.numel(), dtype=torch.int32)
            repetition, frequency, presence = (
                torch.full((shape.num_rows,), value, device=self._device) for value in (1.1, 0.5, 0.2)
            )
            penalties[shape] = Penalties(row_start, token_id, counts, repetition, frequency, presence)

        def start(implementation: Implementation) -> Mapping[Shape, Callable[[], Outputs]]:
            mine = {shape: logits[: shape.num_rows].clone() for shape in self._sampled}

            def once(shape: Shape) -> Outputs:
                implementation.apply_penalties(mine[shape], penalties[shape])
                return (mine[shape],)

            return _each(self._sampled, once)

        return start

    def _sample(self) -> Start:
        """Half greedy or plain, half with filters."""
        logits = self._logits
        batches = {shape: self._sampling_batch(shape.num_rows) for shape in self._sampled}
        return self._start(self._sampled, lambda used, shape: (used.sample(logits[: shape.num_rows], batches[shape]),))

    def _sampling_batch(self, num_rows: int) -> SamplingBatch:
        def cycle(*values: float) -> Tensor:
            return torch.tensor(values, device=self._device).repeat(-(-num_rows // len(values)))[:num_rows]

        rows = torch.arange(num_rows, device=self._device)

        return SamplingBatch(
            temperature=cycle(0.8, 0.0, 0.8, 1.0),
            top_k=cycle(0, 0, 50, 0).to(torch.int32),
            top_p=cycle(0.9, 1.0, 0.9, 1.0),
            min_p=torch.zeros_like(rows, dtype=torch.float32),
            seed=rows + 1,
            choice=torch.zeros_like(rows, dtype=torch.int32),
            position=rows.to(torch.int32),
        )

    def _philox_uniform(self) -> Start:
        seed, choice, position = (self._randint(1 << 31, self._most) for _ in range(3))
        return self._start(
            self._sampled,
            lambda used, shape: (used.philox_uniform(*(column[: shape.num_rows] for column in (seed, choice, position))),),
        )

    def _token_logprobs(self) -> Start:
        logits = self._logits
        token_ids = self._randint(self._sizes.vocab_size, logits.shape[0])
        num_top = min(_NUM_TOP, self._sizes.vocab_size)
        return self._start(
            self._sampled, lambda used, shape: used.token_logprobs(logits[: shape.num_rows], token_ids[: shape.num_rows], num_top)
        )

    @staticmethod
    def _start(shapes: list[Shape], once: Callable[[Implementation, Shape], Outputs]) -> Start:
        """For operators that write nothing but their results."""
        return lambda implementation: _each(shapes, lambda shape: once(implementation, shape))


def _each(shapes: list[Shape], once: Callable[[Shape], Outputs]) -> dict[Shape, Callable[[], Outputs]]:
    return {shape: (lambda shape=shape: once(shape)) for shape in shapes}  # type: ignore[misc]


def _adapter_batch(shape: Shape, device: torch.device) -> AdapterBatch:
    adapters = [request % _NUM_ADAPTERS for request in range(shape.num_requests) for _ in range(shape.query_len)]
    return build_adapter_batch(adapters, device)


def _attention_batch(shape: Shape, num_blocks: int, block_size: int, device: torch.device) -> AttentionBatch:
    """Requests with a context of the same length, in the same blocks, each in an order of its own."""
    context = max(shape.query_len, min(_CONTEXT, num_blocks * block_size))
    blocks = torch.arange(num_blocks, dtype=torch.int32, device=device)
    return AttentionBatch(
        query_start=torch.arange(0, shape.num_rows + 1, shape.query_len, dtype=torch.int32, device=device),
        context_len=torch.full((shape.num_requests,), context, dtype=torch.int32, device=device),
        block_table=torch.stack([blocks.roll(request) for request in range(shape.num_requests)]),
        kv_slot=torch.full((shape.num_rows,), -1, device=device),
        max_query_len=shape.query_len,
        max_context_len=context,
    )
