"""The front door of adapter memory: which adapters are on the host and on the device, and who still needs them.

Knows keys and references; refuses to know requests, tenants and the kernels that read the memory.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import cast

from graftwork_adapters.background import Background
from graftwork_adapters.device_pool import DevicePool, PoolTensors
from graftwork_adapters.device_room import DeviceRoom
from graftwork_adapters.direct_copy import DirectCopy
from graftwork_adapters.fetcher import Fetcher
from graftwork_adapters.host_cache import HostCache, HostCopy
from graftwork_adapters.load_failure import LoadFailure, failure_of
from graftwork_adapters.page_table import Extent, PageLayout, Placement
from graftwork_adapters.residency_books import ResidencyBooks
from graftwork_adapters.residency_entry import Entry, HostState
from graftwork_adapters.residency_loads import Fetched, Loads
from graftwork_adapters.wholes import WholeFacts

_log = logging.getLogger(__name__)


class AdapterResidency:
    """Host and device copies of adapters by key: the engine's adapter gate.

    Every method but `close` belongs to one thread, the engine's, and none of them blocks: what the local disk has is read on
    ``load_executor``, what it lacks is fetched on ``store_executor`` (by default ``max_loads`` threads each), copies to the device
    run on ``copy_executor`` (one thread, always), and `poll` takes in what they have finished. ``on_change`` is called from those
    threads, so that an idle engine can be woken.

    What the local disk has is brought to the device without another turn of the engine's thread, if there is room for it on the
    way: a busy engine polls once a step, so each turn would cost whoever waits as long as a step takes.

    A holder keeps the host copy only until the device has one. Device memory goes to those that asked for it, first come first
    served among those that the host has, or is reading while nobody waits for room; so does host memory, in the order in which
    loads began. ``base_id``, where given, is checked against every adapter: what was made for another base does not fit this one.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        device_pool: DevicePool,
        host_bytes: int,
        *,
        base_id: str | None = None,
        max_loads: int = 4,
        on_change: Callable[[], None] | None = None,
        load_executor: Executor | None = None,
        store_executor: Executor | None = None,
        copy_executor: Executor | None = None,
    ) -> None:
        self._fetcher = fetcher
        self._pool = device_pool
        self._room = DeviceRoom(device_pool)
        self._host = HostCache(host_bytes)
        self._background = Background(on_change)
        disk_lane = load_executor or ThreadPoolExecutor(max_loads, thread_name_prefix="adapter-load")
        store_lane = store_executor or ThreadPoolExecutor(max_loads, thread_name_prefix="adapter-fetch")
        self._loads = Loads(fetcher, device_pool, host_bytes, base_id, self._background, disk_lane, store_lane)
        self._copies = copy_executor or ThreadPoolExecutor(1, thread_name_prefix="adapter-copy")
        self._entries: dict[str, Entry] = {}
        self._arrivals = count()
        self._read_queue: list[tuple[int, str]] = []  # (arrival, key) of the fetched, ascending
        self._copy_queue: OrderedDict[str, None] = OrderedDict()  # wanted, on the host and not yet placed
        self._num_abandoning = 0  # fetched, no longer wanted, and not yet given up on the disk
        self._num_loads = self._num_load_failures = self._num_evictions = self._num_copies = self._num_hits = 0

    @property
    def memory(self) -> PoolTensors:
        """The tensors that kernels read, always the same ones."""
        return self._pool.tensors

    def hold(self, key: str) -> None:
        """Keep the adapter within reach: on the host, unless it is on the device. Paired with one `drop`."""
        entry = self._entries.setdefault(key, Entry(key))
        entry.holds += 1
        if entry.is_failure_told:
            entry.forget_failure()
        self._room.touch(key)
        self._claim_host(entry)

    def drop(self, key: str) -> None:
        """Undo one `hold`. The last one forgets a failure and lets the host copy be evicted."""
        entry = self._entries.get(key)
        if entry is None or not entry.holds:
            raise AssertionError(f"adapter {key} is dropped but not held")
        entry.holds -= 1
        if entry.holds:
            return
        entry.forget_failure()
        entry.wanted = entry.fresh = False
        self._copy_queue.pop(key, None)
        if entry.host is HostState.FETCHED:
            self._read_queue.remove((entry.arrival, key))
            self._abandon(entry)
        elif entry.host is HostState.PINNED and not entry.copying:
            self._unclaim_host(entry)
        self._settle(entry)
        self._start_what_can()

    def acquire(self, key: str) -> int | None:
        """Take a device reference and return the adapter's index, or None while it is not there; asking brings it there.

        Paired, where it succeeds, with one `release`. Whoever asks for an adapter that is not on the device must hold it.
        """
        entry = self._entries.get(key)
        if entry is not None and entry.is_resident:
            self._num_hits += not entry.fresh  # the first use of a copy is what the copy was made for
            entry.fresh = False
            entry.references += 1
            self._settle(entry)
            return entry.require_placement().index
        if entry is None or not entry.holds:
            raise AssertionError(f"adapter {key} is asked for on the device but not held")
        if not entry.wanted and not entry.copying and entry.failure is None:
            entry.wanted = True
            self._place_early(entry)
            self._queue_copy(entry)
            self._start_copies()
        return None

    def release(self, key: str) -> None:
        """Undo one successful `acquire`, however long after: no kernel may still be running that reads the adapter for it."""
        entry = self._entries.get(key)
        if entry is None or not entry.references:
            raise AssertionError(f"adapter {key} is released but not referenced")
        entry.references -= 1
        self._settle(entry)
        self._start_copies()

    def needs_room(self, key: str) -> bool:
        """True while only device references of others keep the adapter from the device."""
        return key in self._copy_queue and not self._room.protected

    def wholes(self, index: int) -> WholeFacts | None:
        """What an adapter that has a device reference brings whole; None if that is nothing."""
        brought = self._pool.wholes.get(index)
        return None if brought is None else brought.facts

    def failure(self, key: str) -> LoadFailure | None:
        """Why loading failed, until the last holder has dropped the key or, once this was asked, a new one tries again.

        Were it not asked in between, new holders that come faster than a load fails would keep the others from ever hearing.
        """
        entry = self._entries.get(key)
        if entry is None or entry.failure is None:
            return None
        entry.is_failure_told = True
        return entry.failure

    def poll(self) -> bool:
        """Take in finished background work and start what can now start; true if anything had finished."""
        changed = self._background.take_in()
        if changed:
            self._start_what_can()
        return changed

    def close(self) -> None:
        """Wait for running loads and copies and start no more. Call nothing else afterwards."""
        self._loads.close()
        self._copies.shutdown(wait=True, cancel_futures=True)

    def stats(self) -> dict[str, float]:
        """Readings for metrics, by names that do not depend on the adapters."""
        return {
            "adapter_disk_bytes": self._fetcher.disk_bytes,
            **self._books().levels(),
            "adapter_loads_total": self._num_loads,
            "adapter_load_failures_total": self._num_load_failures,
            "adapter_copies_total": self._num_copies,
            "adapter_hits_total": self._num_hits,
            "adapter_host_evictions_total": self._host.num_evictions,
            "adapter_device_evictions_total": self._num_evictions,
        }

    def discrepancies(self, holds: Mapping[str, int], references: Mapping[str, int]) -> list[str]:
        """Recount every tier, given the holds and references by key of those who took them; empty when all is well.

        Touches the local disk, for no longer than listing the cached files takes, if no load is in flight.
        """
        found = self._books().discrepancies(holds, references)
        in_flight = (HostState.FETCHING, HostState.READING)
        if not self._num_abandoning and not any(e.host in in_flight for e in self._entries.values()):
            found += self._fetcher.discrepancies(dict.fromkeys((key for _, key in self._read_queue), 1))
        return found

    def _books(self) -> ResidencyBooks:
        return ResidencyBooks(
            entries=self._entries,
            host=self._host,
            pool=self._pool,
            read_queue=[key for _, key in self._read_queue],
            copy_queue=self._copy_queue,
            room=self._room,
        )

    # To the host.

    def _claim_host(self, entry: Entry) -> None:
        """Bring the adapter to the host and keep it there, if a holder needs that. What brings wholes is placed by its index."""
        if not entry.holds or entry.placement is not None or entry.failure is not None or entry.host is not HostState.UNCLAIMED:
            return
        if entry.key in self._host:
            self._host.pin(entry.key)
            entry.host = HostState.PINNED
            self._queue_copy(entry)
            return
        self._num_loads += 1
        entry.arrival = next(self._arrivals)
        num_bytes = None if self._fetcher.brings_wholes(entry.key) else self._fetcher.cached_bytes(entry.key)
        if num_bytes is not None and not self._read_queue and self._host.reserve(entry.key, num_bytes):
            direct = self._begin_read(entry, self._pool.most_needed(num_bytes))
            self._loads.load(entry.key, num_bytes, direct, partial(self._take_in_load, entry))
        else:
            self._fetch(entry)

    def _fetch(self, entry: Entry) -> None:
        entry.host = HostState.FETCHING
        self._loads.fetch(entry.key, partial(self._take_in_fetch, entry))

    def _unclaim_host(self, entry: Entry) -> None:
        self._host.unpin(entry.key)
        entry.host = HostState.UNCLAIMED

    def _take_in_fetch(self, entry: Entry, future: Future[Fetched]) -> None:
        error = future.exception()
        if error is not None:
            entry.host = HostState.UNCLAIMED
            self._fail(entry, error)
        else:
            entry.host = HostState.FETCHED
            entry.fetched = future.result()
            if entry.holds:
                insort(self._read_queue, (entry.arrival, entry.key))
            else:
                self._abandon(entry)
        self._settle(entry)

    def _abandon(self, entry: Entry) -> None:
        entry.host = HostState.UNCLAIMED
        self._num_abandoning += 1
        self._loads.abandon(entry.take_fetched()[0], self._take_in_abandon)

    def _take_in_abandon(self, future: Future[None]) -> None:
        self._num_abandoning -= 1
        if error := future.exception():
            _log.error("giving up a fetched adapter failed", exc_info=error)

    def _start_reads(self) -> None:
        while self._read_queue:
            entry = self._entries[self._read_queue[0][1]]
            index, layout = entry.take_fetched()
            if not self._host.reserve(entry.key, index.num_bytes):
                entry.fetched = index, layout
                return  # those behind it wait too, or small adapters could keep a large one out for ever
            self._read_queue.pop(0)
            direct = self._begin_read(entry, layout.extent)
            self._loads.read((index, layout), direct, partial(self._take_in_read, entry), partial(self._end_direct, entry))
            self._place_early(entry)

    def _begin_read(self, entry: Entry, extent: Extent) -> DirectCopy:
        entry.host = HostState.READING
        entry.direct = DirectCopy(extent, self._copies, self._write)
        return entry.direct

    def _take_in_load(self, entry: Entry, future: Future[HostCopy | None]) -> None:
        if future.exception() is not None or future.result() is not None:
            self._take_in_read(entry, cast("Future[HostCopy]", future))
            return
        self._end_direct(entry)  # the disk has none that is sound, so the store is asked
        self._host.cancel(entry.key)
        entry.host = HostState.UNCLAIMED
        if entry.holds:
            self._fetch(entry)
        self._settle(entry)

    def _take_in_read(self, entry: Entry, future: Future[HostCopy]) -> None:
        error = future.exception()
        if error is not None:
            self._end_direct(entry)
            self._host.cancel(entry.key)
            entry.host = HostState.UNCLAIMED
            self._fail(entry, error)
        else:
            copy = future.result()
            self._host.fill(entry.key, copy)
            entry.host = HostState.PINNED
            if entry.direct is not None and entry.direct.copied is not None:
                self._take_in_direct(entry, copy.layout, entry.direct.copied)
                return
            self._end_direct(entry)
            if entry.holds:
                self._queue_copy(entry)
            else:
                self._unclaim_host(entry)
        self._settle(entry)

    # To the device.

    def _place_early(self, entry: Entry) -> None:
        """Give an adapter that is being read its place on the device, if it is wanted there and nobody is waiting for room.

        Where only its size is known yet, it is given the most that it can need until it has been read.
        """
        direct = entry.direct
        if direct is None or not entry.wanted or self._copy_queue:
            return
        placement = self._room.make(direct.extent, self._evict, is_early=True)
        if placement is None:
            return
        if stale := self._room.take_stale():
            self._copies.submit(self._pool.clear, stale)  # now: what takes one of these indices later is written after it
        entry.wanted = False
        entry.placement = placement
        entry.copying = True
        direct.placement = placement
        self._settle(entry)

    def _end_direct(self, entry: Entry) -> None:
        """The read has ended, or goes on by way of the store, without a copy of use: the place goes back."""
        entry.direct = None
        if entry.placement is not None:
            entry.copying = False
            self._room.give_back(entry)
            entry.wanted = entry.holds > 0
            self._settle(entry)

    def _take_in_direct(self, entry: Entry, layout: PageLayout, copied: Future[None]) -> None:
        entry.direct = None
        entry.placement = self._pool.trim(entry.require_placement(), layout.extent)
        self._take_in_copy(entry, copied)

    def _queue_copy(self, entry: Entry) -> None:
        if entry.wanted and entry.host is HostState.PINNED and entry.placement is None:
            self._copy_queue[entry.key] = None

    def _start_copies(self) -> None:
        while self._copy_queue:
            entry = self._entries[next(iter(self._copy_queue))]
            copy = self._host.get(entry.key)
            placement = self._room.make(copy.layout.extent, self._evict)
            if placement is None:
                return  # those behind it wait too, as in `_start_reads`
            del self._copy_queue[entry.key]
            entry.wanted = False
            entry.placement = placement
            entry.copying = True
            job = partial(self._write, placement, copy, self._room.take_stale())
            self._background.start(self._copies, job, partial(self._take_in_copy, entry))
            self._settle(entry)

    def _evict(self, key: str) -> None:
        entry = self._entries[key]
        self._num_evictions += 1
        self._room.give_back(entry)
        self._claim_host(entry)
        self._settle(entry)

    def _write(self, placement: Placement, copy: HostCopy, stale_indices: Sequence[int] = ()) -> None:  # on the copy thread
        if stale_indices:
            self._pool.clear(stale_indices)
        self._pool.write(placement, copy.layout, copy.adapter)

    def _take_in_copy(self, entry: Entry, future: Future[None]) -> None:
        self._num_copies += 1
        entry.copying = False
        entry.fresh = entry.holds > 0
        self._unclaim_host(entry)
        if (error := future.exception()) is not None:
            self._room.give_back(entry)
            self._fail(entry, error)
        self._settle(entry)

    # Both ways.

    def _start_what_can(self) -> None:
        self._start_copies()
        self._start_reads()

    def _fail(self, entry: Entry, error: BaseException) -> None:
        self._num_load_failures += 1
        if entry.holds:
            entry.failure = failure_of(entry.key, error)
            entry.wanted = False

    def _settle(self, entry: Entry) -> None:
        """Bring what is derived from an entry up to date after a change, and forget one that nothing concerns any more."""
        self._room.settle(entry)
        if not (entry.holds or entry.references or entry.placement) and entry.host is HostState.UNCLAIMED:
            del self._entries[entry.key]
