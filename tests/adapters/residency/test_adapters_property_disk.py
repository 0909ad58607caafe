"""The disk cache under random use, on a full disk, and after a kill: bounded, never wrong, and plain about what it cannot do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from property_budget import budget

from graftwork_adapters.disk_cache import DiskCache
from graftwork_adapters.errors import StoreUnavailable
from graftwork_adapters.fetcher import Fetcher
from graftwork_adapters.keys import packed_path

KEYS = [letter * 64 for letter in "abcdef"]
BOUND = 1000
GENEROUS = 1 << 30
keys = st.sampled_from(KEYS)


class DiskMachine(RuleBasedStateMachine):
    """Beside the cache, a model of which files it must have, in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = tempfile.TemporaryDirectory()
        self.root = Path(self.holder.name)
        self.folder = self.root / "cache"
        self.cache = DiskCache(self.folder, BOUND)
        self.model: OrderedDict[str, bytes] = OrderedDict()  # the least recently used first
        self.pins: Counter[str] = Counter()
        self.paths: list[tuple[str, Path]] = []  # all there ever were
        self.num_added = 0

    @rule(key=keys, size=st.integers(0, 600))
    def add(self, key: str, size: int) -> None:
        self.num_added += 1
        content = (b"%d " % self.num_added * 600)[:size]
        source = self.root / "source"
        source.write_bytes(content)
        path = self.cache.add(key, source)
        assert not source.exists()
        self.paths.append((key, path))
        self.model.pop(key, None)
        self.model[key] = content
        self._trim()

    @rule(key=keys, size=st.integers(0, 600))
    def add_to_a_full_disk(self, key: str, size: int) -> None:
        source = self.root / "source"
        source.write_bytes(b"x" * size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "rename", _no_space)
            with pytest.raises(OSError, match="No space left"):
                self.cache.add(key, source)
        source.unlink()

    @rule(key=keys)
    def find(self, key: str) -> None:
        path = self.cache.find(key)
        if key in self.model:
            assert path is not None
            assert path.read_bytes() == self.model[key]
            self.model.move_to_end(key)
        else:
            assert path is None

    @rule(key=keys)
    def pin(self, key: str) -> None:
        self.cache.pin(key)
        self.pins[key] += 1

    @precondition(lambda self: +self.pins)
    @rule(place=st.integers(0, 9))
    def unpin(self, place: int) -> None:
        pinned = sorted(+self.pins)
        key = pinned[place % len(pinned)]
        self.cache.unpin(key)
        self.pins[key] -= 1
        self.cache.trim()
        self._trim()

    @precondition(lambda self: self.paths)
    @rule(place=st.integers(0, 99))
    def discard_perhaps_too_late(self, place: int) -> None:
        key, path = self.paths[place % len(self.paths)]
        newest = [one for one in self.paths if one[0] == key][-1]
        if newest == (key, path):
            self.model.pop(key, None)
        self.cache.discard(key, path)

    @rule(foreign=st.booleans(), bound=st.sampled_from([BOUND, BOUND, 300]))
    def the_process_starts_again(self, foreign: bool, bound: int) -> None:
        if foreign:
            (self.folder / "note.txt").write_text("not ours" * 1000)
            (self.folder / f"{KEYS[0]}.safetensors").write_bytes(b"also not ours" * 1000)
            (self.folder / f"{KEYS[1]}-{'0' * 32}.safetensors").mkdir(exist_ok=True)
            link = self.folder / f"{KEYS[2]}-{'0' * 32}.safetensors"
            if not link.is_symlink():
                link.symlink_to(self.folder / "note.txt")
        for age, key in enumerate(self.model):  # clocks of file systems are coarse
            path = self.cache.find(key)
            assert path is not None
            os.utime(path, ns=(age, age))
        self.cache = DiskCache(self.folder, bound)
        self.pins.clear()
        self._trim(bound)
        if bound != BOUND:
            self.cache = DiskCache(self.folder, BOUND)

    @invariant()
    def files_and_books_agree(self) -> None:
        assert self.cache.discrepancies(+self.pins) == []
        assert self.cache.num_bytes == sum(map(len, self.model.values()))
        assert self.cache.num_bytes <= BOUND + sum(len(content) for key, content in self.model.items() if self.pins[key])
        files = {
            path.name.split("-")[0]: path
            for path in self.folder.iterdir()
            if "-" in path.name and path.is_file() and not path.is_symlink()
        }
        assert files.keys() == self.model.keys()

    def teardown(self) -> None:
        self.holder.cleanup()

    def _trim(self, bound: int = BOUND) -> None:
        for key in [key for key in self.model if not self.pins[key]]:
            if sum(map(len, self.model.values())) <= bound:
                return
            del self.model[key]


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = budget(60, steps=40)


def _no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/path")


def load(fetcher: Fetcher, key: str) -> np.ndarray:
    return fetcher.read(fetcher.fetch(key)).rows


class TestDiskFull:
    """Fault kind of LMCache#4725 and LMCache#4664: a full disk is a clear error, and what is there stays right."""

    WRITES = ("pathlib.Path.mkdir", "tempfile.mkdtemp", "pathlib.Path.write_bytes", "pathlib.Path.rename")

    @pytest.mark.parametrize("write", WRITES)
    @pytest.mark.parametrize("half", ["fetch", "read"])
    def test_at_each_write(
        self, memory_store, packed_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, half: str
    ) -> None:
        old, new = packed_of("old"), packed_of("new")
        for packed in (old, new):
            memory_store.add(packed, tmp_path)
        fetcher = Fetcher(memory_store, tmp_path / "cache", GENEROUS)
        load(fetcher, old.key)
        index = fetcher.fetch(new.key)
        (file,) = (tmp_path / "cache").glob(f"{new.key}-*")
        if half == "fetch":
            fetcher.abandon(index)
        file.write_bytes(b"damaged, so that it must be written again")
        with monkeypatch.context() as patch:
            patch.setattr(write, _no_space)
            with pytest.raises(StoreUnavailable, match="No space left") as caught:
                fetcher.fetch(new.key) if half == "fetch" else fetcher.read(index)
            assert "/" not in str(caught.value)
            assert fetcher.discrepancies({}) == []
            assert np.array_equal(load(fetcher, old.key), old.rows)
        assert np.array_equal(load(fetcher, new.key), new.rows)
        assert fetcher.discrepancies({}) == []

    def test_a_file_that_cannot_be_deleted_fails_nothing_and_is_found(
        self, memory_store, packed_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        adapters = [packed_of(name, num_bytes=4096) for name in "abcd"]
        sizes = [len(memory_store.blobs[packed_path(memory_store.add(packed, tmp_path))]) for packed in adapters]
        fetcher = Fetcher(memory_store, tmp_path / "cache", 2 * max(sizes))
        for packed in adapters[:2]:
            load(fetcher, packed.key)
        real = Path.unlink

        def unlink(path: Path, missing_ok: bool = False) -> None:
            if path.name.startswith(adapters[0].key):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(path, missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            for packed in adapters[2:]:
                assert np.array_equal(load(fetcher, packed.key), packed.rows)
        (left,) = (tmp_path / "cache").glob(f"{adapters[0].key}-*")
        assert fetcher.discrepancies({}) == [f"disk cache: {left.name} is in nobody's books"]
        assert "Input/output error" in caplog.text
        again = Fetcher(memory_store, tmp_path / "cache", 2 * max(sizes))
        assert again.discrepancies({}) == []
        assert again.disk_bytes <= 2 * max(sizes)


HALF_A_DOWNLOAD = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    sys.path[:0] = sys.argv[4:]
    from graftwork_adapters.fetcher import Fetcher

    class HangingStore:
        def fetch(self, key, dest):
            data = Path(sys.argv[2]).read_bytes()
            dest.write_bytes(data[: len(data) // 2])
            print("half", flush=True)
            time.sleep(600)

    Fetcher(HangingStore(), Path(sys.argv[1]), 1 << 30).fetch(sys.argv[3])
    """
)


def test_killed_in_the_middle_of_a_download(memory_store, packed_of, tmp_path: Path) -> None:
    """Fault kind of lorax#210: half a file that is taken for a whole one ever after."""
    packed = packed_of("one", num_bytes=1 << 16)
    memory_store.add(packed, tmp_path)
    blob = tmp_path / "blob"
    blob.write_bytes(memory_store.blobs[packed_path(packed.key)])
    command = [sys.executable, "-c", HALF_A_DOWNLOAD, str(tmp_path / "cache"), str(blob), packed.key, *filter(None, sys.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"
            assert len(list((tmp_path / "cache" / "incoming").iterdir())) == 1
        finally:
            process.kill()
    fetcher = Fetcher(memory_store, tmp_path / "cache", GENEROUS)
    assert fetcher.disk_bytes == 0
    assert np.array_equal(load(fetcher, packed.key), packed.rows)
    assert fetcher.discrepancies({}) == []
