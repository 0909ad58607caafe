"""Where a model runs, and what an engine does differently there. `graftwork_engine.cuda` has what is done on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from graftwork_engine.batch import StepCapacity
from graftwork_engine.config import EngineConfig
from graftwork_engine.cuda import Gpu
from graftwork_engine.errors import ConfigError
from graftwork_engine.forward import MakeForward
from graftwork_engine.kernel_choice import Kernels
from graftwork_engine.step_io import HostIo, StepIo


class Device(Protocol):
    """``place`` is torch's name for it. ``is_ahead``: steps are launched before the results of the last one are known, since it
    computes while the host goes on. ``compiles``: kernels are compiled when they are first run. A step has up to ``usual_rows`` of
    ``usual_requests``, unless the configuration says otherwise.
    """

    place: torch.device
    is_ahead: bool
    compiles: bool
    usual_rows: int
    usual_requests: int
    adapter_fraction: float
    """Of what is free once the weights are there, for adapters, unless the configuration says otherwise."""
    whole_fraction: float
    """The same for what adapters bring whole, where that is more than the configuration says."""

    def step_io(self, num_bytes: int) -> StepIo:
        """The way to it and back, for arrays of so many bytes."""
        ...

    def make_forward(self, kernels: Kernels, capacity: StepCapacity) -> MakeForward | None:
        """How ``kernels`` are run fastest there; None: operator by operator."""
        ...

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """How much of its memory ``run`` takes for a time; 0, without running it, where that is nothing to plan for."""
        ...


class Host:
    """The CPU, which has run what it was told when the call returns."""

    place = torch.device("cpu")
    is_ahead = False
    compiles = False
    usual_rows, usual_requests = 256, 64
    adapter_fraction = 0.0
    whole_fraction = 0.0

    def step_io(self, num_bytes: int) -> StepIo:  # noqa: ARG002 - the protocol's
        """See `Device`, here and below."""
        return HostIo()

    def make_forward(self, kernels: Kernels, capacity: StepCapacity) -> MakeForward | None:  # noqa: ARG002 - the protocol's
        return kernels.make_forward()

    def peak_bytes(self, run: Callable[[], object]) -> int:  # noqa: ARG002 - the protocol's
        return 0


def open_device(config: EngineConfig) -> Device:
    """The device that a configuration names; raises `ConfigError` where there is none."""
    place = resolve_device(config.device)
    return Host() if place.type == "cpu" else Gpu(place, use_graphs=config.use_graphs)


def resolve_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device that `graftwork_engine.config.EngineConfig.device` names here; of several GPUs the current one.

    Raises `ConfigError` for "cuda" where torch has no GPU.
    """
    if name == "cpu":
        return torch.device("cpu")
    # A build for AMD's GPUs answers for them under the same name, and has no version of CUDA.
    if torch.version.cuda is not None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if name == "auto":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ConfigError(
            f"device is cuda, and torch {torch.__version__} is built without CUDA; install one with it, or choose cpu"
        )
    raise ConfigError(
        "device is cuda, and torch finds no GPU; look at nvidia-smi, at CUDA_VISIBLE_DEVICES and, in a container, at whether it "
        "was given one, or choose cpu"
    )
