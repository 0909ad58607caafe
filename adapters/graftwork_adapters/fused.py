"""Adapters trained on fused projections, for a base whose projections are split. Reads names and shapes, never values.

A fused weight is its parts' rows one after the other, so that A [r, in] is every part's, and each part has its own rows of what has
one row per output: B, its bias, the magnitudes of DoRA (a norm per row), and weights and biases saved whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from graftwork_adapters.base_spec import FUSED_PROJECTIONS, BaseSpec
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.tensor_source import AdapterTensor, TensorSource

_SHARED_PARTS = ("lora_A",)


def split_fused(tensors: Iterable[AdapterTensor], spec: BaseSpec, report: Report) -> list[AdapterTensor]:
    """The tensors with those of fused projections replaced by their parts', wherever the base has the parts and not the whole.

    A tensor whose rows are not those of its parts together is a failing finding and is left out.
    """
    outputs = {site.module: site.out_features for site in spec.sites}
    found: list[AdapterTensor] = []
    problems: list[tuple[str | None, str]] = []
    for tensor in tensors:
        parts = parts_of(tensor.module)
        if not parts or tensor.module in spec.module_names or not all(part in outputs for part in parts):
            found.append(tensor)
            continue
        sizes = [outputs[part] for part in parts]
        if tensor.part in _SHARED_PARTS:
            found += [replace(tensor, module=part) for part in parts]
        elif 0 in tensor.source.shape:
            continue  # which is a finding already
        elif not tensor.source.shape or tensor.source.shape[0] != sum(sizes):
            message = (
                f"has shape {list(tensor.source.shape)}; the base splits {tensor.module} into rows {sizes}, {sum(sizes)} in all"
            )
            problems.append((shown(tensor.source.sent_as), message))
        else:
            found += _split_rows(tensor, parts, sizes)
    report.fail_each("shapes", problems, "the adapter was trained on another base, or on one that fuses its projections otherwise")
    return found


def parts_of(module: str) -> tuple[str, ...]:
    """The modules that the fused ``module`` stands for, in row order; empty where it is not fused."""
    for fused, parts in FUSED_PROJECTIONS.items():
        if module.endswith(f".{fused}"):
            layer = module.removesuffix(fused)
            return tuple(layer + part for part in parts)
    return ()


def fused_of(module: str) -> str | None:
    """The fused module that ``module`` is a part of where projections are fused; None where it is in none."""
    for fused, parts in FUSED_PROJECTIONS.items():
        for part in parts:
            if module.endswith(f".{part}"):
                return module.removesuffix(part) + fused
    return None


def trained_names(sent: Iterable[str], spec: BaseSpec) -> dict[str, str]:
    """The projections of the base, and by what name the trainer knew each, given the names of modules that were ``sent``.

    A base that fuses its projections may be adapted by one who split them, and the other way round: what was sent tells.
    """
    names = set(sent)
    is_split = any(fused_of(name) for name in names)
    is_fused = any(parts_of(name) for name in names) or (spec.fuses_projections and not is_split)
    return {site.module: (fused_of(site.module) if is_fused else None) or site.module for site in spec.sites}


def _split_rows(tensor: AdapterTensor, parts: tuple[str, ...], sizes: list[int]) -> list[AdapterTensor]:
    split: list[AdapterTensor] = []
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        split.append(replace(tensor, module=part, source=take_rows(tensor.source, (range(start, start + size),))))
        start += size
    return split


def take_rows(source: TensorSource, rows: tuple[range, ...]) -> TensorSource:
    """``source`` with these of its rows, in this order; it must be whole."""
    if source.rows is not None:
        raise ValueError(f"{source.sent_as}: rows are taken already")
    return replace(source, rows=rows)
