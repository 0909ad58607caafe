"""The memory that keys and values of the paged cache lie in, and how much of it fits. Knows no requests and no prefixes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from graftwork_engine import cuda_memory
from graftwork_engine.errors import ConfigError
from graftwork_engine.model.config import ModelConfig

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")

FRACTION_OF_MACHINE, FRACTION_OF_DEVICE = 0.4, 0.9
"""Of free memory, for KV blocks, unless the configuration says otherwise. A machine's memory is everybody's. A GPU is the engine's
alone, and a tenth stays for what no measurement of a step foresees, such as pieces too small for what is asked for."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """One pair of tensors [num_blocks, num_kv_heads, block_size, head_dim] for each layer."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    num_blocks: int
    block_size: int

    @property
    def num_bytes(self) -> int:
        """Of all keys and values."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into all blocks together."""
        return self.num_blocks * self.block_size


def kv_block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values together."""
    return 2 * model.num_layers * model.num_kv_heads * block_size * model.head_dim * dtype.itemsize


def kv_share(free_bytes: int, reserved_bytes: int, fraction: float) -> int:
    """Bytes for KV blocks: ``fraction`` of what is free beside the ``reserved_bytes`` that a step needs."""
    return int(max(0, free_bytes - reserved_bytes) * fraction)


def blocks_that_fit(model: ModelConfig, block_size: int, dtype: torch.dtype, memory: int, whence: str = "as configured") -> int:
    """How many blocks ``memory`` bytes hold; raises `ConfigError`, saying ``whence`` the size is, when it is not even one."""
    block = kv_block_bytes(model, block_size, dtype)
    if memory < block:
        raise ConfigError(
            f"KV memory of {memory} bytes ({whence}) holds no block: one block of {block_size} tokens takes {block} bytes "
            f"({model.num_layers} layers, {model.num_kv_heads} KV heads of {model.head_dim}, {dtype}); raise kv_memory_bytes or "
            "kv_memory_fraction, or make room by lowering adapter_memory_bytes or max_num_batched_tokens"
        )
    return memory // block


def allocate_kv_cache(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> KvCache:
    """A cache of zeros, so that a block never written holds no NaN. On the CPU the system hands out its pages on first use."""
    shape = (model.num_layers, 2, num_blocks, model.num_kv_heads, block_size, model.head_dim)
    if torch.device(device).type == "cpu":  # torch.zeros would touch every page now
        memory = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
    else:
        memory = torch.zeros(shape, dtype=dtype, device=device)
    return KvCache(memory[:, 0].unbind(), memory[:, 1].unbind(), num_blocks, block_size)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on ``device``: of the GPU, or of this machine within its control group."""
    return min(_free_on_machine(), _free_in_cgroup()) if device.type == "cpu" else cuda_memory.free_bytes(device)


def usual_fraction(device: torch.device) -> float:
    """Of the memory that is free on ``device``, for KV blocks, where nobody has said how much."""
    return FRACTION_OF_MACHINE if device.type == "cpu" else FRACTION_OF_DEVICE


def _free_on_machine() -> int:
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{MEMINFO} has no MemAvailable: set the KV memory in bytes")


def _free_in_cgroup() -> int:
    """What the container's limit leaves (control groups v2); the machine's own number would let it be killed."""
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if not limit.exists() or (ceiling := limit.read_text().strip()) == "max":
        return torch.iinfo(torch.int64).max
    return max(0, int(ceiling) - int(used.read_text()))
