"""Packed adapters from the object store to host memory, by way of a bounded disk cache. Knows no device and no reference counts."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graftwork_adapters.disk_cache import DiskCache
from graftwork_adapters.errors import BlobCorrupt, BlobNotFound, StoreUnavailable
from graftwork_adapters.keys import packed_path
from graftwork_adapters.packed import Expect, PackedIndex, read_index, read_packed
from graftwork_adapters.scratch import scratch_folder, sweep_scratch
from graftwork_adapters.store import ObjectStore

_log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}")

_MOST_NOTED = 4096
"""Keys of which it is kept in mind that they bring tensors whole."""


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """A verified adapter in host memory; ``rows`` is uint8 [index.num_bytes]."""

    index: PackedIndex
    rows: npt.NDArray[np.uint8]


class Fetcher:
    """Fetches packed adapters by key and verifies them each time.

    In two halves, so that the caller can make room in memory between them: `fetch` brings the file to the local disk and tells
    its size, `read` brings the rows into memory. Both may ask the store and wait for it as long as it takes; `find` and
    `read_cached` are the same without that, and `load_cached` is both in one. Every call but `cached_bytes` blocks: make it from
    a worker thread, any number at once.
    Concurrent fetches of one key make one request to the store. A cached file that turns out corrupt is fetched again, once.

    Errors: `BlobNotFound`, `StoreUnavailable`, and `BlobCorrupt` for what the store has: nothing of it stays on the disk, so that
    the next load finds what has been mended there.
    """

    def __init__(self, store: ObjectStore, disk_dir: Path, max_disk_bytes: int) -> None:
        self._store = store
        self._incoming = disk_dir / "incoming"
        with _unavailable_on_os_error():
            sweep_scratch(self._incoming)
            self._disk = DiskCache(disk_dir, max_disk_bytes)
        self._lock = threading.Lock()
        self._flights: dict[str, _Flight] = {}
        self._with_wholes: dict[str, None] = {}  # the longest known first

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files in the disk cache."""
        return self._disk.num_bytes

    def cached_bytes(self, key: str) -> int | None:
        """Size of the local disk's file for ``key``, sound or not, which is more than its rows have; None without one. Does not
        block."""
        return self._disk.num_bytes_of(key)

    def brings_wholes(self, key: str) -> bool:
        """Whether an index of ``key`` that was read lately says so; false where none was. Does not block."""
        return key in self._with_wholes

    def load_cached(self, key: str, expect: Expect | None = None) -> HostAdapter | None:
        """What `fetch` and `read` do together if the local disk has the file; None if it has none that is sound.

        ``expect`` is called as `graftwork_adapters.packed.read_packed` says; that it raises `BlobCorrupt`
        makes the file an unsound one.
        """
        self._disk.pin(key)
        try:
            with _unavailable_on_os_error():
                return self._read_cached(key, expect)
        finally:
            self._disk.unpin(key)
            self._disk.trim()

    def find(self, key: str) -> PackedIndex | None:
        """What `fetch` does if the local disk has the file; None, and nothing kept, if it has none that is sound."""
        with ExitStack() as undo:
            self._disk.pin(key)
            undo.callback(self._disk.unpin, key)
            with _unavailable_on_os_error():
                index = self._cached_index(key)
            if index is not None:
                undo.pop_all()
            return index

    def fetch(self, key: str) -> PackedIndex:
        """Bring the packed file of ``key`` to the local disk and keep it there until the matching `read` or `abandon`."""
        if not _KEY.fullmatch(key):
            raise BlobNotFound(f"{key!r} is not the key of a packed adapter")
        with ExitStack() as undo:
            self._disk.pin(key)
            undo.callback(self._disk.unpin, key)
            with _unavailable_on_os_error(), self._single_flight(key):
                index = self._cached_index(key) or self._download(key)
            undo.pop_all()
            return index

    def read_cached(self, index: PackedIndex, expect: Expect | None = None) -> HostAdapter | None:
        """What `read` does if the local disk has the file; None, and nothing given up, if it has none that is sound any more."""
        with ExitStack() as undo:
            undo.callback(self.abandon, index)
            with _unavailable_on_os_error():
                adapter = self._read_cached(index.key, expect)
            if adapter is None:
                undo.pop_all()
                return None
            return _unchanged(adapter, index)

    def read(self, index: PackedIndex) -> HostAdapter:
        """The verified rows of what `fetch` returned."""
        key = index.key
        try:
            with _unavailable_on_os_error():
                adapter = self._read_cached(key)
                if adapter is None:
                    with self._single_flight(key):
                        adapter = self._read_cached(key) or self._download_and_read(key)
            return _unchanged(adapter, index)
        finally:
            self.abandon(index)

    def abandon(self, index: PackedIndex) -> None:
        """Give up what `fetch` returned without reading it."""
        self._disk.unpin(index.key)
        self._disk.trim()

    def reject(self, index: PackedIndex) -> None:
        """Give up what `fetch` returned and delete its file, of which the caller has found that it cannot be right."""
        path = self._disk.find(index.key)
        if path is not None:
            self._disk.discard(index.key, path)
        self.abandon(index)

    def discrepancies(self, pins: Mapping[str, int]) -> list[str]:
        """What is wrong on the local disk while nothing is being fetched, read or abandoned; empty when all is well.

        ``pins`` counts, by key, what was fetched and neither read nor abandoned.
        """
        with self._lock:
            found = [f"fetches: {flight.num_waiting} are waiting for {key}" for key, flight in self._flights.items()]
        leftovers = [path.name for path in self._incoming.iterdir()] if self._incoming.is_dir() else []
        found += [f"fetches: {name} was left half written" for name in leftovers]
        return found + self._disk.discrepancies(pins)

    def _cached_index(self, key: str) -> PackedIndex | None:
        path = self._disk.find(key)
        if path is None:
            return None
        try:
            return self._noted(read_index(path, key))
        except BlobCorrupt:
            self._disk.discard(key, path)
            return None

    def _read_cached(self, key: str, expect: Expect | None = None) -> HostAdapter | None:
        path = self._disk.find(key)
        if path is None:
            return None
        try:
            adapter = HostAdapter(*read_packed(path, key, expect))
        except BlobCorrupt:
            self._disk.discard(key, path)
            return None
        self._noted(adapter.index)
        return adapter

    def _noted(self, index: PackedIndex) -> PackedIndex:
        if index.wholes and index.key not in self._with_wholes:
            with self._lock:
                self._with_wholes[index.key] = None
                if len(self._with_wholes) > _MOST_NOTED:
                    del self._with_wholes[next(iter(self._with_wholes))]
        return index

    def _download(self, key: str) -> PackedIndex:
        with scratch_folder(self._incoming) as scratch:
            file = scratch / "packed"
            self._store.fetch(packed_path(key), file)
            with _sent_by_the_store(key):
                index = read_index(file, key)
            self._disk.add(key, file)
            return self._noted(index)

    def _download_and_read(self, key: str) -> HostAdapter:
        with scratch_folder(self._incoming) as scratch:
            file = scratch / "packed"
            self._store.fetch(packed_path(key), file)
            with _sent_by_the_store(key):
                adapter = HostAdapter(*read_packed(file, key))
            self._disk.add(key, file)
            return adapter

    @contextmanager
    def _single_flight(self, key: str) -> Iterator[None]:
        with self._lock:
            flight = self._flights.setdefault(key, _Flight())
            flight.num_waiting += 1
        try:
            with flight.lock:
                yield
        finally:
            with self._lock:
                flight.num_waiting -= 1
                if not flight.num_waiting:
                    del self._flights[key]


class _Flight:
    """The lock of one key, kept while anyone uses it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_waiting = 0


def _unchanged(adapter: HostAdapter, index: PackedIndex) -> HostAdapter:
    if adapter.index != index:
        raise BlobCorrupt(f"packed adapter {index.key}: its index changed while it was being loaded")
    return adapter


@contextmanager
def _sent_by_the_store(key: str) -> Iterator[None]:
    try:
        yield
    except BlobCorrupt as error:
        _log.warning("the object store's copy of packed adapter %s is corrupt", key)
        raise BlobCorrupt(f"corrupt in the object store: {error}") from error


@contextmanager
def _unavailable_on_os_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"the adapter disk cache cannot be used: {error.strerror or type(error).__name__}") from error
