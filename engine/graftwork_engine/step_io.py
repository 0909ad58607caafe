"""How the numbers of a step get to where its operators run, and its results back. `graftwork_engine.cuda` has that of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graftwork_kernels.step_arrays import Array, HostArrays, StepArrays

ALIGNMENT = 64
"""Bytes: where an array begins, so that kernels read it in wide pieces."""


class StepIo(StepArrays, Protocol):
    """The way to a device and back, in the order of its steps. No call waits for the device but what `fetch` returns.

    ``is_late``: by the time that this waits, the next step's operators may have written over what they do not keep.
    """

    is_late: bool

    def send(self, last: Array) -> None:
        """Let operators see all that was written to arrays since the last time, up to the end of ``last``, which is a part of one;
        arrays that were made later than that one are left out.
        """
        ...

    def send_entries(self, array: Array, places: npt.NDArray[np.int64]) -> None:
        """Let operators see these entries of an array that `send` leaves out; ``places`` count through all of its dimensions."""
        ...

    def upload(self, tensor: Tensor) -> Tensor:
        """A tensor of the host's, for this step's operators."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Have ``tensors`` brought to the host as they are now, whatever is written to them later; the call waits for them."""
        ...


class HostIo(HostArrays):
    """`StepIo` of a CPU, whose operators have run when they return: everything is there already."""

    is_late = False

    def send(self, last: Array) -> None:
        """See `StepIo.send`."""

    def send_entries(self, array: Array, places: npt.NDArray[np.int64]) -> None:
        """See `StepIo.send_entries`."""

    def upload(self, tensor: Tensor) -> Tensor:
        """See `StepIo.upload`."""
        return tensor

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """See `StepIo.fetch`."""
        return lambda: tensors


class Fence(Protocol):
    """A point in what a device was told to do."""

    def set(self) -> None:
        """The point is now, behind all that the device was told so far."""
        ...

    def wait(self) -> None:
        """Until the device has got there; at once if the point was never set."""
        ...


class Link(Protocol):
    """What lies between a host and a device that does what it is told later, in order."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device can read and write by itself. It may be let go while it does."""
        ...

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Have the device copy, one of the two being its own, the other pinned: behind all that it was told so far."""
        ...

    def fence(self) -> Fence:
        """One that is not set."""
        ...


class MirrorIo:
    """`StepIo` of a device with memory of its own: the arrays are one piece of memory on either side, which a step sends in one go.

    What is sent is first copied into one of two pieces of pinned memory: so the arrays may be written for the next step while the
    device reads. Raises ValueError where ``num_bytes`` are too few for the arrays.
    """

    is_late = True

    def __init__(self, num_bytes: int, device: torch.device, link: Link) -> None:
        self._device, self._link = device, link
        self._host = np.zeros(num_bytes, dtype=np.uint8)
        self._mirror = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._slots = [(link.pinned((num_bytes,), torch.uint8), link.fence()) for _ in range(2)]
        self._num_used = 0

    def array(self, length: int, dtype: npt.DTypeLike) -> Array:
        """See `StepArrays.array`."""
        start = -(-self._num_used // ALIGNMENT) * ALIGNMENT
        end = start + length * np.dtype(dtype).itemsize
        if end > len(self._host):
            raise ValueError(f"an array of {length} {np.dtype(dtype)} does not fit behind {start} of {len(self._host)} bytes")
        self._num_used = end
        return self._host[start:end].view(dtype)

    def tensor(self, part: Array) -> Tensor:
        """See `StepArrays.tensor`."""
        start = self._offset(part)
        dtype = torch.from_numpy(part[:0]).dtype
        return self._mirror[start : start + part.nbytes].view(dtype).view(part.shape)

    def send(self, last: Array) -> None:
        """See `StepIo.send`."""
        end = self._offset(last) + last.nbytes
        slot, fence = self._slots[0]
        self._slots.reverse()
        fence.wait()  # for the step before the last one, which is over
        slot.numpy()[:end] = self._host[:end]
        self._link.copy(self._mirror[:end], slot[:end])
        fence.set()

    def send_entries(self, array: Array, places: npt.NDArray[np.int64]) -> None:
        """See `StepIo.send_entries`."""
        values = self.upload(torch.from_numpy(array.reshape(-1)[places]))
        self.tensor(array).view(-1).index_copy_(0, self.upload(torch.from_numpy(places)), values)

    def upload(self, tensor: Tensor) -> Tensor:
        """See `StepIo.upload`."""
        pinned = self._link.pinned(tensor.shape, tensor.dtype).copy_(tensor)
        uploaded = torch.empty_like(tensor, device=self._device)
        self._link.copy(uploaded, pinned)
        return uploaded

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """See `StepIo.fetch`."""
        copies = [self._link.pinned(tensor.shape, tensor.dtype) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            self._link.copy(copy, tensor)
        fence = self._link.fence()
        fence.set()

        def wait() -> Sequence[Tensor]:
            fence.wait()
            return copies

        return wait

    def _offset(self, part: Array) -> int:
        """Of a part of an array, in bytes. An empty one may say anything."""
        if not part.flags.c_contiguous:
            raise ValueError("a tensor is made of a contiguous part of an array")
        return (part.ctypes.data - self._host.ctypes.data) if part.nbytes else 0
