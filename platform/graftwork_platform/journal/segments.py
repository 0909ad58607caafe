"""A journal's files: one locked folder per process, append-only segments in it. Knows no meaning of what is written.

DATA_DIR/journal/<id of the process>/lock           held with flock while the process lives
                                     0000000001.seg
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from graftwork_platform.ids import uuid7

Sync = Callable[[int], None]
"""Makes what was written to a descriptor durable: `os.fsync`."""

_LOCK_NAME = "lock"
_SUFFIX = ".seg"


class Segment:
    """One file that only grows. `append` may be called from any thread; once a fault left it in doubt, nothing more is taken."""

    def __init__(self, path: Path, descriptor: int, sync: Sync) -> None:
        self.path = path
        self.size = 0
        self._descriptor = descriptor
        self._sync = sync
        self._lock = threading.Lock()
        self._broken: OSError | None = None

    def append(self, data: bytes) -> None:
        """Hand ``data`` to the kernel, whole or not at all: it then survives this process, but not the machine, until `sync`.

        Raises `OSError`, for ever after a fault that could not be undone.
        """
        with self._lock:
            if self._broken is not None:
                raise self._broken
            try:
                _write_all(self._descriptor, data)
            except OSError as fault:
                self._undo(fault)
                raise
            self.size += len(data)

    def sync(self) -> None:
        """Make all that was appended durable. After a failed attempt the kernel may have dropped it, so the segment is given up."""
        try:
            self._sync(self._descriptor)
        except OSError as fault:
            with self._lock:
                self._broken = fault
            raise

    def close(self) -> None:
        """Take no more."""
        with self._lock:
            self._broken = OSError(errno.EBADF, f"{self.path} is closed")
            os.close(self._descriptor)

    def _undo(self, fault: OSError) -> None:
        try:
            os.ftruncate(self._descriptor, self.size)
        except OSError:
            self._broken = fault


class JournalFolder:
    """The folder of one process's journal, locked from `create` or `take_dead` on until `release` or `remove`."""

    def __init__(self, path: Path, lock: int, sync: Sync) -> None:
        self.path = path
        self._lock = lock
        self._sync = sync
        self._last = 0

    @classmethod
    def create(cls, root: Path, sync: Sync = os.fsync) -> JournalFolder:
        """A new folder under ``root``, which is made if need be. Folders sort by the time of their making. Raises `OSError`."""
        if not root.is_dir():
            root.mkdir(parents=True, mode=0o700, exist_ok=True)
            _sync_folder(root.parent, sync)
        while True:
            path = root / uuid7().hex
            path.mkdir(mode=0o700)
            lock = _try_lock(path)
            if lock is not None:  # else another process's recovery took it for a dead one's in the meantime
                _sync_folder(root, sync)
                return cls(path, lock, sync)

    def start_segment(self, head: bytes) -> Segment:
        """A new segment that begins with ``head``; both are durable. Raises `OSError`, and then leaves no file."""
        self._last += 1
        path = self.path / f"{self._last:010d}{_SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        segment = Segment(path, descriptor, self._sync)
        try:
            segment.append(head)
            segment.sync()
            _sync_folder(self.path, self._sync)
        except OSError:
            segment.close()
            path.unlink()
            raise
        return segment

    def segments(self) -> list[Path]:
        """Its segments, the oldest first."""
        return sorted(self.path.glob(f"*{_SUFFIX}"))

    def release(self) -> None:
        """Leave the folder to whoever finds it; done once, however often it is called."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def remove(self) -> None:
        """Delete the folder with all in it. The lock goes last, so a deletion that is cut short is seen and done again."""
        for path in self.segments():
            path.unlink()
        (self.path / _LOCK_NAME).unlink(missing_ok=True)
        with suppress(OSError):  # something that is not ours lies in it
            self.path.rmdir()
        self.release()


def take_dead(root: Path, sync: Sync = os.fsync) -> list[JournalFolder]:
    """Lock and return the folders under ``root`` whose process has ended, the oldest first. Raises `OSError`."""
    taken: list[JournalFolder] = []
    try:
        taken.extend(
            JournalFolder(path, lock, sync)
            for path in (sorted(root.iterdir()) if root.is_dir() else ())
            if path.is_dir() and (lock := _try_lock(path)) is not None
        )
    except OSError:
        for folder in taken:
            folder.release()
        raise
    return taken


def _try_lock(folder: Path) -> int | None:
    """The descriptor that locks ``folder``; None if another one does, or if the folder is gone."""
    try:
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink > 0:  # else its last holder has deleted it with the folder
            return descriptor
    except OSError as fault:
        if fault.errno not in (errno.EAGAIN, errno.EACCES):
            os.close(descriptor)
            raise
    os.close(descriptor)
    return None


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_folder(folder: Path, sync: Sync) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
