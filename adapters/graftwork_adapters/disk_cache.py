"""A byte-bounded folder of packed files, by key. Knows nothing of what they hold or where they come from."""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
            replaced.path.unlink(missing_ok=True)
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
        path.unlink(missing_ok=True)

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
            file.path.unlink(missing_ok=True)

    def _scan(self) -> None:
        found = []
        for entry in os.scandir(self._folder):
            match = _FILE_NAME.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, match[1], _File(Path(entry.path), status.st_size)))
        for _, key, file in sorted(found, key=lambda item: item[0]):
            older = self._files.pop(key, None)
            if older:
                self._num_bytes -= older.num_bytes
                older.path.unlink(missing_ok=True)
            self._files[key] = file
            self._num_bytes += file.num_bytes
        self.trim()
