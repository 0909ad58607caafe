"""The base product and the adapter linear in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from graftwork_kernels.layout import AdapterBatch, AdapterMemory, LinearSite, RowType, SiteField, Weight
from graftwork_kernels.row_codec import RowRun, read_runs

_UPCAST_ROWS = 512
"""Rows of a bf16 weight widened at a time: few enough to stay in cache, so that memory is read once and at two bytes."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """The rows of one adapter, start .. end of the grouped rows, and its record for each site of the linear."""

    start: int
    end: int
    records: Sequence[Sequence[int]]


def prepare_weight(weight: Tensor) -> Weight:
    """See `graftwork_kernels.ops.Operators.prepare_weight`: it is read as it is."""
    return Weight.plain(weight)


def embedding(token_ids: Tensor, weight: Weight) -> Tensor:
    """See `graftwork_kernels.ops.Operators.embedding`."""
    return functional.embedding(token_ids, weight.matrix)


def linear(x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See `graftwork_kernels.ops.Operators.linear`."""
    product = _product(x.to(torch.float32), weight.matrix)
    if bias is not None:
        product += bias
    return product.to(out_dtype)


def adapter_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    memory: AdapterMemory,
    batch: AdapterBatch,
    sites: tuple[LinearSite, ...],
    out_dtype: torch.dtype,
) -> Tensor:
    """See `graftwork_kernels.ops.Operators.adapter_linear`."""
    wide = x.to(torch.float32)
    product = _product(wide, weight.matrix)
    segments = _segments(memory, batch, sites)
    if segments:
        rows = batch.permutation[: segments[-1].end]
        grouped = product.index_select(0, rows)
        _add_deltas(grouped, wide.index_select(0, rows), memory, sites, segments)
        _scale_outputs(grouped, memory, sites, segments)
        _add_biases(grouped, bias, memory, sites, segments)
    if bias is not None:
        product += bias
    if segments:
        product.index_copy_(0, rows, grouped)
    return product.to(out_dtype)


def plan_adapters(memory: AdapterMemory, batch: AdapterBatch) -> AdapterBatch:  # noqa: ARG001 - the implementations' signature
    """See `graftwork_kernels.ops.Operators.plan_step`: nothing is planned."""
    return batch


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ in fp32, x fp32 [T, in]."""
    if weight.dtype == torch.float32:
        return functional.linear(x, weight)
    product = x.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, weight.shape[0], _UPCAST_ROWS):
        columns = slice(start, start + _UPCAST_ROWS)
        torch.mm(x, weight[columns].to(torch.float32).t(), out=product[:, columns])
    return product


def _segments(memory: AdapterMemory, batch: AdapterBatch, sites: tuple[LinearSite, ...]) -> list[_Segment]:
    num_segments = int(batch.num_segments)
    if num_segments == 0 or not sites:
        return []
    starts: list[int] = batch.segment_start[: num_segments + 1].tolist()
    adapters = batch.segment_adapter[:num_segments].to(torch.int64)
    if int(adapters[-1]) >= memory.sites.shape[0]:  # they ascend
        raise ValueError(
            f"batch.token_adapter: adapter {int(adapters[-1])} is not among the {memory.sites.shape[0]} in memory.sites"
        )
    records = memory.sites.index_select(0, adapters)[:, [site.index for site in sites]].tolist()
    return [_Segment(start, end, record) for (start, end), record in zip(pairwise(starts), records, strict=True)]


def _add_deltas(grouped: Tensor, x: Tensor, memory: AdapterMemory, sites: tuple[LinearSite, ...], segments: list[_Segment]) -> None:
    """Add (x Aᵀ) Bᵀ to the columns of each site, every segment with its own A and B."""
    for number, site in enumerate(sites):
        touched = [(segment, segment.records[number]) for segment in segments if segment.records[number][SiteField.RANK] > 0]
        a_rows = read_runs(memory, [_run(record, SiteField.A_ROW) for _, record in touched], x.shape[1])  # [r, in] each
        b_rows = read_runs(memory, [_run(record, SiteField.B_ROW) for _, record in touched], site.size)  # [r, size] each
        for (segment, _), a, b in zip(touched, a_rows, b_rows, strict=True):
            h = torch.mm(x[segment.start : segment.end], a.t())
            grouped[segment.start : segment.end, site.start : site.start + site.size].addmm_(h, b)


def _scale_outputs(grouped: Tensor, memory: AdapterMemory, sites: tuple[LinearSite, ...], segments: list[_Segment]) -> None:
    for segment, site, record in _having(SiteField.SCALE_ROW, sites, segments):
        columns = grouped[segment.start : segment.end, site.start : site.start + site.size]
        columns *= _vector(memory, record[SiteField.SCALE_ROW], site.size)


def _add_biases(
    grouped: Tensor, bias: Tensor | None, memory: AdapterMemory, sites: tuple[LinearSite, ...], segments: list[_Segment]
) -> None:
    """Add the base's bias, or an adapter's own in its place, to the columns of each site and the base's to the rest."""
    replaced = []
    for segment, site, record in _having(SiteField.BIAS_ROW, sites, segments):
        columns = grouped[segment.start : segment.end, site.start : site.start + site.size]
        replaced.append((columns, columns + _vector(memory, record[SiteField.BIAS_ROW], site.size)))
    if bias is not None:
        grouped += bias
    for columns, total in replaced:
        columns.copy_(total)


def _having(
    field: SiteField, sites: tuple[LinearSite, ...], segments: list[_Segment]
) -> list[tuple[_Segment, LinearSite, Sequence[int]]]:
    """Every site of every segment whose record has a row in ``field``."""
    return [
        (segment, site, record)
        for segment in segments
        for site, record in zip(sites, segment.records, strict=True)
        if record[field] >= 0
    ]


def _run(record: Sequence[int], first_row: SiteField) -> RowRun:
    return RowRun(record[first_row], record[SiteField.RANK], record[SiteField.ROW_TYPE])


def _vector(memory: AdapterMemory, row: int, width: int) -> Tensor:
    """One fp32 row: an output scale or a bias."""
    return read_runs(memory, [RowRun(row, 1, RowType.FP32)], width)[0]
