"""Where LoRA can attach to a base model, read from its config and tensor headers alone. Knows no tensors' values."""

from __future__ import annotations

from dataclasses import dataclass

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The decoder's projections in packing order. Site number = layer * len(PROJECTIONS) + place in this tuple."""


@dataclass(frozen=True, slots=True)
class Site:
    """One projection of one layer. ``module`` is its dotted path, for example ``model.layers.3.self_attn.q_proj``."""

    index: int
    layer: int
    projection: str
    module: str
    in_features: int
    out_features: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class BaseSpec:
    """A base model as adapters see it. ``base_id`` is a hash over its tensors' contents (`base_id.py`)."""

    base_id: str
    name: str
    architecture: str
    num_layers: int
    sites: tuple[Site, ...]
    module_names: frozenset[str]  # every module path of the base that has tensors, for telling "absent" from "not served"

    def site(self, module: str) -> Site | None:
        """The site of a module path, or None where LoRA cannot attach."""
        return next((s for s in self.sites if s.module == module), None)
