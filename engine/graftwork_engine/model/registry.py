"""Which class runs which architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from graftwork_engine.errors import UnsupportedModel
from graftwork_engine.model.config import ModelConfig
from graftwork_engine.model.layers import Placement
from graftwork_engine.model.llama import Llama

MODELS: Mapping[str, type[Llama]] = MappingProxyType(
    {"LlamaForCausalLM": Llama, "Qwen2ForCausalLM": Llama, "Qwen3ForCausalLM": Llama, "Phi3ForCausalLM": Llama},
)
"""One entry for each of `graftwork_engine.model.config.FAMILIES`."""


def build_model(config: ModelConfig, max_positions: int, place: Placement) -> Llama:
    """The model of ``config``, its parameters not yet filled, for sequences of up to ``max_positions`` tokens."""
    model = MODELS.get(config.architecture)
    if model is None:
        raise UnsupportedModel(f"no model runs {config.architecture}; served are {', '.join(MODELS)}")
    return model(config, max_positions, place)
