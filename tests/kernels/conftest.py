"""An adapter memory filled by hand, with the dense matrices that its rows stand for beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graftwork_kernels import reference
from graftwork_kernels.cpu.build import SOURCES, build_library
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.cpu.onednn import OneDnnOperators
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.layout import NUM_SITE_FIELDS, QUANTISED_ROW_HEAD, ROW_ALIGNMENT, AdapterMemory, RowType, SiteField
from graftwork_kernels.ops import Operators
from graftwork_kernels.triton.linear import Form
from graftwork_kernels.triton.operators import TritonOperators


@pytest.fixture(autouse=True)
def _seeded_and_single_threaded() -> Iterator[None]:
    """Bitwise comparisons mean something only for a fixed number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def cpu_library(shared_kernels: Path) -> Library:
    """The C++ operators, compiled if their sources have changed."""
    return Library(build_library(shared_kernels))


@pytest.fixture(scope="session")
def foreign_library(shared_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The operators as a machine with other vectors has them: 16 lanes that multiply bf16 in pairs, or 8 where ours are those."""
    ours = "avx512f" in Path("/proc/cpuinfo").read_text()
    sources = tmp_path_factory.mktemp("foreign") / "src"
    shutil.copytree(SOURCES, sources)
    header = sources / "vec.h"
    lanes, pairs = (8, 0) if ours else (16, 1)
    header.write_text(f"#define GRAFTWORK_LANES {lanes}\n#define GRAFTWORK_PAIRS {pairs}\n{header.read_text()}")
    return Library(build_library(shared_kernels, sources))


HOST = ("reference", "cpu", "foreign")
INTERPRETED = ("triton", "fused")


def interpreted(form: Form, num_programs: int = 3, *, has_e4m3: bool = False) -> TritonOperators:
    """The Triton kernels under the interpreter; few programs, so that each takes several tasks in turn."""
    return TritonOperators(num_programs, max_rank=512, has_e4m3=has_e4m3, form=form, is_exact=True, is_wide=True)


@pytest.fixture(params=[*HOST, "triton"])
def ops(request: pytest.FixtureRequest) -> Operators:
    """Every implementation that a CPU can run. "onednn", which has linears alone, and "fused", which has an adapter linear of its
    own, are for tests that ask for them.
    """
    return _operators(request)


@pytest.fixture(params=HOST)
def host_ops(request: pytest.FixtureRequest) -> Operators:
    """Those that look at values, where a wrong one would lead them out of memory. A GPU has nobody to tell."""
    return _operators(request)


@pytest.fixture
def make_interpreted() -> Callable[..., TritonOperators]:
    """`interpreted`, for tests that vary it."""
    return interpreted


def _operators(request: pytest.FixtureRequest) -> Operators:
    if request.param == "reference":
        return Operators(reference)
    if request.param in INTERPRETED:
        return Operators(interpreted(Form.FUSED if request.param == "fused" else Form.TWO))
    issuer = Immediate(request.getfixturevalue("foreign_library" if request.param == "foreign" else "cpu_library"))
    return Operators(OneDnnOperators(issuer) if request.param == "onednn" else CpuOperators(issuer))


def encode_row(row: Tensor, row_type: RowType) -> tuple[Tensor, Tensor]:
    """The bytes of one row (uint8) and the fp32 values they stand for."""
    if row_type is RowType.FP32:
        return row.view(torch.uint8), row
    if row_type is RowType.BF16:
        stored = row.to(torch.bfloat16)
        return stored.view(torch.uint8), stored.to(torch.float32)
    if row_type is RowType.INT8:
        scale = row.abs().max() / 127
        stored = (row / scale).round().to(torch.int8)
    else:
        scale = row.abs().max() / 448
        stored = (row / scale).to(torch.float8_e4m3fn)
    head = torch.zeros(QUANTISED_ROW_HEAD, dtype=torch.uint8)
    head[:4] = scale.reshape(1).view(torch.uint8)
    return torch.cat((head, stored.view(torch.uint8))), stored.to(torch.float32) * scale


@dataclass
class DenseSite:
    """What a site record means: A [r, in], Bᵀ [r, out], and the output scale and replacement bias where there are any."""

    a: Tensor
    b: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None


@dataclass
class MemoryBuilder:
    """Collects sites, then lays their rows out back to back, or scattered over the pool with rubbish between them."""

    num_sites: int
    dense: dict[tuple[int, int], DenseSite] = field(default_factory=dict)
    _rows: list[Tensor] = field(default_factory=list)
    _records: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def add(
        self,
        adapter: int,
        site: int,
        *,
        rank: int,
        size: tuple[int, int],
        row_type: RowType = RowType.FP32,
        has_scale: bool = False,
        has_bias: bool = False,
    ) -> DenseSite:
        """Give ``adapter`` a random delta of ``rank`` at ``site``, a projection of ``size`` (in, out)."""
        num_in, num_out = size
        record = [-1] * NUM_SITE_FIELDS
        record[SiteField.RANK] = rank
        if rank:
            record[SiteField.ROW_TYPE] = row_type
        dense = DenseSite(torch.zeros(rank, num_in), torch.zeros(rank, num_out))
        for first_row, matrix in ((SiteField.A_ROW, dense.a), (SiteField.B_ROW, dense.b)):
            if rank:
                record[first_row] = len(self._rows)
            for row in matrix:
                raw, row[:] = encode_row(torch.randn(row.numel()) / 4, row_type)
                self._rows.append(raw)
        if has_scale:
            dense.scale = torch.rand(num_out) + 0.5
            record[SiteField.SCALE_ROW] = self._append_vector(dense.scale)
        if has_bias:
            dense.bias = torch.randn(num_out)
            record[SiteField.BIAS_ROW] = self._append_vector(dense.bias)
        self.dense[adapter, site] = dense
        self._records[adapter, site] = record
        return dense

    def build(self, *, scattered: bool = False, rubbish: int | None = None) -> AdapterMemory:
        """``rubbish``: every byte that is no row's; random ones if None. 0xff is NaN in all types but int8, there in the scale."""
        num_units = [-(-row.numel() // ROW_ALIGNMENT) for row in self._rows]
        gap = 2 if scattered else 0
        order = torch.randperm(len(self._rows)).tolist() if scattered else range(len(self._rows))
        pool = torch.randint(0, 256, ((sum(num_units) + gap * len(self._rows) + 1) * ROW_ALIGNMENT,), dtype=torch.uint8)
        if rubbish is not None:
            pool.fill_(rubbish)
        row_offset = torch.zeros(len(self._rows), dtype=torch.int64)
        position = gap * ROW_ALIGNMENT
        for row in order:
            row_offset[row] = position
            pool[position : position + self._rows[row].numel()] = self._rows[row]
            position += (num_units[row] + gap) * ROW_ALIGNMENT
        num_adapters = 1 + max((adapter for adapter, _ in self._records), default=-1)
        sites = torch.full((num_adapters, self.num_sites, NUM_SITE_FIELDS), -1, dtype=torch.int64)
        sites[:, :, SiteField.RANK] = 0
        for (adapter, site), record in self._records.items():
            sites[adapter, site] = torch.tensor(record)
        return AdapterMemory(pool, row_offset, sites)

    def _append_vector(self, vector: Tensor) -> int:
        self._rows.append(vector.view(torch.uint8))
        return len(self._rows) - 1


@pytest.fixture
def memory_builder() -> type[MemoryBuilder]:
    return MemoryBuilder


@pytest.fixture
def many_ranks() -> AdapterMemory:
    """For linears of 70 features with sites of 20 and 50 columns: ranks of one round, of exactly one, of several, of none, in every
    type; a scale and a bias.
    """
    builder = MemoryBuilder(2)
    for adapter, (rank, row_type) in enumerate(
        [(5, RowType.BF16), (128, RowType.FP32), (129, RowType.INT8), (300, RowType.BF16), (16, RowType.E4M3)]
    ):
        builder.add(adapter, 1, rank=rank, size=(70, 50), row_type=row_type, has_scale=adapter == 3)
        builder.add(adapter, 0, rank=rank % 7, size=(70, 20), row_type=row_type, has_bias=adapter == 1)
    return builder.build(scattered=True)
