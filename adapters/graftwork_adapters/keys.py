"""The names by which adapter bytes are known: content digest, packed key, and where each lies in the object store."""

from __future__ import annotations

import hashlib
from typing import Literal, NewType

AdapterDigest = NewType("AdapterDigest", str)
"""Hex sha256 over an upload's canonical form."""

PackedKey = NewType("PackedKey", str)
"""Hex sha256 of (digest, base id, packed version, row type): the engine's adapter key in every cache."""

RowTypeName = Literal["bfloat16", "float32", "int8", "e4m3"]

PACKED_VERSION = 2
"""Raised whenever the packed form's layout or arithmetic changes; old packed files are then rebuilt."""


def packed_key(digest: AdapterDigest, base_id: str, row_type: RowTypeName) -> PackedKey:
    """The key of the packed form of ``digest`` for one base and row type."""
    parts = ("graftwork.packed", digest, base_id, str(PACKED_VERSION), row_type)
    return PackedKey(hashlib.sha256("\0".join(parts).encode()).hexdigest())


def packed_path(key: PackedKey | str) -> str:
    """Object store key of a packed form."""
    return f"packed/{key}.safetensors"


def upload_prefix(digest: AdapterDigest) -> str:
    """Object store prefix of an upload's files, as they were sent."""
    return f"uploads/{digest}/"
