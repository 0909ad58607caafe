"""The adapters room's errors.

AdapterError
├── InvalidUpload        the uploaded folder cannot be served; carries every finding
├── StoreError
│   ├── BlobNotFound     no such key in the object store
│   ├── BlobCorrupt      its bytes are not what the key or the metadata says
│   └── StoreUnavailable it does not answer, or the disk is full
├── AdapterTooLarge      it can never fit the memory it is meant for
└── UnsupportedBase      the base model's files do not describe a decoder that adapters can attach to
"""

from __future__ import annotations


class AdapterError(Exception):
    """Root of the tree."""


class StoreError(AdapterError):
    """The object store could not do what was asked."""


class BlobNotFound(StoreError):
    """No such key in the object store."""


class BlobCorrupt(StoreError):
    """The bytes are not what their key or metadata promises."""


class StoreUnavailable(StoreError):
    """The store does not answer, or cannot write."""


class AdapterTooLarge(AdapterError):
    """An adapter larger than the memory it is meant for can ever be."""


class UnsupportedBase(AdapterError):
    """A base folder that does not describe a decoder which adapters can attach to."""
