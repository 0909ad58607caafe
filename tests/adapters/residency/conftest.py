"""Packed adapters of random bytes, an executor that runs jobs when told to, and the view of adapter memory that a kernel has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graftwork_adapters.device_pool import PoolTensors
from graftwork_adapters.errors import AdapterError, BlobNotFound
from graftwork_adapters.keys import AdapterDigest, RowTypeName, packed_key, packed_path
from graftwork_adapters.packed import ABSENT, PackedIndex, PackedSite, PackedWhole, write_packed
from graftwork_adapters.whole_memory import DeviceWholes

BASE_ID = "ba5e"
NUM_SITES = 4


@dataclass(frozen=True)
class Packed:
    """A packed adapter that is not written yet."""

    index: PackedIndex
    rows: np.ndarray

    @property
    def key(self) -> str:
        return self.index.key

    def rows_of(self, site: PackedSite) -> dict[str, list[bytes]]:
        """The rows of each part of a site, as they are in the file."""
        ends = np.cumsum(self.index.row_bytes)
        starts = ends - self.index.row_bytes
        parts = {"a": (site.a_row, site.rank), "b": (site.b_row, site.rank)}
        parts |= {"scale": (site.scale_row, 1), "bias": (site.bias_row, 1)}
        return {
            name: [self.rows[starts[r] : ends[r]].tobytes() for r in range(row, row + count)] if row != ABSENT else []
            for name, (row, count) in parts.items()
        }


def build_packed(
    name: str,
    ranks: tuple[int, ...] = (2, 0, 3, 1),
    *,
    row_bytes: tuple[int, int] = (128, 192),
    row_type: RowTypeName = "bfloat16",
    base_id: str = BASE_ID,
    num_bytes: int | None = None,
    wholes: tuple[PackedWhole, ...] = (),
) -> Packed:
    """An adapter of random bytes with the given rank per site (0: absent, but for a scale and bias at site 0).

    ``num_bytes`` asks for that many bytes instead, as one site of 64-byte rows. Token ids among the ``wholes`` are 1, 3, 5 ...
    """
    if num_bytes is not None:
        ranks, row_bytes = (num_bytes // 128,), (64, 64)
    digest = AdapterDigest(hashlib.sha256(name.encode()).hexdigest())
    sites, runs, row = [], [], 0
    for number, rank in enumerate(ranks):
        if not rank:
            continue
        extras = number == 0 and num_bytes is None
        scale, bias = (row + 2 * rank, row + 2 * rank + 1) if extras else (ABSENT, ABSENT)
        sites.append(PackedSite(number, rank, row, row + rank, scale, bias))
        runs += [(rank, row_bytes[0]), (rank, row_bytes[1])] + ([(2, 256)] if extras else [])
        row += 2 * rank + (2 if extras else 0)
    index = PackedIndex(packed_key(digest, base_id, row_type), digest, base_id, row_type, tuple(sites), tuple(runs), wholes)
    generator = np.random.default_rng(int(digest[:8], 16))
    rows = generator.integers(0, 256, index.num_bytes, dtype=np.uint8)
    for whole, start in zip(wholes, index.whole_starts, strict=True):
        if whole.dtype == "int64":
            rows[start : start + whole.num_bytes].view("<i8")[:] = 2 * np.arange(*whole.shape) + 1
    return Packed(index, rows)


class MemoryStore:
    """An object store in memory that counts what is asked of it and can be made to fail."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.error: Exception | None = None

    def add(self, packed: Packed, folder: Path) -> str:
        """Write the packed form and keep its bytes; gives the packed key."""
        path = folder / f"source-{packed.key}"
        write_packed(path, packed.index, packed.rows)
        self.blobs[packed_path(packed.key)] = path.read_bytes()
        path.unlink()
        return packed.key

    def put_if_absent(self, key: str, source: Path) -> bool:
        is_new = key not in self.blobs
        self.blobs.setdefault(key, source.read_bytes())
        return is_new

    def fetch(self, key: str, dest: Path) -> None:
        self.fetched.append(key)
        if self.error is not None:
            raise self.error
        if key not in self.blobs:
            raise BlobNotFound(f"the store has no {key}")
        dest.write_bytes(self.blobs[key])

    def exists(self, key: str) -> bool:
        return key in self.blobs

    def list_keys(self, prefix: str):
        return iter(sorted(key for key in self.blobs if key.startswith(prefix)))

    def delete(self, key: str) -> None:
        self.blobs.pop(key, None)


class ManualExecutor(Executor):
    """Runs jobs only when told to, in the calling thread."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn, /, *args, **kwargs):
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self, place: int = 0) -> None:
        """Run the job at this place of the queue."""
        future, job = self.jobs.pop(place)
        try:
            result = job()
        except (AdapterError, RuntimeError) as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.jobs.clear()


def assert_kernel_sees(memory: PoolTensors, adapter: int, packed: Packed) -> None:
    """Follow the tables as a kernel does and compare every byte, and that sites the adapter lacks are absent."""
    present = {site.index: site for site in packed.index.sites}
    for number, record in enumerate(memory.sites[adapter].tolist()):
        a, b, rank, row_type, scale, bias = record
        site = present.get(number)
        if site is None:
            assert record == [-1, -1, 0, -1, -1, -1]
            continue
        assert (rank, row_type) == (site.rank, {"bfloat16": 0, "float32": 1, "int8": 2, "e4m3": 3}[packed.index.row_type])
        expected = packed.rows_of(site)
        for name, first, count in (("a", a, rank), ("b", b, rank), ("scale", scale, 1), ("bias", bias, 1)):
            if not expected[name]:
                assert first == -1
                continue
            for row, wanted in zip(range(first, first + count), expected[name], strict=True):
                offset = int(memory.row_offset[row])
                assert offset % 64 == 0
                assert bytes(memory.pool[offset : offset + len(wanted)].tolist()) == wanted


def assert_model_sees(wholes: Mapping[int, DeviceWholes], adapter: int, packed: Packed) -> None:
    """Compare all that an adapter brings whole, as it is, or in fp32 where it was packed in bf16."""
    if not packed.index.wholes:
        assert adapter not in wholes
        return
    assert wholes[adapter].tensors.keys() == {whole.name for whole in packed.index.wholes}
    for whole, start in zip(packed.index.wholes, packed.index.whole_starts, strict=True):
        tensor = wholes[adapter].tensors[whole.name]
        packed_bytes = packed.rows[start : start + whole.num_bytes]
        wanted = packed_bytes.view("<u2").astype("<u4") << 16 if whole.dtype == "bfloat16" else packed_bytes
        assert tuple(tensor.shape) == whole.shape
        assert tensor.numpy().tobytes() == wanted.tobytes()


@pytest.fixture(scope="session")
def model_sees() -> Callable[[Mapping[int, DeviceWholes], int, Packed], None]:
    return assert_model_sees


@pytest.fixture(scope="session")
def packed_of() -> Callable[..., Packed]:
    return build_packed


@pytest.fixture
def memory_store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(scope="session")
def new_store() -> Callable[[], MemoryStore]:
    return MemoryStore


@pytest.fixture(scope="session")
def new_executor() -> Callable[[], ManualExecutor]:
    return ManualExecutor


@pytest.fixture(scope="session")
def kernel_sees() -> Callable[[PoolTensors, int, Packed], None]:
    return assert_kernel_sees
