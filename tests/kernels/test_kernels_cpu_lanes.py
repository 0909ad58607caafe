"""The compiled operators with the vectors of other machines: 16 lanes that know no pairs of bf16, and 4 lanes.

They are compiled with few optimisations, which is quicker, and held to the reference on a few steps: the arithmetic of lanes and
ends of rows is the same. (The machine with 16 lanes and pairs goes through all tests, as `ops` of conftest.py.)
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from graftwork_kernels import reference
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.candidates import measure
from graftwork_kernels.cpu import build
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.layout import LinearSite, RowType
from graftwork_kernels.ops import Operators
from graftwork_kernels.probes import StepSizes
from graftwork_kernels.timing import ClockTimer

MACHINES = [(4, 0), (16, 0)]
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=MACHINES, ids=lambda machine: "{} lanes, pairs {}".format(*machine))
def library(request: pytest.FixtureRequest, shared_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Library:
    lanes, pairs = request.param
    sources = tmp_path_factory.mktemp("lanes") / "src"
    shutil.copytree(build.SOURCES, sources)
    header = sources / "vec.h"
    header.write_text(f"#define GRAFTWORK_LANES {lanes}\n#define GRAFTWORK_PAIRS {pairs}\n{header.read_text()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS))
        return Library(build.build_library(shared_kernels, sources))


@pytest.fixture
def cpu(library: Library) -> CpuOperators:
    return CpuOperators(Immediate(library, 2))


def sizes(dtype: torch.dtype, head_dim: int) -> StepSizes:
    """Nothing is a whole number of vectors but where ``head_dim`` is."""
    return StepSizes(
        hidden_size=73,
        intermediate_size=107,
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        vocab_size=2501,
        block_size=7,
        max_rows=75,
        max_requests=6,
        dtype=dtype,
    )


@pytest.mark.parametrize("head_dim", [10, 64])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_operator_agrees_with_the_reference(cpu: CpuOperators, dtype: torch.dtype, head_dim: int) -> None:
    verdicts = measure(sizes(dtype, head_dim), {"reference": reference, "cpu": cpu}, ClockTimer(), torch.device("cpu"))
    assert {operator: verdict.dropped for operator, verdict in verdicts.items() if verdict.dropped} == {}
    assert all(verdict.seconds["cpu"] for verdict in verdicts.values())


@pytest.mark.parametrize("row_type", list(RowType))
def test_adapters_of_any_row_type_agree_with_the_reference(cpu: CpuOperators, memory_builder, row_type: RowType) -> None:
    builder, ops, plain = memory_builder(1), Operators(cpu), Operators(reference)
    for adapter, rank in enumerate((1, 5, 140)):
        builder.add(adapter, 0, rank=rank, size=(73, 51), row_type=row_type, has_bias=adapter == 1)
    memory, site = builder.build(scattered=True), (LinearSite(0, 3, 51),)
    batch = build_adapter_batch([2, -1, 0, 1, 2, 2, 1, 0, -1, 2])
    x, weight = torch.randn(10, 73), torch.randn(60, 73)
    actual = ops.adapter_linear(x, ops.prepare_weight(weight), None, memory, batch, site)
    expected = plain.adapter_linear(x, plain.prepare_weight(weight), None, memory, batch, site)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_a_row_keeps_every_bit_whatever_its_neighbours(cpu: CpuOperators) -> None:
    ops = Operators(cpu)
    x, weight = torch.randn(9, 73).bfloat16(), ops.prepare_weight(torch.randn(61, 73).bfloat16())
    together = ops.linear(x, weight)
    assert all(torch.equal(ops.linear(x[row : row + 1], weight)[0], together[row]) for row in range(9))
