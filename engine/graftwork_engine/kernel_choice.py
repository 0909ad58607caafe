"""Which kernels an engine runs on: compiles those in C++ and has the choice made on its model's sizes. Holds no arithmetic."""

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
from graftwork_kernels.candidates import choose, implementation, implementations
from graftwork_kernels.choice import CPU, METHODS, ONEDNN, REFERENCE, BadPin, Choice, pinned
from graftwork_kernels.cpu.build import KernelsUnavailable, default_cache_dir
from graftwork_kernels.cpu.capture import Recorder
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library, open_library
from graftwork_kernels.cpu.onednn import unavailable as onednn_unavailable
from graftwork_kernels.ops import Operators
from graftwork_kernels.probes import StepSizes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What was chosen. ``library`` is None where nothing of it is in C++; ``used`` are the operators of the model's forward
    pass."""

    choice: Choice
    library: Library | None
    used: frozenset[str]

    def operators(self) -> Operators:
        """The operators, each run when it is called."""
        return Operators(implementation(self.choice, None if self.library is None else Immediate(self.library)))

    def recorder(self) -> tuple[Recorder, Operators] | None:
        """A recorder, with the operators that record into it; None where a forward pass has operators that cannot be recorded."""
        if self.library is None or not self.choice.is_native(self.used):
            return None
        recorder = Recorder(self.library)
        return recorder, Operators(implementation(replace(self.choice, onednn_rows=None), recorder))

    def make_forward(self) -> MakeForward | None:
        """The pass that replays what the recorder has; None where there is none."""
        recorded = self.recorder()
        return None if recorded is None else replaying(*recorded, self.choice.onednn_rows)

    @property
    def packs_twice(self) -> bool:
        """Whether `operators` prepares weights for oneDNN beside those for C++."""
        return self.choice.onednn_rows is not None or self.choice.names["linear"] == ONEDNN


def choose_kernels(config: EngineConfig, model: ModelConfig, max_model_len: int, dtype: torch.dtype) -> Kernels:
    """The fastest kernels that this machine has for this model, or those that the configuration pins; raises `ConfigError`.

    Compiles on the first start, and measures on the first start with a model of these sizes.
    """
    folder = kernel_dir(config)
    try:
        library, unavailable = _library(folder, dtype) if needs_library(config.kernels) else (None, {})
        found = implementations(None if library is None else Immediate(library), dtype)
        choice = choose(
            _step_sizes(config, model, max_model_len, dtype),
            found,
            folder=folder,
            fingerprint="" if library is None else library.fingerprint,
            pins=config.kernels,
            unavailable=unavailable,
        )
    except BadPin as error:
        raise ConfigError(str(error)) from error
    if CPU in unavailable:
        logger.warning(
            "every operator runs in plain torch, which takes several times as long as compiled kernels: %s", unavailable[CPU]
        )
    kernels = Kernels(choice, library if {CPU, ONEDNN} & set(choice.names.values()) else None, _used(model))
    if kernels.library is not None and not choice.is_native(kernels.used):
        others = ", ".join(sorted(operator for operator in kernels.used if choice.names[operator] != CPU))
        logger.warning("the forward pass is called operator by operator, since these are not compiled ones: %s", others)
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


def needs_library(pins: Mapping[str, str]) -> bool:
    """Whether any operator may come out as one in C++."""
    decided = pinned(pins)
    return any(decided.get(operator, CPU) != REFERENCE for operator in METHODS)


def _library(folder: Path, dtype: torch.dtype) -> tuple[Library | None, Mapping[str, str]]:
    """The compiled operators, and why this machine lacks them or what stands on them."""
    try:
        library = open_library(folder)
    except KernelsUnavailable as error:
        return None, {CPU: str(error), ONEDNN: f"it needs the compiled operators: {error}"}
    reason = onednn_unavailable(dtype)
    return library, {} if reason is None else {ONEDNN: reason}


def _step_sizes(config: EngineConfig, model: ModelConfig, max_model_len: int, dtype: torch.dtype) -> StepSizes:
    chunk = min(config.max_num_batched_tokens, config.prefill_chunk_size or config.max_num_batched_tokens, max_model_len)
    return StepSizes(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        block_size=config.block_size,
        max_rows=chunk,
        max_requests=config.max_num_seqs,
        dtype=dtype,
    )
