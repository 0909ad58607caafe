"""What every part of the GPU check stands on: where it runs, its deadline, captured graphs, times, and what counts as wrong."""

from __future__ import annotations

import math
import statistics
import time
from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from gpu_loads import Shape
from graftwork_kernels.layout import AdapterBatch, AdapterMemory, AdapterTasks
from graftwork_kernels.triton.linear import AdapterLauncher, Form
from graftwork_kernels.triton.operators import TritonOperators

Figures = MutableMapping[str, float | str]
"""What a part has measured so far. It may be stopped at any time, and what stands here then is kept."""

Item = TypeVar("Item")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1.6e-2}
"""Of a result's own magnitude and the root mean square of its row or head: sums in another order, and two roundings to bf16."""

RUBBISH = -0x5A5A5A5B
"""What integers are filled with that nobody has written yet; a narrower type keeps its low bits."""


class SentFigures(UserDict[str, float | str]):
    """Figures that are passed on as soon as they are known."""

    def __init__(self, send: Callable[[str, float | str], None]) -> None:
        super().__init__()
        self._send = send

    def __setitem__(self, name: str, value: float | str) -> None:
        super().__setitem__(name, value)
        self._send(name, value)


class Wrong(Exception):
    """A kernel's result is not what it must be."""


@dataclass
class Bench:
    """Where the check runs and how large it is. ``deadline`` is on `time.monotonic`; ``part`` of ``parts``: which of several
    processes that share a part's work this one is. ``copy_gbps`` is 0 where no copy has been measured.
    """

    device: torch.device
    shape: Shape
    is_dry: bool
    max_rank: int
    deadline: float
    copy_gbps: float = 0.0
    part: int = 0
    parts: int = 1
    cut: list[str] = field(default_factory=list)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What is computed in, the usual one first; the interpreter cannot multiply bf16."""
        return (torch.float32,) if self.is_dry else (torch.bfloat16, torch.float32)

    def operators(self, form: Form = Form.TWO) -> TritonOperators:
        """The kernels as they are served, interpreted where there is no GPU."""
        if self.is_dry:
            return TritonOperators(3, self.max_rank, has_e4m3=False, form=form, is_exact=True, is_wide=True)
        return TritonOperators.on(self.device, self.max_rank, form=form)

    def launcher(self, form: Form) -> AdapterLauncher:
        """What launches the adapters' part of a linear in `operators`, with the programs that are served."""
        return self.operators(form)._add_adapters

    def plan_adapters(self, launcher: AdapterLauncher, memory: AdapterMemory, adapters: AdapterBatch) -> AdapterTasks:
        """The tasks of a step's adapters alone."""
        return launcher.plan(memory, adapters)

    def in_time(self, items: Sequence[Item], name: Callable[[Item], str] = str) -> Iterator[Item]:
        """``items`` until the deadline; what is left out is told."""
        for item in items:
            if time.monotonic() > self.deadline:
                self.cut.append(name(item))
            else:
                yield item

    def replayed(self, run: Callable[[], tuple[Tensor, ...]]) -> Replayed:
        """``run`` as one graph; called again where nothing can be captured."""
        return Replayed(run, None) if self.is_dry else Replayed(run, *captured(run))

    def seconds(self, run: Callable[[], object], rounds: int = 5) -> float:
        """Of one ``run``, replayed as a captured graph.

        Many replays stand between two events, behind one more that keeps the device busy until the first event is reached: so
        nothing of what the host takes to launch them is in it.
        """
        if self.is_dry:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        graph, _ = captured(run)
        number = min(50, max(3, math.ceil(0.02 / _replay_seconds(graph, 3))))
        return statistics.median(_replay_seconds(graph, number) for _ in range(rounds))


@dataclass
class Replayed:
    """A captured ``run`` and the tensors that it writes; without a graph it is called instead."""

    run: Callable[[], tuple[Tensor, ...]]
    graph: torch.cuda.CUDAGraph | None
    results: tuple[Tensor, ...] = ()

    def __call__(self) -> tuple[Tensor, ...]:
        """Copies of what one replay writes; memory that it does not write comes back as rubbish."""
        if self.graph is None:
            return self.run()
        for result in self.results:
            spoil(result)
        self.graph.replay()
        return tuple(result.clone() for result in self.results)


Result = TypeVar("Result")


def captured(run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """``run`` as a graph, compiled and warm, and where it writes its results."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def _replay_seconds(graph: torch.cuda.CUDAGraph, number: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    start.record()
    for _ in range(number):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / number


def compare(name: str, out: Tensor, exact: Tensor) -> float:
    """The largest error, as `TOLERANCE` measures it; raises `Wrong` above it, and for NaN.

    Rows, or heads of a row, are measured by themselves: a long context's result is a hundred times smaller than a short one's.
    """
    if out.shape != exact.shape:
        raise Wrong(f"{name}: its shape is {tuple(out.shape)} and not {tuple(exact.shape)}")
    if not exact.numel():
        return 0.0
    of_row = exact.square().mean(-1, keepdim=True).sqrt()
    off = (out.double() - exact).abs()
    error = float(torch.where(off == 0, 0.0, off / (exact.abs() + of_row)).nan_to_num(torch.inf).max())
    if error > TOLERANCE[out.dtype]:
        raise Wrong(f"{name}: off by {error:.3g} of its magnitude, {TOLERANCE[out.dtype]:g} is allowed")
    return error


def must_equal(name: str, out: Tensor, exact: Tensor) -> None:
    """Raises `Wrong` where a bit differs; zeros of either sign, and any two NaN, are the same."""
    if not torch.equal(out.nan_to_num(12345.0), exact.nan_to_num(12345.0)) or not torch.equal(out.isnan(), exact.isnan()):
        raise Wrong(f"{name}: {int((out != exact).sum())} of {out.numel()} values are not what they must be")


def spoil(tensor: Tensor) -> Tensor:
    """Fill with what no kernel may take for a value."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.is_floating_point():
        return tensor.fill_(math.nan)
    return tensor.fill_(RUBBISH & 0x7F if tensor.dtype == torch.uint8 else RUBBISH)


@contextmanager
def spoiled_memory() -> Iterator[None]:
    """New tensors without values come full of NaN and rubbish, as they may after hours of serving: outputs and scratch alike."""
    makers = [(torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")]
    before = [getattr(owner, name) for owner, name in makers]

    def spoiled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            return spoil(make(*args, **options))

        return made

    for (owner, name), make in zip(makers, before, strict=True):
        setattr(owner, name, spoiled(make))
    try:
        yield
    finally:
        for (owner, name), make in zip(makers, before, strict=True):
            setattr(owner, name, make)


@contextmanager
def noted_compiles() -> Iterator[list[tuple[str, bool]]]:
    """Every variant of a kernel that this process meets for the first time: its name, and whether Triton's cache on disk had it."""
    found: list[tuple[str, bool]] = []

    def note(*, src: Any, cache_hit: bool, **_: object) -> None:
        found.append((str(getattr(src, "name", "?")), cache_hit))

    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = note
    try:
        yield found
    finally:
        triton.knobs.compilation.listener = before
