"""What the engine asks of CUDA: pinned memory, events, graphs, and how much memory is free. Nothing else in this room names it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graftwork_engine.graphs import Replay
from graftwork_engine.step_io import MirrorIo

WARM_UP_RUNS = 2
"""Before a capture: the first compiles, and libraries set aside what they need."""


class CudaFence:
    """`graftwork_engine.step_io.Fence` on the stream that steps run on."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def set(self) -> None:
        """See `Fence.set`."""
        self._event.record()

    def wait(self) -> None:
        """See `Fence.wait`. Other threads go on meanwhile."""
        self._event.synchronize()


def cuda_io(num_bytes: int, device: torch.device) -> MirrorIo:
    """The way to a GPU and back; its arrays may take ``num_bytes``."""
    return MirrorIo(num_bytes, device, Tensor.pin_memory, CudaFence)


class CudaCapture:
    """`graftwork_engine.graphs.Capture`. All graphs share their working memory, since no two run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        """See `Capture`; nothing is captured of what other threads do meanwhile."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return Replay(graph.replay, output)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Device memory that ``run`` needs at its height, beyond what is taken before it."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
