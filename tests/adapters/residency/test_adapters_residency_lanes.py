"""A store that hangs or sends corrupt bytes: what the disk has loads meanwhile, what is mended in the store loads afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.errors import BlobCorrupt, StoreUnavailable
from graftwork_adapters.fetcher import Fetcher
from graftwork_adapters.keys import packed_path
from graftwork_adapters.residency import AdapterResidency
from graftwork_engine.errors import ErrorCode

PAGE, NUM_LOADERS = 512, 2
PATIENCE = 60.0
"""Seconds that a test waits for what should be there at once."""


class GatedStore:
    """A store whose fetches wait for ``answers``, as those of a server that accepts connections and then says nothing."""

    def __init__(self, store) -> None:
        self.store = store
        self.answers = threading.Event()
        self.is_asked = threading.Semaphore(0)

    def fetch(self, path: str, dest: Path) -> None:
        self.is_asked.release()
        if not self.answers.wait(PATIENCE * 3):
            raise StoreUnavailable("no answer")
        self.store.fetch(path, dest)


class Site:
    """A residency of real threads over a gated store; ``cached`` lie on its disk, ``missing`` do not."""

    def __init__(self, store, add: Callable[..., list[str]], cache: Path) -> None:
        self.cached, self.missing = add("abc"), add([f"missing {n}" for n in range(NUM_LOADERS + 2)])
        first = Fetcher(store, cache, 1 << 30)
        for key in self.cached:
            first.abandon(first.fetch(key))
        self.cache = cache
        self.store = GatedStore(store)
        self.woken = threading.Event()
        self.pool = DevicePool(16 * PAGE, 4, 256, page_bytes=PAGE, max_rows=512)
        self.residency = AdapterResidency(
            Fetcher(self.store, cache, 1 << 30), self.pool, 16 * PAGE, max_loads=NUM_LOADERS, on_change=self.woken.set
        )

    def hold_until_all_loaders_hang(self, keys: list[str]) -> None:
        for key in keys:
            self.residency.hold(key)
        taken = 0
        deadline = time.monotonic() + PATIENCE
        while taken < NUM_LOADERS:
            assert time.monotonic() < deadline
            self.residency.poll()
            taken += self.store.is_asked.acquire(timeout=0.01)

    def wait_for(self, key: str) -> int:
        """The index of a held adapter, whose hold is then dropped."""
        deadline = time.monotonic() + PATIENCE
        while (index := self.residency.acquire(key)) is None:
            assert self.residency.failure(key) is None
            assert time.monotonic() < deadline, "it is not resident yet"
            self.woken.wait(0.05)
            self.woken.clear()
            self.residency.poll()
        self.residency.drop(key)
        return index


@pytest.fixture
def add(memory_store, packed_of, tmp_path) -> Callable[..., list[str]]:
    """Put adapters of one page into the store, by name; gives their keys."""
    return lambda names: [memory_store.add(packed_of(name, num_bytes=PAGE), tmp_path) for name in names]


@pytest.fixture
def site(memory_store, add, tmp_path) -> Iterator[Site]:
    site = Site(memory_store, add, tmp_path / "cache")
    yield site
    site.store.answers.set()
    site.residency.close()


def test_what_the_disk_has_does_not_wait_for_a_store_that_hangs(site: Site, packed_of, kernel_sees) -> None:
    site.hold_until_all_loaders_hang(site.missing)
    for key, name in zip(site.cached, "abc", strict=True):
        site.residency.hold(key)
        kernel_sees(site.residency.memory, site.wait_for(key), packed_of(name, num_bytes=PAGE))
    assert not site.store.answers.is_set()
    assert site.residency.stats()["adapters_loading"] == len(site.missing)
    held, referenced = dict.fromkeys(site.missing, 1), dict.fromkeys(site.cached, 1)
    assert site.residency.discrepancies(held, referenced) == []

    site.store.answers.set()
    for key in site.missing:
        site.wait_for(key)
    assert sorted(site.store.store.fetched) == sorted(map(packed_path, site.cached + site.missing)), "each once"
    assert site.residency.discrepancies({}, referenced | dict.fromkeys(site.missing, 1)) == []


@pytest.mark.parametrize("place", [-1, 0], ids=["rows", "header"])
def test_corrupt_cached_files_do_not_carry_the_wait_to_sound_ones(site: Site, place: int) -> None:
    """Each half of a load can find its file corrupt, and goes to the store for another: not on a thread that the disk needs."""
    sound, *spoilt = site.cached
    assert len(spoilt) >= NUM_LOADERS
    for key in spoilt:
        (file,) = site.cache.glob(f"{key}-*")
        data = bytearray(file.read_bytes())
        data[place] ^= 0xFF
        file.write_bytes(data)
    site.hold_until_all_loaders_hang(spoilt)
    site.residency.hold(sound)
    site.wait_for(sound)
    site.store.answers.set()
    for key in spoilt:
        site.wait_for(key)
    assert site.residency.discrepancies({}, dict.fromkeys(site.cached, 1)) == []


def test_finding_and_reading_from_the_disk_alone_ask_no_store(memory_store, add, tmp_path) -> None:
    cached, missing = add("ab")
    fetcher = Fetcher(memory_store, tmp_path / "cache", 1 << 30)
    index = fetcher.fetch(cached)
    fetcher.abandon(index)
    memory_store.fetched.clear()
    assert (fetcher.cached_bytes(cached) is not None, fetcher.cached_bytes(missing)) == (True, None)
    assert (fetcher.find(cached), fetcher.find(missing)) == (index, None)
    assert fetcher.discrepancies({cached: 1}) == []
    adapter = fetcher.read_cached(index)
    assert adapter is not None
    assert fetcher.discrepancies({}) == []
    assert fetcher.find(cached) == index
    fetcher.reject(index)
    assert fetcher.cached_bytes(cached) is None
    assert fetcher.discrepancies({}) == []
    assert memory_store.fetched == []


def test_what_vanished_between_finding_and_reading_stays_kept_for_the_store(memory_store, add, tmp_path) -> None:
    (key,) = add("a")
    fetcher = Fetcher(memory_store, tmp_path / "cache", 1)
    index = fetcher.fetch(key)
    (file,) = (tmp_path / "cache").glob(f"{key}-*")
    file.unlink()
    assert fetcher.read_cached(index) is None
    assert fetcher.read(index).index == index
    assert fetcher.discrepancies({}) == []


class Rebuilt:
    """A residency that is run by hand, and an adapter whose packed form in the store is corrupt until `mend`."""

    def __init__(self, store, executor, packed, folder: Path, spoil: Callable) -> None:
        self.store, self.jobs, self.cache = store, executor, folder / "cache"
        self.key = store.add(packed, folder)
        self.path = packed_path(self.key)
        self.good = store.blobs[self.path]
        spoil(self, packed, folder)
        assert store.blobs[self.path] != self.good
        executors = {"load_executor": executor, "store_executor": executor, "copy_executor": executor}
        pool = DevicePool(8 * PAGE, 4, 256, page_bytes=PAGE, max_rows=512)
        self.residency = AdapterResidency(Fetcher(store, self.cache, 1 << 30), pool, 8 * PAGE, **executors)

    def mend(self) -> None:
        self.store.blobs[self.path] = self.good

    def attempt(self) -> int | None:
        """What a held adapter's load comes to."""
        index = self.residency.acquire(self.key)
        while index is None and self.residency.failure(self.key) is None and self.jobs.jobs:
            while self.jobs.jobs:
                self.jobs.run()
            self.residency.poll()
            index = self.residency.acquire(self.key)
        return index

    def files(self) -> list[Path]:
        return [path for path in self.cache.rglob("*") if path.is_file()]


def flip_rows(case: Rebuilt, packed, folder: Path) -> None:
    case.store.blobs[case.path] = case.good[:-1] + bytes([case.good[-1] ^ 1])


def cut(case: Rebuilt, packed, folder: Path) -> None:
    case.store.blobs[case.path] = case.good[:-1]


def garble_header(case: Rebuilt, packed, folder: Path) -> None:
    case.store.blobs[case.path] = b"\xff" * len(case.good)


def lead_outside(case: Rebuilt, packed, folder: Path) -> None:
    """Every checksum is right, and the index would send a kernel beyond the adapter's rows."""
    (site,) = packed.index.sites
    case.store.add(replace(packed, index=replace(packed.index, sites=(replace(site, b_row=packed.index.num_rows),))), folder)


@pytest.fixture(params=[flip_rows, cut, garble_header, lead_outside])
def rebuilt(request, memory_store, new_executor, packed_of, tmp_path) -> Rebuilt:
    return Rebuilt(memory_store, new_executor(), packed_of("a", num_bytes=PAGE), tmp_path, request.param)


def test_a_blob_that_was_corrupt_in_the_store_loads_once_it_is_rebuilt(rebuilt: Rebuilt) -> None:
    residency, key = rebuilt.residency, rebuilt.key
    residency.hold(key)
    assert rebuilt.attempt() is None
    failure = residency.failure(key)
    assert failure is not None
    assert failure.code == ErrorCode.ADAPTER_CORRUPT
    assert key in failure.message
    assert rebuilt.files() == []
    assert residency.discrepancies({key: 1}, {}) == []
    residency.drop(key)
    rebuilt.mend()
    residency.hold(key)
    assert rebuilt.attempt() is not None
    residency.drop(key)
    assert residency.discrepancies({}, {key: 1}) == []


def test_one_that_came_corrupt_and_was_never_read_is_fetched_again_after_the_rebuild(rebuilt: Rebuilt) -> None:
    residency, key = rebuilt.residency, rebuilt.key
    residency.hold(key)
    rebuilt.jobs.run()  # to the disk, if it can come there
    residency.poll()
    residency.drop(key)
    rebuilt.mend()
    residency.hold(key)
    assert rebuilt.attempt() is not None
    assert residency.failure(key) is None


def test_a_holder_that_has_not_dropped_yet_does_not_keep_the_failure_for_those_after_the_rebuild(rebuilt: Rebuilt) -> None:
    """Fault kind of aibrix#235: under load there is always somebody who still holds the adapter that failed."""
    residency, key = rebuilt.residency, rebuilt.key
    for _ in range(2):
        residency.hold(key)
    assert rebuilt.attempt() is None
    assert residency.failure(key) is not None
    residency.drop(key)  # the first was told; the second, which no seat is free for, was not
    rebuilt.mend()
    residency.hold(key)
    assert residency.failure(key) is None
    assert rebuilt.attempt() is not None
    for _ in range(2):
        residency.drop(key)
    assert residency.discrepancies({}, {key: 1}) == []


def test_a_new_holder_does_not_hide_a_failure_that_nobody_has_heard_of(rebuilt: Rebuilt) -> None:
    residency, key = rebuilt.residency, rebuilt.key
    residency.hold(key)
    while rebuilt.jobs.jobs:
        while rebuilt.jobs.jobs:
            rebuilt.jobs.run()
        residency.poll()
    residency.hold(key)
    assert rebuilt.jobs.jobs == []
    assert residency.failure(key) is not None


def test_the_error_says_that_the_store_has_it_corrupt(memory_store, packed_of, tmp_path) -> None:
    packed = packed_of("a", num_bytes=PAGE)
    path = packed_path(memory_store.add(packed, tmp_path))
    good = memory_store.blobs[path]
    fetcher = Fetcher(memory_store, tmp_path / "cache", 1 << 30)
    for bad in (good[:-1], good[:-1] + bytes([good[-1] ^ 1])):
        memory_store.blobs[path] = bad
        with pytest.raises(BlobCorrupt, match=f"corrupt in the object store.*{packed.key}"):
            fetcher.read(fetcher.fetch(packed.key))
    memory_store.blobs[path] = good
    index = fetcher.fetch(packed.key)
    (file,) = (tmp_path / "cache").glob(f"{packed.key}-*")
    file.write_bytes(bad)
    assert fetcher.read(index).index == packed.index  # corrupt on the disk alone is nobody's concern


def test_a_cached_file_whose_index_cannot_be_right_is_replaced_from_the_store(
    memory_store, new_executor, packed_of, tmp_path
) -> None:
    """Its checksums hold, so only the plan of its pages finds it out."""
    case = Rebuilt(memory_store, new_executor(), packed_of("a", num_bytes=PAGE), tmp_path, lead_outside)
    other = Fetcher(memory_store, case.cache, 1 << 30)
    other.abandon(other.fetch(case.key))
    case.residency.close()
    restarted = Rebuilt(memory_store, new_executor(), packed_of("a", num_bytes=PAGE), tmp_path, lead_outside)
    restarted.mend()
    restarted.residency.hold(restarted.key)
    assert restarted.attempt() is not None
    assert len(restarted.files()) == 1
