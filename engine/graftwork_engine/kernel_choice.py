"""Which kernels an engine runs on: those that its device can have, chosen on its model's sizes. Holds no arithmetic."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from graftwork_engine.config import EngineConfig
from graftwork_engine.errors import ConfigError
from graftwork_engine.forward import MakeForward, replaying
from graftwork_engine.model.config import ModelConfig
from graftwork_engine.model.layers import Placement
from graftwork_engine.warm_up import StepLimits
from graftwork_kernels.candidates import choose, implementation, implementations
from graftwork_kernels.choice import CPU, METHODS, ON_GPU, ONEDNN, REFERENCE, TRITON, BadPin, Choice, pinned
from graftwork_kernels.cpu.build import KernelsUnavailable, default_cache_dir
from graftwork_kernels.cpu.capture import Recorder
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library, open_library
from graftwork_kernels.cpu.onednn import unavailable as onednn_unavailable
from graftwork_kernels.ops import Operators
from graftwork_kernels.probes import StepSizes
from graftwork_kernels.triton import device as gpu

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What was chosen for ``device``, for adapters of up to ``max_rank``. ``library`` is None where nothing of it is in C++;
    ``used`` are the operators of the model's forward pass."""

    choice: Choice
    library: Library | None
    used: frozenset[str]
    device: torch.device
    max_rank: int

    def operators(self) -> Operators:
        """The operators, each run when it is called."""
        issuer = None if self.library is None else Immediate(self.library)
        return Operators(implementation(self.choice, issuer, self.device, self.max_rank))

    def recorder(self) -> tuple[Recorder, Operators] | None:
        """A recorder, with the operators that record into it; None where a forward pass has operators that cannot be recorded."""
        if self.library is None or not self.choice.is_native(self.used):
            return None
        recorder = Recorder(self.library)
        return recorder, Operators(implementation(replace(self.choice, onednn_rows=None), recorder, self.device, self.max_rank))

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can hold the model's forward pass, from the embedding to the logits."""
        return self.device.type == "cuda" and self.choice.is_capturable(self.used)

    def make_forward(self) -> MakeForward | None:
        """The pass that replays what the recorder has; None where there is none."""
        recorded = self.recorder()
        return None if recorded is None else replaying(*recorded, self.choice.onednn_rows)

    @property
    def packs_twice(self) -> bool:
        """Whether `operators` prepares weights for oneDNN beside those for C++."""
        return self.choice.onednn_rows is not None or self.choice.names["linear"] == ONEDNN


def choose_kernels(config: EngineConfig, model: ModelConfig, steps: StepLimits, place: Placement) -> Kernels:
    """The fastest kernels that ``place`` has for this model, or those that the configuration pins; raises `ConfigError`.

    Compiles on the first start, and measures on the first start with a model of these sizes.
    """
    folder, device, dtype = kernel_dir(config), place.device, place.dtype
    library, unavailable = _on_gpu(folder, device) if device.type == "cuda" else _on_cpu(folder, dtype, config.kernels)
    try:
        found = implementations(None if library is None else Immediate(library), dtype, device, config.max_adapter_rank)
        choice = choose(
            _step_sizes(config, model, steps, dtype),
            found,
            device=device,
            folder=folder,
            fingerprint="" if library is None else library.fingerprint,
            pins=config.kernels,
            unavailable=unavailable,
        )
    except BadPin as error:
        raise ConfigError(str(error)) from error
    compiled = TRITON if device.type == "cuda" else CPU
    if compiled in unavailable and len(pinned(config.kernels)) < len(METHODS):
        logger.warning(
            "every operator runs in plain torch, which takes several times as long as compiled kernels: %s", unavailable[compiled]
        )
    if not {CPU, ONEDNN} & set(choice.names.values()):
        library = None
    kernels = Kernels(choice, library, _used(model), device, config.max_adapter_rank)
    if kernels.library is not None and not choice.is_native(kernels.used):
        others = ", ".join(sorted(operator for operator in kernels.used if choice.names[operator] != CPU))
        logger.warning("the forward pass is called operator by operator, since these are not compiled ones: %s", others)
    if device.type == "cuda" and not kernels.is_capturable:
        others = ", ".join(sorted(operator for operator in kernels.used if choice.names[operator] not in ON_GPU))
        logger.warning("the forward pass is called operator by operator, since these are not kernels of the GPU: %s", others)
    return kernels


def _used(model: ModelConfig) -> frozenset[str]:
    """Operators that the model's forward pass calls."""
    always = {"linear", "paged_attention", "rotary_and_write_kv", "add_rms_norm", "silu_and_mul"}
    return frozenset(always | {"rms_norm"} if model.qk_norm else always)


def kernel_dir(config: EngineConfig) -> Path:
    """Where compiled kernels and what was measured of them are kept."""
    if config.kernel_dir is not None:
        return Path(config.kernel_dir)
    return default_cache_dir() if config.cache_dir is None else Path(config.cache_dir) / "kernels"


def needs_library(pins: Mapping[str, str], device: torch.device) -> bool:
    """Whether any operator may come out as one in C++."""
    decided = pinned(pins)
    return device.type == "cpu" and any(decided.get(operator, CPU) not in {REFERENCE, *ON_GPU} for operator in METHODS)


def _on_gpu(folder: Path, device: torch.device) -> tuple[None, Mapping[str, str]]:
    """Has what Triton compiles kept in ``folder``. No library, and why a GPU lacks implementations."""
    unavailable = dict.fromkeys((CPU, ONEDNN), f"it runs on the CPU, and the engine's device is {device.type}")
    reason = gpu.unavailable(device)
    if reason is None:
        gpu.keep_compiled_in(folder / "triton")
    else:
        unavailable |= dict.fromkeys(ON_GPU, reason)
    return None, unavailable


def _on_cpu(folder: Path, dtype: torch.dtype, pins: Mapping[str, str]) -> tuple[Library | None, Mapping[str, str]]:
    """The compiled operators, if any may be used, and why this machine lacks implementations."""
    device = torch.device("cpu")
    library, unavailable = _library(folder, dtype) if needs_library(pins, device) else (None, {})
    reason = gpu.unavailable(device)
    return library, {**unavailable, **({} if reason is None else dict.fromkeys(ON_GPU, reason))}


def _library(folder: Path, dtype: torch.dtype) -> tuple[Library | None, Mapping[str, str]]:
    """The compiled operators, and why this machine lacks them or what stands on them."""
    try:
        library = open_library(folder)
    except KernelsUnavailable as error:
        return None, {CPU: str(error), ONEDNN: f"it needs the compiled operators: {error}"}
    reason = onednn_unavailable(dtype)
    return library, {} if reason is None else {ONEDNN: reason}


def _step_sizes(config: EngineConfig, model: ModelConfig, steps: StepLimits, dtype: torch.dtype) -> StepSizes:
    chunk = min(steps.num_rows, config.prefill_chunk_size or steps.num_rows, steps.longest)
    return StepSizes(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        block_size=config.block_size,
        max_rows=chunk,
        max_requests=steps.num_requests,
        dtype=dtype,
    )
