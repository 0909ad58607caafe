"""Measures what the machine can do at best: how fast it reads memory and how fast it multiplies matrices. Knows no model.

    machine.py [--json] [--threads N]

A floor is the time that a piece of work would take at these rates. They are measured anew in each run of a benchmark, since
a machine that is shared changes from hour to hour.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

READ_BYTES = 1 << 30
CACHED_BYTES = 128 << 10
GEMM_SIZE = 2048
LONGEST_GEMM_S = 4.0

FEATURES = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
"""Of the processor, those that decide which instructions the kernels have."""


@dataclass(frozen=True)
class Machine:
    """Rates in bytes and floating-point operations a second.

    ``read_headroom`` is how much faster the loop that measured ``read_bandwidth`` runs over memory that lies in a cache: near 1 it
    would be the loop that was measured and not the memory.
    """

    processor: str
    features: tuple[str, ...]
    cores: int
    threads: int
    torch_version: str
    read_bandwidth: float
    read_headroom: float
    gemm_bf16: float
    gemm_fp32: float

    @property
    def gemm(self) -> float:
        """The better of the two; a processor without bf16 instructions multiplies fp32 faster."""
        return max(self.gemm_bf16, self.gemm_fp32)

    def floor_s(self, num_bytes: float, flops: float = 0.0) -> float:
        """Seconds that reading so much, or computing so much, takes at the least."""
        return max(num_bytes / self.read_bandwidth, flops / self.gemm)

    def as_json(self) -> dict[str, Any]:
        """What a report says of the machine, in GB/s and GFLOP/s."""
        return {
            "processor": self.processor,
            "features": list(self.features),
            "cores": self.cores,
            "threads": self.threads,
            "torch": self.torch_version,
            "read_gb_s": round(self.read_bandwidth / 1e9, 2),
            "read_headroom": round(self.read_headroom, 2),
            "gemm_bf16_gflop_s": round(self.gemm_bf16 / 1e9, 1),
            "gemm_fp32_gflop_s": round(self.gemm_fp32 / 1e9, 1),
        }


def measure(threads: int | None = None, read_bytes: int = READ_BYTES, gemm_size: int = GEMM_SIZE) -> Machine:
    """Takes some seconds and ``read_bytes`` of memory. Matrices use ``threads``, torch's number unless given."""
    before = torch.get_num_threads()
    threads = threads or before
    try:
        bandwidth, headroom = _read_bandwidth(read_bytes, threads)
        torch.set_num_threads(threads)
        bf16, fp32 = (_gemm_rate(gemm_size, dtype) for dtype in (torch.bfloat16, torch.float32))
    finally:
        torch.set_num_threads(before)
    processor, features, cores = _processor()
    return Machine(processor, features, cores, threads, torch.__version__, bandwidth, headroom, bf16, fp32)


def best_time(work: Callable[[], object], least_s: float, repeats: int = 3) -> float:
    """Seconds of the fastest of at least ``repeats`` runs that together take at least ``least_s``."""
    best, began, done = float("inf"), time.perf_counter(), 0
    while done < repeats or time.perf_counter() - began < least_s:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        done += 1
    return best


def _read_bandwidth(num_bytes: int, threads: int) -> tuple[float, float]:
    """Bytes a second of a sum over memory that no cache holds, the best of one thread and several; and the loop's headroom."""
    content = torch.ones(num_bytes // 8, dtype=torch.int64)
    cached = torch.ones(CACHED_BYTES // 8, dtype=torch.int64)
    best, headroom = 0.0, 0.0
    for count in sorted({1, min(2, threads), threads}):
        torch.set_num_threads(count)
        rate = num_bytes / best_time(content.sum, 0.5)
        if rate > best:
            # The cached sum is too small to be shared, so it is one thread's; several go as much faster.
            best, headroom = rate, count * CACHED_BYTES / best_time(cached.sum, 0.05, 100) / rate
    return best, headroom


def _gemm_rate(size: int, dtype: torch.dtype) -> float:
    """Operations a second of a product of square matrices of ``size``, or of the greatest that takes less than `LONGEST_GEMM_S`.

    Torch multiplies bf16 with plain loops where the processor has no instructions for it: 2048³ would take minutes.
    """
    rate = 0.0
    for side in (s for s in (128, 256, 512, 1024, size) if s <= size):
        if rate and 2 * side**3 / rate > LONGEST_GEMM_S:
            break
        a, b = (torch.randn(side, side, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
        rate = 2 * side**3 / best_time(partial(torch.matmul, a, b), 0.5 if side == size else 0.0, 2)
    return rate


def _processor() -> tuple[str, tuple[str, ...], int]:
    """Name, features and cores, as far as the system tells."""
    facts: dict[str, str] = {}
    cores = 0
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
        cores += name.strip() == "processor"
    known = (facts.get("flags") or facts.get("Features") or "").split()
    family = f" (family {facts['cpu family']}, model {facts['model']})" if "cpu family" in facts else ""
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name}{family}", tuple(feature for feature in FEATURES if feature in known), cores or torch.get_num_threads()


def main(arguments: list[str]) -> int:
    """Print the rates."""
    parser = argparse.ArgumentParser(description="Measure read bandwidth and matrix-product rate.")
    parser.add_argument("--threads", type=int, help="of matrix products; torch's number by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads {options.threads}: give at least 1")
    facts = measure(options.threads).as_json()
    if options.json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            print(f"{name:20} {' '.join(value) if isinstance(value, list) else value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
