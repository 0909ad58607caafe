"""How the rows of a step are drawn from, as the arrays that the sampler reads. Knows no tokens and no plan."""

from __future__ import annotations

import numpy as np

from graftwork_engine.request_table import Entries
from graftwork_kernels.layout import SamplingBatch
from graftwork_kernels.step_arrays import StepArrays


class SamplingArrays:
    """A `SamplingBatch` of up to ``num_rows`` rows, in memory that stays where it is."""

    def __init__(self, num_rows: int, arrays: StepArrays) -> None:
        self._arrays = arrays
        self._temperature, self._top_p, self._min_p = (arrays.array(num_rows, np.float32) for _ in range(3))
        self._top_k, self._choice, self.position = (arrays.array(num_rows, np.int32) for _ in range(3))
        self._seed = arrays.array(num_rows, np.uint64)

    def write(self, requests: Entries) -> None:
        """All but the position, of entries of a `RequestTable`."""
        rows = slice(len(requests))
        self._temperature[rows] = requests["temperature"]
        self._top_k[rows] = requests["top_k"]
        self._top_p[rows] = requests["top_p"]
        self._min_p[rows] = requests["min_p"]
        self._seed[rows] = requests["seed"]
        self._choice[rows] = requests["choice"]

    def first(self, num_rows: int) -> SamplingBatch:
        """The first rows as tensors."""
        tensor = self._arrays.tensor
        return SamplingBatch(
            temperature=tensor(self._temperature[:num_rows]),
            top_k=tensor(self._top_k[:num_rows]),
            top_p=tensor(self._top_p[:num_rows]),
            min_p=tensor(self._min_p[:num_rows]),
            seed=tensor(self._seed[:num_rows].view(np.int64)),
            choice=tensor(self._choice[:num_rows]),
            position=tensor(self.position[:num_rows]),
        )
