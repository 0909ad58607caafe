"""A Hugging Face model that computes what a packed adapter says, by the formulas alone: for comparing with PEFT's own model."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import LlamaForCausalLM

from graftwork_adapters import wholes
from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.packed import ABSENT, PackedIndex

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}


def read_wholes(index: PackedIndex, rows: np.ndarray) -> dict[str, Tensor]:
    """The tensors that lie whole behind the rows, floats as fp32."""
    found = {}
    for whole, start in zip(index.wholes, index.whole_starts, strict=True):
        tensor = torch.from_numpy(rows[start : start + whole.num_bytes].copy()).view(_TYPES[whole.dtype]).reshape(whole.shape)
        found[whole.name] = tensor if whole.dtype == "int64" else tensor.float()
    return found


class PackedLinear(nn.Module):
    """y = c ⊙ (x Wᵀ + (x Aᵀ) Bᵀ) + bias, from fp32 rows."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor, scale: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.base, self.a, self.b, self.scale = base, a, b, scale
        self.bias = base.bias if bias is None else bias

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.base.weight) + linear(x, self.a) @ self.b
        y = y if self.scale is None else self.scale * y
        return y if self.bias is None else y + self.bias


class PackedEmbedding(nn.Module):
    """The embedding's formula of `wholes.py`."""

    def __init__(self, base: nn.Embedding, found: dict[str, Tensor]) -> None:
        super().__init__()
        self.weight = _with_rows(
            found.get(wholes.EMBEDDING, base.weight), found.get(wholes.EMBEDDING_TOKENS), found.get(wholes.EMBEDDING_ROWS)
        )
        self.a, self.b, self.scale = (
            found.get(name) for name in (wholes.EMBEDDING_LORA_A, wholes.EMBEDDING_LORA_B, wholes.EMBEDDING_SCALE)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = embedding(ids, self.weight)
        if self.a is not None and self.b is not None:
            x = x + embedding(ids, self.a) @ self.b.T
        return x if self.scale is None else self.scale * x


class PackedHead(nn.Module):
    """The head's formula of `wholes.py`; its weight is the base's own, never the adapter's embedding."""

    def __init__(self, base: Tensor, found: dict[str, Tensor]) -> None:
        super().__init__()
        self.weight = _with_rows(found.get(wholes.HEAD, base), found.get(wholes.HEAD_TOKENS), found.get(wholes.HEAD_ROWS))
        self.a, self.b, self.scale = (found.get(name) for name in (wholes.HEAD_LORA_A, wholes.HEAD_LORA_B, wholes.HEAD_SCALE))
        self.bias = found.get(wholes.HEAD_BIAS)

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight)
        if self.a is not None and self.b is not None:
            y = y + linear(linear(x, self.a), self.b)
        y = y if self.scale is None else self.scale * y
        return y if self.bias is None else y + self.bias


def _with_rows(weight: Tensor, ids: Tensor | None, rows: Tensor | None) -> Tensor:
    if ids is None or rows is None:
        return weight
    assert torch.equal(ids, ids.sort().values)
    return weight.detach().index_copy(0, ids, rows)


def packed_model(base: LlamaForCausalLM, index: PackedIndex, rows: np.ndarray, spec: BaseSpec) -> LlamaForCausalLM:
    """A copy of ``base`` with the fp32 packed form in it."""
    assert index.row_type == "float32"
    model = copy.deepcopy(base)
    offsets = np.concatenate([[0], np.cumsum(index.row_bytes)])

    def read(first: int, count: int, length: int) -> Tensor:
        held = [rows[offsets[row] : offsets[row] + 4 * length].copy().view(np.float32) for row in range(first, first + count)]
        return torch.from_numpy(np.array(held, dtype=np.float32).reshape(count, length))

    for packed in index.sites:
        site = spec.sites[packed.index]
        assert packed.rank or packed.bias_row != ABSENT
        scale, bias = (None if row == ABSENT else read(row, 1, site.out_features)[0] for row in (packed.scale_row, packed.bias_row))
        a, b = read(packed.a_row, packed.rank, site.in_features), read(packed.b_row, packed.rank, site.out_features)
        linear_layer = model.get_submodule(site.module)
        assert isinstance(linear_layer, nn.Linear)
        model.set_submodule(site.module, PackedLinear(linear_layer, a, b, scale, bias))
    found = read_wholes(index, rows)
    head = model.lm_head.weight
    for name, tensor in found.items():
        if not name.startswith(("model.embed_tokens.", "lm_head.")):
            module, _, part = name.rpartition(".")
            setattr(model.get_submodule(module), part, nn.Parameter(tensor))
    model.model.embed_tokens = PackedEmbedding(model.model.embed_tokens, found)
    model.lm_head = PackedHead(head, found)
    return model.eval()
