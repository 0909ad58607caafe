"""Fetching: one request per key, verification every time, a disk cache that stays within its bound and survives restarts."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from graftwork_adapters.disk_cache import DiskCache
from graftwork_adapters.errors import BlobCorrupt, BlobNotFound, StoreUnavailable
from graftwork_adapters.fetcher import Fetcher
from graftwork_adapters.folder_store import FolderStore
from graftwork_adapters.keys import packed_path
from graftwork_adapters.packed import write_packed

GENEROUS = 1 << 30
DAMAGES = ["byte", "index", "truncated", "empty", "not safetensors", "other adapter"]


def load(fetcher: Fetcher, key: str):
    return fetcher.read(fetcher.fetch(key))


def cached(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


@pytest.fixture
def fetcher(memory_store, tmp_path) -> Fetcher:
    return Fetcher(memory_store, tmp_path / "cache", GENEROUS)


def test_the_bytes_are_those_of_the_packed_form(fetcher, memory_store, packed_of, tmp_path):
    packed = packed_of("one")
    adapter = load(fetcher, memory_store.add(packed, tmp_path))
    assert adapter.index == packed.index
    assert np.array_equal(adapter.rows, packed.rows)


@pytest.mark.parametrize("place", [None, 0, (1 << 20) - 1, 1 << 20, -1])
def test_each_part_that_is_read_is_checked(fetcher, memory_store, packed_of, tmp_path, place):
    """An adapter of several parts, whole or with one byte changed where parts begin and end."""
    packed = packed_of("large", num_bytes=5 << 19)
    key = memory_store.add(packed, tmp_path)
    if place is None:
        assert np.array_equal(load(fetcher, key).rows, packed.rows)
        return
    blob = bytearray(memory_store.blobs[packed_path(key)])
    blob[place if place < 0 else len(blob) - packed.rows.nbytes + place] ^= 1
    memory_store.blobs[packed_path(key)] = bytes(blob)
    with pytest.raises(BlobCorrupt, match="do not match their checksum"):
        load(fetcher, key)


def test_the_second_load_needs_no_store(fetcher, memory_store, packed_of, tmp_path):
    key = memory_store.add(packed_of("one"), tmp_path)
    load(fetcher, key)
    memory_store.error = StoreUnavailable("gone")
    load(fetcher, key)
    assert len(memory_store.fetched) == 1


def test_thirty_two_threads_that_want_one_key_make_one_request(memory_store, packed_of, tmp_path):
    packed = packed_of("one")
    key = memory_store.add(packed, tmp_path)
    inside = threading.Event()
    real_fetch = memory_store.fetch

    def slow_fetch(name, dest):
        inside.wait(0.2)
        real_fetch(name, dest)

    memory_store.fetch = slow_fetch
    fetcher = Fetcher(memory_store, tmp_path / "cache", GENEROUS)
    start = threading.Barrier(32)

    def one(_):
        start.wait()
        return load(fetcher, key)

    with ThreadPoolExecutor(32) as pool:
        adapters = list(pool.map(one, range(32)))
    assert memory_store.fetched == [packed_path(key)]
    assert all(np.array_equal(adapter.rows, packed.rows) for adapter in adapters)
    assert len(cached(tmp_path / "cache")) == 1


def test_a_slow_key_does_not_hold_up_another(memory_store, packed_of, tmp_path):
    slow, quick = (memory_store.add(packed_of(name), tmp_path) for name in ("slow", "quick"))
    release, asked = threading.Event(), threading.Event()
    real_fetch = memory_store.fetch

    def fetch(name, dest):
        if name == packed_path(slow):
            asked.set()
            assert release.wait(60)
        real_fetch(name, dest)

    memory_store.fetch = fetch
    fetcher = Fetcher(memory_store, tmp_path / "cache", GENEROUS)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(load, fetcher, slow)
        assert asked.wait(60)
        load(fetcher, quick)
        assert not future.done()
        release.set()
        future.result()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_cached_file_is_fetched_again(fetcher, memory_store, packed_of, tmp_path, damage):
    packed, other = packed_of("one"), packed_of("two")
    key = memory_store.add(packed, tmp_path)
    load(fetcher, key)
    (file,) = cached(tmp_path / "cache")
    spoil(file, damage, other)
    assert np.array_equal(load(fetcher, key).rows, packed.rows)
    assert len(memory_store.fetched) == 2
    assert len(cached(tmp_path / "cache")) == 1
    load(fetcher, key)
    assert len(memory_store.fetched) == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_blob_is_an_error_and_is_not_kept(fetcher, memory_store, packed_of, tmp_path, damage):
    packed = packed_of("one")
    key = memory_store.add(packed, tmp_path)
    good = memory_store.blobs[packed_path(key)]
    file = tmp_path / "blob"
    file.write_bytes(good)
    spoil(file, damage, packed_of("two"))
    memory_store.blobs[packed_path(key)] = file.read_bytes()
    with pytest.raises(BlobCorrupt) as caught:
        load(fetcher, key)
    assert str(tmp_path) not in str(caught.value)
    assert len(memory_store.fetched) <= 2
    assert cached(tmp_path / "cache") == []
    memory_store.blobs[packed_path(key)] = good
    assert np.array_equal(load(fetcher, key).rows, packed.rows)


def spoil(file: Path, damage: str, other) -> None:
    data = file.read_bytes()
    if damage == "other adapter":
        file.unlink()
        write_packed(file, other.index, other.rows)
        return
    spoilt = {
        "index": data.replace(b'rank\\":3', b'rank\\":2'),
        "byte": data[:-1] + bytes([data[-1] ^ 1]),
        "truncated": data[:-7],
        "empty": b"",
        "not safetensors": b"\xff" * len(data),
    }
    assert spoilt[damage] != data
    file.write_bytes(spoilt[damage])


def test_a_vanished_cached_file_is_fetched_again(fetcher, memory_store, packed_of, tmp_path):
    packed = packed_of("one")
    key = memory_store.add(packed, tmp_path)
    index = fetcher.fetch(key)
    cached(tmp_path / "cache")[0].unlink()
    assert np.array_equal(fetcher.read(index).rows, packed.rows)


def test_missing_blobs_wrong_keys_and_a_dead_store(fetcher, memory_store, packed_of, tmp_path):
    for key in ("0" * 64, "", "../x", "A" * 64, "/etc/passwd"):
        with pytest.raises(BlobNotFound):
            fetcher.fetch(key)
    assert memory_store.fetched == [packed_path("0" * 64)]
    key = memory_store.add(packed_of("one"), tmp_path)
    memory_store.error = StoreUnavailable("no answer")
    with pytest.raises(StoreUnavailable):
        fetcher.fetch(key)
    memory_store.error = None
    load(fetcher, key)


def test_an_error_of_the_local_disk_is_store_unavailable_without_paths(memory_store, packed_of, tmp_path):
    key = memory_store.add(packed_of("one"), tmp_path)
    fetcher = Fetcher(memory_store, tmp_path / "cache", GENEROUS)
    memory_store.error = OSError(28, "No space left on device", str(tmp_path))
    with pytest.raises(StoreUnavailable, match="No space left") as caught:
        fetcher.fetch(key)
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(StoreUnavailable):
        Fetcher(memory_store, Path("/proc/nowhere"), GENEROUS)


def test_the_disk_cache_keeps_its_bound_and_the_most_recently_used(memory_store, packed_of, tmp_path):
    keys = [memory_store.add(packed_of(name, num_bytes=8192), tmp_path) for name in "abcd"]
    size = len(memory_store.blobs[packed_path(keys[0])])
    fetcher = Fetcher(memory_store, tmp_path / "cache", 3 * size + 100)
    for key in (keys[0], keys[1], keys[2], keys[0], keys[3]):
        load(fetcher, key)
        assert fetcher.disk_bytes == sum(path.stat().st_size for path in cached(tmp_path / "cache")) <= 3 * size + 100
    memory_store.fetched.clear()
    for key in (keys[0], keys[2], keys[3]):
        load(fetcher, key)
    assert memory_store.fetched == []
    load(fetcher, keys[1])
    assert memory_store.fetched == [packed_path(keys[1])]


def test_a_file_that_is_to_be_read_is_not_deleted(memory_store, packed_of, tmp_path):
    keys = [memory_store.add(packed_of(name, num_bytes=8192), tmp_path) for name in "abc"]
    fetcher = Fetcher(memory_store, tmp_path / "cache", 1)
    index = fetcher.fetch(keys[0])
    for key in keys[1:]:
        load(fetcher, key)
    assert len(cached(tmp_path / "cache")) == 1
    fetcher.read(index)
    assert memory_store.fetched == [packed_path(key) for key in keys]
    assert cached(tmp_path / "cache") == []
    fetcher.abandon(fetcher.fetch(keys[0]))
    assert fetcher.disk_bytes == 0
    assert cached(tmp_path / "cache") == []


def test_the_cache_survives_a_restart_in_order_of_use_and_sweeps_leftovers(memory_store, packed_of, tmp_path):
    keys = [memory_store.add(packed_of(name, num_bytes=8192), tmp_path) for name in "abc"]
    fetcher = Fetcher(memory_store, tmp_path / "cache", GENEROUS)
    for key in (*keys, keys[0]):
        load(fetcher, key)
    for place, key in enumerate((keys[1], keys[2], keys[0])):  # clocks of file systems are coarse
        (path,) = [path for path in cached(tmp_path / "cache") if path.name.startswith(key)]
        os.utime(path, ns=(place, place))
    leftover = tmp_path / "cache" / "incoming" / "crashed"
    leftover.mkdir()
    (leftover / "packed").write_bytes(b"half")
    (tmp_path / "cache" / "note.txt").write_text("not ours")
    size = len(memory_store.blobs[packed_path(keys[0])])
    memory_store.fetched.clear()
    again = Fetcher(memory_store, tmp_path / "cache", 2 * size + 100)
    assert not leftover.exists()
    assert (tmp_path / "cache" / "note.txt").exists()
    for key in (keys[0], keys[2]):
        load(again, key)
    assert memory_store.fetched == []
    load(again, keys[1])
    assert memory_store.fetched == [packed_path(keys[1])]


def test_use_is_written_down_for_the_next_start(fetcher, memory_store, packed_of, tmp_path):
    key = memory_store.add(packed_of("one"), tmp_path)
    load(fetcher, key)
    (file,) = cached(tmp_path / "cache")
    os.utime(file, ns=(1, 1))
    load(fetcher, key)
    assert file.stat().st_mtime_ns > 1


def test_of_two_files_of_one_key_the_newer_is_kept(tmp_path):
    for name, age in (("0" * 32, 1), ("1" * 32, 2)):
        path = tmp_path / f"{'a' * 64}-{name}.safetensors"
        path.write_bytes(name.encode())
        os.utime(path, ns=(age, age))
    cache = DiskCache(tmp_path, GENEROUS)
    assert cache.find("a" * 64) == path
    assert cached(tmp_path) == [path]
    assert cache.num_bytes == 32


def test_a_late_discard_spares_the_newer_file(tmp_path):
    cache = DiskCache(tmp_path / "cache", GENEROUS)
    paths = []
    for content in (b"old", b"newer"):
        source = tmp_path / "source"
        source.write_bytes(content)
        paths.append(cache.add("a" * 64, source))
    cache.discard("a" * 64, paths[0])
    assert cache.find("a" * 64) == paths[1]
    assert paths[1].read_bytes() == b"newer"
    assert cache.num_bytes == 5


def test_many_threads_many_keys_small_cache(packed_of, tmp_path):
    store = FolderStore(tmp_path / "store")
    adapters = [packed_of(f"adapter {n}", num_bytes=4096) for n in range(12)]
    for packed in adapters:
        write_packed(tmp_path / "source", packed.index, packed.rows)
        store.put_if_absent(packed_path(packed.key), tmp_path / "source")
    fetcher = Fetcher(store, tmp_path / "cache", 20_000)

    def one(n: int) -> bool:
        packed = adapters[n * 7 % 12]
        return np.array_equal(load(fetcher, packed.key).rows, packed.rows)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(150)))
    assert fetcher.disk_bytes == sum(path.stat().st_size for path in cached(tmp_path / "cache")) <= 20_000
    assert list((tmp_path / "cache" / "incoming").iterdir()) == []
