"""A device on the CPU: its memory apart, copies that may be late, graphs that do again what torch and interpreted kernels did.

What a graph on a GPU bakes in, this one does too: the memory that operators read and write, and every number that Python gave them.
What was decided in Python while it was captured stays decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from triton.runtime.interpreter import GridExecutor

from graftwork_engine.batch import StepCapacity
from graftwork_engine.forward import MakeForward
from graftwork_engine.graphs import Replay
from graftwork_engine.kernel_choice import Kernels
from graftwork_engine.step_io import MirrorIo, StepIo


class ImmediateFence:
    """Everything that the device was told is done at once."""

    def set(self) -> None: ...

    def wait(self) -> None: ...


class ImmediateLink:
    """To a device that is the CPU, whose operators run when they are called: so do its copies."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def copy(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source)

    def fence(self) -> ImmediateFence:
        return ImmediateFence()


class LateLink:
    """To a device that copies as late as it may: when somebody waits for it. Pinned memory holds garbage until then."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.num_done = 0

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), 77, dtype=dtype)

    def copy(self, destination: Tensor, source: Tensor) -> None:
        self.waiting.append((destination, source))

    def fence(self) -> LateFence:
        return LateFence(self)

    def run(self, number: int) -> None:
        """Do what it was told up to that copy, counted from the first of all."""
        while self.num_done < number:
            destination, source = self.waiting.pop(0)
            destination.copy_(source)
            self.num_done += 1


class LateFence:
    def __init__(self, link: LateLink) -> None:
        self._link, self._number = link, 0

    def set(self) -> None:
        self._number = self._link.num_done + len(self._link.waiting)

    def wait(self) -> None:
        self._link.run(self._number)


def mirror_io(num_bytes: int) -> MirrorIo:
    return MirrorIo(num_bytes, torch.device("cpu"), ImmediateLink())


class _Recorder(TorchDispatchMode):
    """Notes every operation of torch's that computes something."""

    def __init__(self, steps: list[Callable[[], None]]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} reads the device's memory on the host, which ends a capture")
        outputs = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._steps.append(lambda: func(*args, **kwargs))
            return outputs
        read = {tensor.untyped_storage().data_ptr() for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
        made = [tensor for tensor in tree_iter(outputs) if isinstance(tensor, Tensor)]
        if any(tensor.untyped_storage().data_ptr() not in read for tensor in made) and "empty" not in str(func):

            def again() -> None:
                results = [tensor for tensor in tree_iter(func(*args, **kwargs)) if isinstance(tensor, Tensor)]
                for tensor, result in zip(made, results, strict=True):
                    tensor.copy_(result)

            self._steps.append(again)
        return outputs


class TwinCapture:
    """`graftwork_engine.graphs.Capture` of a CPU. ``num_launches`` of Triton kernels are in the graphs."""

    def __init__(self, patch: Any) -> None:
        self._patch = patch
        self.num_launches = 0
        self.num_replays = 0

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        steps: list[Callable[[], None]] = []
        launch = GridExecutor.__call__

        def noting(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                launch(executor, *args, **kwargs)
            steps.append(lambda: launch(executor, *args, **kwargs))
            self.num_launches += 1

        run()
        with self._patch.context() as patched, _Recorder(steps):
            patched.setattr(GridExecutor, "__call__", noting)
            output = run()

        def replay() -> None:
            self.num_replays += 1
            with torch.inference_mode():
                for step in steps:
                    step()

        return Replay(replay, output)


class TwinDevice:
    """`graftwork_engine.device.Device` of a CPU that is treated as a GPU is: mirrored, a step ahead, measured and warmed up."""

    place = torch.device("cpu")
    is_ahead = True
    compiles = True
    usual_rows, usual_requests = 256, 64
    adapter_fraction = 0.0
    whole_fraction = 0.0

    def __init__(self) -> None:
        self.num_measured = 0

    def step_io(self, num_bytes: int) -> StepIo:
        return mirror_io(num_bytes)

    def make_forward(self, kernels: Kernels, capacity: StepCapacity) -> MakeForward | None:
        return None

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        self.num_measured += 1
        return 1 << 20
