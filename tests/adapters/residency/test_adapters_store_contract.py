"""What every object store must do; a driver joins by adding itself to `store`."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from graftwork_adapters.errors import BlobNotFound, InvalidKey, StoreUnavailable
from graftwork_adapters.store import ObjectStore, StoreConfig
from graftwork_adapters.stores import open_store


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path) -> ObjectStore:
    if request.param == "s3":
        return open_store(request.getfixturevalue("s3_config"))
    return open_store(StoreConfig(str(tmp_path / "store")))


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


def test_names_that_begin_alike_are_told_apart(store, tmp_path):
    """lorax#210: ids 1 to 5 found the files of 10 to 50."""
    names = ["1", "10", "11", "a", "ab", "a-b", "a.b"]
    for name in names:
        for file in ("config", "weights"):
            assert store.put_if_absent(f"uploads/{name}/{file}", file_of(tmp_path, f"{name} {file}".encode()))
    for name in names:
        assert list(store.list_keys(f"uploads/{name}/")) == [f"uploads/{name}/config", f"uploads/{name}/weights"]
        store.fetch(f"uploads/{name}/weights", tmp_path / f"copy of {name}")
        assert (tmp_path / f"copy of {name}").read_bytes() == f"{name} weights".encode()
        assert not store.exists(f"uploads/{name}")


def test_a_prefix_of_other_keys_is_no_blob(store, tmp_path):
    store.put_if_absent("uploads/a/b", file_of(tmp_path, b"x"))
    with pytest.raises(InvalidKey):
        store.put_if_absent("uploads/a", file_of(tmp_path, b"x"))
    store.delete("uploads/a")
    assert not store.exists("uploads/a")
    assert store.exists("uploads/a/b")


def test_an_empty_blob_is_a_blob(store, tmp_path):
    assert store.put_if_absent("packed/empty", file_of(tmp_path, b""))
    assert not store.put_if_absent("packed/empty", file_of(tmp_path, b"x"))
    store.fetch("packed/empty", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b""


def test_a_file_is_never_fetched_over_another(store, tmp_path):
    store.put_if_absent("packed/a", file_of(tmp_path, b"new"))
    kept = file_of(tmp_path, b"kept", "dest")
    with pytest.raises(StoreUnavailable, match="File exists"):
        store.fetch("packed/a", kept)
    assert kept.read_bytes() == b"kept"


def test_a_source_that_is_not_there_is_an_error_of_the_store(store, tmp_path):
    with pytest.raises(StoreUnavailable, match="No such file") as caught:
        store.put_if_absent("packed/a", tmp_path / "absent")
    assert str(tmp_path) not in str(caught.value)
    assert not store.exists("packed/a")


def test_deleting_is_idempotent_and_the_key_can_be_put_again(store, tmp_path):
    store.put_if_absent("packed/a", file_of(tmp_path, b"first"))
    store.delete("packed/a")
    store.delete("packed/a")
    assert not store.exists("packed/a")
    assert store.put_if_absent("packed/a", file_of(tmp_path, b"second"))


BAD_KEYS = [
    "",
    "/",
    "/etc/passwd",
    "../x",
    "a/../b",
    "a//b",
    "a/",
    "./a",
    "a/.",
    "a\0b",
    ".incoming/x",
    "x" * 300,
    "/".join(["x" * 100] * 9),
    "a/\ud800",
]


def test_names_that_are_not_keys_are_refused_by_every_call(store, tmp_path):
    source = file_of(tmp_path, b"x")
    before = sorted(tmp_path.rglob("*"))
    calls = [
        lambda key: store.put_if_absent(key, source),
        lambda key: store.fetch(key, tmp_path / "copy"),
        lambda key: store.exists(key),
        lambda key: store.delete(key),
        lambda key: store.list_keys(key + "/"),
    ]
    for key, call in itertools.product(BAD_KEYS, calls):
        with pytest.raises(InvalidKey):
            call(key)
    assert sorted(tmp_path.rglob("*")) == before
