"""Linears whose base product is oneDNN's, of weights that it packed once: for many rows, where the processor multiplies bf16.

What a row's adapter adds, scales and biases are the compiled operator's, which is given the product. Knows no layout of oneDNN's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from graftwork_kernels.cpu import linear
from graftwork_kernels.cpu.issue import Issuer
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.layout import AdapterBatch, AdapterMemory, LinearSite, Weight, WeightLayout

_USUAL_ROWS = 256
"""What oneDNN is told when it picks an order for a weight; any number of rows can be multiplied with it."""


class OneDnnOperators(CpuOperators):
    """`CpuOperators` with oneDNN's product in linears of ``from_rows`` rows and more.

    A weight is prepared both ways: few rows and the embedding read panels. In bf16 the product is rounded to bf16 before anything
    is added to it. Not batch-invariant: oneDNN picks its kernel by the number of rows. A type that oneDNN cannot multiply on this
    machine is left to `CpuOperators`.
    """

    def __init__(self, issuer: Issuer, from_rows: int = 1) -> None:
        super().__init__(issuer)
        self._from_rows = from_rows

    def prepare_weight(self, weight: Tensor) -> Weight:
        """See `graftwork_kernels.ops.Operators`, here and below."""
        panels = super().prepare_weight(weight)
        if unavailable(weight.dtype) is not None:
            return panels
        return replace(panels, large=Weight(_pack(weight), panels.out_features, panels.in_features, WeightLayout.ONEDNN))

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if weight.large is None or x.shape[0] < self._from_rows:
            return super().linear(x, weight, bias, out_dtype)
        product = self._product(x, weight.large)
        if bias is None and out_dtype == product.dtype:
            return product
        return linear.linear(self.issuer, x, weight, bias, out_dtype, product)

    def adapter_linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        memory: AdapterMemory,
        batch: AdapterBatch,
        sites: tuple[LinearSite, ...],
        out_dtype: torch.dtype,
    ) -> Tensor:
        product = None
        if weight.large is not None and x.shape[0] >= self._from_rows:
            product = self._product(x, weight.large)
        return linear.adapter_linear(self.issuer, x, weight, bias, memory, batch, sites, out_dtype, product)

    def _product(self, x: Tensor, weight: Weight) -> Tensor:
        """x Wᵀ in x's type."""
        self.issuer.compute("a product of oneDNN")
        return _multiply(x, weight.data)


def unavailable(dtype: torch.dtype) -> str | None:
    """Why products of ``dtype`` cannot be oneDNN's; None where they can."""
    if dtype not in linear.FLOAT_TYPES:
        return f"the compiled operators add nothing to a product in {dtype}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch was built without oneDNN"
    try:
        _multiply(torch.ones(1, 1, dtype=dtype), _pack(torch.ones(1, 1, dtype=dtype)))
    except (AttributeError, RuntimeError) as error:  # it asks for instructions, or torch has these operators no more
        return str(error).partition("\n")[0]
    return None


# Torch's compiler has these two for models that it freezes: `torch/_inductor/fx_passes/mkldnn_fusion.py`.


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _USUAL_ROWS)
    return packed


def _multiply(x: Tensor, packed: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return product
