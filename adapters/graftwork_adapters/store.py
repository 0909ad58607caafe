"""The object store: blobs by exact key, written once. Drivers: `folder_store.FolderStore` and, later, S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol


class ObjectStore(Protocol):
    """Blobs by key. Keys are ``/``-separated, never begin with ``/`` and hold no ``..``; blobs never change once written.

    Every method may block on disk or network: call it from a worker thread. Errors are `graftwork_adapters.errors.StoreError`.
    """

    def put_if_absent(self, key: str, source: Path) -> bool:
        """Store the file's bytes under ``key``, durably, unless the key exists; true if it was written. Never half-visible."""
        ...

    def fetch(self, key: str, dest: Path) -> None:
        """Write the blob to ``dest`` (a new file). Raises `BlobNotFound`, `StoreUnavailable`."""
        ...

    def exists(self, key: str) -> bool:
        """True if exactly this key is there."""
        ...

    def list_keys(self, prefix: str) -> Iterator[str]:
        """Keys that begin with ``prefix`` (which must end in ``/``), in order."""
        ...

    def delete(self, key: str) -> None:
        """Remove the blob; no error if it is absent."""
        ...
