"""Where LoRA can attach to a base model, read from its config and tensor headers alone. Knows no tensors' values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from graftwork_adapters.base_id import base_id
from graftwork_adapters.errors import InvalidSafetensors, UnsupportedBase
from graftwork_adapters.safetensors_header import TensorEntry, read_header

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM")

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

FUSED_PROJECTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
)
"""A fused projection of some bases and trainers, and the projections whose rows it holds one after the other."""


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
    head_dim: int | None = None  # outputs of one attention head; None where the config does not say
    vocab_size: int = 0
    hidden_size: int = 0
    is_tied: bool = False  # the head is the embedding
    norms: tuple[tuple[str, int], ...] = ()  # module path and length of every norm, in name order
    num_weight_bytes: int = 0  # of all its tensors together, as its files hold them
    fuses_projections: bool = False  # its files hold `FUSED_PROJECTIONS`, which PEFT then knows and their parts not

    def site(self, module: str) -> Site | None:
        """The site of a module path, or None where LoRA cannot attach."""
        return next((s for s in self.sites if s.module == module), None)


def load_base_spec(model_dir: Path, cache_dir: Path | None = None, *, name: str | None = None) -> BaseSpec:
    """Describe the base model in ``model_dir`` (a Hugging Face folder) from `config.json` and its safetensors files.

    ``cache_dir`` keeps the base id between starts (`base_id.base_id`); ``name`` is what adapters call this base, the folder's own
    name if None. Raises `UnsupportedBase`.
    """
    config = _read_object(model_dir / "config.json")
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedBase(f"architecture {architecture} is not served; served are {', '.join(SUPPORTED_ARCHITECTURES)}")
    num_layers = config.get("num_hidden_layers")
    if type(num_layers) is not int or num_layers < 1:
        raise UnsupportedBase(f"config.json: num_hidden_layers is {num_layers!r}")
    tensors = read_base_tensors(model_dir)
    modules = {tensor.rpartition(".")[0] for tensor in tensors}
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or len(embedding[1].shape) != 2:
        raise UnsupportedBase("the base has no matrix model.embed_tokens.weight, which its architecture calls for")
    vocab_size, hidden_size = embedding[1].shape
    return BaseSpec(
        base_id=base_id(model_dir, tensors, cache_dir),
        name=name or model_dir.resolve().name,
        architecture=architecture,
        num_layers=num_layers,
        sites=tuple(_site(layer, place, tensors) for layer in range(num_layers) for place in range(len(PROJECTIONS))),
        # A tied head has no tensor of its own and is a module all the same.
        module_names=frozenset(modules | {"lm_head"}),
        head_dim=_head_dim(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        is_tied=config.get("tie_word_embeddings") is True,
        norms=tuple(
            (name.removesuffix(".weight"), entry.shape[0])
            for name, (_, entry) in sorted(tensors.items())
            if name.endswith(".weight") and len(entry.shape) == 1
        ),
        num_weight_bytes=sum(entry.end - entry.start for _, entry in tensors.values()),
        fuses_projections=any(map(_is_fused, _read_tensors(model_dir))),
    )


def _head_dim(config: Mapping[str, object]) -> int | None:
    named, hidden, heads = config.get("head_dim"), config.get("hidden_size"), config.get("num_attention_heads")
    if type(named) is int and named > 0:
        return named
    return hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None


def _site(layer: int, place: int, tensors: Mapping[str, tuple[Path, TensorEntry]]) -> Site:
    projection = PROJECTIONS[place]
    module = f"model.layers.{layer}.{projection}"
    weight = tensors.get(f"{module}.weight")
    if weight is None or len(weight[1].shape) != 2:
        raise UnsupportedBase(f"the base has no matrix {module}.weight, which its architecture calls for")
    out_features, in_features = weight[1].shape
    return Site(
        index=layer * len(PROJECTIONS) + place,
        layer=layer,
        projection=projection,
        module=module,
        in_features=in_features,
        out_features=out_features,
        has_bias=f"{module}.bias" in tensors,
    )


def read_base_tensors(model_dir: Path) -> dict[str, tuple[Path, TensorEntry]]:
    """Every tensor of the model's shards and the file it lies in, fused projections as their parts. Raises `UnsupportedBase`."""
    tensors = _read_tensors(model_dir)
    if not any(map(_is_fused, tensors)):
        return tensors
    config = _read_object(model_dir / "config.json")
    return dict(part for name, (path, entry) in tensors.items() for part in _split(name, path, entry, config))


def _is_fused(tensor: str) -> bool:
    return tensor.removesuffix(".weight").endswith(tuple(FUSED_PROJECTIONS))


def _split(
    name: str, path: Path, entry: TensorEntry, config: Mapping[str, object]
) -> Iterator[tuple[str, tuple[Path, TensorEntry]]]:
    """The tensor, or the parts of a fused projection's: their rows lie one after the other, so each is a stretch of its bytes."""
    module, _, kind = name.rpartition(".")
    fused = next((fused for fused in FUSED_PROJECTIONS if module.endswith(f".{fused}")), None)
    if fused is None:
        yield name, (path, entry)
        return
    sizes = _part_sizes(fused, entry, config)
    row_bytes = (entry.end - entry.start) // max(1, entry.shape[0])
    start = entry.start
    for part, size in zip(FUSED_PROJECTIONS[fused], sizes, strict=True):
        name = f"{module.removesuffix(fused)}{part}.{kind}"
        end = start + size * row_bytes
        yield name, (path, TensorEntry(name, entry.dtype, (size, *entry.shape[1:]), start, end))
        start = end


def _part_sizes(fused: str, entry: TensorEntry, config: Mapping[str, object]) -> list[int]:
    """How many rows of a fused tensor each part has; raises `UnsupportedBase` if the config's shape is another one."""
    num_rows = entry.shape[0] if entry.shape else 0
    if fused == "mlp.gate_up_proj":
        sizes = [num_rows // 2] * 2
    else:
        heads, head_dim = config.get("num_attention_heads"), _head_dim(config)
        kv_heads = config.get("num_key_value_heads", heads) or heads
        if type(heads) is not int or type(kv_heads) is not int or head_dim is None:
            raise UnsupportedBase(f"config.json does not say how many heads {entry.name} holds")
        sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    if sum(sizes) != num_rows:
        raise UnsupportedBase(f"{entry.name} has {num_rows} rows, config.json calls for {sizes}")
    return sizes


def _read_tensors(model_dir: Path) -> dict[str, tuple[Path, TensorEntry]]:
    index_path = model_dir / "model.safetensors.index.json"
    shards = {"model.safetensors"}
    if index_path.is_file():
        weight_map = _read_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UnsupportedBase("model.safetensors.index.json has no weight_map")
        shards = set(weight_map.values())
    tensors: dict[str, tuple[Path, TensorEntry]] = {}
    for shard in sorted(shards, key=str):
        if not isinstance(shard, str) or not re.fullmatch(r"[\w.-]+\.safetensors", shard):
            raise UnsupportedBase(f"model.safetensors.index.json names the shard {shard!r}")
        # The model hub's local cache is made of links; the base is the operator's own, so they are followed.
        path = (model_dir / shard).resolve()
        try:
            header = read_header(path)
        except (InvalidSafetensors, OSError) as error:
            raise UnsupportedBase(f"{shard} cannot be read: {error}") from error
        tensors.update((entry.name, (path, entry)) for entry in header.tensors)
    return tensors


def _read_object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UnsupportedBase(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedBase(f"{path.name} is not a JSON object")
    return value
