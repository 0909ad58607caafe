"""Linears: the base's product by torch's BLAS, and the launches that add adapters to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

import torch
import triton
from torch import Tensor
from torch.nn import functional

from graftwork_kernels import reference
from graftwork_kernels.checks import check_contiguous
from graftwork_kernels.layout import AdapterBatch, AdapterMemory, AdapterTasks, LinearSite, Weight
from graftwork_kernels.triton.adapter_linear import expand, fused, shrink
from graftwork_kernels.triton.adapter_tasks import NUM_ADAPTER_TILES, NUM_TILES, TILE_RANKS, TILE_ROWS, plan_tasks

K_CHUNK = 1024
"""Features that one shrink task sums: fixed, so that the order of a sum is; few, so that all of a task is on its way at once."""

BLOCK_K, FUSED_BLOCK_K, WIDE_BLOCK_K = 128, 64, 32
"""Features multiplied at a time: the fused form keeps both halves' registers, and fp32 takes several times as many."""

BLOCK_COLUMNS, NARROW_BLOCK_COLUMNS = 256, 128
"""Columns of one expand task, at most; fewer in the fused form and in fp32."""

NUM_WARPS = 4
SHRINK_STAGES, EXPAND_STAGES = 4, 2

FUSED_REGISTERS = 168
"""Of each thread of the fused form in bf16: three programs fit a multiprocessor. By itself ptxas aims at four, and spills."""

E4M3_SINCE = (8, 9)
"""Compute capability of the first GPUs that convert E4M3 themselves."""

MOST_SITES = 8
"""Projections that one linear may hold."""


class Form(Enum):
    """How the two halves are launched."""

    TWO = "two"
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class Sites:
    """A linear's projections on the device: ``table`` int32 [S, 3], number in a record table, first column, columns."""

    table: Tensor
    num: int
    widest: int
    align: int  # a power of two that divides all first columns and numbers of columns: what lies there is read that wide
    gaps: tuple[slice, ...]  # columns that no site covers


def has_e4m3(device: torch.device) -> bool:
    """Whether what runs there converts E4M3 itself; an interpreter takes NaN in that type for 480."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= E4M3_SINCE


@dataclass(slots=True)
class AdapterLauncher:
    """Launches for one device. ``num_programs``: as many as it holds at once; ``max_rank``: of any adapter in memory.

    ``is_exact``: the base's product stays fp32 until the sum is rounded, which costs its traffic twice; else it is rounded to the
    result's type as BLAS gives it. ``is_wide``: products of bf16 are multiplied in fp32, as an interpreter must. ``has_e4m3``: E4M3
    is converted by the GPU, which `has_e4m3` can do so; else by moving bits. Either gives the same.
    """

    num_programs: int
    max_rank: int
    form: Form
    is_exact: bool
    is_wide: bool
    has_e4m3: bool
    _sites: dict[tuple[tuple[LinearSite, ...], int, torch.device], Sites] = field(default_factory=dict)

    def plan(self, memory: AdapterMemory, batch: AdapterBatch) -> AdapterTasks:
        """The tasks of ``batch``, in new memory."""
        num_rows, device = batch.token_adapter.shape[0], batch.token_adapter.device
        rank_tiles = triton.cdiv(self.max_rank, TILE_RANKS)
        tasks = AdapterTasks(
            tiles=torch.empty((num_rows, 4), dtype=torch.int32, device=device),
            shrinks=torch.empty((num_rows * rank_tiles, 2), dtype=torch.int32, device=device),
            counts=torch.empty(3, dtype=torch.int32, device=device),
            arrivals=torch.zeros(num_rows * MOST_SITES, dtype=torch.int32, device=device),
        )
        plan_tasks(batch, memory, tasks)
        return tasks

    def __call__(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        memory: AdapterMemory,
        batch: AdapterBatch,
        sites: tuple[LinearSite, ...],
        out_dtype: torch.dtype,
    ) -> Tensor:
        """See `graftwork_kernels.ops.Operators.adapter_linear`."""
        if not len(x) or not sites or not memory.sites.shape[0]:
            return linear(x, weight, bias, out_dtype)
        product = linear(x, weight, None, torch.float32 if self.is_exact else out_dtype)
        out = product if product.dtype == out_dtype else torch.empty_like(product, dtype=out_dtype)
        self.add(out, product, x, bias, memory, batch, sites)
        return out

    def add(
        self,
        out: Tensor,
        product: Tensor,
        x: Tensor,
        bias: Tensor | None,
        memory: AdapterMemory,
        batch: AdapterBatch,
        sites: tuple[LinearSite, ...],
    ) -> None:
        """Write to ``out`` what becomes of ``product``, x Wᵀ [T, out], with adapters and bias; they may be one tensor."""
        for name, tensor in {"bias": bias, "batch.permutation": batch.permutation}.items():
            if tensor is not None:
                check_contiguous(name, tensor)
        x = x if x.stride(1) == 1 else x.contiguous()
        num_rows, num_in = x.shape
        where = self._on_device(sites, out.shape[1], x.device)
        tasks = batch.tasks or self.plan(memory, batch)
        # Tiles of the base have work where there is a bias, and where their result lies elsewhere than their product.
        tiles_with_work = tasks.counts[NUM_TILES if bias is not None or out is not product else NUM_ADAPTER_TILES :]
        num_chunks = triton.cdiv(num_in, K_CHUNK)
        h = torch.empty((num_chunks, num_rows, where.num, self.max_rank), dtype=torch.float32, device=x.device)
        adapters = (memory.pool, memory.row_offset, memory.sites, where.table, h)
        counts = (memory.sites.shape[1], num_rows)
        result = (product, product.stride(0), out, out.stride(0), out if bias is None else bias)
        is_fused = self.form is Form.FUSED
        is_wide = self.is_wide or x.dtype != torch.bfloat16
        on_gpu = WIDE_BLOCK_K if is_wide else FUSED_BLOCK_K if is_fused else BLOCK_K
        block_k = _at_most(BLOCK_K if self.is_wide else on_gpu, num_in)
        block_columns = _at_most(NARROW_BLOCK_COLUMNS if is_fused or is_wide else BLOCK_COLUMNS, where.widest)
        common = {
            "NUM_SITES": where.num, "MAX_RANK": self.max_rank, "WIDE": is_wide, "HAS_E4M3": self.has_e4m3,
            "NUM_CHUNKS": num_chunks, "TILE_ROWS": TILE_ROWS, "TILE_RANKS": TILE_RANKS, "num_warps": NUM_WARPS,
            "enable_fp_fusion": True,
        }  # fmt: skip
        widths = {"HAS_BIAS": bias is not None, "ALIGN": where.align, "BLOCK_COLUMNS": block_columns}
        grid = (self.num_programs,)
        if is_fused:
            fused[grid](
                x, x.stride(0), *result, batch.permutation, tasks.tiles, tasks.shrinks, tasks.counts, tiles_with_work,
                tasks.arrivals, *adapters, num_in, *counts, **common, **widths, K_CHUNK=K_CHUNK, BLOCK_K=block_k,
                num_stages=SHRINK_STAGES, maxnreg=None if is_wide else FUSED_REGISTERS,
            )  # fmt: skip
        else:
            shrink[grid](
                x, x.stride(0), batch.permutation, tasks.tiles, tasks.shrinks, tasks.counts, *adapters, num_in, *counts, **common,
                K_CHUNK=K_CHUNK, BLOCK_K=block_k, num_stages=SHRINK_STAGES,
            )  # fmt: skip
            expand[grid](
                *result, batch.permutation, tasks.tiles, tiles_with_work, *adapters, *counts, **common, **widths,
                NUM_BLOCKS=triton.cdiv(where.widest, block_columns), num_stages=EXPAND_STAGES,
            )  # fmt: skip
        _fill_gaps(out, product, bias, where.gaps)

    def _on_device(self, sites: tuple[LinearSite, ...], num_columns: int, device: torch.device) -> Sites:
        key = (sites, num_columns, device)
        if key not in self._sites:
            self._sites[key] = _describe(sites, num_columns, device)
        return self._sites[key]


def linear(x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See `graftwork_kernels.ops.Operators.linear`."""
    if not x.is_cuda:
        return reference.linear(x, weight, bias, out_dtype)
    matrix = weight.matrix
    if out_dtype == x.dtype and bias is None:
        return functional.linear(x, matrix)
    is_narrow = x.dtype != torch.float32
    product = torch.mm(x, matrix.t(), out_dtype=torch.float32) if is_narrow else functional.linear(x, matrix)
    if bias is not None:
        product += bias
    return product.to(out_dtype)


def _at_most(limit: int, size: int) -> int:
    """A power of two that holds ``size``, between what a product needs and ``limit``."""
    return min(limit, max(16, int(triton.next_power_of_2(size))))


def _describe(sites: tuple[LinearSite, ...], num_columns: int, device: torch.device) -> Sites:
    if len(sites) > MOST_SITES:
        raise ValueError(f"sites: expected {MOST_SITES} at most, got {len(sites)}")
    table = torch.tensor([(site.index, site.start, site.size) for site in sites], dtype=torch.int32).to(device)
    align = math.gcd(16, *(site.start for site in sites), *(site.size for site in sites))
    gaps, end = [], 0
    for site in sorted(sites, key=lambda site: site.start):
        if site.start > end:
            gaps.append(slice(end, site.start))
        end = max(end, site.start + site.size)
    if end < num_columns:
        gaps.append(slice(end, num_columns))
    return Sites(table, len(sites), max(site.size for site in sites), align, tuple(gaps))


def _fill_gaps(out: Tensor, product: Tensor, bias: Tensor | None, gaps: tuple[slice, ...]) -> None:
    """Columns that no site covers: the base's alone."""
    for columns in gaps:
        if bias is not None:
            out[:, columns] = product[:, columns] + bias[columns]
        elif out is not product:
            out[:, columns] = product[:, columns]
