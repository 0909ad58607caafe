"""The base's own tensors, read where they lie: for DoRA's norms, for biases that an adapter adds to, and to know copies of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graftwork_adapters.base_spec import BaseSpec, read_base_tensors
from graftwork_adapters.tensor_source import TensorSource
from graftwork_adapters.tensor_values import RawValues, to_bf16_bits, to_fp8_bits, to_fp32

PART_ELEMENTS = 1 << 22
"""How many values are held as fp32 at a time, however large the tensor is: 16 MiB of them."""

_ROUTES: dict[str, tuple[str | None, ...]] = {"F8_E4M3": (None, "BF16", "F16"), "F8_E5M2": (None, "BF16", "F16")}
"""By the type that a copy was cast to, which type the trainer may have had the base in before; None: the base's own."""


class BaseWeights:
    """The tensors of the base ``spec`` in the folder ``base_dir``; its headers are read once, at the first that is asked for."""

    def __init__(self, base_dir: Path, spec: BaseSpec) -> None:
        self._base_dir = base_dir
        self._is_tied = spec.is_tied
        self._sources: dict[str, TensorSource] | None = None

    def tensor(self, name: str) -> TensorSource:
        """The tensor ``name``, which the base has. A tied head's weight is the embedding's. Raises `UnsupportedBase`."""
        if self._sources is None:
            tensors = read_base_tensors(self._base_dir)
            self._sources = {name: TensorSource(path, entry, name) for name, (path, entry) in tensors.items()}
        if self._is_tied and name == "lm_head.weight":
            name = "model.embed_tokens.weight"
        return self._sources[name]


def rows_at_a_time(shape: tuple[int, ...]) -> int:
    """How many rows of a tensor of ``shape`` make up `PART_ELEMENTS`; at least one."""
    return max(1, PART_ELEMENTS // max(1, int(np.prod(shape[1:]))))


def is_copy(sent: TensorSource, own: TensorSource) -> bool:
    """True if ``sent`` holds the values of ``own``, as they are or after a cast of either to the other's type."""
    return sent.shape == own.shape and (_casts_to(sent, own) or _casts_to(own, sent))


def _casts_to(wide: TensorSource, narrow: TensorSource) -> bool:
    return any(_casts_by(route, wide, narrow) for route in _ROUTES.get(narrow.dtype, (None,)))


def _casts_by(route: str | None, wide: TensorSource, narrow: TensorSource) -> bool:
    values, expected, step = wide.map(), narrow.map(), rows_at_a_time(wide.shape)
    return all(
        np.array_equal(_cast(values[start : start + step], wide.dtype, route, narrow.dtype), expected[start : start + step])
        for start in range(0, wide.shape[0], step)
    )


def _cast(values: RawValues, source: str, route: str | None, target: str) -> RawValues:
    if source == target:
        return values
    if route is not None:
        values, source = _cast(values, source, None, route), route
    exact = to_fp32(values, source)
    if target == "BF16":
        return to_bf16_bits(exact)
    if target in ("F8_E4M3", "F8_E5M2"):
        return to_fp8_bits(np.ascontiguousarray(exact), target)
    with np.errstate(over="ignore"):
        return exact.astype({"F64": np.float64, "F32": np.float32, "F16": np.float16}[target])
