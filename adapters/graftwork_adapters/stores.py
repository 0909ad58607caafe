"""The object store that a configuration names. Knows the drivers, and nothing of what blobs hold."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from graftwork_adapters.errors import UnsupportedStore
from graftwork_adapters.folder_store import FolderStore
from graftwork_adapters.store import ObjectStore, StoreConfig


def open_store(config: StoreConfig) -> ObjectStore:
    """The store at ``config.url``. Raises `UnsupportedStore` for a URL that no driver serves."""
    parts = urlsplit(config.url)
    if not parts.scheme:
        return FolderStore(Path(config.url))
    if parts.scheme != "file":
        raise UnsupportedStore(f"a store at {parts.scheme}:// is not served by this version; give a folder or a file:// URL")
    if parts.netloc not in ("", "localhost"):
        raise UnsupportedStore(f"a file:// URL names a folder of this machine, not of {parts.netloc}")
    return FolderStore(Path(unquote(parts.path)))
