"""Where Triton's kernels run, and how their times are taken there: what the choice of kernels knows of CUDA, and all of it.

Triton is imported by what needs it, when it is asked: an engine on a CPU never does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from graftwork_kernels.choice import TRITON_FUSED
from graftwork_kernels.cpu.build import CacheUnusable, private_folder
from graftwork_kernels.implementation import Implementation
from graftwork_kernels.probes import Outputs
from graftwork_kernels.timing import ClockTimer

logger = logging.getLogger(__name__)

INTERPRETED_PROGRAMS = 3
"""Of a persistent kernel, one after the other: few, since each costs Python's time, and several, so that tasks are dealt out."""

CALLS = 8
"""Of an operator in one graph: one alone would take less time than its launch from the host."""

REPLAYS = 5
"""Of a graph; the shortest counts."""

_INTERPRET, _CACHE_DIR = "TRITON_INTERPRET", "TRITON_CACHE_DIR"


def unavailable(device: torch.device) -> str | None:
    """Why Triton's kernels cannot compute on ``device``; None where they can, on a CPU interpreted: for proofs, at a
    thousandth of the speed, so that they are no candidates there.
    """
    if find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    is_interpreted = os.environ.get(_INTERPRET, "").lower() in ("1", "true", "on", "yes", "y")  # what triton takes for true
    if device.type == "cuda" and is_interpreted:
        return f"{_INTERPRET} is set, under which no kernel is compiled for the GPU; unset it"
    if device.type != "cuda" and not is_interpreted:
        return f"its kernels are a GPU's; on a CPU they are interpreted, slowly and for proofs alone, where {_INTERPRET}=1 is set"
    return None


def operators(name: str, device: torch.device, max_rank: int) -> Implementation:
    """Those of `graftwork_kernels.choice.ON_GPU` that is called ``name``, for adapters of up to ``max_rank``."""
    from graftwork_kernels.triton.linear import Form
    from graftwork_kernels.triton.operators import TritonOperators

    form = Form.FUSED if name == TRITON_FUSED else Form.TWO
    if device.type == "cuda":
        return TritonOperators.on(device, max_rank, form=form)
    return TritonOperators(INTERPRETED_PROGRAMS, max_rank, has_e4m3=False, form=form, is_wide=True)


def compile_errors(device: torch.device) -> tuple[type[Exception], ...]:
    """What a call raises whose kernel Triton cannot compile for ``device``."""
    if device.type != "cuda":
        return ()
    from triton.errors import TritonError

    return (TritonError,)


def keep_compiled_in(folder: Path) -> None:
    """Have what Triton compiles from now on kept in ``folder``, for the next start, unless the user says where in the environment.

    A folder that others can write to is not used, since what is kept there is loaded and runs: Triton's own is then.
    """
    from triton import knobs

    if _CACHE_DIR in os.environ:
        return
    try:
        knobs.cache.dir = str(private_folder(folder))
    except (CacheUnusable, OSError) as error:
        logger.warning("compiled kernels are kept in %s: %s", knobs.cache.dir, error)


def facts(device: torch.device) -> dict[str, str]:
    """All of a GPU, and of what compiles for it, that times depend on."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "machine": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": str(properties.multi_processor_count),
        "cuda": str(torch.version.cuda),
        "triton": _version_of("triton"),
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def release(device: torch.device) -> None:
    """Give back the memory that measuring took: what is free afterwards is dealt out to keys and values."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


class GraphTimer:
    """A `graftwork_kernels.timing.Timer` for a CUDA device: of operators as a captured step runs them, without gaps between
    launches.

    What reads on the host while it runs cannot be captured, and is timed as it is called, from an idle device to an idle one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._called = ClockTimer(self._idle_clock)

    def time(self, run: Callable[[], Outputs]) -> tuple[float, Outputs]:
        """See `graftwork_kernels.timing.Timer`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # inputs were made there
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            seconds, outputs = self._called.time(run)  # compiles, and warms up what a capture may not begin with
            graph = self._captured(run)
            if graph is not None:
                seconds = self._shortest_replay(graph) / CALLS
        return max(seconds, 1e-9), outputs

    def _idle_clock(self) -> float:
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _captured(self, run: Callable[[], Outputs]) -> torch.cuda.CUDAGraph | None:
        """`CALLS` runs; None for what cannot be captured."""
        try:
            with _host_reads_are_errors():  # nobody promises anything of the stream and the memory of a capture that broke off
                run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                for _ in range(CALLS):
                    run()
        except RuntimeError as error:
            logger.debug("not captured, and timed as it is called: %s", error)
            return None
        return graph

    def _shortest_replay(self, graph: torch.cuda.CUDAGraph) -> float:
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # while it runs, the next one and both events are handed over
            start.record(self._stream)
            graph.replay()
            end.record(self._stream)
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / 1e3)
        return min(times)


@contextlib.contextmanager
def _host_reads_are_errors() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
