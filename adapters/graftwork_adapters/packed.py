"""The packed form: an adapter as the rows that kernels read, in one safetensors file. Knows no torch.

The file holds one uint8 tensor, ``rows``, and in its metadata the index, the key and the sha256 of index and rows. Rows follow each
other in layer → projection order (per site: the rows of A, the rows of B transposed, the output scale, the bias), each padded to a
multiple of `ROW_ALIGNMENT`, so that loading is one read and one copy per device page. Behind them lie the tensors that an adapter
brings whole (`wholes.py`), each from a multiple of `ROW_ALIGNMENT` on, which go to a memory of their own.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from graftwork_adapters.errors import BlobCorrupt
from graftwork_adapters.keys import AdapterDigest, PackedKey, RowTypeName, packed_key

ROW_ALIGNMENT = 64
"""Bytes; the kernels' own constant of the same name (a test holds the two together)."""

_PART_BYTES = 1 << 20
"""Read at a time: small beside an adapter, so that its check begins early, and large beside what a call costs."""

ABSENT = -1

Number = Annotated[int, msgspec.Meta(ge=ABSENT, le=1 << 48)]
"""Of something in a file: what is beyond is no number that a file can hold, and is refused where it is read."""

WholeTypeName = Literal["bfloat16", "float32", "int64"]

WHOLE_ELEMENT_BYTES: dict[WholeTypeName, int] = {"bfloat16": 2, "float32": 4, "int64": 8}

_UNREADABLE = (OSError, ValueError)  # what msgspec raises is a ValueError


@dataclass(frozen=True, slots=True)
class PackedSite:
    """Where one projection's rows begin, as row numbers inside this adapter; `ABSENT` where it has no such part."""

    index: Number  # the site's number in the base (`base_spec.Site.index`)
    rank: Number
    a_row: Number
    b_row: Number
    scale_row: Number
    bias_row: Number


@dataclass(frozen=True, slots=True)
class PackedWhole:
    """A tensor that an adapter brings whole: ``name`` is one of `wholes.py`, its elements lie in order, little-endian."""

    name: str
    dtype: WholeTypeName
    shape: tuple[Number, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, without padding."""
        return math.prod(self.shape) * WHOLE_ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class PackedIndex:
    """What lies where in ``rows``. ``row_runs`` lists (number of rows, bytes of each) in file order."""

    key: PackedKey
    digest: AdapterDigest
    base_id: str
    row_type: RowTypeName
    sites: tuple[PackedSite, ...]
    row_runs: tuple[tuple[Number, Number], ...]
    wholes: tuple[PackedWhole, ...] = ()

    @cached_property
    def row_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each row, padding included; int64 [rows]."""
        counts, sizes = zip(*self.row_runs, strict=True) if self.row_runs else ((), ())
        return np.repeat(np.array(sizes, dtype=np.int64), np.array(counts, dtype=np.int64))

    @cached_property
    def site_table(self) -> npt.NDArray[np.int64]:
        """The sites as they are, a row each: int64 [sites, fields of `PackedSite`]."""
        fields = [(s.index, s.rank, s.a_row, s.b_row, s.scale_row, s.bias_row) for s in self.sites]
        return np.array(fields, dtype=np.int64).reshape(len(fields), 6)

    @cached_property
    def num_rows(self) -> int:
        """Rows of all sites together."""
        return sum(count for count, _ in self.row_runs)

    @cached_property
    def num_row_bytes(self) -> int:
        """Bytes of all rows together: what goes into pages."""
        return sum(count * size for count, size in self.row_runs)

    @cached_property
    def whole_starts(self) -> tuple[int, ...]:
        """Where in ``rows`` each of the ``wholes`` begins."""
        starts, start = [], self.num_row_bytes
        for whole in self.wholes:
            starts.append(start)
            start += -(-whole.num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return tuple(starts)

    @cached_property
    def num_whole_bytes(self) -> int:
        """Bytes of all wholes together, padding included: what they take of their memory."""
        return sum(-(-whole.num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT for whole in self.wholes)

    @cached_property
    def num_bytes(self) -> int:
        """Length of ``rows``, the wholes behind them included."""
        return self.num_row_bytes + self.num_whole_bytes


Expect: TypeAlias = Callable[[PackedIndex], Callable[[npt.NDArray[np.uint8]], None]]
"""What is done with an index while its rows are read, and what then with the rows: see `read_packed`."""


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
    with _opened(path, key) as file:
        return _read_head(file, key).index


def read_packed(path: Path, key: str, expect: Expect | None = None) -> tuple[PackedIndex, npt.NDArray[np.uint8]]:
    """Read and verify the packed form ``key``; raises `BlobCorrupt` unless every byte is what its key and metadata promise.

    The file is opened once and its rows are read once, into memory of their own, while a thread beside compares what has come with
    the checksum, which takes several times as long. That thread first calls ``expect`` with the index, of which everything has been
    verified by then; what it returns is called with the rows once all are there. It may start to copy them, and must let nobody use
    the copy unless this function returns.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1, thread_name_prefix="adapter-check") as beside:
        with _opened(path, key) as file:
            head = _read_head(file, key)
            expecting = None if expect is None else beside.submit(expect, head.index)
            rows = _memory(head.index.num_bytes)
            # The length was compared before, and is again: the file may have been cut meanwhile.
            if _read_into(file, rows, lambda part: beside.submit(digest.update, part)) != rows.nbytes:
                raise ValueError("it ends before its rows do")
        if expecting is not None:
            expecting.result()(rows)
    # At every load, of our own cache's files too: a bit that flipped on the disk, a file that was cut or written to by another
    # program would be served as a tenant's adapter and nobody could tell. It is no guard against one who may write there.
    if digest.hexdigest() != head.rows_sha256:
        raise BlobCorrupt(f"packed adapter {key}: the bytes of its rows do not match their checksum")
    return head.index, rows


def _memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """In ordinary pages. NumPy would ask for huge ones, which a virtual machine may take longer to clear than it takes to read an
    adapter, and whoever waits for the adapter waits for that.
    """
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8) if num_bytes else np.empty(0, dtype=np.uint8)


class _Rows(msgspec.Struct, frozen=True):
    """The header's entry of the one tensor."""

    dtype: Literal["U8"]
    shape: tuple[int]
    data_offsets: tuple[int, int]


class _Metadata(msgspec.Struct, frozen=True, rename=lambda name: f"graftwork.{name}"):
    """What `write_packed` notes beside the tensor."""

    sha256: str
    index: str
    index_sha256: str


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a packed file: one tensor and nothing else."""

    rows: _Rows
    metadata: _Metadata = msgspec.field(name="__metadata__")


@dataclass(frozen=True, slots=True)
class _Head:
    """What comes before the rows: the verified index, and the checksum that the rows must have."""

    index: PackedIndex
    rows_sha256: str


@contextmanager
def _opened(path: Path, key: str) -> Iterator[FileIO]:
    try:
        with FileIO(path) as file:
            yield file
    except _UNREADABLE as error:
        raise BlobCorrupt(f"packed adapter {key} cannot be read: {_reason(error)}") from error


def _read_head(file: FileIO, key: str) -> _Head:
    """Read up to where the rows begin. Raises what `_opened` takes for a file that cannot be read, and `BlobCorrupt`."""
    # By hand: an engine does this for every load while its step waits for the interpreter, so one decoder checks and builds all.
    num_bytes = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > num_bytes - 8:
        raise ValueError("its header is longer than the file")
    header = msgspec.json.decode(file.read(length), type=_Header)
    text = header.metadata.index
    if hashlib.sha256(text.encode()).hexdigest() != header.metadata.index_sha256:
        raise BlobCorrupt(f"packed adapter {key}: its index does not match its checksum")
    index = msgspec.json.decode(text, type=PackedIndex)
    if index.key != key or packed_key(index.digest, index.base_id, index.row_type) != key:
        raise BlobCorrupt(f"packed adapter {key} holds another adapter, {index.key}")
    due = index.num_bytes
    if header.rows.shape != (due,) or header.rows.data_offsets != (0, due) or num_bytes != 8 + length + due:
        raise BlobCorrupt(
            f"packed adapter {key} has {num_bytes - 8 - length} bytes of rows, {header.rows.shape[0]} by its header and {due} by "
            "its index"
        )
    return _Head(index, header.metadata.sha256)


def _read_into(file: FileIO, rows: npt.NDArray[np.uint8], came: Callable[[memoryview], object]) -> int:
    """Fill ``rows`` from where the file stands, telling ``came`` each part; how many bytes came, fewer only where it ends."""
    done = 0
    while done < rows.nbytes and (count := file.readinto(rows[done : done + _PART_BYTES].data)):
        came(rows[done : done + count].data)
        done += count
    return done


def _reason(error: Exception) -> str:
    # Paths stay out of it: the message may reach a client.
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
