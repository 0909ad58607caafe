"""The data directory belongs to one server at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DataDirBusy(Exception):
    """Another server holds the data directory."""


def holder(lock_file: Path) -> int | None:
    """The process that holds the lock, by what it wrote there; None if there is none, or it has ended.

    Looks without taking: a server that starts meanwhile gets the lock. Raises `OSError` if the file cannot be read.
    """
    try:
        process = int(lock_file.read_text(errors="replace"))
        os.kill(process, 0)
    except (ValueError, OverflowError, FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError as error:
        if error.filename is not None:  # the file's; without a name it is another user's process, which lives
            raise
    return process


@contextmanager
def locked(lock_file: Path) -> Iterator[None]:
    """Hold the data directory's lock; raises `DataDirBusy` if another process does.

    The kernel drops the lock when its holder ends, however it ends. Folders are made as needed.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise DataDirBusy(
                f"{lock_file.parent} is in use by another server (process {holder}): stop it, or choose another --data-dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
