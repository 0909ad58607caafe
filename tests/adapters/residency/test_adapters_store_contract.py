"""What every object store must do; a driver joins by adding itself to `store`."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from graftwork_adapters.errors import BlobNotFound, InvalidKey
from graftwork_adapters.folder_store import FolderStore
from graftwork_adapters.store import ObjectStore


@pytest.fixture(params=["folder"])
def store(request, tmp_path) -> ObjectStore:
    drivers = {"folder": lambda: FolderStore(tmp_path / "store")}
    return drivers[request.param]()


def file_of(tmp_path: Path, data: bytes, name: str = "source") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def test_a_blob_comes_back_as_it_was_put(store, tmp_path):
    assert store.put_if_absent("packed/a.safetensors", file_of(tmp_path, b"first"))
    store.fetch("packed/a.safetensors", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"first"


def test_an_existing_key_is_never_written_again(store, tmp_path):
    assert store.put_if_absent("packed/a", file_of(tmp_path, b"first"))
    assert not store.put_if_absent("packed/a", file_of(tmp_path, b"second"))
    store.fetch("packed/a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"first"


def test_of_many_writers_of_one_key_one_wins_and_readers_see_whole_blobs(store, tmp_path):
    blobs = [bytes([n]) * 200_000 for n in range(8)]
    sources = [file_of(tmp_path, blob, f"source-{n}") for n, blob in enumerate(blobs)]
    won: list[int] = []
    seen: list[bytes] = []
    start = threading.Barrier(9)

    def write(n: int) -> None:
        start.wait()
        if store.put_if_absent("packed/one", sources[n]):
            won.append(n)

    def read() -> None:
        start.wait()
        for attempt in range(50):
            try:
                store.fetch("packed/one", tmp_path / f"copy-{attempt}")
            except BlobNotFound:
                continue
            seen.append((tmp_path / f"copy-{attempt}").read_bytes())

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    store.fetch("packed/one", tmp_path / "last")
    assert (tmp_path / "last").read_bytes() == blobs[won[0]]
    assert all(blob == blobs[won[0]] for blob in seen)


def test_keys_are_exact(store, tmp_path):
    store.put_if_absent("uploads/abc/config.json", file_of(tmp_path, b"x"))
    assert store.exists("uploads/abc/config.json")
    for other in ("uploads/abc", "uploads/abc/config", "uploads/abc/config.json2", "uploads/ab"):
        assert not store.exists(other)
        with pytest.raises(BlobNotFound):
            store.fetch(other, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_prefixes_end_at_slashes_and_keys_are_listed_in_order(store, tmp_path):
    keys = ["uploads/abc/b", "uploads/abc/a/z", "uploads/abc/a-b", "uploads/abcd/a", "packed/abc"]
    for key in keys:
        store.put_if_absent(key, file_of(tmp_path, b"x"))
    assert list(store.list_keys("uploads/abc/")) == ["uploads/abc/a-b", "uploads/abc/a/z", "uploads/abc/b"]
    assert list(store.list_keys("uploads/")) == sorted(key for key in keys if key.startswith("uploads/"))
    assert list(store.list_keys("nothing/")) == []
    with pytest.raises(InvalidKey):
        store.list_keys("uploads/abc")


def test_deleting_is_idempotent_and_the_key_can_be_put_again(store, tmp_path):
    store.put_if_absent("packed/a", file_of(tmp_path, b"first"))
    store.delete("packed/a")
    store.delete("packed/a")
    assert not store.exists("packed/a")
    assert store.put_if_absent("packed/a", file_of(tmp_path, b"second"))


BAD_KEYS = ["", "/", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a/.", "a\0b", ".incoming/x", "x" * 300, "a/\ud800"]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_names_that_are_not_keys_are_refused_by_every_call(store, tmp_path, key):
    source = file_of(tmp_path, b"x")
    before = sorted(tmp_path.rglob("*"))
    calls = [
        lambda: store.put_if_absent(key, source),
        lambda: store.fetch(key, tmp_path / "copy"),
        lambda: store.exists(key),
        lambda: store.delete(key),
        lambda: store.list_keys(key + "/"),
    ]
    for call in calls:
        with pytest.raises(InvalidKey):
            call()
    assert sorted(tmp_path.rglob("*")) == before
