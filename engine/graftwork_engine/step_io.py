"""How the numbers of a step get to where its operators run, and its results back. `graftwork_engine.cuda` has that of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from graftwork_kernels.step_arrays import Array, HostArrays, StepArrays


class StepIo(StepArrays, Protocol):
    """The way to a device and back, in the order of its steps. Nothing waits but what `fetch` returns."""

    def send(self, last: Array) -> None:
        """Let operators see all that was written to arrays since the last time, up to the end of ``last``, which is a part of one;
        arrays that were made later than that one are left out.
        """
        ...

    def upload(self, tensor: Tensor) -> Tensor:
        """A tensor of the host's, for this step's operators."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Have ``tensors`` brought to the host as they are now, whatever is written to them later; the call waits for them."""
        ...


class HostIo(HostArrays):
    """`StepIo` of a CPU, whose operators have run when they return: everything is there already."""

    def send(self, last: Array) -> None:
        """See `StepIo.send`."""

    def upload(self, tensor: Tensor) -> Tensor:
        """See `StepIo.upload`."""
        return tensor

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """See `StepIo.fetch`."""
        return lambda: tensors
