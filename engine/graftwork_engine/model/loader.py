"""Fills a model from the safetensors files of its folder, a tensor at a time. Knows no architecture: models name their tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graftwork_engine.errors import UnsupportedModel
from graftwork_engine.model.llama import Llama

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

TIED_HEAD = "lm_head.weight"
"""Some checkpoints bring the head although it is the embedding."""

DERIVED_SUFFIX = ".rotary_emb.inv_freq"
"""Old checkpoints bring the rotary frequencies, which the config determines."""

FLOAT_TYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


def load_weights(model: Llama, path: Path) -> None:
    """Fill every parameter of ``model`` exactly once, casting to its element type.

    Raises `UnsupportedModel` for a file that cannot be read, for a tensor that is missing, unexpected, there twice, of another
    shape or not of floats, and for a head that the config calls tied but that differs from the embedding.
    """
    waiting = dict(model.destinations())
    expected = frozenset(waiting)
    tied_head: Tensor | None = None
    for name, tensor in _tensors(path):
        if name.endswith(DERIVED_SUFFIX):
            continue
        if name == TIED_HEAD and model.config.tie_word_embeddings:
            tied_head = tensor
            continue
        destination = waiting.pop(name, None)
        if destination is None:
            trouble = "is there twice" if name in expected else f"has no place in {model.config.architecture} with this config"
            raise UnsupportedModel(f"{path}: tensor {name} {trouble}")
        if tensor.dtype not in FLOAT_TYPES:
            raise UnsupportedModel(f"{path}: tensor {name} is {tensor.dtype}; served are bfloat16, float16, float32 and float64")
        if tensor.shape != destination.shape:
            raise UnsupportedModel(f"{path}: tensor {name} is {list(tensor.shape)}, the config says {list(destination.shape)}")
        destination.copy_(tensor)
    if waiting:
        some = ", ".join(sorted(waiting)[:8])
        raise UnsupportedModel(f"{path}: {len(waiting)} tensors are missing: {some}{', …' if len(waiting) > 8 else ''}")
    head = model.lm_head.weight.data
    if tied_head is not None and not torch.equal(tied_head.to(head), head):
        raise UnsupportedModel(f"{path}: tie_word_embeddings is true, but {TIED_HEAD} is not the embedding")


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder; at no time is more than one of them in memory because of this."""
    for file in _shards(path):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - a safetensors file is no mapping
                    yield name, shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{file} cannot be read: {error}") from error


def _shards(path: Path) -> list[Path]:
    """The folder's safetensors files: the single one, or those that the index lists."""
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.exists() and index.exists():
        raise UnsupportedModel(f"{path} holds both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is out of date")
    if single.exists():
        return [single]
    if not index.exists():
        raise UnsupportedModel(f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}; other formats are not served")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{index} cannot be read: {error!r}") from error
    return [path / str(name) for name in names]
