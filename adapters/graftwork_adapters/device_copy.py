"""How bytes get from host memory to a device. All that this room knows of CUDA; knows no adapters and no pages."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BUFFER_BYTES = 4 << 20
"""Of one staging buffer: large beside what starting a copy costs, and small beside an adapter, so that its first bytes are under
way while the next are staged."""

NUM_BUFFERS = 2
"""One is filled while the other is read by the device, which is the faster of the two."""


class Copier(Protocol):
    """Copies to one device. One thread uses it, which is not the engine's."""

    def copy(self, destination: Tensor, source: npt.NDArray[Any]) -> None:
        """Bring ``source`` to ``destination``: as many bytes, both contiguous. They need not be there before `finish`, and
        ``source`` may change once this returns.

        Copies are made in the order of the calls.
        """
        ...

    def finish(self) -> None:
        """Wait until everything copied so far is on the device, for whatever is started there from now on."""
        ...


def copier_for(device: torch.device) -> Copier:
    """The way to ``device``, behind everything it has been given to do before."""
    return HostCopier() if device.type == "cpu" else StagedCopier(CudaStream(device))


class HostCopier:
    """A `Copier` to the CPU, where a copy is there when it returns."""

    def copy(self, destination: Tensor, source: npt.NDArray[Any]) -> None:
        """See `Copier.copy`."""
        # Not by torch, which shares a copy of a page's size out to threads of this thread's own: they would take the cores from
        # the step that runs meanwhile.
        np.copyto(_bytes_of(destination).numpy(), _host_bytes(destination, source))

    def finish(self) -> None:
        """See `Copier.finish`."""


class Sent(Protocol):
    """A copy that was started."""

    def synchronize(self) -> None:
        """Wait until it has been made. Raises what the device makes of it."""
        ...


class Stream(Protocol):
    """What `StagedCopier` needs of a device: memory that copies start from without the processor, and one queue of copies."""

    def staging_buffer(self, num_bytes: int) -> Tensor:
        """Host memory, uint8 [num_bytes], for as long as it is referenced."""
        ...

    def send(self, destination: Tensor, source: Tensor) -> Sent:
        """Start a copy behind those that were started before. ``source``, of a staging buffer, is read until it has been made."""
        ...


class StagedCopier:
    """A `Copier` by way of a ring of staging buffers, on a stream of its own: copies run beside the kernels of a step.

    A device reads ordinary memory only once the driver has copied it to memory of its own, for which the driver makes the caller
    wait and every other copy too. So the bytes are staged here, where the next ones are staged while the device fetches the last.
    """

    def __init__(self, stream: Stream, buffer_bytes: int = BUFFER_BYTES, num_buffers: int = NUM_BUFFERS) -> None:
        self._stream = stream
        self._buffer_bytes = buffer_bytes
        # All at once: to pin memory stops the device, and a graph that is captured meanwhile would be lost.
        self._ring = [_Buffer(stream.staging_buffer(buffer_bytes)) for _ in range(num_buffers)]
        self._current = 0
        self._used = 0  # bytes of the current buffer, from its beginning

    def copy(self, destination: Tensor, source: npt.NDArray[Any]) -> None:
        """See `Copier.copy`."""
        target, waiting = _bytes_of(destination), _host_bytes(destination, source)
        done = 0
        while done < len(waiting):
            buffer = self._buffer_with_room()
            count = min(len(waiting) - done, self._buffer_bytes - self._used)
            staged = buffer.memory[self._used : self._used + count]
            np.copyto(staged.numpy(), waiting[done : done + count])
            buffer.sent = self._stream.send(target[done : done + count], staged)
            self._used += count
            done += count

    def finish(self) -> None:
        """See `Copier.finish`. Other threads run meanwhile."""
        for buffer in self._ring:
            buffer.wait()
        self._used = 0

    def _buffer_with_room(self) -> _Buffer:
        if self._used == self._buffer_bytes:
            following = (self._current + 1) % len(self._ring)
            self._ring[following].wait()
            self._current, self._used = following, 0
        return self._ring[self._current]


class _Buffer:
    """A staging buffer and the last copy that was started from it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.sent: Sent | None = None

    def wait(self) -> None:
        """Until every copy from it has been made: they are made in order, so the last one tells of all."""
        if self.sent is not None:
            self.sent.synchronize()
            self.sent = None


class CudaStream:
    """A `Stream` of a CUDA device. What the device was given to do before this was made is done by then."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def staging_buffer(self, num_bytes: int) -> Tensor:
        """See `Stream.staging_buffer`: pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, destination: Tensor, source: Tensor) -> Sent:
        """See `Stream.send`."""
        # Whoever waits for a blocking event sleeps; the processor is the engine's.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
            event.record(self._stream)
        return event


def _bytes_of(destination: Tensor) -> Tensor:
    return destination.view(-1).view(torch.uint8)


def _host_bytes(destination: Tensor, source: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if source.nbytes != destination.nbytes:
        raise AssertionError(f"{source.nbytes} bytes are to be copied to {destination.nbytes}")
    return source.reshape(-1).view(np.uint8)
