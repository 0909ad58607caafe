"""The packed form: an adapter as the rows that kernels read, in one safetensors file. Knows no torch.

The file holds one uint8 tensor, ``rows``, and in its metadata the index, the key and the sha256 of index and rows. Rows follow each
other in layer → projection order (per site: the rows of A, the rows of B transposed, the output scale, the bias), each padded to a
multiple of `ROW_ALIGNMENT`, so that loading is one read and one copy per device page.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from graftwork_adapters.errors import BlobCorrupt
from graftwork_adapters.keys import AdapterDigest, PackedKey, RowTypeName, packed_key

ROW_ALIGNMENT = 64
"""Bytes; the kernels' own constant of the same name (a test holds the two together)."""

ABSENT = -1

_UNREADABLE = (SafetensorError, OSError, KeyError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class PackedSite:
    """Where one projection's rows begin, as row numbers inside this adapter; `ABSENT` where it has no such part."""

    index: int  # the site's number in the base (`base_spec.Site.index`)
    rank: int
    a_row: int
    b_row: int
    scale_row: int
    bias_row: int


@dataclass(frozen=True)
class PackedIndex:
    """What lies where in ``rows``. ``row_runs`` lists (number of rows, bytes of each) in file order."""

    key: PackedKey
    digest: AdapterDigest
    base_id: str
    row_type: RowTypeName
    sites: tuple[PackedSite, ...]
    row_runs: tuple[tuple[int, int], ...]

    @cached_property
    def row_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each row, padding included; int64 [rows]."""
        counts, sizes = zip(*self.row_runs, strict=True) if self.row_runs else ((), ())
        return np.repeat(np.array(sizes, dtype=np.int64), np.array(counts, dtype=np.int64))

    @property
    def num_rows(self) -> int:
        """Rows of all sites together."""
        return sum(count for count, _ in self.row_runs)

    @property
    def num_bytes(self) -> int:
        """Length of ``rows``."""
        return sum(count * size for count, size in self.row_runs)


def write_packed(path: Path, index: PackedIndex, rows: npt.NDArray[np.uint8]) -> None:
    """Write ``rows`` (uint8 [index.num_bytes]) and its index to ``path``; the same index and rows give the same bytes."""
    if rows.dtype != np.uint8 or rows.shape != (index.num_bytes,):
        raise AssertionError(f"rows are {rows.dtype} {rows.shape}, the index says uint8 ({index.num_bytes},)")
    index_text = json.dumps(asdict(index), separators=(",", ":"))
    metadata = {
        "graftwork.key": index.key,
        "graftwork.sha256": hashlib.sha256(rows.data).hexdigest(),
        "graftwork.index": index_text,
        "graftwork.index_sha256": hashlib.sha256(index_text.encode()).hexdigest(),
    }
    # Not by the safetensors library: it orders metadata anew in each process, and copies the rows.
    entry = {"dtype": "U8", "shape": [index.num_bytes], "data_offsets": [0, index.num_bytes]}
    header = json.dumps({"__metadata__": metadata, "rows": entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(rows.data)


def read_index(path: Path, key: str) -> PackedIndex:
    """Read the index of the packed form ``key`` without its rows; raises `BlobCorrupt` unless it belongs to that key and file."""
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            shape = file.get_slice("rows").get_shape()
        index_text, checksum = metadata["graftwork.index"], metadata["graftwork.index_sha256"]
        index = _parse_index(json.loads(index_text))
    except _UNREADABLE as error:
        raise BlobCorrupt(f"packed adapter {key} cannot be read: {_reason(error)}") from error
    if hashlib.sha256(index_text.encode()).hexdigest() != checksum:
        raise BlobCorrupt(f"packed adapter {key}: its index does not match its checksum")
    if index.key != key or packed_key(index.digest, index.base_id, index.row_type) != key:
        raise BlobCorrupt(f"packed adapter {key} holds another adapter, {index.key}")
    if shape != [index.num_bytes]:
        raise BlobCorrupt(f"packed adapter {key} has {shape} bytes of rows, its index says {index.num_bytes}")
    return index


def read_packed(path: Path, key: str) -> tuple[PackedIndex, npt.NDArray[np.uint8]]:
    """Read and verify the packed form ``key``; raises `BlobCorrupt` unless every byte is what its key and metadata promise."""
    index = read_index(path, key)
    try:
        with safe_open(path, framework="np") as file:
            rows = file.get_tensor("rows")
            checksum = (file.metadata() or {})["graftwork.sha256"]
    except _UNREADABLE as error:
        raise BlobCorrupt(f"packed adapter {key} cannot be read: {_reason(error)}") from error
    if rows.dtype != np.uint8 or hashlib.sha256(rows.data).hexdigest() != checksum:
        raise BlobCorrupt(f"packed adapter {key}: the bytes of its rows do not match their checksum")
    return index, rows


def _reason(error: Exception) -> str:
    # Paths stay out of it: the message may reach a client.
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__


def _parse_index(raw: dict[str, object]) -> PackedIndex:
    sites, runs = raw["sites"], raw["row_runs"]
    row_type: RowTypeName | None = next((name for name in get_args(RowTypeName) if name == raw["row_type"]), None)
    if not isinstance(sites, list) or not isinstance(runs, list) or row_type is None:
        raise ValueError("malformed index")
    return PackedIndex(
        key=PackedKey(str(raw["key"])),
        digest=AdapterDigest(str(raw["digest"])),
        base_id=str(raw["base_id"]),
        row_type=row_type,
        sites=tuple(PackedSite(**site) for site in sites),
        row_runs=tuple((int(count), int(size)) for count, size in runs),
    )
