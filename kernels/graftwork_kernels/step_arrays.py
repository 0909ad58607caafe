"""Arrays of a step that NumPy writes on the host and operators read as tensors where they run. Knows no requests."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


class StepArrays(Protocol):
    """Memory that stays where it is from step to step."""

    def array(self, length: int, dtype: npt.DTypeLike) -> Array:
        """``length`` zeros to write to."""
        ...

    def tensor(self, part: Array) -> Tensor:
        """A contiguous ``part`` of such an array as operators read it; what is written to it they see from the next step on."""
        ...


class HostArrays:
    """`StepArrays` of a CPU: the tensors are the arrays."""

    def array(self, length: int, dtype: npt.DTypeLike) -> Array:
        """See `StepArrays.array`."""
        return np.zeros(length, dtype=dtype)

    def tensor(self, part: Array) -> Tensor:
        """See `StepArrays.tensor`."""
        return torch.from_numpy(part)
