"""What the decoders are built of: linears that can carry adapters, norms, the embedding and the rotary table.

A layer owns plain tensors and says under which names a checkpoint brings them (`Destinations`), so that the loader needs to know no
model. Refuses to know requests and which implementation of an operator runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graftwork_adapters.base_spec import PROJECTIONS
from graftwork_engine.model import wholes
from graftwork_engine.model.config import Llama3Scaling, RopeConfig
from graftwork_engine.model.wholes import WholeGroup
from graftwork_kernels.layout import AdapterBatch, AdapterMemory, AttentionBatch, LinearSite, Weight
from graftwork_kernels.ops import Operators

Destinations = Iterator[tuple[str, Tensor]]
"""(Name in the checkpoint, the part of a parameter it fills); together they cover every parameter exactly once."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Element type and device of a model's parameters."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        """A parameter that waits for the loader."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All that the layers need to know of a step beside its rows: the operators that compute it, and what those ask for.

    ``positions`` int64 [T]: each row's place in its sequence. ``wholes``: the rows whose adapters bring tensors whole; a pass that
    is recorded has none.
    """

    ops: Operators
    positions: Tensor
    attention: AttentionBatch
    adapters: AdapterBatch
    adapter_memory: AdapterMemory
    wholes: tuple[WholeGroup, ...] = ()


class RmsNorm:
    """Root mean square norm (Zhang and Sennrich, 2019) over the last dimension."""

    def __init__(self, name: str, size: int, eps: float, place: Placement) -> None:
        self.name = name
        self.eps = eps
        self.weight = place.empty(size)

    def destinations(self) -> Destinations:
        """The norm's weight."""
        yield f"{self.name}.weight", self.weight

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Norm of ``x`` [T, ..., size]."""
        normed = batch.ops.rms_norm(x, self.weight, self.eps)
        if batch.wholes:
            wholes.norm(batch.ops, x, self.name, self.eps, normed, batch.wholes)
        return normed

    def add(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """(norm of ``x + residual`` [T, size], ``x + residual`` in fp32)."""
        normed, total = batch.ops.add_rms_norm(x, residual, self.weight, self.eps)
        if batch.wholes:
            wholes.norm(batch.ops, total, self.name, self.eps, normed, batch.wholes)
        return normed, total


class Projections:
    """One or several projections of the same input computed as one product; each can carry adapters of its own.

    ``sizes`` maps places in `PROJECTIONS` to output features, in the order in which the outputs lie side by side. ``fused``: the
    name under which a checkpoint brings all of them as one, None where each has its own.
    """

    def __init__(
        self, layer: int, in_features: int, sizes: Mapping[str, int], bias: bool, place: Placement, fused: str | None = None
    ) -> None:
        self.layer = layer
        self.fused = fused
        self.modules = tuple(f"model.layers.{layer}.{name}" for name in sizes)
        self.sizes = tuple(sizes.values())
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.sites = tuple(
            LinearSite(layer * len(PROJECTIONS) + PROJECTIONS.index(name), start, size)
            for (name, size), start in zip(sizes.items(), starts, strict=True)
        )
        self.weight = Weight.plain(place.empty(sum(self.sizes), in_features))
        self.bias = place.empty(sum(self.sizes)) if bias else None

    def destinations(self) -> Destinations:
        """Each projection's rows of the packed weight and bias."""
        if self.fused is not None:
            yield f"model.layers.{self.layer}.{self.fused}.weight", self.weight.data
            return
        for module, site in zip(self.modules, self.sites, strict=True):
            yield f"{module}.weight", self.weight.data[site.start : site.start + site.size]
            if self.bias is not None:
                yield f"{module}.bias", self.bias[site.start : site.start + site.size]

    def prepare(self, ops: Operators) -> None:
        """Hand the loaded weight to the operators that will read it; nothing can be loaded into it afterwards."""
        self.weight = ops.prepare_weight(self.weight.data)

    def __call__(self, x: Tensor, batch: ForwardBatch, out_dtype: torch.dtype | None = None) -> Tensor:
        """[T, in_features] → [T, sum of sizes], in x's type if ``out_dtype`` is None."""
        memory, adapters = batch.adapter_memory, batch.adapters
        out = batch.ops.adapter_linear(x, self.weight, self.bias, memory, adapters, self.sites, out_dtype=out_dtype)
        if batch.wholes:
            for module, site in zip(self.modules, self.sites, strict=True):
                columns = slice(site.start, site.start + site.size)
                bias = None if self.bias is None else self.bias[columns]
                wholes.linear(batch.ops, x, module, bias, out[:, columns], batch.wholes)
        return out


class Embedding:
    """A row for each token id; also the head's matrix where the two are tied."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, place: Placement) -> None:
        self.name = name
        self.weight = Weight.plain(place.empty(vocab_size, hidden_size))

    def destinations(self) -> Destinations:
        """The whole matrix."""
        yield f"{self.name}.weight", self.weight.data

    def prepare(self, ops: Operators) -> None:
        """As `Projections.prepare`."""
        self.weight = ops.prepare_weight(self.weight.data)

    def __call__(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T] → [T, hidden]."""
        if batch.wholes:
            return wholes.embed(batch.ops, token_ids, self.weight, batch.wholes)
        return batch.ops.embedding(token_ids, self.weight)


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """fp32 [num_positions, head_dim]: cosines of each position's angles, then their sines (RoFormer, Su et al., 2021)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling is not None:
        frequencies = _stretch(frequencies, rope.scaling)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend in between, as Llama 3.1 does."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    blend = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < shortest, frequencies, stretched)
