"""DoRA's output scale c = m / ‖W + s·B·A‖ (arXiv:2402.09353), computed once when packing. Reads the base in parts.

The norm is over the inputs of each output: over the rows of a linear layer's or the head's weight [out, in], and over the columns
of an embedding's [tokens, hidden size], since there each hidden feature is an output, as PEFT has it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from graftwork_adapters.adapter_content import AdapterContent, LoraPair
from graftwork_adapters.base_weights import BaseWeights, rows_at_a_time
from graftwork_adapters.peft_config import EMBEDDING_MODULE, HEAD_MODULE
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.tensor_source import TensorSource
from graftwork_adapters.tensor_values import Matrix, to_fp32

_FIX = "train again with a lower learning rate; do not save after a diverged step"
_HUGE = 1e6
"""Trained magnitudes are near the norms that they are divided by: a scale beyond this is a mistake, if no overflow yet."""


def output_scales(content: AdapterContent, base: BaseWeights, report: Report) -> dict[str, Matrix]:
    """c, fp32 [outputs], of every module with a magnitude; a finding for each that is not finite."""
    wholes = {EMBEDDING_MODULE: content.embedding.whole, HEAD_MODULE: content.head.whole}
    scales: dict[str, Matrix] = {}
    problems: list[tuple[str | None, str]] = []
    huge: list[str] = []
    for pair in content.pairs:
        if pair.magnitude is None:
            continue
        weight = wholes.get(pair.module) or base.tensor(f"{pair.module}.weight")
        norms = _column_norms(weight, pair) if pair.module == EMBEDDING_MODULE else _row_norms(weight, pair)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            scale = pair.magnitude.read() / norms
        scales[pair.module] = scale
        num_bad = int(np.count_nonzero(~np.isfinite(scale)))
        if num_bad:
            message = f"has {num_bad} outputs whose adapted weight has a norm of 0, or whose scale is beyond fp32"
            problems.append((shown(pair.magnitude.sent_as), message))
        elif np.abs(scale).max(initial=0) > _HUGE:
            huge.append(shown(pair.magnitude.sent_as))
    report.fail_each("values", problems, _FIX)
    if huge:
        message = (
            f"{len(huge)} magnitudes of DoRA make some output more than {_HUGE:g} times the adapted weight's own, so that it may "
            "overflow, and a request that overflows fails with non_finite_output"
        )
        report.warn("values", huge[0], message, _FIX)
    return scales


def _row_norms(weight: TensorSource, pair: LoraPair) -> Matrix:
    a, b, values = pair.a.read(), pair.b.read(), weight.map()
    norms = np.empty(weight.shape[0], dtype=np.float32)
    step = rows_at_a_time(weight.shape)
    for start in range(0, weight.shape[0], step):
        adapted = _adapted(to_fp32(values[start : start + step], weight.dtype), b[start : start + step], a, pair.scale)
        norms[start : start + step] = np.sqrt(_squares(adapted).sum(axis=1))
    return norms


def _column_norms(weight: TensorSource, pair: LoraPair) -> Matrix:
    a, b, values = pair.a.read().T, pair.b.read().T, weight.map()
    totals = np.zeros(weight.shape[1], dtype=np.float64)
    step = rows_at_a_time(weight.shape)
    for start in range(0, weight.shape[0], step):
        adapted = _adapted(to_fp32(values[start : start + step], weight.dtype), a[start : start + step], b, pair.scale)
        totals += _squares(adapted).sum(axis=0)
    return np.sqrt(totals).astype(np.float32)


def _adapted(weight: Matrix, left: Matrix, right: Matrix, scale: float) -> Matrix:
    with np.errstate(over="ignore", invalid="ignore"):
        return weight + np.float32(scale) * (left @ right)


def _squares(values: Matrix) -> npt.NDArray[np.float64]:
    wide = values.astype(np.float64)
    return np.square(wide, out=wide)
