"""Rows whose adapter brings tensors whole: what its own embedding, norms, linears and head make of them, in place of the base's.

Beside the base's pass, not in it: the base computes all rows of a step, then each group's are written over. A step has few groups,
one for each distinct adapter with wholes; `graftwork_adapters.wholes` has the names and the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftwork_adapters import wholes
from graftwork_kernels.layout import Weight
from graftwork_kernels.ops import Operators


@dataclass(frozen=True, slots=True)
class WholeGroup:
    """``rows`` int64 [n] of a batch are those of one adapter, which brings ``tensors``, by name."""

    rows: Tensor
    tensors: Mapping[str, Tensor]


def is_of_head(name: str) -> bool:
    """Whether a tensor of this name takes part in `logits` alone."""
    return name.startswith("lm_head.")


def embed(ops: Operators, token_ids: Tensor, weight: Weight, groups: Sequence[WholeGroup]) -> Tensor:
    """`Operators.embedding` of int64 [T]; ids of a group's rows may be any that its own embedding has."""
    out = ops.embedding(token_ids.clamp(max=weight.out_features - 1), weight)
    for group in groups:
        tensors = group.tensors
        if not any(name in tensors for name in (wholes.EMBEDDING, wholes.EMBEDDING_TOKENS, wholes.EMBEDDING_LORA_A)):
            continue
        ids = token_ids[group.rows]
        x = tensors[wholes.EMBEDDING][ids] if wholes.EMBEDDING in tensors else out[group.rows]
        if (known := tensors.get(wholes.EMBEDDING_TOKENS)) is not None:
            places = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
            x = torch.where((known[places] == ids)[:, None], tensors[wholes.EMBEDDING_ROWS][places], x)
        if (a := tensors.get(wholes.EMBEDDING_LORA_A)) is not None:
            delta = a[ids].float() @ tensors[wholes.EMBEDDING_LORA_B].float().T
            x = _scaled(x.float() + delta, tensors.get(wholes.EMBEDDING_SCALE)).to(out.dtype)
        out.index_copy_(0, group.rows, x)
    return out


def norm(ops: Operators, x: Tensor, name: str, eps: float, out: Tensor, groups: Sequence[WholeGroup]) -> None:
    """Write over the rows of ``out``, which is the base's norm of ``x`` [T, ..., H], where a group has the norm's ``name``."""
    for group in groups:
        if (weight := group.tensors.get(f"{name}.weight")) is not None:
            normed, _ = ops.add_rms_norm(x[group.rows], None, weight, eps)
            out.index_copy_(0, group.rows, normed)


def linear(ops: Operators, x: Tensor, module: str, bias: Tensor | None, out: Tensor, groups: Sequence[WholeGroup]) -> None:
    """Write over the rows of ``out``, the base's product of ``x`` [T, in] and ``module``, where a group has that whole; with its
    own bias, or the base's ``bias``.
    """
    for group in groups:
        if (weight := group.tensors.get(f"{module}.weight")) is not None:
            own_bias = group.tensors.get(f"{module}.bias", bias)
            made = ops.linear(x[group.rows], Weight.plain(weight), own_bias, out_dtype=out.dtype)
            out.index_copy_(0, group.rows, made)


def logits(ops: Operators, hidden: Tensor, weight: Weight, groups: Sequence[WholeGroup], num_logits: int) -> Tensor:
    """fp32 [rows, V] of ``hidden`` [rows, H], V at least ``num_logits``; -inf beyond what a row's own head has."""
    vocab_size = weight.out_features
    widest = max(vocab_size, num_logits)
    out = ops.linear(hidden, weight, out_dtype=torch.float32)
    if widest > vocab_size:
        narrow, out = out, out.new_full((len(out), widest), float("-inf"))
        out[:, :vocab_size] = narrow
    for group in groups:
        own = _own_logits(ops, hidden[group.rows], out[group.rows, :vocab_size], group.tensors)
        padded = own if own.shape[1] == widest else out.new_full((len(own), widest), float("-inf"))
        padded[:, : own.shape[1]] = own
        out.index_copy_(0, group.rows, padded)
    return out


def within_vocabulary(tokens: Tensor, vocab_size: int, groups: Sequence[WholeGroup]) -> Tensor:
    """``tokens`` int64 [rows], drawn from `logits`, none above what a row's own head has: what is drawn from logits that are not
    finite means nothing, and must still be one that the next step can look up.
    """
    last = torch.full_like(tokens, vocab_size - 1)
    for group in groups:
        if (head := group.tensors.get(wholes.HEAD)) is not None:
            last.index_fill_(0, group.rows, head.shape[0] - 1)
    return torch.minimum(tokens, last)


def _own_logits(ops: Operators, x: Tensor, base: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """fp32 [n, V'] of ``x`` [n, H], whose logits by the ``base`` are a copy."""
    head = tensors.get(wholes.HEAD)
    y = base if head is None else ops.linear(x, Weight.plain(head), out_dtype=torch.float32)
    if (token_ids := tensors.get(wholes.HEAD_TOKENS)) is not None:
        y.index_copy_(1, token_ids, ops.linear(x, Weight.plain(tensors[wholes.HEAD_ROWS]), out_dtype=torch.float32))
    if (a := tensors.get(wholes.HEAD_LORA_A)) is not None:
        h = ops.linear(x, Weight.plain(a))
        y += ops.linear(h, Weight.plain(tensors[wholes.HEAD_LORA_B]), out_dtype=torch.float32)
    y = _scaled(y, tensors.get(wholes.HEAD_SCALE))
    return y if (bias := tensors.get(wholes.HEAD_BIAS)) is None else y + bias


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale
