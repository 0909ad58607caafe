"""Puts an engine together from its configuration: model, KV memory, adapter memory, scheduler. Holds no logic of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from graftwork_adapters.base_spec import BaseSpec, load_base_spec
from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.errors import AdapterError, UnsupportedBase
from graftwork_adapters.fetcher import Fetcher
from graftwork_adapters.pack import longest_row_bytes
from graftwork_adapters.residency import AdapterResidency
from graftwork_adapters.stores import open_store
from graftwork_adapters.whole_checks import weight_sites, whole_shapes
from graftwork_adapters.whole_memory import DeviceWholes, WholeLimits
from graftwork_adapters.wholes import WholeFacts
from graftwork_engine.ahead import AheadCore
from graftwork_engine.config import EngineConfig
from graftwork_engine.core import EngineCore
from graftwork_engine.device import Device, open_device
from graftwork_engine.errors import ConfigError, ErrorCode, UnsupportedModel
from graftwork_engine.kernel_choice import Kernels, choose_kernels
from graftwork_engine.kv.manager import KVCacheManager
from graftwork_engine.kv_memory import (
    KvCache,
    allocate_kv_cache,
    blocks_that_fit,
    free_memory,
    kv_block_bytes,
    kv_share,
    usual_fraction,
)
from graftwork_engine.memory_report import adapter_room, what_fits
from graftwork_engine.model.config import ModelConfig
from graftwork_engine.model.layers import Placement
from graftwork_engine.model.llama import Llama
from graftwork_engine.model.loader import load_weights
from graftwork_engine.model.registry import build_model
from graftwork_engine.runner import ModelRunner
from graftwork_engine.sampler import SCORED_ROWS_AT_ONCE
from graftwork_engine.sched.limits import SchedulerLimits
from graftwork_engine.sched.plan import AdapterFailure, AdapterGate
from graftwork_engine.sched.scheduler import Scheduler
from graftwork_engine.warm_up import GREEDIEST, StepLimits, warm_up
from graftwork_kernels.layout import AdapterMemory, empty_adapter_memory
from graftwork_kernels.ops import Operators

logger = logging.getLogger(__name__)

MAX_KV_ROUNDS = 4
"""Without a size given, KV memory holds at most this many times what all running requests of the greatest length need: what is
beyond one serves prefixes, and on a small model a share of all memory would be millions of blocks."""

_LOGIT_COPIES = 3
"""What a step takes beside the largest that is tried at start, if adapters have heads of their own: its logits so many times."""

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

    def wholes(self, index: int) -> WholeFacts | None:  # noqa: ARG002 - the protocol's
        """Never asked: nothing is acquired."""
        return None

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
    device = open_device(config)
    place = Placement(DTYPES[config.dtype], device.place)
    model_dir = Path(config.model_dir)
    model_config = ModelConfig.from_dir(model_dir)
    max_model_len = _max_model_len(config, model_config)
    spec = _base_spec(config, model_dir)
    steps = StepLimits(
        config.max_num_batched_tokens or device.usual_rows,
        config.max_num_seqs or device.usual_requests,
        max_model_len,
        config.block_size,
    )
    kernels = choose_kernels(config, model_config, steps, place)
    ops = kernels.operators()

    started = time.monotonic()
    with _fitting("the base model", place.device, "choose a smaller base, or a device with more memory"):
        model = build_model(model_config, max_model_len, place)
        num_elements = sum(tensor.numel() for _, tensor in model.destinations())  # before they are laid out for operators
        load_weights(model, model_dir)
        _prepare(model, kernels, ops)
    logger.info("%s: %s in %s, loaded in %.1f s", spec.name, spec.architecture, config.dtype, time.monotonic() - started)

    waker = _Waker()
    pool = _adapter_pool(config, spec, device)
    residency = None if pool is None else _residency(config, spec, pool, waker)
    gate: AdapterGate = NoAdapters() if residency is None else residency
    memory = empty_adapter_memory(model_config.num_sites, place.device) if residency is None else AdapterMemory(*residency.memory)
    with _fitting("what the largest step takes for a time", place.device, "lower max_num_batched_tokens or max_num_seqs"):
        reserved = device.peak_bytes(lambda: _largest_step(model, memory, ops, device, steps))
    if reserved and pool is not None:
        reserved += _LOGIT_COPIES * max(steps.num_requests, SCORED_ROWS_AT_ONCE) * model_config.vocab_size * 4
    kv = _kv_cache(config, model, steps, reserved)
    head_bytes = model_config.vocab_size * model_config.hidden_size * place.dtype.itemsize
    room = None if pool is None else adapter_room(pool, spec, config.dtype, head_bytes)
    logger.info("%s", what_fits(kv, max_model_len, room, _left_free(kv, place.device), reserved))
    limits = SchedulerLimits(
        max_num_batched_tokens=steps.num_rows,
        max_num_seqs=steps.num_requests,
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        prefill_chunk_size=config.prefill_chunk_size,
        base_bytes=num_elements * place.dtype.itemsize,
    )
    blocks = KVCacheManager(kv.num_blocks, kv.block_size, spec.base_id, enable_prefix_caching=config.enable_prefix_caching)
    scheduler = Scheduler(limits, blocks, gate, clock)
    with _fitting("what steps take beside the KV memory", place.device, "lower kv_memory_fraction or max_num_seqs"):
        steps = replace(steps, longest=scheduler.max_request_tokens)
        runner = _runner(model, kv, memory, {} if pool is None else pool.wholes, kernels, device, steps)
    return EngineAssembly(
        core=AheadCore(scheduler, runner, gate) if device.is_ahead else EngineCore(scheduler, runner, gate),
        base_id=spec.base_id,
        max_model_len=max_model_len,
        max_prompt_and_output=scheduler.max_request_tokens,
        residency=residency,
        _waker=waker,
    )


@contextmanager
def _fitting(what: str, place: torch.device, remedy: str) -> Iterator[None]:
    """Turns memory that is not there into a `ConfigError` that says what makes room: to start again would not."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{what} does not fit: {free_memory(place)} bytes are free on {place}; {remedy}") from error


def _largest_step(model: Llama, memory: AdapterMemory, ops: Operators, device: Device, steps: StepLimits) -> None:
    """The most that a step computes, with the memory that it takes for that, over a cache that holds little more."""
    plan = steps.largest(GREEDIEST)
    num_blocks = max(len(s.block_ids) for s in plan.scheduled)
    kv = allocate_kv_cache(model.config, num_blocks, steps.block_size, model.place.dtype, model.place.device)
    io = device.step_io(steps.capacity.num_bytes)
    ModelRunner(model, kv, memory, ops, steps.capacity, io=io).execute(plan)


def _runner(
    model: Llama,
    kv: KvCache,
    memory: AdapterMemory,
    wholes: Mapping[int, DeviceWholes],
    kernels: Kernels,
    device: Device,
    steps: StepLimits,
) -> ModelRunner:
    """What executes steps, all of its kernels compiled."""
    started = time.monotonic()
    runner = ModelRunner(
        model,
        kv,
        memory,
        kernels.operators(),
        steps.capacity,
        io=device.step_io(steps.capacity.num_bytes),
        is_ahead=device.is_ahead,
        make_forward=device.make_forward(kernels, steps.capacity),
        wholes=wholes,
    )
    if device.compiles:
        number = warm_up(runner, steps)
        left = (_left_free(kv, device.place) or 0) >> 20
        logger.info("warm after %d steps, in %.1f s; %d MiB are left free", number, time.monotonic() - started, left)
    return runner


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


def _adapter_pool(config: EngineConfig, spec: BaseSpec, device: Device) -> DevicePool | None:
    """Adapter memory; None without a store."""
    if config.store is None:
        return None
    longest_row, place = longest_row_bytes(spec), device.place
    fraction = device.adapter_fraction if config.adapter_memory_fraction is None else config.adapter_memory_fraction
    num_bytes = max(config.adapter_memory_bytes, int(fraction * free_memory(place)) if fraction else 0)
    whole_bytes = config.adapter_whole_bytes
    if whole_bytes and device.whole_fraction:
        whole_bytes = max(whole_bytes, int(device.whole_fraction * free_memory(place)))
    try:
        pool = DevicePool(
            num_bytes,
            len(spec.sites),
            longest_row,
            page_bytes=config.adapter_page_bytes,
            max_rank=config.max_adapter_rank,
            widths=[(site.in_features, site.out_features) for site in spec.sites],
            wholes=WholeLimits(whole_bytes, whole_shapes(spec), weight_sites(spec), DTYPES[config.dtype]),
            device=place,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"adapter memory of {num_bytes} bytes, with {whole_bytes} beside it for what adapters bring whole, does not fit beside "
            f"the weights: {free_memory(place)} bytes are free on {place}; lower adapter_memory_bytes or adapter_whole_bytes"
        ) from error
    if not pool.capacity_bytes:
        raise ConfigError(
            f"adapter memory of {num_bytes} bytes holds no page: one page takes {pool.page_bytes} bytes, and the "
            f"longest row of an adapter {longest_row}; raise adapter_memory_bytes"
        )
    return pool


def _residency(config: EngineConfig, spec: BaseSpec, pool: DevicePool, on_change: Callable[[], None]) -> AdapterResidency:
    """The way into adapter memory."""
    if config.store is None or config.cache_dir is None:
        raise AssertionError("an engine with adapter memory has a store and a cache")  # `validate` saw to that
    try:
        fetcher = Fetcher(open_store(config.store), Path(config.cache_dir) / "packed", config.adapter_disk_bytes)
    except AdapterError as error:
        raise ConfigError(str(error)) from error
    return AdapterResidency(
        fetcher,
        pool,
        config.adapter_host_bytes,
        base_id=spec.base_id,
        max_loads=config.num_adapter_loaders,
        on_change=on_change,
    )


def _kv_cache(config: EngineConfig, model: Llama, steps: StepLimits, reserved_bytes: int = 0) -> KvCache:
    """As many blocks as the memory allows, and no more than can be of use. ``reserved_bytes`` of what is free are left to the step:
    activations, logits and whatever else its largest takes beyond weights, adapters and blocks.
    """
    device, dtype = model.place.device, model.place.dtype
    if config.kv_memory_bytes is not None:
        fit = blocks_that_fit(model.config, config.block_size, dtype, config.kv_memory_bytes)
    else:
        free, fraction = free_memory(device), config.kv_memory_fraction or usual_fraction(device)
        whence = f"{fraction:g} of {free} bytes that are free, less {reserved_bytes} for a step"
        memory = kv_share(free, reserved_bytes, fraction)
        useful = MAX_KV_ROUNDS * steps.num_requests * steps.capacity.num_blocks
        fit = min(blocks_that_fit(model.config, config.block_size, dtype, memory, whence), useful)
    try:
        return allocate_kv_cache(model.config, fit, config.block_size, dtype, device)
    except torch.OutOfMemoryError as error:
        wanted = fit * kv_block_bytes(model.config, config.block_size, dtype)
        raise ConfigError(
            f"KV memory of {wanted} bytes does not fit: {free_memory(device)} bytes are free on {device}; lower kv_memory_bytes or "
            "kv_memory_fraction"
        ) from error


def _left_free(kv: KvCache, device: torch.device) -> int | None:
    """Bytes that are free once all of ``kv`` is used; None where this machine does not tell."""
    try:
        free = free_memory(device)
    except ConfigError:
        return None
    return max(0, free - kv.num_bytes) if device.type == "cpu" else free  # see `allocate_kv_cache`
