"""The linears of linear.cpp and weights.cpp: weights in panels, the base product and each row's own adapter in one command."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from graftwork_kernels import reference
from graftwork_kernels.cpu.issue import Issuer
from graftwork_kernels.layout import AdapterBatch, AdapterMemory, LinearSite, Weight, WeightLayout

FLOAT_TYPES: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1})
"""`FloatType` of linear.cpp."""

RANK_CHUNK = 128
"""`kRankChunk` of adapter.h."""

TILE_ROWS = 12
"""`kTileRows` of tile.h, on the widest machine."""

PANEL_COLUMNS = 32
"""Of a panel of the widest machine, two vectors of 16 fp32: what a weight's columns are rounded up to at most."""


class _PackArguments(ctypes.Structure):
    _fields_ = (
        ("matrix", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
        ("weight_type", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
    )


class _EmbeddingArguments(ctypes.Structure):
    _fields_ = (
        ("token_ids", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("weight_type", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("out", ctypes.c_void_p),
    )


class _LinearArguments(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("weight_type", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("product", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("bias_type", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_type", ctypes.c_int64),
        ("wide", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("padded_in", ctypes.c_int64),
        ("delta", ctypes.c_void_p),
        ("sites", ctypes.c_void_p),
        ("num_sites", ctypes.c_int64),
        ("pool", ctypes.c_void_p),
        ("row_offset", ctypes.c_void_p),
        ("records", ctypes.c_void_p),
        ("pool_bytes", ctypes.c_int64),
        ("num_memory_rows", ctypes.c_int64),
        ("num_adapters", ctypes.c_int64),
        ("num_adapter_sites", ctypes.c_int64),
        ("token_adapter", ctypes.c_void_p),
        ("permutation", ctypes.c_void_p),
        ("segment_start", ctypes.c_void_p),
        ("segment_adapter", ctypes.c_void_p),
        ("num_segments", ctypes.c_void_p),
        ("h", ctypes.c_void_p),
    )


def prepare_weight(issuer: Issuer, weight: Tensor) -> Weight:
    """See `graftwork_kernels.ops.Operators.prepare_weight`: in panels of as many columns as two of the machine's vectors hold."""
    if weight.dtype not in FLOAT_TYPES:
        return reference.prepare_weight(weight)
    matrix = weight.contiguous()
    out_features, in_features = matrix.shape
    panels = torch.empty(-(-out_features // PANEL_COLUMNS) * PANEL_COLUMNS * (in_features + in_features % 2), dtype=weight.dtype)
    arguments = _PackArguments(matrix.data_ptr(), panels.data_ptr(), FLOAT_TYPES[weight.dtype], in_features, out_features)
    issuer.now("graftwork_pack", arguments)
    return Weight(panels, out_features, in_features, WeightLayout.PANELS)


def embedding(issuer: Issuer, token_ids: Tensor, weight: Weight) -> Tensor:
    """See `graftwork_kernels.ops.Operators.embedding`."""
    if weight.layout is not WeightLayout.PANELS:
        issuer.compute("embedding in plain torch")
        return reference.embedding(token_ids, weight)
    token_ids = token_ids.contiguous()
    out = issuer.empty(token_ids.numel(), weight.in_features, dtype=weight.dtype)
    arguments = _EmbeddingArguments(
        token_ids.data_ptr(),
        weight.data.data_ptr(),
        FLOAT_TYPES[weight.dtype],
        weight.in_features,
        weight.out_features,
        out.data_ptr(),
    )
    issuer.issue("graftwork_embedding", arguments, (token_ids, weight.data, out), token_ids.numel())
    return out


def linear(
    issuer: Issuer, x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype, product: Tensor | None = None
) -> Tensor:
    """See `graftwork_kernels.ops.Operators.linear`. ``product`` is ``x @ weight.T`` of x's type, contiguous,
    where it is computed already."""
    if (
        weight.layout is not WeightLayout.PANELS
        or out_dtype not in FLOAT_TYPES
        or (bias is not None and bias.dtype not in FLOAT_TYPES)
    ):
        issuer.compute("linear in plain torch")
        return reference.linear(x, weight, bias, out_dtype)
    return _Call(issuer, x, weight, bias, out_dtype, product).issue()


def adapter_linear(
    issuer: Issuer,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    memory: AdapterMemory,
    batch: AdapterBatch,
    sites: tuple[LinearSite, ...],
    out_dtype: torch.dtype,
    product: Tensor | None = None,
) -> Tensor:
    """See `graftwork_kernels.ops.Operators.adapter_linear`; ``product`` as in `linear`."""
    if (
        weight.layout is not WeightLayout.PANELS
        or out_dtype not in FLOAT_TYPES
        or (bias is not None and bias.dtype not in FLOAT_TYPES)
    ):
        issuer.compute("adapter_linear in plain torch")
        return reference.adapter_linear(x, weight, bias, memory, batch, sites, out_dtype)
    call = _Call(issuer, x, weight, bias, out_dtype, product)
    if sites:
        call.add_adapters(memory, batch, sites)
    return call.issue()


class _Call:
    """One linear's arguments as they come together, with the tensors that they point into."""

    def __init__(
        self, issuer: Issuer, x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype, product: Tensor | None
    ) -> None:
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            issuer.compute("a copy of x")
            x = x.contiguous()
        self._issuer, self._x, self._num_rows = issuer, x, x.shape[0]
        self._weight = weight
        self._out = issuer.empty(self._num_rows, weight.out_features, dtype=out_dtype)
        self._tensors = [x, weight.data, self._out]
        self._arguments = _LinearArguments(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=None if product is not None else weight.data.data_ptr(),
            weight_type=FLOAT_TYPES[weight.dtype],
            in_features=weight.in_features,
            out_features=weight.out_features,
            out=self._out.data_ptr(),
            out_type=FLOAT_TYPES[out_dtype],
            padded_in=weight.in_features + weight.in_features % 2,
        )
        if product is not None:
            self._arguments.product = self._keep(product)
        if bias is not None:
            bias = bias.contiguous()
            self._arguments.bias, self._arguments.bias_type = self._keep(bias), FLOAT_TYPES[bias.dtype]

    def _copy_rows(self, *, with_adapters: bool) -> None:
        """Room for the copies of x that the kernel takes: in fp32, and in pairs of bf16, for a machine that multiplies them."""
        arguments = self._arguments
        if arguments.product:
            return
        if self._x.dtype == torch.bfloat16 or with_adapters:
            arguments.wide = self._scratch(arguments.padded_in, torch.float32)
        if self._x.dtype == torch.bfloat16 and (with_adapters or arguments.padded_in != arguments.in_features):
            arguments.pairs = self._scratch(arguments.padded_in, torch.bfloat16)

    def add_adapters(self, memory: AdapterMemory, batch: AdapterBatch, sites: tuple[LinearSite, ...]) -> None:
        """Let each row's adapter add to the columns of ``sites``."""
        places = torch.tensor([[site.index, site.start, site.size] for site in sites])
        arguments = self._arguments
        arguments.sites, arguments.num_sites = self._keep(places), len(sites)
        arguments.delta = self._scratch(-(-self._weight.out_features // PANEL_COLUMNS) * PANEL_COLUMNS, torch.float32)
        tiles = self._issuer.empty(self._issuer.num_threads, TILE_ROWS * arguments.padded_in, dtype=torch.float32)
        arguments.tiles = self._keep(tiles)
        arguments.h = self._scratch(len(sites) * RANK_CHUNK, torch.float32)
        arguments.pool, arguments.pool_bytes = self._keep(memory.pool), memory.pool.numel()
        arguments.row_offset, arguments.num_memory_rows = self._keep(memory.row_offset), memory.row_offset.numel()
        arguments.records = self._keep(memory.sites)
        arguments.num_adapters, arguments.num_adapter_sites = memory.sites.shape[:2]
        for name in ("token_adapter", "permutation", "segment_start", "segment_adapter", "num_segments"):
            setattr(arguments, name, self._keep(getattr(batch, name)))

    def issue(self) -> Tensor:
        """The result, computed now or whenever the command is run."""
        self._copy_rows(with_adapters=bool(self._arguments.num_sites))
        self._issuer.issue("graftwork_linear", self._arguments, self._tensors, self._num_rows)
        return self._out

    def _scratch(self, columns: int, dtype: torch.dtype) -> int:
        return self._keep(self._issuer.empty(self._num_rows, columns, dtype=dtype))

    def _keep(self, tensor: Tensor) -> int:
        if not tensor.is_contiguous():
            raise ValueError(f"expected a contiguous tensor, got strides {tensor.stride()}")
        self._tensors.append(tensor)
        return tensor.data_ptr()
