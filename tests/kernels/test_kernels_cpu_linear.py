"""The compiled linear: every shape of tile, ranks of several rounds, and the same bits for a row whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graftwork_kernels import reference
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.layout import LinearSite
from graftwork_kernels.ops import Operators

REFERENCE = Operators(reference)
NUM_IN, NUM_OUT = 70, 83
"""No multiples of any vector."""
SITES = (LinearSite(1, 0, 50), LinearSite(0, 50, 20))
"""Thirteen columns belong to no site."""


@pytest.fixture
def native(cpu_library) -> Operators:
    return Operators(CpuOperators(Immediate(cpu_library)))


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if actual.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (17, 5), (31, 64), (64, 33), (576, 48)])
def test_every_height_of_a_tile(native, dtype, size):
    num_in, num_out = size
    weight, bias = (torch.randn(num_out, num_in) / num_in**0.5).to(dtype), torch.randn(num_out).to(dtype)
    for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 40):
        x = torch.randn(num_rows, num_in).to(dtype)
        out = native.linear(x, native.prepare_weight(weight), bias, out_dtype=torch.float32)
        close(out, REFERENCE.linear(x, REFERENCE.prepare_weight(weight), bias, out_dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_tensor(native, dtype):
    """Rows that lie apart, and begin at odd places."""
    packed = torch.randn(9, 50).to(dtype)
    x = packed[:, 3:20]
    weight = torch.randn(40, 17).to(dtype)
    assert torch.equal(
        native.linear(x, native.prepare_weight(weight)), native.linear(x.contiguous(), native.prepare_weight(weight.clone()))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(6, 5), (64, 33), (7, 100)])
def test_embedding_reads_back_what_was_packed(native, dtype, size):
    matrix = torch.randn(size[1], size[0]).to(dtype)
    ids = torch.randint(0, size[1], (12,))
    assert torch.equal(native.embedding(ids, native.prepare_weight(matrix)), matrix[ids])
    with pytest.raises(IndexError):
        native.embedding(torch.tensor([0, size[1]]), native.prepare_weight(matrix))
    with pytest.raises(IndexError):
        native.embedding(torch.tensor([-1]), native.prepare_weight(matrix))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_of_several_rounds_and_segments_of_many_rows(native, many_ranks, dtype):
    adapters = [3] * 70 + [0, 1, 2, 3, 4, -1] * 3 + [1] * 50
    x, weight = torch.randn(len(adapters), NUM_IN).to(dtype), (torch.randn(NUM_OUT, NUM_IN) / 8).to(dtype)
    bias = torch.randn(NUM_OUT).to(dtype)
    batch = build_adapter_batch(adapters)
    out = native.adapter_linear(x, native.prepare_weight(weight), bias, many_ranks, batch, SITES)
    expected = REFERENCE.adapter_linear(x, REFERENCE.prepare_weight(weight), bias, many_ranks, batch, SITES)
    scale = float(expected.abs().max())
    torch.testing.assert_close(out / scale, expected / scale, rtol=0, atol=2e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_has_the_same_bits_alone_and_among_any_others(cpu_library, many_ranks, dtype, num_threads):
    adapters = [0, 1, 2, 3, 4, -1] * 4 + [3] * 60 + [-1] * 5
    x, bias = torch.randn(len(adapters), NUM_IN).to(dtype), torch.randn(NUM_OUT).to(dtype)
    weight = torch.randn(NUM_OUT, NUM_IN).to(dtype)
    native = Operators(CpuOperators(Immediate(cpu_library, num_threads)))
    prepared = native.prepare_weight(weight)
    alone = [
        native.adapter_linear(x[row : row + 1], prepared, bias, many_ranks, build_adapter_batch([adapter]), SITES)
        for row, adapter in enumerate(adapters)
    ]
    single = Operators(CpuOperators(Immediate(cpu_library, 1)))
    for order in (range(len(adapters)), torch.randperm(len(adapters)).tolist(), torch.randperm(len(adapters)).tolist()[:13]):
        rows = list(order)
        for ops in (native, single):
            batch = build_adapter_batch([adapters[row] for row in rows])
            together = ops.adapter_linear(x[rows], prepared, bias, many_ranks, batch, SITES)
            assert torch.equal(together, torch.cat([alone[row] for row in rows]))


def test_a_weight_prepared_by_another_implementation_is_refused(native):
    with pytest.raises(ValueError, match="another implementation"):
        REFERENCE.linear(torch.randn(2, 8), native.prepare_weight(torch.randn(4, 8)))


def test_nan_stays_nan_and_zero_padding_hides_none(native):
    """A last column of NaN reaches its own output alone, and an odd row's padding reads nothing behind it."""
    weight = torch.randn(6, 7).bfloat16()
    weight[3] = float("nan")
    buffer = torch.full((2, 8), float("nan")).bfloat16()
    buffer[:, :7] = torch.randn(2, 7).bfloat16()
    out = native.linear(buffer[:, :7], native.prepare_weight(weight))
    assert out[:, 3].isnan().all()
    assert out[:, [0, 1, 2, 4, 5]].isfinite().all()
