"""Everything an engine process is told at start. Frozen, passed down, and sent to the process as JSON. Reads no environment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from graftwork_adapters.store import StoreConfig
from graftwork_engine.errors import ConfigError
from graftwork_kernels.choice import BadPin, check_pins

MIB = 1 << 20
GIB = 1 << 30

MOST_THREADS = 1024
"""Beyond any machine's cores, and still few enough that the system starts them all."""

MAX_ADAPTER_RANK = 256
"""Where nothing else is said."""

ROW_ALIGNMENT = 64
"""Bytes; adapter rows begin at multiples of it, so a page must be one."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's settings. Sizes are bytes, times seconds. `validate` before use: decoding checks types only."""

    model_dir: str
    """Folder with config.json and the safetensors of the base model."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the base's weights, activations and KV cache."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; "auto": on a GPU where torch has one."""

    use_graphs: bool = True
    """On a GPU, whether steps that decode are captured at start and replayed; off, every step is called operator by operator."""

    num_threads: int | None = None
    """Threads of one operator on the CPU; None leaves it to torch, which takes the physical cores."""

    max_model_len: int | None = None
    """Prompt and output of one request, in tokens; None: the model's own limit."""

    max_num_batched_tokens: int | None = None
    """Rows of one step, prompt and output tokens together: more of them share one reading of the weights, and each step takes
    longer, which running streams feel as a pause. None: 256 on the CPU, 2048 on a GPU."""

    max_num_seqs: int | None = None
    """Requests that run at the same time. None: 64 on the CPU, 256 on a GPU."""

    prefill_chunk_size: int | None = None
    """Tokens of one request in one step, where that is to be less than the whole budget; None: no cap of its own."""

    block_size: int = 16
    """Tokens of one KV block, the unit in which prefixes are shared."""

    enable_prefix_caching: bool = True
    """Keep the blocks of ended requests findable until their memory is needed."""

    kv_memory_fraction: float | None = None
    """For KV blocks, of the memory that is free once weights and adapters have theirs and a step has what it needs; None: 0.4 of a
    machine's, which others want too, and 0.9 of a GPU's."""

    kv_memory_bytes: int | None = None
    """For KV blocks; overrides the fraction."""

    adapter_memory_bytes: int = 256 * MIB
    """Device pool that adapters of running requests lie in, at least: uploads are held to it before any engine runs."""

    adapter_memory_fraction: float | None = None
    """Of the memory that is free once the weights are loaded, for the same pool, where that is more. None: 0.1 on a GPU, 0 on the
    CPU, which is shared."""

    adapter_whole_bytes: int = 256 * MIB
    """Device memory beside that pool for the tensors that adapters bring whole (heads, embeddings, norms, linears), at least:
    uploads are held to it before any engine runs. A step reads them for each adapter. 0: those that bring any are not served."""

    adapter_page_bytes: int = 256 * 1024
    """Page of that pool. A row lies within one page, so it bounds the row; small pages waste less at an adapter's end."""

    max_adapter_rank: int = MAX_ADAPTER_RANK
    """Of any adapter at any projection; one above it is not loaded. Kernels for GPUs keep this much room for every row."""

    adapter_host_bytes: int = 1 * GIB
    """Host memory for adapters that waiting requests name or that were used lately."""

    adapter_disk_bytes: int = 10 * GIB
    """Disk under ``cache_dir`` for packed adapters that were fetched."""

    num_adapter_loaders: int = 4
    """Adapters that are fetched from the store at the same time, and as many that are read from the local disk meanwhile."""

    store: StoreConfig | None = None
    """Object store of packed adapters; None: this engine serves the base alone."""

    cache_dir: str | None = None
    """Folder of the local disk cache; needed with a store."""

    kernels: dict[str, str] = {}
    """Implementation by operator, or by "all", instead of the fastest: `graftwork_kernels.choice` has the names of both."""

    kernel_dir: str | None = None
    """Folder for compiled kernels and what was measured of them, which several engines may share; None: ``kernels`` in
    ``cache_dir``, or in this user's cache."""

    step_limit_s: float = 300.0
    """A step that takes longer is taken for hung, and the process ends so that a new one can start."""

    def validate(self) -> None:
        """Raise `ConfigError`, saying what to do, for settings that contradict each other or the machine."""
        self._check_numbers()
        if not (Path(self.model_dir) / "config.json").is_file():
            raise ConfigError(f"model_dir: {self.model_dir} has no config.json; name a folder in Hugging Face's format")
        if self.kv_memory_fraction is not None and not 0 < self.kv_memory_fraction <= 0.95:
            raise ConfigError(f"kv_memory_fraction is {self.kv_memory_fraction}; choose a number above 0 and up to 0.95")
        if self.adapter_memory_fraction is not None and not 0 <= self.adapter_memory_fraction <= 0.9:
            raise ConfigError(f"adapter_memory_fraction is {self.adapter_memory_fraction}; choose a number from 0 to 0.9")
        if self.adapter_whole_bytes < 0:
            raise ConfigError(f"adapter_whole_bytes is {self.adapter_whole_bytes}; choose 0, for none, or a number above it")
        if self.adapter_page_bytes % ROW_ALIGNMENT:
            raise ConfigError(f"adapter_page_bytes is {self.adapter_page_bytes}; choose a multiple of {ROW_ALIGNMENT}")
        if self.adapter_memory_bytes < self.adapter_page_bytes:
            raise ConfigError(
                f"adapter_memory_bytes is {self.adapter_memory_bytes}, less than one page of {self.adapter_page_bytes}; "
                "raise it, or lower adapter_page_bytes"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}; a prompt and an output token need at least 2")
        if self.store is not None and self.cache_dir is None:
            raise ConfigError("store is set and cache_dir is not; name a folder for the packed adapters that are fetched")
        try:
            check_pins(self.kernels, unavailable={})
        except BadPin as error:
            raise ConfigError(str(error)) from error

    def _check_numbers(self) -> None:
        for name in (
            "num_threads",
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "prefill_chunk_size",
            "block_size",
            "kv_memory_bytes",
            "adapter_memory_bytes",
            "adapter_page_bytes",
            "max_adapter_rank",
            "adapter_host_bytes",
            "adapter_disk_bytes",
            "num_adapter_loaders",
            "step_limit_s",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}; choose a number above 0")
        if self.num_threads is not None and self.num_threads > MOST_THREADS:
            raise ConfigError(f"num_threads is {self.num_threads}; choose at most {MOST_THREADS}, best the number of cores")
