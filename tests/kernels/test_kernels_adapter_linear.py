"""The adapter linear against a dense W + BA for each row."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import (
    NUM_SITE_FIELDS,
    QUANTISED_ROW_HEAD,
    AdapterMemory,
    LinearSite,
    RowType,
    SiteField,
    empty_adapter_memory,
)

pytestmark = pytest.mark.parametrize("ops", ["reference", "cpu", "foreign", "onednn", "triton", "fused"], indirect=True)

NUM_IN = 40
PACKED = (LinearSite(1, 0, 24), LinearSite(3, 24, 8), LinearSite(0, 32, 8))
"""A packed qkv whose site numbers are in no order."""
NUM_OUT = 40


def dense_linear(x, weight, bias, dense, token_adapter, sites) -> Tensor:
    """Each row by its own full matrix, in fp64."""
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for row, adapter in enumerate(token_adapter):
        full = weight.double().clone()
        scale = torch.ones(weight.shape[0], dtype=torch.float64)
        shift = torch.zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias.double().clone()
        for site in sites:
            columns = slice(site.start, site.start + site.size)
            part = dense.get((adapter, site.index))
            if part is None:
                continue
            full[columns] += part.b.double().T @ part.a.double()
            if part.scale is not None:
                scale[columns] = part.scale.double()
            if part.bias is not None:
                shift[columns] = part.bias.double()
        out[row] = scale * (full @ x[row].double()) + shift
    return out


def adapter_linear(ops, x, weight, bias, memory, batch, sites) -> Tensor:
    return ops.adapter_linear(x, ops.prepare_weight(weight), bias, memory, batch, sites)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("row_type", list(RowType))
@pytest.mark.parametrize("rank", [1, 2, 3, 5, 8, 24, 64])
def test_every_rank_and_row_type(ops, memory_builder, rank, row_type):
    builder = memory_builder(1)
    builder.add(0, 0, rank=rank, size=(NUM_IN, NUM_OUT), row_type=row_type)
    site = (LinearSite(0, 0, NUM_OUT),)
    x, weight, bias = torch.randn(5, NUM_IN), torch.randn(NUM_OUT, NUM_IN), torch.randn(NUM_OUT)
    adapters = [0, -1, 0, 0, -1]
    for scattered in (False, True):
        out = adapter_linear(ops, x, weight, bias, builder.build(scattered=scattered), build_adapter_batch(adapters), site)
        assert_close(out, dense_linear(x, weight, bias, builder.dense, adapters, site))


def mixed_builder(memory_builder):
    """Eight adapters over a packed linear: all sites, one, several types and ranks, scales and biases, some without a delta."""
    builder = memory_builder(5)
    for site, size, rank in ((1, 24, 8), (3, 8, 8), (0, 8, 8)):
        builder.add(0, site, rank=rank, size=(NUM_IN, size), row_type=RowType.BF16)
    builder.add(1, 3, rank=5, size=(NUM_IN, 8), row_type=RowType.INT8)
    builder.add(2, 1, rank=24, size=(NUM_IN, 24), row_type=RowType.E4M3, has_scale=True)
    builder.add(2, 0, rank=3, size=(NUM_IN, 8), row_type=RowType.FP32, has_scale=True, has_bias=True)
    builder.add(3, 4, rank=2, size=(NUM_IN, 16))  # a site of another linear
    builder.add(4, 3, rank=0, size=(NUM_IN, 8), has_bias=True)
    builder.add(5, 1, rank=0, size=(NUM_IN, 24), has_scale=True)
    builder.add(5, 3, rank=1, size=(NUM_IN, 8), has_bias=True)
    builder.add(6, 1, rank=9, size=(NUM_IN, 24), row_type=RowType.INT8, has_scale=True, has_bias=True)
    builder.add(6, 0, rank=0, size=(NUM_IN, 8), has_scale=True, has_bias=True)
    builder.add(7, 3, rank=11, size=(NUM_IN, 8), row_type=RowType.E4M3, has_bias=True)
    builder.add(7, 0, rank=2, size=(NUM_IN, 8), row_type=RowType.INT8, has_scale=True)
    return builder


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("scattered", [True, False])
def test_mixed_batch_on_a_packed_linear(ops, memory_builder, has_bias, scattered):
    builder = mixed_builder(memory_builder)
    adapters = [3, 0, -1, 2, 2, 5, 1, 7, 0, -1, 4, 6, 0, 2, 5, 7]
    x, weight = torch.randn(len(adapters), NUM_IN), torch.randn(NUM_OUT, NUM_IN)
    bias = torch.randn(NUM_OUT) if has_bias else None
    out = adapter_linear(ops, x, weight, bias, builder.build(scattered=scattered), build_adapter_batch(adapters), PACKED)
    assert_close(out, dense_linear(x, weight, bias, builder.dense, adapters, PACKED))


@pytest.mark.parametrize("row_type", [RowType.INT8, RowType.E4M3])
def test_every_code_of_an_8_bit_row(ops, row_type):
    """Of a row of A and of one of B: -128 too, subnormals, both zeros, and NaN, which only the columns that hold it show."""
    codes = torch.arange(256, dtype=torch.uint8)
    one = 1 if row_type is RowType.INT8 else 0x38
    values = (codes.view(torch.int8) if row_type is RowType.INT8 else codes.view(torch.float8_e4m3fn)).float()
    usable = torch.where(values.isnan(), torch.zeros_like(codes), codes)
    lone = torch.zeros(256, dtype=torch.uint8)
    lone[0] = one
    site, nothing = (LinearSite(0, 0, 256),), ops.prepare_weight(torch.zeros(256, 256))
    for a, b, expected in ((usable, lone, values.nan_to_num()), (lone, codes, values)):
        memory = rows_of_rank_one(row_type, a, b)
        x = torch.eye(256) if b is lone else torch.eye(256)[:1]
        out = ops.adapter_linear(x, nothing, None, memory, build_adapter_batch([0] * x.shape[0]), site)
        torch.testing.assert_close(out[:, 0] if b is lone else out[0], expected, rtol=0, atol=0, equal_nan=True)


def rows_of_rank_one(row_type: RowType, a: Tensor, b: Tensor) -> AdapterMemory:
    """One adapter of which A and B have a row each, given by their codes; the scales are a half and 2."""
    stride = 320
    pool = torch.zeros(2 * stride, dtype=torch.uint8)
    for row, (codes, scale) in enumerate(((a, 0.5), (b, 2.0))):
        pool[row * stride : row * stride + 4] = torch.tensor([scale]).view(torch.uint8)
        pool[row * stride + QUANTISED_ROW_HEAD : row * stride + QUANTISED_ROW_HEAD + codes.numel()] = codes
    record = torch.full((1, 1, NUM_SITE_FIELDS), -1, dtype=torch.int64)
    record[0, 0, :4] = torch.tensor([0, 1, 1, row_type])
    return AdapterMemory(pool, torch.tensor([0, stride]), record)


def test_sites_that_leave_columns_uncovered(ops, memory_builder):
    builder = memory_builder(1)
    builder.add(0, 0, rank=4, size=(NUM_IN, 8), has_scale=True, has_bias=True)
    sites = (LinearSite(0, 16, 8),)
    x, weight, bias = torch.randn(3, NUM_IN), torch.randn(NUM_OUT, NUM_IN), torch.randn(NUM_OUT)
    out = adapter_linear(ops, x, weight, bias, builder.build(), build_adapter_batch([0, -1, 0]), sites)
    assert_close(out, dense_linear(x, weight, bias, builder.dense, [0, -1, 0], sites))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_round_once(ops, memory_builder, dtype):
    """The base product and the delta meet in fp32: the result is the exact one, rounded, but for ties of that rounding. OneDNN's
    product was rounded before.
    """
    builder = mixed_builder(memory_builder)
    adapters = [0, 1, 2, 3, 4, 5, 6, 7, -1]
    x, weight, bias = torch.randn(9, NUM_IN).to(dtype), torch.randn(NUM_OUT, NUM_IN).to(dtype), torch.randn(NUM_OUT).to(dtype)
    out = adapter_linear(ops, x, weight, bias, builder.build(), build_adapter_batch(adapters), PACKED)
    exact = dense_linear(x, weight, bias, builder.dense, adapters, PACKED)
    assert out.dtype == dtype
    error = (out.double() - exact).abs()
    half_ulp = torch.finfo(dtype).eps / 2 * exact.abs()
    if ops.prepare_weight(weight).large is not None:
        half_ulp += 2 * torch.finfo(dtype).eps / 2 * (x.double() @ weight.double().T).abs()  # scales lie below 2
    assert (error <= half_ulp + 1e-4).all()


def test_weights_taller_than_one_upcast_block(ops):
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(1100, 8).bfloat16()
    exact = x.double() @ weight.double().T
    prepared = ops.prepare_weight(weight)
    out = ops.linear(x, prepared, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert_close(out, exact, 1e-6 if prepared.large is None else 4e-3)
    assert torch.equal(ops.linear(x, prepared), out.bfloat16())


def test_a_base_alone_needs_no_adapter_memory(ops):
    x, weight, bias = torch.randn(4, NUM_IN), torch.randn(NUM_OUT, NUM_IN), torch.randn(NUM_OUT)
    out = adapter_linear(ops, x, weight, bias, empty_adapter_memory(5), build_adapter_batch([-1] * 4), PACKED)
    assert torch.equal(out, ops.linear(x, ops.prepare_weight(weight), bias))
    assert_close(out, x.double() @ weight.double().T + bias.double())


def test_no_rows(ops):
    out = adapter_linear(
        ops, torch.randn(0, NUM_IN), torch.randn(NUM_OUT, NUM_IN), None, empty_adapter_memory(5), build_adapter_batch([]), PACKED
    )
    assert out.shape == (0, NUM_OUT)


def test_base_rows_are_the_base(ops, memory_builder):
    """-1 must not select the last adapter."""
    memory = mixed_builder(memory_builder).build()
    adapters = [-1, 5, -1, 2]
    x, weight, bias = torch.randn(4, NUM_IN), torch.randn(NUM_OUT, NUM_IN), torch.randn(NUM_OUT)
    out = adapter_linear(ops, x, weight, bias, memory, build_adapter_batch(adapters), PACKED)
    assert torch.equal(out[[0, 2]], ops.linear(x, ops.prepare_weight(weight), bias)[[0, 2]])


def test_a_row_ignores_other_adapters_bitwise(ops, memory_builder):
    """Whatever the rows of other adapters are, number and order and even NaN, an adapter's rows keep every bit."""
    builder = mixed_builder(memory_builder)
    memory = builder.build(scattered=True)
    x, weight, bias = torch.randn(12, NUM_IN), torch.randn(NUM_OUT, NUM_IN), torch.randn(NUM_OUT)
    first = adapter_linear(ops, x, weight, bias, memory, build_adapter_batch([2, 0, 2] + [1] * 9), PACKED)
    second = adapter_linear(ops, x, weight, bias, memory, build_adapter_batch([2, 5, 2, 3, 4, 0, 0, 0, 5, 1, -1, -1]), PACKED)
    assert torch.equal(first[[0, 2]], second[[0, 2]])

    poisoned = memory.pool.clone()
    for row in memory.sites[0, 1, [SiteField.A_ROW, SiteField.B_ROW]].tolist():
        offset = int(memory.row_offset[row])
        poisoned[offset : offset + 48] = torch.full((24,), float("nan"), dtype=torch.bfloat16).view(torch.uint8)
    third = adapter_linear(
        ops, x, weight, bias, dataclasses.replace(memory, pool=poisoned), build_adapter_batch([2, 0, 2] + [1] * 9), PACKED
    )
    assert third[1].isnan().any()
    others = [0, *range(2, 12)]
    assert torch.equal(third[others], first[others])


def test_rows_of_one_adapter_differ_by_rounding_alone(ops, memory_builder):
    builder = mixed_builder(memory_builder)
    memory = builder.build()
    x, weight = torch.randn(16, NUM_IN), torch.randn(NUM_OUT, NUM_IN)
    together = adapter_linear(ops, x, weight, None, memory, build_adapter_batch([2] * 16), PACKED)
    for row in range(16):
        alone = adapter_linear(ops, x[row : row + 1], weight, None, memory, build_adapter_batch([2]), PACKED)
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("x", {"x": torch.randn(2, NUM_IN + 1)}),
        ("x", {"x": torch.zeros(2, NUM_IN, dtype=torch.int64)}),
        ("weight", {"weight": torch.randn(NUM_OUT, NUM_IN).bfloat16()}),
        ("bias", {"bias": torch.randn(NUM_OUT + 1)}),
        ("batch.token_adapter", {"batch": build_adapter_batch([0])}),
        ("sites", {"sites": (LinearSite(5, 0, 8),)}),
        ("sites", {"sites": (LinearSite(0, NUM_OUT - 4, 8),)}),
    ],
)
def test_a_wrong_argument_is_named(ops, memory_builder, argument, change):
    arguments = {
        "x": torch.randn(2, NUM_IN),
        "weight": torch.randn(NUM_OUT, NUM_IN),
        "bias": None,
        "memory": mixed_builder(memory_builder).build(),
        "batch": build_adapter_batch([0, -1]),
        "sites": PACKED,
    }
    with pytest.raises((ValueError, IndexError), match=f"^{argument}:"):
        adapter_linear(ops, **(arguments | change))


@pytest.mark.parametrize("name", ["token_adapter", "permutation", "segment_start", "segment_adapter", "num_segments", "row_offset"])
def test_grouping_of_another_type_is_refused(ops, memory_builder, name):
    """Read as the type that it should have, it would lead anywhere."""
    memory, batch = mixed_builder(memory_builder).build(), build_adapter_batch([0, -1])
    owner = memory if name == "row_offset" else batch
    other = torch.int32 if getattr(owner, name).dtype == torch.int64 else torch.int64
    changed = dataclasses.replace(owner, **{name: getattr(owner, name).to(other)})
    memory, batch = (changed, batch) if name == "row_offset" else (memory, changed)
    with pytest.raises(ValueError, match=name):
        adapter_linear(ops, torch.randn(2, NUM_IN), torch.randn(NUM_OUT, NUM_IN), None, memory, batch, PACKED)


def test_a_weight_without_columns_is_refused(ops):
    with pytest.raises(ValueError, match=r"^weight: expected a column"):
        ops.prepare_weight(torch.zeros(3, 0))
