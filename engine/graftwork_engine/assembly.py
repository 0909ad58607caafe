"""Puts an engine together from its configuration: model, KV memory, adapter memory, scheduler. Holds no logic of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from graftwork_adapters.base_spec import BaseSpec, load_base_spec
from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.errors import AdapterError, UnsupportedBase
from graftwork_adapters.fetcher import Fetcher
from graftwork_adapters.pack import longest_row_bytes
from graftwork_adapters.residency import AdapterResidency
from graftwork_adapters.stores import open_store
from graftwork_engine.batch import StepCapacity
from graftwork_engine.config import EngineConfig
from graftwork_engine.core import EngineCore
from graftwork_engine.errors import ConfigError, ErrorCode, UnsupportedModel
from graftwork_engine.kernel_choice import Kernels, choose_kernels
from graftwork_engine.kv.manager import KVCacheManager
from graftwork_engine.kv_memory import KvCache, allocate_kv_cache, blocks_that_fit, free_memory
from graftwork_engine.model.config import ModelConfig
from graftwork_engine.model.layers import Placement
from graftwork_engine.model.llama import Llama
from graftwork_engine.model.loader import load_weights
from graftwork_engine.model.registry import build_model
from graftwork_engine.runner import ModelRunner
from graftwork_engine.sched.plan import AdapterFailure, AdapterGate
from graftwork_engine.sched.scheduler import Scheduler, SchedulerLimits
from graftwork_kernels.layout import AdapterMemory, empty_adapter_memory
from graftwork_kernels.ops import Operators

logger = logging.getLogger(__name__)

MAX_KV_ROUNDS = 4
"""Without a size given, KV memory holds at most this many times what all running requests of the greatest length need: what is
beyond one serves prefixes, and on a small model a share of all memory would be millions of blocks."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class EngineAssembly:
    """A core with all it stands on. ``max_prompt_and_output`` is ``max_model_len`` bounded by what KV memory can ever hold."""

    core: EngineCore
    base_id: str
    max_model_len: int
    max_prompt_and_output: int
    residency: AdapterResidency | None
    _waker: _Waker

    def wake_with(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, from any thread, when a background load has finished."""
        self._waker.wake = wake

    def stats(self) -> dict[str, float]:
        """The core's readings and those of adapter memory."""
        return {**self.core.stats(), **(self.residency.stats() if self.residency else {})}

    def close(self) -> None:
        """Stop background threads."""
        if self.residency is not None:
            self.residency.close()


class _Waker:
    """Lets the residency be built before there is anything to wake."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.wake is not None:
            self.wake()


class NoAdapters:
    """The gate of an engine without a store: it serves the base alone, and a request for an adapter fails."""

    def hold(self, key: str) -> None:
        """Nothing is fetched."""

    def drop(self, key: str) -> None:
        """Nothing was kept."""

    def acquire(self, key: str) -> int | None:  # noqa: ARG002 - the protocol's
        """No adapter is ever on the device."""
        return None

    def release(self, key: str) -> None:
        """Never called: nothing is acquired."""

    def needs_room(self, key: str) -> bool:  # noqa: ARG002 - the protocol's
        """Room would not help."""
        return False

    def failure(self, key: str) -> AdapterFailure | None:
        """The same answer for every adapter."""
        return AdapterFailure(
            ErrorCode.ADAPTER_MISSING, f"adapter {key}: this engine has no adapter store, it serves the base alone"
        )

    def poll(self) -> bool:
        """Nothing runs in the background."""
        return False

    def discrepancies(self, holds: Mapping[str, int], references: Mapping[str, int]) -> list[str]:  # noqa: ARG002 - the protocol's
        """There is nothing to count."""
        return []


def build_engine(config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> EngineAssembly:
    """Load the base and lay out memory; ready to step. ``clock`` is the one that requests' deadlines are on.

    Raises `ConfigError` and `UnsupportedModel`; starting again cannot help either.
    """
    config.validate()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    place = Placement(DTYPES[config.dtype], torch.device(config.device))
    model_dir = Path(config.model_dir)
    model_config = ModelConfig.from_dir(model_dir)
    max_model_len = _max_model_len(config, model_config)
    spec = _base_spec(config, model_dir)
    kernels = choose_kernels(config, model_config, max_model_len, place.dtype)
    ops = kernels.operators()

    started = time.monotonic()
    model = build_model(model_config, max_model_len, place)
    load_weights(model, model_dir)
    _prepare(model, kernels, ops)
    logger.info("%s: %s in %s, loaded in %.1f s", spec.name, spec.architecture, config.dtype, time.monotonic() - started)

    waker = _Waker()
    residency = _residency(config, spec, place.device, waker)
    gate: AdapterGate = NoAdapters() if residency is None else residency
    memory = empty_adapter_memory(model_config.num_sites, place.device) if residency is None else AdapterMemory(*residency.memory)
    kv = _kv_cache(config, model, max_model_len)
    limits = SchedulerLimits(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        prefill_chunk_size=config.prefill_chunk_size,
    )
    blocks = KVCacheManager(kv.num_blocks, kv.block_size, spec.base_id, enable_prefix_caching=config.enable_prefix_caching)
    scheduler = Scheduler(limits, blocks, gate, clock)
    capacity = StepCapacity(config.max_num_batched_tokens, config.max_num_seqs, -(-scheduler.max_request_tokens // kv.block_size))
    runner = ModelRunner(model, kv, memory, ops, capacity, kernels.recorder(), kernels.choice.onednn_rows)
    return EngineAssembly(
        core=EngineCore(scheduler, runner, gate),
        base_id=spec.base_id,
        max_model_len=max_model_len,
        max_prompt_and_output=scheduler.max_request_tokens,
        residency=residency,
        _waker=waker,
    )


def _prepare(model: Llama, kernels: Kernels, ops: Operators) -> None:
    """Have the weights laid out for the operators that will read them, and say what a second layout costs."""
    num_bytes = sum(tensor.nbytes for _, tensor in model.destinations() if tensor.dim() > 1)
    model.prepare(ops)
    if kernels.packs_twice:
        rows = kernels.choice.onednn_rows or 1
        logger.info(
            "linears of %d rows and more are oneDNN's, whose weights take %d MB beside the others", rows, num_bytes // 10**6
        )


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len is {config.max_model_len}; this base was made for up to {longest} positions")
    return config.max_model_len or longest


def _base_spec(config: EngineConfig, model_dir: Path) -> BaseSpec:
    try:
        return load_base_spec(model_dir, None if config.cache_dir is None else Path(config.cache_dir))
    except UnsupportedBase as error:
        raise UnsupportedModel(str(error)) from error


def _residency(
    config: EngineConfig, spec: BaseSpec, device: torch.device, on_change: Callable[[], None]
) -> AdapterResidency | None:
    """Adapter memory and the way into it; None without a store."""
    if config.store is None or config.cache_dir is None:
        return None
    longest_row = longest_row_bytes(spec, config.dtype)
    try:
        fetcher = Fetcher(open_store(config.store), Path(config.cache_dir) / "packed", config.adapter_disk_bytes)
    except AdapterError as error:
        raise ConfigError(str(error)) from error
    pool = DevicePool(
        config.adapter_memory_bytes,
        len(spec.sites),
        longest_row,
        page_bytes=config.adapter_page_bytes,
        widths=[(site.in_features, site.out_features) for site in spec.sites],
        max_rank=config.max_adapter_rank,
        device=device,
    )
    return AdapterResidency(
        fetcher,
        pool,
        config.adapter_host_bytes,
        base_id=spec.base_id,
        max_loads=config.num_adapter_loaders,
        on_change=on_change,
    )


def _kv_cache(config: EngineConfig, model: Llama, max_model_len: int) -> KvCache:
    """As many blocks as the memory allows, and no more than can be of use."""
    place = model.place
    memory = config.kv_memory_bytes or int(free_memory(place.device) * config.kv_memory_fraction)
    fit = blocks_that_fit(model.config, config.block_size, place.dtype, memory)
    useful = MAX_KV_ROUNDS * config.max_num_seqs * -(-max_model_len // config.block_size)
    if config.kv_memory_bytes is None:
        fit = min(fit, useful)
    kv = allocate_kv_cache(model.config, fit, config.block_size, place.dtype, place.device)
    logger.info(
        "KV memory: %d blocks of %d tokens in %d MiB, room for %.1f requests of the greatest length, %d tokens",
        *(kv.num_blocks, kv.block_size, kv.num_bytes >> 20, kv.num_tokens / max_model_len, max_model_len),
    )
    return kv
