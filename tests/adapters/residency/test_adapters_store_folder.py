"""The folder store's own promises: crashes, full disks, shared folders, URLs."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest

from graftwork_adapters import folder_store
from graftwork_adapters.errors import InvalidKey, StoreUnavailable, UnsupportedStore
from graftwork_adapters.folder_store import FolderStore
from graftwork_adapters.scratch import scratch_folder, sweep_scratch
from graftwork_adapters.store import StoreConfig
from graftwork_adapters.stores import open_store


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(b"bytes" * 1000)
    return path


def test_a_full_disk_is_store_unavailable_and_leaves_nothing(tmp_path, source, monkeypatch):
    store = FolderStore(tmp_path / "store")

    def no_space(original, copy, length=0):
        copy.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", no_space)
    with pytest.raises(StoreUnavailable, match="No space left") as caught:
        store.put_if_absent("packed/a", source)
    assert str(tmp_path) not in str(caught.value)
    monkeypatch.undo()
    assert not store.exists("packed/a")
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
    assert store.put_if_absent("packed/a", source)


def test_a_fetch_that_fails_leaves_no_half_file(tmp_path, source, monkeypatch):
    store = FolderStore(tmp_path / "store")
    store.put_if_absent("packed/a", source)

    def broken(target, source, offset, count):
        os.write(target, b"half")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "sendfile", broken)
    with pytest.raises(StoreUnavailable, match="Input/output error"):
        store.fetch("packed/a", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_file_system_that_cannot_copy_by_itself_is_read_and_written(tmp_path, source, monkeypatch):
    store = FolderStore(tmp_path / "store")
    store.put_if_absent("packed/a", source)

    def refused(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sendfile", refused)
    store.fetch("packed/a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_bytes_are_synced_before_the_name_and_the_folders_after_it(tmp_path, source, monkeypatch):
    store = FolderStore(tmp_path / "store")
    events: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor):
        events.append("sync " + os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path / "store"))
        real_fsync(descriptor)

    def link(old, new):
        events.append("link")
        real_link(old, new)

    monkeypatch.setattr(folder_store.os, "fsync", fsync)
    monkeypatch.setattr(folder_store.os, "link", link)
    store.put_if_absent("uploads/abc/config.json", source)
    assert events[0].startswith("sync .incoming/")
    assert events[1:] == ["link", "sync uploads/abc", "sync uploads", "sync ."]
    events.clear()
    assert not store.put_if_absent("uploads/abc/config.json", source)
    assert "sync uploads/abc" in events  # the writer that came first may not have got that far


CRASH = """
import pathlib, sys, time
from graftwork_adapters.scratch import scratch_folder
with scratch_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "blob").write_bytes(b"half")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_start_sweeps_what_a_killed_writer_left_and_spares_live_writers(tmp_path):
    incoming = tmp_path / "store" / ".incoming"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writer = subprocess.Popen([sys.executable, "-c", CRASH, str(incoming)], stdout=subprocess.PIPE, env=environment)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        FolderStore(tmp_path / "store")
        assert len(list(incoming.iterdir())) == 1
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    assert len(list(incoming.iterdir())) == 1
    FolderStore(tmp_path / "store")
    assert list(incoming.iterdir()) == []


def test_a_sweep_in_the_same_process_spares_open_scratch_folders(tmp_path):
    with scratch_folder(tmp_path) as folder:
        sweep_scratch(tmp_path)
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_a_blob_or_a_prefix_not_both(tmp_path, source):
    store = FolderStore(tmp_path / "store")
    store.put_if_absent("a/b", source)
    for key in ("a", "a/b/c"):
        with pytest.raises(InvalidKey):
            store.put_if_absent(key, source)
    assert not store.exists("a/b/c")


def test_a_symbolic_link_is_not_a_blob(tmp_path, source):
    store = FolderStore(tmp_path / "store")
    (tmp_path / "store" / "packed").mkdir()
    (tmp_path / "store" / "packed" / "a").symlink_to(source)
    assert not store.exists("packed/a")
    assert list(store.list_keys("packed/")) == []


def test_a_root_that_cannot_be_a_folder_is_store_unavailable(source):
    with pytest.raises(StoreUnavailable):
        FolderStore(source)


def test_two_stores_on_one_folder_see_each_other(tmp_path, source):
    first, second = FolderStore(tmp_path / "store"), FolderStore(tmp_path / "store")
    assert first.put_if_absent("packed/a", source)
    assert not second.put_if_absent("packed/a", source)


def test_store_urls(tmp_path, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_store(StoreConfig("re lative")).put_if_absent("packed/a", source)
    assert open_store(StoreConfig(str(tmp_path / "re lative"))).exists("packed/a")
    assert open_store(StoreConfig(f"file://{tmp_path}/re%20lative")).exists("packed/a")
    for url in ("http://host/x", "file://elsewhere/x"):
        with pytest.raises(UnsupportedStore):
            open_store(StoreConfig(url))
