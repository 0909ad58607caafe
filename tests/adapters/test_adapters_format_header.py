"""The header reader against truncated, lying and random files."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from graftwork_adapters.errors import InvalidSafetensors
from graftwork_adapters.safetensors_header import read_header


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def problems_of(path: Path, max_header_bytes: int = 1 << 20) -> list[tuple[str | None, str]]:
    with pytest.raises(InvalidSafetensors) as caught:
        read_header(path, max_header_bytes)
    assert path.name in str(caught.value)
    return list(caught.value.problems)


def test_what_safetensors_wrote_is_read(tmp_path: Path) -> None:
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones((4,), dtype=np.float16), "z": np.zeros((0, 3))}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert [e.name for e in header.tensors] == ["a", "b", "z"]
    assert header.metadata == {"format": "pt"}
    whole = (tmp_path / "x.safetensors").read_bytes()
    for e in header.tensors:
        assert whole[e.start : e.end] == tensors[e.name].tobytes()
        assert e.shape == tensors[e.name].shape


@pytest.mark.parametrize(
    ("header", "data", "tensor", "says"),
    [
        ({"a": entry([2], 0, 8)}, b"1234", "a", "truncated: reaches 4 bytes beyond"),
        ({"a": entry([1], 0, 4)}, b"12345", None, "1 bytes after the last tensor"),
        ({"a": entry([2], 0, 4)}, b"1234", "a", "needs 8 bytes, its data_offsets hold 4"),
        ({"a": entry([1], 0, 4), "b": entry([1], 2, 6)}, b"123456", "b", "overlaps another tensor by 2"),
        ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"1" * 12, "b", "gap of 4 bytes"),
        ({"a": entry([1], 4, 0)}, b"1234", "a", "not a begin and an end"),
        ({"a": entry([1], -4, 0)}, b"", "a", "not a begin and an end"),
        ({"a": entry([-1, -1], 0, 4)}, b"1234", "a", "not a list of at most"),
        ({"a": entry([True], 0, 4)}, b"1234", "a", "not a list of at most"),
        ({"a": entry([1 << 63, 0], 0, 0)}, b"", "a", "not a list of at most"),
        ({"a": entry([1], 0, 4, "F31")}, b"1234", "a", "unknown dtype F31"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"1234", "a", "must hold exactly"),
        ({"a": 3}, b"", "a", "must hold exactly"),
        ({"": entry([1], 0, 4)}, b"1234", "''", "1 to 512 printable"),
        ({"n" * 600: entry([1], 0, 4)}, b"1234", "n" * 197 + "...", "1 to 512 printable"),
        ({"__metadata__": {"k": 1}}, b"", None, "not an object of strings"),
        (b'{"a":1,"a":2}', b"", None, "the name a appears more than once"),
        (b"[]", b"", None, "does not begin with"),
        (b"{", b"", None, "not a valid JSON object"),
        (b'{"a": NaN}', b"", None, "NaN is not JSON"),
        (b'{"\xff": 1}', b"", None, "not a valid JSON object"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", None, "not a valid JSON object"),
    ],
)
def test_a_lying_header_is_refused_naming_the_tensor(
    tmp_path: Path, header: object, data: bytes, tensor: str | None, says: str
) -> None:
    problems = problems_of(write(tmp_path / "x.safetensors", header, data))
    assert [(where, says in what) for where, what in problems] == [(tensor, True)], problems


def test_every_broken_tensor_is_named(tmp_path: Path) -> None:
    header = {"a": entry([2], 0, 4), "b": entry([1], 4, 8), "c": entry([1], 8, 12, "X")}
    assert [where for where, _ in problems_of(write(tmp_path / "x.safetensors", header, b"1" * 12))] == ["a", "c"]


def test_length_prefix_is_bounded(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {}, length=1 << 63)
    assert "more than the 1048576 allowed" in problems_of(path)[0][1]
    path = write(tmp_path / "x.safetensors", {}, length=1000)
    assert "truncated: says its header has 1000 bytes" in problems_of(path)[0][1]
    path.write_bytes(b"123")
    assert "cannot hold a header length" in problems_of(path)[0][1]
    write(path, {"a": entry([1], 0, 4)}, b"1234")
    assert "more than the 10 allowed" in problems_of(path, max_header_bytes=10)[0][1]


def test_links_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "real.safetensors", {})
    os.symlink(tmp_path / "real.safetensors", tmp_path / "link.safetensors")
    with pytest.raises(OSError, match="symbolic links"):
        read_header(tmp_path / "link.safetensors")


def read_or_refuse(path: Path) -> None:
    try:
        header = read_header(path, 1 << 16)
    except InvalidSafetensors:
        return
    size = path.stat().st_size
    assert all(8 <= e.start <= e.end <= size for e in header.tensors)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), lambda v: st.lists(v, max_size=4), max_leaves=8
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "U8", "nope"]) | JSON_VALUES,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON_VALUES,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON_VALUES,
    }
)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=5), ENTRIES | JSON_VALUES, max_size=4), data=st.binary(max_size=40))
def test_fuzzed_headers_raise_nothing_else(tmp_path: Path, header: dict[str, object], data: bytes) -> None:
    read_or_refuse(write(tmp_path / "x.safetensors", json.dumps(header).encode(), data))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=64), small_length=st.booleans(), place=st.integers(0, 200), byte=st.integers(0, 255))
def test_fuzzed_bytes_raise_nothing_else(tmp_path: Path, data: bytes, small_length: bool, place: int, byte: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((struct.pack("<Q", len(data) // 2) if small_length else b"") + data)
    read_or_refuse(path)
    good = bytearray(write(path, {"a": entry([2], 0, 8), "b": entry([1], 8, 12)}, b"1" * 12).read_bytes())
    good[place % len(good)] = byte
    path.write_bytes(good)
    read_or_refuse(path)
