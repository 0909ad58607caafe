"""What runs beside the engine's thread to bring an adapter to the host: disk first, then store. Knows no holders and no queues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from graftwork_adapters.background import Background
from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.direct_copy import DirectCopy
from graftwork_adapters.errors import AdapterError, AdapterTooLarge, BlobCorrupt
from graftwork_adapters.fetcher import Fetcher, HostAdapter
from graftwork_adapters.host_cache import HostCopy
from graftwork_adapters.packed import PackedIndex
from graftwork_adapters.page_table import PageLayout

T = TypeVar("T")
Fetched: TypeAlias = tuple[PackedIndex, PageLayout]
"""The index of an adapter on the local disk, and how its rows will lie in the device's pages."""


class Loads:
    """Starts the two halves of a load. Each ends with a call of its ``take_in`` by the thread that takes in ``background``.

    A store that hangs holds its callers until their deadline. So whatever needs only the local disk runs on ``disk_lane``, and
    what must ask the store on ``store_lane``: no adapter that the disk has waits for one that it lacks.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        pool: DevicePool,
        host_bytes: int,
        base_id: str | None,
        background: Background,
        disk_lane: Executor,
        store_lane: Executor,
    ) -> None:
        self._fetcher = fetcher
        self._pool = pool
        self._host_bytes = host_bytes
        self._base_id = base_id
        self._background = background
        self._disk_lane = disk_lane
        self._store_lane = store_lane

    def load(self, key: str, num_bytes: int, direct: DirectCopy, take_in: Callable[[Future[HostCopy | None]], None]) -> None:
        """Bring what the local disk has to the ``num_bytes`` of memory that are reserved for it, and on to the device if there is
        a place by then.

        Its result is None if the disk has none that is sound. Takes in both when both have ended.
        """
        self._background.start(self._disk_lane, partial(self._load, key, num_bytes, direct), take_in, lambda: direct.copied)

    def fetch(self, key: str, take_in: Callable[[Future[Fetched]], None]) -> None:
        """Bring the adapter to the local disk and check that it fits."""
        if self._fetcher.cached_bytes(key) is not None:
            self._disk_then_store(partial(self._find, key), partial(self._fetch, key), take_in)
        else:
            self._background.start(self._store_lane, partial(self._fetch, key), take_in)

    def read(
        self, fetched: Fetched, direct: DirectCopy, take_in: Callable[[Future[HostCopy]], None], lost: Callable[[], None]
    ) -> None:
        """The same for what was fetched. ``lost`` is called before the store must be asked for it again, which may take long."""
        self._disk_then_store(
            partial(self._read_cached, *fetched, direct), partial(self._read, *fetched), take_in, lost, lambda: direct.copied
        )

    def abandon(self, index: PackedIndex, take_in: Callable[[Future[None]], None]) -> None:
        """Give up what was fetched without reading it."""
        self._background.start(self._disk_lane, partial(self._fetcher.abandon, index), take_in)

    def close(self) -> None:
        """Wait for running jobs and start no more."""
        self._store_lane.shutdown(wait=True, cancel_futures=True)
        self._disk_lane.shutdown(wait=True, cancel_futures=True)

    def _disk_then_store(
        self,
        from_disk: Callable[[], T | None],
        from_store: Callable[[], T],
        take_in: Callable[[Future[T]], None],
        lost: Callable[[], None] = lambda: None,
        started_from_disk: Callable[[], Future[None] | None] = lambda: None,
    ) -> None:
        def take_in_first(future: Future[T | None]) -> None:
            if future.exception() is None and future.result() is None:
                lost()
                self._background.start(self._store_lane, from_store, take_in)
            else:
                take_in(cast("Future[T]", future))

        self._background.start(self._disk_lane, from_disk, take_in_first, started_from_disk)

    # On the threads of the lanes.

    def _find(self, key: str) -> Fetched | None:
        index = self._fetcher.find(key)
        if index is None:
            return None
        try:
            return self._checked(index)
        except BlobCorrupt:
            return None  # the store's copy may be a better one

    def _fetch(self, key: str) -> Fetched:
        return self._checked(self._fetcher.fetch(key))

    def _load(self, key: str, num_bytes: int, direct: DirectCopy) -> HostCopy | None:
        layout: PageLayout | None = None

        def expect(index: PackedIndex) -> Callable[[npt.NDArray[np.uint8]], None]:
            nonlocal layout
            layout = planned = self._plan(index)
            return lambda rows: direct.offer(HostCopy(HostAdapter(index, rows), planned))

        adapter = self._fetcher.load_cached(key, expect)
        if adapter is None or layout is None or adapter.rows.nbytes > num_bytes:
            return None  # larger than when room was made for it: the store's is looked at as for the first time
        return self._offered(HostCopy(adapter, layout), direct)

    def _plan(self, index: PackedIndex) -> PageLayout:
        if self._base_id is not None and index.base_id != self._base_id:
            raise BlobCorrupt(f"packed adapter {index.key} is for another base model, {index.base_id}")
        if index.num_bytes > self._host_bytes:
            raise AdapterTooLarge(
                f"adapter {index.key} needs {index.num_bytes} bytes of host memory, adapters may use {self._host_bytes}"
            )
        return self._pool.plan(index)

    def _checked(self, index: PackedIndex) -> Fetched:
        try:
            return index, self._plan(index)
        except BlobCorrupt:
            self._fetcher.reject(index)
            raise
        except AdapterError:
            self._fetcher.abandon(index)
            raise

    def _read_cached(self, index: PackedIndex, layout: PageLayout, direct: DirectCopy) -> HostCopy | None:
        def expect(found: PackedIndex) -> Callable[[npt.NDArray[np.uint8]], None]:
            def offer(rows: npt.NDArray[np.uint8]) -> None:
                if found == index:  # else the load fails
                    direct.offer(HostCopy(HostAdapter(index, rows), layout))

            return offer

        adapter = self._fetcher.read_cached(index, expect)
        return None if adapter is None else self._offered(HostCopy(adapter, layout), direct)

    @staticmethod
    def _offered(copy: HostCopy, direct: DirectCopy) -> HostCopy:
        direct.offer(copy)  # once more: the place for it may have come during the check
        return copy

    def _read(self, index: PackedIndex, layout: PageLayout) -> HostCopy:
        return HostCopy(self._fetcher.read(index), layout)
