"""How adapter memory, the parts of a batch and the paged KV cache lie in memory: the structures every operator reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

import torch
from torch import Tensor

ROW_ALIGNMENT = 64
"""Bytes; every row of adapter memory begins at a multiple of it."""

QUANTISED_ROW_HEAD = 16
"""Bytes before the elements of an int8 or e4m3 row; the first four hold the row's fp32 scale."""

NO_ADAPTER = -1


class RowType(IntEnum):
    """Element type of an adapter's rows, as stored in a site record."""

    BF16 = 0
    FP32 = 1
    INT8 = 2
    E4M3 = 3  # kept as uint8


class SiteField(IntEnum):
    """Columns of a site record (int64). Offsets and row numbers are -1 where the adapter has no such part."""

    A_ROW = 0  # index into row_offset of A's first row; the rest follow
    B_ROW = 1  # the same for the rows of B transposed
    RANK = 2  # 0: the adapter does not touch this projection's product
    ROW_TYPE = 3
    SCALE_ROW = 4  # index into row_offset of the output scale c: fp32 [out]
    BIAS_ROW = 5  # of the replacement bias: fp32 [out]


NUM_SITE_FIELDS = len(SiteField)


class WeightLayout(Enum):
    """How the elements of a prepared weight lie."""

    PLAIN = "plain"  # [out, in]
    PANELS = "panels"  # as the `cpu` implementation's tiles read them
    ONEDNN = "onednn"  # as oneDNN packed them: torch's opaque tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix of ``out_features`` rows of ``in_features``, as `graftwork_kernels.ops.Operators.prepare_weight` made it of a
    tensor.

    ``data`` is read by implementations alone, which know what its ``layout`` means. ``large`` is the same matrix once more, as it
    is best read for many rows; None where one way is best for any number.
    """

    data: Tensor
    out_features: int
    in_features: int
    layout: WeightLayout
    large: Weight | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.data.dtype

    @property
    def matrix(self) -> Tensor:
        """[out, in] of a plain weight; raises ValueError for one that another implementation laid out."""
        if self.layout is not WeightLayout.PLAIN:
            raise ValueError(f"weight: expected a plain matrix, got {self.layout.value}, which another implementation prepared")
        return self.data

    @classmethod
    def plain(cls, matrix: Tensor) -> Weight:
        """``matrix`` [out, in] as it is."""
        return cls(matrix, matrix.shape[0], matrix.shape[1], WeightLayout.PLAIN)


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Every resident adapter.

    ``pool`` uint8 [bytes]; ``row_offset`` int64 [rows], byte offsets into the pool, multiples of `ROW_ALIGNMENT`;
    ``sites`` int64 [adapters, sites, `NUM_SITE_FIELDS`], where an absent site has rank 0 and -1 elsewhere. Scale is folded into B.
    """

    pool: Tensor
    row_offset: Tensor
    sites: Tensor


@dataclass(frozen=True, slots=True)
class LinearSite:
    """One projection inside a (possibly packed) linear: its number in a site record table and its columns of the output."""

    index: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class AdapterTasks:
    """The adapter work of a step of up to T rows, cut into tiles; made and read on the device.

    ``tiles`` int32 [T, 4]: adapter (-1: the base), first place in the permutation, rows, tiles of ranks (1 at least, so that an
    adapter that brings no more than a bias is somebody's work; 0 for the base). Tiles of the base come last. ``shrinks`` int32
    [T * tiles of the largest rank, 2]: tile, and which of its tiles of ranks, tile by tile. ``counts`` int32 [3]: shrinks, tiles
    with an adapter, all tiles. ``arrivals`` int32 [T * sites of a linear], 0 between launches, where tasks count who has come.
    """

    tiles: Tensor
    shrinks: Tensor
    counts: Tensor
    arrivals: Tensor


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """Which adapter each row of a step uses, and the same sorted for grouped work. Nothing is shaped by the number of adapters.

    ``token_adapter`` int32 [T], -1 for the base. ``permutation`` int64 [T] lists the rows that have an adapter, grouped by
    adapter in ascending order and by position within one, then the base rows. ``segment_start`` int32 [T + 1] marks where each
    group begins in it (the rest repeats the end of the last group), ``segment_adapter`` int32 [T] its adapter (-1 beyond the last).
    ``num_segments`` int32 [1]. All live on the device of the rows. ``tasks`` is None until an implementation that wants them makes
    them, once a step.
    """

    token_adapter: Tensor
    permutation: Tensor
    segment_start: Tensor
    segment_adapter: Tensor
    num_segments: Tensor
    tasks: AdapterTasks | None = None


@dataclass(frozen=True, slots=True)
class AttentionTasks:
    """How many pieces of attention come before each request's, on the device: of those that decode, chunks of the context in
    ``first_chunk``, of the others tiles of ``queries`` queries in ``first_tile``; int32 [R + 1] each, the total last.
    """

    first_chunk: Tensor
    first_tile: Tensor
    queries: int


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the keys and values of a step's requests lie.

    ``query_start`` int32 [R + 1]: rows of request r are query_start[r] .. query_start[r + 1]. ``context_len`` int32 [R]: tokens
    in the cache for each request, this step's included. ``block_table`` int32 [R, max_blocks]. ``kv_slot`` int64 [T]: block *
    block_size + offset where each row's key and value go, -1 to write nowhere. The two maxima size launches. ``tasks`` is None
    until an implementation that wants them makes them, once a step.
    """

    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    kv_slot: Tensor
    max_query_len: int
    max_context_len: int
    tasks: AttentionTasks | None = None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each of R rows of logits is drawn from; one entry a row.

    ``temperature`` fp32 (0: greedy), ``top_k`` int32 (0: off), ``top_p`` and ``min_p`` fp32, ``seed`` int64 (the bits of an
    unsigned value), ``choice`` and ``position`` int32.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values added to single logits: a list for each of R rows, laid end to end, so that nothing is shaped by the vocabulary.

    ``row_start`` int32 [R + 1]: the entries of row r are row_start[r] .. row_start[r + 1]. ``token_id`` int32 [N], distinct within
    a row. ``value`` fp32 [N]; -inf bans the token.
    """

    row_start: Tensor
    token_id: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """What repetition costs each of R rows of logits, with the tokens it is about laid out as in `LogitBias`.

    ``output_count`` int32 [N]: how often the row's output holds the token; 0 for one that only its prompt holds, which nothing but
    the repetition penalty touches: a row without that need not list them. ``repetition`` (1: off), ``frequency`` and ``presence``
    (0: off) fp32 [R].
    """

    row_start: Tensor
    token_id: Tensor
    output_count: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def empty_adapter_memory(num_sites: int, device: torch.device | str = "cpu") -> AdapterMemory:
    """Memory that holds no adapter, for a base served alone."""
    return AdapterMemory(
        pool=torch.zeros(0, dtype=torch.uint8, device=device),
        row_offset=torch.zeros(0, dtype=torch.int64, device=device),
        sites=torch.zeros((0, num_sites, NUM_SITE_FIELDS), dtype=torch.int64, device=device),
    )
