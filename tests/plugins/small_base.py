"""A base with few tensors, and the kinds of tensors that adapters for it bring whole."""

from __future__ import annotations

import torch

from graftwork_adapters import wholes
from graftwork_adapters.packed import PackedWhole
from graftwork_adapters.whole_memory import WholeLimits

VOCAB, HIDDEN = 10, 8
UP, UP_SITE = "model.layers.0.mlp.up_proj.weight", 2
SHAPES = {
    wholes.EMBEDDING: (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    UP: (12, HIDDEN),
    "model.layers.0.mlp.up_proj.bias": (12,),
}

NORM = (PackedWhole("model.norm.weight", "float32", (HIDDEN,)),)
NARROW_NORM = (PackedWhole("model.norm.weight", "bfloat16", (HIDDEN,)),)
HEAD = (PackedWhole(wholes.HEAD, "bfloat16", (VOCAB, HIDDEN)), PackedWhole(wholes.HEAD_SCALE, "float32", (VOCAB,)))
LINEAR = (PackedWhole(UP, "float32", (12, HIDDEN)), PackedWhole("model.layers.0.mlp.up_proj.bias", "float32", (12,)))
TOKENS = (PackedWhole(wholes.EMBEDDING_TOKENS, "int64", (3,)), PackedWhole(wholes.EMBEDDING_ROWS, "bfloat16", (3, HIDDEN)))
WIDE = (PackedWhole(wholes.EMBEDDING, "float32", (VOCAB + 2, HIDDEN)), PackedWhole(wholes.HEAD, "float32", (VOCAB + 2, HIDDEN)))


def limits(num_bytes: int = 4096, dtype: torch.dtype = torch.float32) -> WholeLimits:
    return WholeLimits(num_bytes, SHAPES, {UP: UP_SITE}, dtype)
