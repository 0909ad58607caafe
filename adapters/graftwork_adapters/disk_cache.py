"""A byte-bounded folder of packed files, by key. Knows nothing of what they hold or where they come from."""

from __future__ import annotations

import logging
import os
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

_FILE_NAME = re.compile(r"([0-9a-f]{64})-[0-9a-f]{32}\.safetensors")


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    num_bytes: int


class DiskCache:
    """Files by key, the least recently used deleted first; pinned ones are never deleted and may exceed the bound.

    Safe to call from several threads. The lock guards the bookkeeping alone: files are deleted after it is released, and since
    every file has a name of its own, a late deletion cannot hit a newer file of the same key. A folder belongs to one process.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _File] = OrderedDict()  # least recently used first
        self._pins: dict[str, int] = {}
        self._num_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._scan()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self._num_bytes

    def pin(self, key: str) -> None:
        """Keep the file of ``key``, present or still to come, until the matching `unpin`; counted."""
        with self._lock:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: str) -> None:
        """Undo one `pin`. Deletes nothing: call `trim` from a thread that may touch the disk."""
        with self._lock:
            count = self._pins.pop(key)
            if count > 1:
                self._pins[key] = count - 1

    def num_bytes_of(self, key: str) -> int | None:
        """Size of the file of ``key``; None without one. Does not touch the disk, waits for nobody, and is no use of the file."""
        file = self._files.get(key)
        return None if file is None else file.num_bytes

    def find(self, key: str) -> Path | None:
        """The file of ``key``, which counts as a use of it."""
        with self._lock:
            file = self._files.get(key)
            if file is None:
                return None
            self._files.move_to_end(key)
        with suppress(OSError):
            os.utime(file.path)  # the order of use, for the next start
        return file.path

    def add(self, key: str, source: Path) -> Path:
        """Move ``source``, a file of the same file system, into the cache; it replaces an older file of ``key``."""
        path = self._folder / f"{key}-{uuid.uuid4().hex}.safetensors"
        num_bytes = source.stat().st_size
        source.rename(path)
        with self._lock:
            replaced = self._files.pop(key, None)
            self._files[key] = _File(path, num_bytes)
            self._num_bytes += num_bytes - (replaced.num_bytes if replaced else 0)
        if replaced:
            _delete(replaced.path)
        self.trim()
        return path

    def discard(self, key: str, path: Path) -> None:
        """Delete the file of ``key``, pinned or not, unless it is no longer the one at ``path``."""
        with self._lock:
            file = self._files.get(key)
            if file is None or file.path != path:
                return
            del self._files[key]
            self._num_bytes -= file.num_bytes
        _delete(path)

    def trim(self) -> None:
        """Delete the least recently used unpinned files until the rest is within the bound."""
        with self._lock:
            if self._num_bytes <= self._max_bytes:
                return
            victims = []
            for key in [key for key in self._files if key not in self._pins]:
                victims.append(self._files.pop(key))
                self._num_bytes -= victims[-1].num_bytes
                if self._num_bytes <= self._max_bytes:
                    break
        for file in victims:
            _delete(file.path)

    def discrepancies(self, pins: Mapping[str, int]) -> list[str]:
        """Recount the folder; what is wrong with the books, empty when all is well. Touches the disk.

        For a cache that nobody uses meanwhile: a file that is on its way in or out would be a complaint. ``pins`` are those there
        should be, by key.
        """
        with self._lock:
            files, booked, kept_pins = dict(self._files), self._num_bytes, dict(self._pins)
        found = [
            f"disk cache: {kept_pins.get(key, 0)} pins of {key}, {pins.get(key, 0)} loads in flight"
            for key in sorted(kept_pins.keys() | pins.keys())
            if kept_pins.get(key, 0) != pins.get(key, 0)
        ]
        if booked != (counted := sum(file.num_bytes for file in files.values())):
            found.append(f"disk cache: {booked} bytes booked, {counted} counted")
        unpinned = sum(file.num_bytes for key, file in files.items() if key not in kept_pins)
        if unpinned and booked > self._max_bytes:
            found.append(f"disk cache: {booked} bytes of at most {self._max_bytes}, {unpinned} of them could be deleted")
        try:
            there = {path: num_bytes for _, path, num_bytes, _ in self._files_there()}
        except OSError as error:
            return [*found, f"disk cache: the folder cannot be read: {error.strerror}"]
        for key, file in files.items():
            if (num_bytes := there.pop(file.path, None)) != file.num_bytes:
                state = "is not there" if num_bytes is None else f"has {num_bytes}"
                found.append(f"disk cache: the file of {key} was booked with {file.num_bytes} bytes and {state}")
        return found + [f"disk cache: {path.name} is in nobody's books" for path in there]

    def _files_there(self) -> Iterator[tuple[str, Path, int, int]]:
        """(key, path, bytes, time of last use) of each file in the folder that is named like one of ours."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                match = _FILE_NAME.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    yield match[1], Path(entry.path), status.st_size, status.st_mtime_ns

    def _scan(self) -> None:
        for key, path, num_bytes, _ in sorted(self._files_there(), key=lambda file: file[3]):
            file = _File(path, num_bytes)
            older = self._files.pop(key, None)
            if older:
                self._num_bytes -= older.num_bytes
                _delete(older.path)
            self._files[key] = file
            self._num_bytes += file.num_bytes
        self.trim()


def _delete(path: Path) -> None:
    """Delete a file that is in nobody's books any more. One that cannot be is found by a recount, and by the next start."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("the adapter disk cache cannot delete %s: %s", path.name, error.strerror)
