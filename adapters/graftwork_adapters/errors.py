"""The adapters room's errors.

AdapterError
├── InvalidSafetensors   a file's header is not the format's, or lies about its tensors; carries every problem
├── StoreError
│   ├── BlobNotFound     no such key in the object store
│   ├── BlobCorrupt      its bytes are not what the key or the metadata says
│   ├── InvalidKey       not a key of an object store
│   ├── UnsupportedStore a store's configuration that no driver can serve
│   └── StoreUnavailable it does not answer, refuses us, or its disk is full; says what the operator can do
├── AdapterTooLarge      it can never fit the memory it is meant for, or its rank the kernels that read it
├── PatternTooSlow       an upload's regular expressions took more time than they may; names the config field
└── UnsupportedBase      the base model's files do not describe a decoder that adapters can attach to
"""

from __future__ import annotations

from pathlib import Path


class AdapterError(Exception):
    """Root of the tree."""


class InvalidSafetensors(AdapterError):
    """A safetensors file that cannot be trusted. ``problems`` lists (tensor or None, what is wrong) in file order."""

    def __init__(self, path: Path, problems: tuple[tuple[str | None, str], ...]) -> None:
        self.path = path
        self.problems = problems
        super().__init__("; ".join(f"{path.name}{f' [{tensor}]' if tensor else ''}: {what}" for tensor, what in problems[:5]))


class StoreError(AdapterError):
    """The object store could not do what was asked."""


class BlobNotFound(StoreError):
    """No such key in the object store."""


class BlobCorrupt(StoreError):
    """The bytes are not what their key or metadata promises."""


class InvalidKey(StoreError):
    """Not a key of an object store: an empty, ``.`` or ``..`` part, a leading ``/``, or a name that is also a prefix."""


class UnsupportedStore(StoreError):
    """A store's configuration that no driver can serve."""


class StoreUnavailable(StoreError):
    """The store does not answer, refuses us, or cannot write.

    The text may reach a tenant, so it names no bucket, host or path; ``fix`` is what the operator can do about it, or empty.
    """

    def __init__(self, problem: str, *, fix: str = "") -> None:
        self.fix = fix
        super().__init__(problem)


class AdapterTooLarge(AdapterError):
    """An adapter larger than the memory it is meant for can ever be, or of a rank above the largest that is served."""


class PatternTooSlow(AdapterError):
    """An upload's regular expressions used up their budget while that of config field ``field`` ran."""

    def __init__(self, field: str, seconds: float) -> None:
        self.field = field
        super().__init__(f"the upload's patterns took more than {seconds:g} s of processor time, the last of them in {field}")


class UnsupportedBase(AdapterError):
    """A base folder that does not describe a decoder which adapters can attach to."""
