"""Which tensors an adapter may bring whole, and of what shapes, for a given base. Knows no torch and no values.

The bytes of a packed file have a checksum, its index only a key: an index that says what does not fit the base must not get as far
as the model, where it would end the step of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from graftwork_adapters import wholes
from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.errors import BlobCorrupt
from graftwork_adapters.packed import ROW_ALIGNMENT, PackedIndex, PackedWhole
from graftwork_adapters.wholes import WholeFacts

VECTORS = frozenset({wholes.EMBEDDING_SCALE, wholes.HEAD_SCALE, wholes.HEAD_BIAS})
"""Of a number for each column, kept in fp32 whatever the model computes in."""

TOKEN_IDS = {wholes.EMBEDDING_TOKENS: wholes.EMBEDDING_ROWS, wholes.HEAD_TOKENS: wholes.HEAD_ROWS}
"""The tensors of ids, with the rows that stand for those tokens."""

_TOGETHER = (
    (wholes.EMBEDDING_TOKENS, wholes.EMBEDDING_ROWS),
    (wholes.EMBEDDING_LORA_A, wholes.EMBEDDING_LORA_B),
    (wholes.HEAD_TOKENS, wholes.HEAD_ROWS),
    (wholes.HEAD_LORA_A, wholes.HEAD_LORA_B),
)


def whole_shapes(spec: BaseSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of a base that adapters may bring whole, by the packed form's names; of fused projections, the parts."""
    shapes: dict[str, tuple[int, ...]] = {wholes.EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for site in spec.sites:
        shapes[f"{site.module}.weight"] = (site.out_features, site.in_features)
        if site.has_bias:
            shapes[f"{site.module}.bias"] = (site.out_features,)
    return shapes | {f"{module}.weight": (size,) for module, size in spec.norms}


def weight_sites(spec: BaseSpec) -> dict[str, int]:
    """The numbers of the projections that rows can attach to, by the names of their weights."""
    return {f"{site.module}.weight": site.index for site in spec.sites}


def held_bytes(whole: PackedWhole, element_bytes: int) -> int:
    """What a tensor takes where a model that computes in elements of so many bytes has it, padding included."""
    size = {"int64": 8}.get(whole.dtype, 4 if whole.name in VECTORS else element_bytes)
    return -(-math.prod(whole.shape) * size // ROW_ALIGNMENT) * ROW_ALIGNMENT


def check_wholes(index: PackedIndex, base: Mapping[str, tuple[int, ...]], sites: Mapping[str, int]) -> None:
    """Raise `BlobCorrupt` unless everything that ``index`` says of wholes fits a base with these `whole_shapes`.

    ``sites`` are its `weight_sites`. An adapter brings rows for a projection or the projection whole, not both.
    """
    found = _shapes(index)
    if not found:
        return
    if not base:
        raise BlobCorrupt(f"packed adapter {index.key} brings tensors whole, which this base is not served with")
    due = _due_shapes(found, base)
    for name, shape in found.items():
        if name not in due:
            raise _corrupt(index, name, "has no place in this base")
        if shape != due[name]:
            raise _corrupt(index, name, f"is {list(shape)}, the base calls for {list(due[name])}")
    for first, second in _TOGETHER:
        if (first in found) != (second in found):
            raise BlobCorrupt(f"packed adapter {index.key} has one of {first} and {second} without the other")
    if (rows := head_rows(found, base)) > (most := embedding_rows(found, base)):
        raise BlobCorrupt(f"packed adapter {index.key}: its head can draw {rows} tokens, its embedding knows {most}")
    with_rows = {site.index for site in index.sites}
    for name in found:
        if sites.get(name) in with_rows:
            raise BlobCorrupt(f"packed adapter {index.key} brings {name} whole and has rows for it as well")


def embedding_rows(found: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> int:
    """Tokens that can be looked up, given the shapes of an adapter's wholes and of the base."""
    return found.get(wholes.EMBEDDING, base[wholes.EMBEDDING])[0]


def head_rows(found: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> int:
    """Tokens that have a logit."""
    return found.get(wholes.HEAD, base[wholes.EMBEDDING])[0]


def whole_facts(index: PackedIndex, num_bytes: int) -> WholeFacts | None:
    """What there is to know of a checked index whose wholes take so many bytes; None if it has none."""
    if not index.wholes:
        return None
    found = {whole.name: whole.shape for whole in index.wholes}
    own = found.get(wholes.EMBEDDING) or found.get(wholes.HEAD)
    return WholeFacts(num_bytes, None if own is None else own[0])


def _shapes(index: PackedIndex) -> dict[str, tuple[int, ...]]:
    """Of the wholes by name, each there once, with elements, of a type that it can have."""
    found: dict[str, tuple[int, ...]] = {}
    for whole in index.wholes:
        if whole.name in found:
            raise _corrupt(index, whole.name, "is there twice")
        if any(size < 1 for size in whole.shape):
            raise _corrupt(index, whole.name, "has no elements")
        if whole.dtype not in _types(whole.name):
            raise _corrupt(index, whole.name, f"is {whole.dtype}, due is {' or '.join(_types(whole.name))}")
        found[whole.name] = whole.shape
    return found


def _due_shapes(found: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """By name what is due of the wholes in ``found``, of which some fix the shape of others."""
    _, hidden = base[wholes.EMBEDDING]
    own_rows, logits = embedding_rows(found, base), head_rows(found, base)

    def length(name: str, axis: int) -> int:
        return found[name][axis] if len(found.get(name, ())) > axis else 0

    tokens, head_tokens = length(wholes.EMBEDDING_TOKENS, 0), length(wholes.HEAD_TOKENS, 0)
    rank, head_rank = length(wholes.EMBEDDING_LORA_A, 1), length(wholes.HEAD_LORA_A, 0)
    return {
        **base,
        wholes.EMBEDDING: (own_rows, hidden),
        wholes.EMBEDDING_TOKENS: (min(tokens, own_rows),),
        wholes.EMBEDDING_ROWS: (tokens, hidden),
        wholes.EMBEDDING_LORA_A: (own_rows, rank),
        wholes.EMBEDDING_LORA_B: (hidden, rank),
        wholes.EMBEDDING_SCALE: (hidden,),
        wholes.HEAD: (logits, hidden),
        wholes.HEAD_TOKENS: (min(head_tokens, logits),),
        wholes.HEAD_ROWS: (head_tokens, hidden),
        wholes.HEAD_LORA_A: (head_rank, hidden),
        wholes.HEAD_LORA_B: (logits, head_rank),
        wholes.HEAD_SCALE: (logits,),
        wholes.HEAD_BIAS: (logits,),
    }


def _types(name: str) -> tuple[str, ...]:
    if name in TOKEN_IDS:
        return ("int64",)
    return ("float32",) if name in VECTORS else ("bfloat16", "float32")


def _corrupt(index: PackedIndex, name: str, trouble: str) -> BlobCorrupt:
    return BlobCorrupt(f"packed adapter {index.key}: {name} {trouble}")
