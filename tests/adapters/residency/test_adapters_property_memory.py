"""Memory and file descriptors stay where they are, however many adapters come and go."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import psutil

from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.fetcher import Fetcher
from graftwork_adapters.residency import AdapterResidency

CYCLES, ADAPTER_BYTES = 2_000, 16 * 1024
GROWTH = 8 << 20
"""Bytes; what the cycles load is 31 MiB."""


def bring_and_let_go(residency: AdapterResidency, key: str, woken: threading.Event) -> None:
    residency.hold(key)
    while residency.acquire(key) is None:
        assert residency.failure(key) is None
        assert woken.wait(60)
        woken.clear()
        residency.poll()
    residency.drop(key)
    residency.release(key)


def test_two_thousand_loads_leave_nothing_behind(memory_store, packed_of, tmp_path: Path) -> None:
    """Fault kind of vllm#42207 and trl#2730: memory that grows with each load. Real threads, real files, one adapter fits."""
    keys = [memory_store.add(packed_of(f"adapter {n}", num_bytes=ADAPTER_BYTES), tmp_path) for n in range(12)]
    pool = DevicePool(ADAPTER_BYTES, 4, 256, page_bytes=4096, max_rows=1024, max_adapters=2)
    fetcher = Fetcher(memory_store, tmp_path / "cache", 4 * ADAPTER_BYTES)
    woken = threading.Event()
    residency = AdapterResidency(fetcher, pool, 2 * ADAPTER_BYTES, max_loads=2, on_change=woken.set)
    process = psutil.Process()
    try:
        for cycle in range(200):  # until caches and thread pools have their size
            bring_and_let_go(residency, keys[cycle % len(keys)], woken)
        memory_store.fetched.clear()
        gc.collect()
        memory, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
        for cycle in range(CYCLES):
            bring_and_let_go(residency, keys[cycle % len(keys)], woken)
        gc.collect()
        stats = residency.stats()
        assert stats["adapter_device_evictions_total"] >= CYCLES
        assert stats["adapter_host_evictions_total"] >= CYCLES
        assert len(memory_store.fetched) == CYCLES, "each from the store again: nothing was left on host or disk"
        assert process.memory_info().rss - memory < GROWTH
        assert process.num_fds() == files
        assert process.num_threads() == threads
        assert residency.discrepancies({}, {}) == []
        assert len(residency._entries) == 1
    finally:
        residency.close()
