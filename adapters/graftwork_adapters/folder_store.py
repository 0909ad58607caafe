"""The object store as a folder, local or shared by machines. Knows nothing of what the blobs hold."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

from graftwork_adapters.errors import BlobNotFound, InvalidKey, StoreUnavailable
from graftwork_adapters.scratch import scratch_folder, sweep_scratch
from graftwork_adapters.store import SCRATCH_NAME, check_key, check_prefix, is_key


class FolderStore:
    """An `ObjectStore` whose blobs are files below ``root``; several processes may share it.

    A blob is written to a scratch folder, synced, and then linked to its name, so readers see all of it or nothing. Scratch
    folders of writers that died are removed here.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        with _unavailable_on_os_error("the store's folder"):
            self._root.mkdir(parents=True, exist_ok=True)
            sweep_scratch(self._root / SCRATCH_NAME)

    def put_if_absent(self, key: str, source: Path) -> bool:
        """See `ObjectStore.put_if_absent`. A full disk is `StoreUnavailable`."""
        target = self._path(key)
        with _unavailable_on_os_error(key):
            written = not self.exists(key) and self._link_copy(source, target, key)
            # Another writer may have linked the blob and not yet synced the folders: whoever reports it stored syncs them.
            self._sync_folders(target.parent)
        return written

    def fetch(self, key: str, dest: Path) -> None:
        """See `ObjectStore.fetch`."""
        path = self._path(key)
        if not self.exists(key):
            raise BlobNotFound(f"the store has no {key}")
        with _unavailable_on_os_error(key):
            try:
                blob = path.open("rb")
            except FileNotFoundError as error:
                raise BlobNotFound(f"the store has no {key}") from error
            with blob, dest.open("xb") as copy:
                try:
                    _copy_all(blob.fileno(), copy.fileno())
                except OSError:
                    dest.unlink()
                    raise

    def exists(self, key: str) -> bool:
        """See `ObjectStore.exists`; a folder is not a blob."""
        path = self._path(key)
        with _unavailable_on_os_error(key):
            try:
                return S_ISREG(os.lstat(path).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def list_keys(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_keys`."""
        check_prefix(prefix)
        return self._walk(self._path(prefix[:-1]), prefix)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        path = self._path(key)
        if self.exists(key):
            with _unavailable_on_os_error(key), suppress(FileNotFoundError):
                path.unlink()
                _sync_folder(path.parent)

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._root.joinpath(*key.split("/"))

    def _link_copy(self, source: Path, target: Path, key: str) -> bool:
        with scratch_folder(self._root / SCRATCH_NAME) as scratch:
            blob = scratch / "blob"
            with source.open("rb") as original, blob.open("xb") as copy:
                shutil.copyfileobj(original, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(blob, target)
            except (FileExistsError, NotADirectoryError) as error:
                if not self.exists(key):
                    raise InvalidKey(f"{key!r} is a prefix of other keys, or one of its prefixes is a key") from error
                return False
        return True

    def _sync_folders(self, folder: Path) -> None:
        while folder != self._root.parent:
            _sync_folder(folder)
            folder = folder.parent

    def _walk(self, folder: Path, prefix: str) -> Iterator[str]:
        with _unavailable_on_os_error(prefix):
            try:
                entries = sorted(os.scandir(folder), key=_listing_order)
            except (FileNotFoundError, NotADirectoryError):
                return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(folder / entry.name, f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False) and is_key(prefix + entry.name):
                yield prefix + entry.name


def check_folder(root: Path) -> None:
    """Raises `StoreUnavailable` unless the folder is there and can be read and written. Changes nothing."""
    with _unavailable_on_os_error("the store's folder"), os.scandir(root) as entries:
        next(entries, None)
    if not os.access(root, os.W_OK | os.X_OK):
        raise StoreUnavailable("the object store's folder cannot be written", fix="give it back to the server's user")


def _listing_order(entry: os.DirEntry[str]) -> str:
    # Keys are ordered as strings, where "a-b" comes before "a/b".
    return entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name


def _copy_all(source: int, target: int) -> None:
    """Copy a file in the kernel, which takes half the time of reading and writing it. Not a link: what befalls the copy would
    befall the store's."""
    try:
        while os.sendfile(target, source, None, 1 << 30):
            pass
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP) or os.lseek(target, 0, os.SEEK_CUR):
            raise
        with open(source, "rb", closefd=False) as reader, open(target, "wb", closefd=False) as writer:  # not every file system can
            shutil.copyfileobj(reader, writer)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _unavailable_on_os_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # The reason only: the exception's own text has paths in it, and this one may reach a client.
        raise StoreUnavailable(f"the object store cannot serve {what}: {error.strerror or type(error).__name__}") from error
