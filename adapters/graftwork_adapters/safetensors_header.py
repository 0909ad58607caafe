"""A strict reader of safetensors headers from strangers. Trusts nothing in the file and reads no tensor.

Format: 8 bytes of little-endian header length, a JSON object of {name: {dtype, shape, data_offsets}}, the tensors without gaps.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from graftwork_adapters.errors import InvalidSafetensors

MAX_HEADER_BYTES = 100 << 20
"""The format's own limit."""

MAX_NAME_LENGTH = 512

DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_MAX_DIMENSIONS = 16
_MAX_SIZE = 1 << 62  # beyond any file; keeps sizes within what every reader can hold

Problem = tuple[str | None, str]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: bytes ``start`` to ``end`` of the file itself."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A header that has been checked against its file. ``tensors`` are in name order."""

    tensors: tuple[TensorEntry, ...]
    metadata: dict[str, str]


def read_header(path: Path, max_header_bytes: int = MAX_HEADER_BYTES) -> SafetensorsHeader:
    """Read and check the header of ``path``.

    Raises `InvalidSafetensors`, which lists every problem found, and `OSError` where the file cannot be read. Symbolic links are
    not followed.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        data_start, data_size, raw = _read_json(path, file, max_header_bytes)
    problems: list[Problem] = []
    metadata = _check_metadata(raw.pop("__metadata__", {}), problems)
    entries: list[TensorEntry] = []
    for name, value in raw.items():
        try:
            entries.append(_tensor_entry(name, value, data_start))
        except ValueError as error:
            problems.append((shown(name), str(error)))
    # Where a tensor's own entry is broken, the bytes between the others cannot be judged.
    if not problems:
        _check_coverage(entries, data_start, data_size, problems)
    if problems:
        raise InvalidSafetensors(path, tuple(problems))
    return SafetensorsHeader(tuple(sorted(entries, key=lambda entry: entry.name)), metadata)


def shown(name: str) -> str:
    """A tensor's or field's name as a finding may carry it: printable, not empty and not longer than a line."""
    if not name:
        return "''"
    brief = name if len(name) <= 200 else f"{name[:197]}..."
    return "".join(c if c.isascii() and c.isprintable() else c.encode("unicode_escape").decode() for c in brief)


def _read_json(path: Path, file: BinaryIO, max_header_bytes: int) -> tuple[int, int, dict[str, object]]:
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    if len(prefix) < 8:
        raise _invalid(path, f"truncated: {size} bytes cannot hold a header length")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(max_header_bytes, MAX_HEADER_BYTES):
        raise _invalid(path, f"says its header has {length} bytes, more than the {max_header_bytes} allowed")
    if length > size - 8:
        raise _invalid(path, f"truncated: says its header has {length} bytes, the file has {size - 8} after the length")
    text = file.read(length)
    try:
        if not text.startswith(b"{"):
            raise ValueError("it does not begin with '{'")
        raw = json.loads(text.decode(), object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"header is not a valid JSON object: {shown(str(error))}") from error
    return 8 + length, size - 8 - length, raw


def _invalid(path: Path, message: str) -> InvalidSafetensors:
    return InvalidSafetensors(path, ((None, message),))


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"the name {counts.most_common(1)[0][0]} appears more than once")
    return result


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _check_metadata(value: object, problems: list[Problem]) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        problems.append((None, "__metadata__ is not an object of strings"))
        return {}
    return value


def _tensor_entry(name: str, value: object, data_start: int) -> TensorEntry:
    """The entry of one tensor; raises `ValueError` saying what is wrong with it."""
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise ValueError(f"a name must have 1 to {MAX_NAME_LENGTH} printable characters")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("its entry must hold exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"unknown dtype {shown(str(dtype))}")
    if not _is_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"shape {shown(str(shape))} is not a list of at most {_MAX_DIMENSIONS} sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets {shown(str(offsets))} are not a begin and an end")
    expected, held = math.prod(shape) * DTYPE_BITS[dtype], (offsets[1] - offsets[0]) * 8
    if expected != held:
        raise ValueError(f"{dtype} {shape} needs {(expected + 7) // 8} bytes, its data_offsets hold {held // 8}")
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _MAX_SIZE for size in value)


def _check_coverage(entries: list[TensorEntry], data_start: int, data_size: int, problems: list[Problem]) -> None:
    """The tensors must cover the file from the end of the header to its last byte, once."""
    expected = data_start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start < expected:
            problems.append((shown(entry.name), f"overlaps another tensor by {expected - entry.start} bytes"))
        elif entry.start > expected:
            problems.append((shown(entry.name), f"leaves a gap of {entry.start - expected} bytes before it"))
        if entry.end > data_start + data_size:
            beyond = entry.end - data_start - data_size
            problems.append((shown(entry.name), f"truncated: reaches {beyond} bytes beyond the end of the file"))
        expected = max(expected, entry.end)
    if expected < data_start + data_size:
        problems.append((None, f"{data_start + data_size - expected} bytes after the last tensor belong to none"))
