"""An engine on a GPU: pinned memory, events and graphs. Knows no requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graftwork_engine.batch import StepCapacity
from graftwork_engine.forward import MakeForward
from graftwork_engine.graphs import Replay, capturing, graph_sizes
from graftwork_engine.kernel_choice import Kernels
from graftwork_engine.step_io import MirrorIo, StepIo

WARM_UP_RUNS = 2
"""Before a capture: the first compiles, and libraries set aside what they need."""


class CudaFence:
    """`graftwork_engine.step_io.Fence` on the stream that steps run on."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """See `Fence.set`."""
        self._event.record()

    def wait(self) -> None:
        """See `Fence.wait`. It looks again and again, which costs a core and wakes sooner; other threads go on meanwhile."""
        self._event.synchronize()


class CudaLink:
    """`graftwork_engine.step_io.Link` to the stream that steps run on. Torch keeps pinned memory for the next who asks for as much,
    once the copies from and to it are done.
    """

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Link`, here and below."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def fence(self) -> CudaFence:
        return CudaFence()


class CudaCapture:
    """`graftwork_engine.graphs.Capture`. All graphs share their working memory, since no two run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # one for all: cuBLAS keeps memory for each it has seen

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        """See `Capture`; nothing is captured of what other threads do meanwhile."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()
        return Replay(graph.replay, output)


class Gpu:
    """A CUDA device. ``use_graphs`` off: every step is called operator by operator, which is slow and tells more when it fails."""

    is_ahead = True
    compiles = True
    usual_rows, usual_requests = 2048, 256
    adapter_fraction = 0.1
    whole_fraction = 0.05

    def __init__(self, place: torch.device, *, use_graphs: bool) -> None:
        self.place = place
        self._use_graphs = use_graphs

    def step_io(self, num_bytes: int) -> StepIo:
        """See `graftwork_engine.device.Device`, here and below."""
        return MirrorIo(num_bytes, self.place, CudaLink())

    def make_forward(self, kernels: Kernels, capacity: StepCapacity) -> MakeForward | None:
        if not self._use_graphs or not kernels.is_capturable:
            return None
        return capturing(graph_sizes(min(capacity.num_rows, capacity.num_requests)), CudaCapture())

    def peak_bytes(self, run: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.place)
        before = torch.cuda.memory_allocated(self.place)
        torch.cuda.reset_peak_memory_stats(self.place)
        run()
        torch.cuda.synchronize(self.place)
        return torch.cuda.max_memory_allocated(self.place) - before
