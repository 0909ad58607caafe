"""Every value of an upload must be finite, also after scaling and as bfloat16. Reads the tensors in parts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from graftwork_adapters.adapter_content import AdapterContent, LoraPair
from graftwork_adapters.base_weights import PART_ELEMENTS
from graftwork_adapters.pack import fold_scale
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.tensor_source import TensorSource, UploadTensors
from graftwork_adapters.tensor_values import BF16_MAX, SERVED_DTYPES, Matrix, to_fp32

_FIX = "train again with a lower learning rate; do not save after a diverged step"
_HUGE = 1e30
"""Beyond it lies fp32's range over 10^8: what sums of thousands of a model's largest activations may multiply a value by."""

_Key = tuple[Path, int]


def check_values(upload: UploadTensors, content: AdapterContent, report: Report) -> None:
    """Findings about values; the tensors of a module that failed before are looked at too."""
    problems: list[tuple[str | None, str]] = []
    largest: dict[_Key, Matrix] = {}  # magnitude of each finite tensor, [1]
    for source in _sent(upload):
        if source.dtype not in SERVED_DTYPES:
            continue
        num_bad, magnitude = _scan(source)
        if num_bad:
            problems.append((shown(source.sent_as), f"holds {num_bad} values that are NaN or infinite"))
        else:
            largest[_key(source)] = magnitude
    scaled: list[tuple[TensorSource, float]] = [(source, 1.0) for source in _unscaled(content)]
    for pair in content.pairs:
        scaled += [(source, pair.scale) for source in (pair.b, pair.bias) if source is not None]
    for source, scale in _in_order(scaled):
        with np.errstate(over="ignore"):
            if _key(source) in largest and np.abs(fold_scale(largest[_key(source)], scale)) > BF16_MAX:
                problems.append((shown(source.sent_as), f"holds values too large for bfloat16 (its scale is {scale:g})"))
    report.fail_each("values", problems, _FIX)
    _warn_of_nothing(content.pairs, largest, report)
    _warn_of_overflow(content, largest, report)


def _sent(upload: UploadTensors) -> Iterable[TensorSource]:
    """Each tensor once as it lies in its file, however many parts of a fused one are read."""
    seen: dict[_Key, TensorSource] = {}
    for tensor in upload.tensors:
        source = tensor.source
        seen.setdefault(_key(source), TensorSource(source.path, source.entry, source.sent_as))
    return seen.values()


def _key(source: TensorSource) -> _Key:
    return source.path, source.entry.start if source.entry.start != source.entry.end else -1


def _unscaled(content: AdapterContent) -> Iterable[TensorSource]:
    of_b = {id(source) for pair in content.pairs for source in (pair.b, pair.bias)}
    return [source for source in content.sources() if id(source) not in of_b]


def _in_order(scaled: Iterable[tuple[TensorSource, float]]) -> list[tuple[TensorSource, float]]:
    """Each tensor with each of its scales once, by name."""
    unique = {(source.sent_as, scale): (source, scale) for source, scale in scaled}
    return [unique[key] for key in sorted(unique)]


def _scan(source: TensorSource) -> tuple[int, Matrix]:
    """How many values are not finite, and the largest magnitude, [1]."""
    values = source.map().reshape(-1)  # as it lies in the file: a row of a stranger's tensor may be as long as all of it
    num_bad, largest = 0, np.zeros(1, dtype=np.float32)
    for start in range(0, values.size, PART_ELEMENTS):
        part = to_fp32(values[start : start + PART_ELEMENTS], source.dtype)
        num_bad += int(np.count_nonzero(~np.isfinite(part)))
        with np.errstate(invalid="ignore"):
            largest = np.maximum(largest, max(part.max(initial=0), -part.min(initial=0)))
    return num_bad, largest


def _warn_of_nothing(pairs: tuple[LoraPair, ...], largest: dict[_Key, Matrix], report: Report) -> None:
    plain = [pair for pair in pairs if pair.magnitude is None and pair.bias is None]
    unscaled = [pair.module for pair in plain if not np.float32(pair.scale)]
    if unscaled:
        message = f"{len(unscaled)} of {len(pairs)} modules have a scale of 0 and change nothing: {_some(unscaled)}"
        report.warn("values", "lora_alpha", message, "set lora_alpha and alpha_pattern to what the adapter was trained with")
    zero = [shown(pair.b.sent_as) for pair in plain if _key(pair.b) in largest and not largest[_key(pair.b)].any()]
    if zero:
        report.warn("values", zero[0], f"{len(zero)} of {len(pairs)} lora_B are all zero and change nothing: {_some(zero)}")


def _warn_of_overflow(content: AdapterContent, largest: dict[_Key, Matrix], report: Report) -> None:
    """A warning about values that are finite, and whose products with what a model computes may not be."""
    bounds = {source.sent_as: float(largest[_key(source)][0]) for source in content.sources() if _key(source) in largest}
    for pair in content.pairs:
        a, b = (bounds.get(source.sent_as) for source in (pair.a, pair.b))
        if a is not None and b is not None:
            bounds[pair.b.sent_as] = max(b, b * abs(pair.scale), a * b * abs(pair.scale) * pair.rank)
    huge = [shown(name) for name, bound in sorted(bounds.items()) if bound > _HUGE]
    if huge:
        message = (
            f"{len(huge)} tensors hold values so large that products with them may overflow, and a request that overflows fails "
            f"with non_finite_output: {_some(huge)}"
        )
        report.warn("values", huge[0], message, _FIX)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
