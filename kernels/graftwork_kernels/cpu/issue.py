"""What an operator's Python half talks to: memory for its results, and somewhere to issue its command.

`Immediate` runs each command as it comes. `graftwork_kernels.cpu.capture.Recorder` keeps them, to be run again each step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from graftwork_kernels.cpu.library import Command, Library, Step


class Issuer(Protocol):
    """Takes commands in the order in which they depend on each other."""

    @property
    def library(self) -> Library:
        """Where operators are found."""
        ...

    @property
    def num_threads(self) -> int:
        """Threads that share a command's work."""
        ...

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory for a result or for scratch, contiguous, its content undefined. The first dimension is the step's rows.

        Recorded, it has room for the largest step, and is used for something else after the last command that names it.
        """
        ...

    def now(self, operator: str, arguments: ctypes.Structure) -> None:
        """Run ``operator`` at once, whatever becomes of other commands: for what happens once, such as laying out a weight."""
        ...

    def compute(self, what: str) -> None:
        """Called before anything is computed in another way than by a command; raises ValueError where commands are recorded."""
        ...

    def issue(
        self, operator: str, arguments: ctypes.Structure, tensors: Sequence[Tensor], num_rows: int, num_requests: int | None = None
    ) -> None:
        """Run or record ``operator`` with ``arguments``, which point into ``tensors``.

        The two numbers are this call's, None for one that the operator does not look at. A recorded command gets those of the
        step that it is run in, which are no larger.
        """
        ...


class Immediate:
    """Runs each command at once."""

    def __init__(self, library: Library, num_threads: int | None = None) -> None:
        self.library = library
        self._num_threads = num_threads

    @property
    def num_threads(self) -> int:
        """Torch's number unless one was given."""
        return self._num_threads or torch.get_num_threads()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """See `Issuer`."""
        return torch.empty(shape, dtype=dtype)

    def now(self, operator: str, arguments: ctypes.Structure) -> None:
        """See `Issuer`."""
        self._run(operator, arguments, Step())

    def compute(self, what: str) -> None:
        """See `Issuer`: it may be."""

    def issue(
        self, operator: str, arguments: ctypes.Structure, tensors: Sequence[Tensor], num_rows: int, num_requests: int | None = None
    ) -> None:
        """See `Issuer`; ``tensors`` live as long as the caller holds them, which is long enough."""
        del tensors
        self._run(operator, arguments, Step(num_rows, num_requests or 0))

    def _run(self, operator: str, arguments: ctypes.Structure, step: Step) -> None:
        command = Command(self.library.address(operator, type(arguments)), ctypes.addressof(arguments))
        self.library.run((Command * 1)(command), step, self.num_threads)
