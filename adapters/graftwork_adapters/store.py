"""The object store: blobs by exact key, written once. Drivers: `folder_store`, `s3_store`; `stores.open_store` picks one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from graftwork_adapters.errors import InvalidKey

SCRATCH_NAME = ".incoming"
"""Never the first part of a key: where a driver may keep half-written blobs."""

_MAX_PART_BYTES = 255  # what Linux file systems take as one name
_MAX_KEY_BYTES = 800  # S3 takes 1024, and a store's own prefix comes before the key


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Which object store, as plain values that travel to other processes as JSON.

    ``url`` is a folder's path, ``file://PATH`` or ``s3://BUCKET[/PREFIX]``; the rest is for S3. Credentials are never part of it:
    they come from where AWS's own tools look (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, profiles, instance roles).
    """

    url: str
    s3_endpoint: str | None = None  # of an S3-compatible server; None: AWS
    s3_region: str | None = None  # None: AWS_REGION, a profile's, or us-east-1
    s3_path_style: bool | None = None  # bucket in the path and not in the host's name; None: with an endpoint, yes
    s3_ca_bundle: str | None = None  # PEM file that the endpoint's certificate is checked against


class ObjectStore(Protocol):
    """Blobs by key; `check_key` says what a key is. Blobs never change once written.

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
        """Keys that begin with ``prefix``, which must end in ``/``, ordered as strings; names that are no keys are left out."""
        ...

    def delete(self, key: str) -> None:
        """Remove the blob; no error if it is absent."""
        ...


def is_key(key: str) -> bool:
    """True for a key: ``/``-separated parts, none of them empty, ``.`` or ``..``, and the first not `SCRATCH_NAME`."""
    parts = key.split("/")
    try:
        is_short = len(key.encode()) <= _MAX_KEY_BYTES and all(len(part.encode()) <= _MAX_PART_BYTES for part in parts)
    except UnicodeEncodeError:
        return False
    return is_short and "\0" not in key and parts[0] != SCRATCH_NAME and not any(part in ("", ".", "..") for part in parts)


def check_key(key: str) -> None:
    """Raises `InvalidKey` unless ``key`` is one."""
    if not is_key(key):
        raise InvalidKey(f"{key!r} is not a key of an object store")


def check_prefix(prefix: str) -> None:
    """Raises `InvalidKey` unless ``prefix`` is a key followed by ``/``: ``a/1`` would also match ``a/10``."""
    if not prefix.endswith("/"):
        raise InvalidKey(f"a prefix ends in '/', {prefix!r} does not")
    check_key(prefix[:-1])
