"""Scratch folders for half-written files, which a later start can tell from ones still in use. Knows nothing of what they hold."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder below ``parent``, removed at the end. It is locked while in use; a writer that dies loses the lock."""
    path, lock = _locked_folder(parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def sweep_scratch(parent: Path) -> None:
    """Remove what crashed writers left below ``parent``; folders of live writers, in any process, stay."""
    for path in list(parent.iterdir()) if parent.is_dir() else []:
        lock = _try_lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    while True:
        parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(dir=parent))
        lock = _try_lock(path)
        if lock is None:
            continue  # a sweep came between the folder and its lock, and is removing it
        if path.is_dir():
            return path, lock
        os.close(lock)


def _try_lock(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
