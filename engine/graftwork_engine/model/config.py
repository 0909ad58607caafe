"""The base model's shape and everything else in its files that changes what it computes. Knows no torch.

Reads a Hugging Face folder's ``config.json`` (as transformers 4 and 5 write it) and ``generation_config.json``. What the engine
does not serve is refused by the name of the field, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from graftwork_adapters.base_spec import PROJECTIONS
from graftwork_engine.errors import UnsupportedModel

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes by itself, and the values that its config may leave out."""

    model_type: str
    max_position_embeddings: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden size over query heads
    qkv_bias: bool | None = None  # None: the config's ``attention_bias`` decides for q, k, v and o
    qk_norm: bool = False
    fuses_projections: bool = False
    rms_norm_eps: float = 1e-6


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", max_position_embeddings=2048),
    "Qwen2ForCausalLM": Family("qwen2", max_position_embeddings=32768, num_kv_heads=32, qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", max_position_embeddings=32768, num_kv_heads=32, head_dim=128, qk_norm=True),
    "Phi3ForCausalLM": Family("phi3", max_position_embeddings=4096, qkv_bias=False, fuses_projections=True, rms_norm_eps=1e-5),
}
"""Every architecture that is served, by its name in ``config.json``."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's stretching of rotary wavelengths ("The Llama 3 Herd of Models", 2024)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: its base and, for Llama 3, its scaling."""

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. Every field changes its output, but for the last two, which bound and end it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm of each query and key head before the rotation
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_sites(self) -> int:
        """Projections that an adapter can attach to, over all layers."""
        return self.num_layers * len(PROJECTIONS)

    @property
    def fuses_projections(self) -> bool:
        """Whether its files hold q, k and v as one matrix, and gate and up as another."""
        return FAMILIES[self.architecture].fuses_projections

    @classmethod
    def from_dir(cls, path: Path) -> ModelConfig:
        """Read a model folder; raises `UnsupportedModel` naming whatever is missing, malformed or not served."""
        fields = _Fields(path / "config.json")
        family = FAMILIES[_served_architecture(fields)]
        _refuse_unserved(fields)
        num_heads = fields.positive("num_attention_heads")
        hidden_size = fields.positive("hidden_size")
        attention_bias = fields.get("attention_bias", bool, False)
        max_positions = fields.positive("max_position_embeddings", family.max_position_embeddings)
        config = cls(
            architecture=fields.architecture,
            vocab_size=fields.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=fields.positive("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, family, num_heads),
            head_dim=fields.positive("head_dim", family.head_dim or hidden_size // num_heads),
            rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
            rope=_rope(fields, max_positions),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias and family.qkv_bias is None,
            mlp_bias=fields.get("mlp_bias", bool, False) and family.model_type == "llama",
            qk_norm=family.qk_norm,
            tie_word_embeddings=fields.get("tie_word_embeddings", bool, False),
            max_position_embeddings=max_positions,
            eos_token_ids=_eos_token_ids(path, fields),
        )
        if config.num_heads % config.num_kv_heads:
            fields.refuse("num_key_value_heads", config.num_kv_heads, f"it must divide num_attention_heads, {config.num_heads}")
        if config.head_dim % 2:
            fields.refuse("head_dim", config.head_dim, "rotary embedding needs an even one")
        return config


class _Fields:
    """One JSON object read by field, with a typed refusal for anything that is not what it should be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.architecture = ""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UnsupportedModel(f"{path} cannot be read: {error}") from error
        if not isinstance(raw, dict):
            raise UnsupportedModel(f"{path} is not a JSON object")
        self.raw: dict[str, object] = raw

    def refuse(self, field: str, value: object, reason: str) -> NoReturn:
        raise UnsupportedModel(f"{self.path}: {field} = {json.dumps(value)} is not supported: {reason}")

    def get(self, field: str, kind: type[_T], default: _T) -> _T:
        """The field, or ``default`` where it is absent or null."""
        value = self.raw.get(field)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.refuse(field, value, f"expected {kind.__name__}")
        return value

    def positive(self, field: str, default: int = 0) -> int:
        """A positive integer; a ``default`` of 0 makes the field required."""
        value = self.get(field, int, default)
        if value <= 0:
            self.refuse(field, self.raw.get(field), "expected a positive integer")
        return value

    def number(self, field: str, default: float) -> float:
        value = self.raw.get(field, default)
        return default if value is None else self.as_number(field, value)

    def as_number(self, field: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.refuse(field, value, "expected a positive number")
        return float(value)


def _served_architecture(fields: _Fields) -> str:
    names = fields.get("architectures", list, [])
    served = ", ".join(FAMILIES)
    if len(names) != 1 or names[0] not in FAMILIES:
        fields.refuse("architectures", names, f"served are {served}")
    fields.architecture = names[0]
    expected = FAMILIES[names[0]].model_type
    if (model_type := fields.get("model_type", str, expected)) != expected:
        fields.refuse("model_type", model_type, f"{names[0]} goes with {expected}")
    return fields.architecture


def _refuse_unserved(fields: _Fields) -> None:
    """Fields that would change the arithmetic in ways that are not implemented."""
    if fields.raw.get("quantization_config") is not None:
        fields.refuse("quantization_config", fields.raw["quantization_config"], "quantised bases are not served")
    if (act := fields.get("hidden_act", str, "silu")) != "silu":
        fields.refuse("hidden_act", act, "served is silu")
    if fields.get("use_sliding_window", bool, False):
        fields.refuse("use_sliding_window", True, "attention over a sliding window is not served")
    # Qwen writes the width of a window it does not use; in other configs the field can only mean that one is wanted.
    window = fields.raw.get("sliding_window")
    if fields.architecture in ("LlamaForCausalLM", "Phi3ForCausalLM") and window is not None:
        fields.refuse("sliding_window", window, "attention over a sliding window is not served")
    if any(kind != "full_attention" for kind in fields.get("layer_types", list, [])):
        fields.refuse("layer_types", fields.raw["layer_types"], "served is full_attention alone")
    if fields.raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        fields.refuse("partial_rotary_factor", fields.raw["partial_rotary_factor"], "heads are rotated whole")
    if fields.get("rope_interleaved", bool, False):
        fields.refuse("rope_interleaved", True, "the two halves of a head are rotated against each other")


def _num_kv_heads(fields: _Fields, family: Family, num_heads: int) -> int:
    if "num_key_value_heads" in fields.raw and fields.raw["num_key_value_heads"] is None:
        return num_heads  # an explicit null means plain multi-head attention in every family
    return fields.positive("num_key_value_heads", family.num_kv_heads or num_heads)


def _rope(fields: _Fields, max_positions: int) -> RopeConfig:
    """Rotary settings from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before it)."""
    source = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    rope: dict[str, object] = fields.get(source, dict, {})
    if any(isinstance(value, dict) for value in rope.values()):
        fields.refuse(source, rope, "one rotation for all layers is served")
    theta = fields.as_number(f"{source}.rope_theta", rope.get("rope_theta") or fields.number("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        fields.refuse(f"{source}.partial_rotary_factor", rope["partial_rotary_factor"], "heads are rotated whole")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind != "llama3":
        fields.refuse(f"{source}.rope_type", kind, "served are default and llama3")
    low, high = (fields.as_number(f"{source}.{name}", rope.get(name)) for name in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        fields.refuse(f"{source}.low_freq_factor", low, f"it must be below high_freq_factor, {high}")
    trained = fields.raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or max_positions
    name = f"{source}.original_max_position_embeddings"
    return RopeConfig(
        theta,
        Llama3Scaling(fields.as_number(f"{source}.factor", rope.get("factor")), low, high, int(fields.as_number(name, trained))),
    )


def _eos_token_ids(path: Path, config: _Fields) -> tuple[int, ...]:
    """End-of-sequence ids; the generation config's stand above the model's, as transformers has it."""
    sources = [config]
    if (path / "generation_config.json").exists():
        sources.insert(0, _Fields(path / "generation_config.json"))
    for fields in sources:
        value = fields.raw.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            fields.refuse("eos_token_id", value, "expected a token id or a list of them")
        return tuple(ids)
    return ()
