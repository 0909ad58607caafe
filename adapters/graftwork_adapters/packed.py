"""The packed form: an adapter as the rows that kernels read, in one safetensors file. Knows no torch.

The file holds one uint8 tensor, ``rows``, and in its metadata the index, the key and the sha256 of those bytes. Rows follow each
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
from safetensors.numpy import save_file

from graftwork_adapters.errors import BlobCorrupt
from graftwork_adapters.keys import AdapterDigest, PackedKey, RowTypeName, packed_key

ROW_ALIGNMENT = 64
"""Bytes; the kernels' own constant of the same name (a test holds the two together)."""

ABSENT = -1


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
    """Write ``rows`` (uint8 [index.num_bytes]) and its index to ``path``."""
    if rows.dtype != np.uint8 or rows.shape != (index.num_bytes,):
        raise AssertionError(f"rows are {rows.dtype} {rows.shape}, the index says uint8 ({index.num_bytes},)")
    metadata = {
        "graftwork.key": index.key,
        "graftwork.sha256": hashlib.sha256(rows.data).hexdigest(),
        "graftwork.index": json.dumps(asdict(index), separators=(",", ":")),
    }
    save_file({"rows": rows}, path, metadata=metadata)


def read_packed(path: Path, key: str) -> tuple[PackedIndex, npt.NDArray[np.uint8]]:
    """Read and verify the packed form ``key``; raises `BlobCorrupt` unless every byte is what its key and metadata promise."""
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            rows = file.get_tensor("rows")
        index = _parse_index(json.loads(metadata["graftwork.index"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise BlobCorrupt(f"packed adapter {key} cannot be read: {error}") from error
    if index.key != key or packed_key(index.digest, index.base_id, index.row_type) != key:
        raise BlobCorrupt(f"packed adapter {key} holds another adapter, {index.key}")
    if rows.dtype != np.uint8 or rows.shape != (index.num_bytes,):
        raise BlobCorrupt(f"packed adapter {key} has {rows.shape} bytes of rows, its index says {index.num_bytes}")
    if hashlib.sha256(rows.data).hexdigest() != metadata.get("graftwork.sha256"):
        raise BlobCorrupt(f"packed adapter {key}: the bytes of its rows do not match their checksum")
    return index, rows


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
