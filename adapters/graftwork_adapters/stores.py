"""The object store that a configuration names. Knows the drivers, and nothing of what blobs hold."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from graftwork_adapters.errors import UnsupportedStore
from graftwork_adapters.folder_store import FolderStore, check_folder
from graftwork_adapters.store import ObjectStore, StoreConfig


def open_store(config: StoreConfig) -> ObjectStore:
    """The store at ``config.url``; a folder is made if it is not there, S3 is not asked anything yet.

    Raises `UnsupportedStore` for a configuration that no driver serves.
    """
    folder = _folder_of(config)
    if folder is not None:
        return FolderStore(folder)
    from graftwork_adapters.s3_store import S3Store  # boto3 costs a second and 40 MB, which a folder should not

    return S3Store(config)


def check_store(config: StoreConfig) -> None:
    """Raises `StoreError` unless the store is there and answers us; takes seconds and changes nothing."""
    folder = _folder_of(config)
    if folder is not None:
        check_folder(folder)
        return
    from graftwork_adapters.s3_store import CHECK_LIMITS, S3Store

    S3Store(config, CHECK_LIMITS).check()


def prepare_store(config: StoreConfig) -> None:
    """The same, but a folder that is not there is made."""
    folder = _folder_of(config)
    if folder is not None:
        FolderStore(folder)
    check_store(config)


def _folder_of(config: StoreConfig) -> Path | None:
    """The store's folder, or None for S3."""
    if "://" not in config.url:
        return Path(config.url)
    parts = urlsplit(config.url)
    if parts.scheme == "s3":
        return None
    if parts.scheme != "file":
        raise UnsupportedStore(f"a store at {parts.scheme}:// is not served by this version; give a folder or an s3:// URL")
    if parts.netloc not in ("", "localhost"):
        raise UnsupportedStore(f"a file:// URL names a folder of this machine, not of {parts.netloc}")
    return Path(unquote(parts.path))
