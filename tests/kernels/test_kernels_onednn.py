"""Linears whose product is oneDNN's: adapters added to a product that is given, and which rows have one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from graftwork_kernels import reference
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.cpu import linear, onednn
from graftwork_kernels.cpu.capture import Recorder
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.cpu.onednn import OneDnnOperators, unavailable
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.layout import LinearSite, Weight, WeightLayout, empty_adapter_memory
from graftwork_kernels.ops import Operators

REFERENCE = Operators(reference)
NUM_IN, NUM_OUT = 70, 83
"""No multiples of any vector."""
SITES = (LinearSite(1, 0, 50), LinearSite(0, 50, 20))
"""Thirteen columns belong to no site."""
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["cpu_library", "foreign_library"])
def library(request: pytest.FixtureRequest) -> Library:
    """Panels of this machine's vectors, and of another's."""
    found: Library = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product that is asked of oneDNN. It is torch's, which every processor has in bf16 too."""
    rows: list[int] = []

    def multiply(x: Tensor, packed: Tensor) -> Tensor:
        rows.append(x.shape[0])
        return functional.linear(x, packed)

    monkeypatch.setattr(onednn, "unavailable", lambda _: None)
    monkeypatch.setattr(onednn, "_pack", lambda weight: weight)
    monkeypatch.setattr(onednn, "_multiply", multiply)
    return rows


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the rounding of ``dtype``, relative to the largest."""
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=3e-6 if dtype == torch.float32 else 8e-3)


def few_inputs(dtype: torch.dtype, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    weight = (torch.randn(NUM_OUT, NUM_IN) / 8).to(dtype)
    return torch.randn(num_rows, NUM_IN).to(dtype), weight, torch.randn(NUM_OUT).to(dtype)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_are_added_to_a_given_product(library, many_ranks, multiplied, dtype, out_dtype, has_bias):
    """Rows of no order, several blocks of them, and more ranks than one round has."""
    adapters = [3] * 70 + [0, 1, 2, 3, 4, -1] * 3 + [1] * 50
    x, weight, bias = few_inputs(dtype, len(adapters))
    given = bias if has_bias else None
    ops = Operators(OneDnnOperators(Immediate(library)))
    batch = build_adapter_batch(adapters)
    out = ops.adapter_linear(x, ops.prepare_weight(weight), given, many_ranks, batch, SITES, out_dtype=out_dtype)
    expected = REFERENCE.adapter_linear(x, Weight.plain(weight), given, many_ranks, batch, SITES, out_dtype=out_dtype)
    assert multiplied == [len(adapters)]
    close(out, expected, torch.bfloat16 if torch.bfloat16 in (dtype, out_dtype) else dtype)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_added_is_that_of_the_compiled_operator_to_the_bit(cpu_library, many_ranks, dtype, num_threads):
    """Given the sums that it would compute, it gives what it would: nothing but the product is another's."""
    issuer = Immediate(cpu_library, num_threads)
    adapters = [3, 0, -1, 2, 4, 1] * 9
    x, weight, bias = few_inputs(dtype, len(adapters))
    weight, x = (weight * 8).round().to(dtype), x.round().to(dtype)  # whole numbers: sums are exact, and small enough for bf16
    x[:, 8:] = 0
    prepared, batch = linear.prepare_weight(issuer, weight), build_adapter_batch(adapters)
    product = x @ weight.T
    assert torch.equal(product.to(torch.float64), x.double() @ weight.double().T)
    arguments = (issuer, x, prepared, bias, many_ranks, batch, SITES, torch.float32)
    assert torch.equal(linear.adapter_linear(*arguments, product), linear.adapter_linear(*arguments))
    plain = (issuer, x, prepared, bias, torch.bfloat16)
    assert torch.equal(linear.linear(*plain, product), linear.linear(*plain))


def test_its_own_product_of_rows_that_lie_apart(cpu_library):
    """Slices of a packed tensor, a transposed one, and none."""
    assert unavailable(torch.float32) is None
    ops = Operators(OneDnnOperators(Immediate(cpu_library)))
    _, weight, bias = few_inputs(torch.float32, 0)
    prepared = ops.prepare_weight(weight)
    assert prepared.large is not None
    assert (prepared.layout, prepared.large.layout) == (WeightLayout.PANELS, WeightLayout.ONEDNN)
    for x in (torch.randn(9, 100)[:, 7 : 7 + NUM_IN], torch.randn(NUM_IN, 9).T, torch.randn(0, NUM_IN)):
        for given in (bias, None):
            torch.testing.assert_close(ops.linear(x, prepared, given), functional.linear(x, weight, given), rtol=1e-5, atol=1e-5)
            base = ops.adapter_linear(
                x, prepared, given, empty_adapter_memory(2), build_adapter_batch([-1] * len(x)), SITES, out_dtype=torch.bfloat16
            )
            assert base.shape == (len(x), NUM_OUT)
            assert torch.equal(base, ops.linear(x, prepared, given).bfloat16())


def test_few_rows_and_the_embedding_are_the_compiled_operators(cpu_library, multiplied):
    issuer = Immediate(cpu_library)
    ops, cpu = Operators(OneDnnOperators(issuer, from_rows=8)), Operators(CpuOperators(issuer))
    x, weight, bias = few_inputs(torch.float32, 9)
    prepared, memory = ops.prepare_weight(weight), empty_adapter_memory(2)
    for num_rows in (1, 7, 8, 9):
        ops.linear(x[:num_rows], prepared, bias)
        ops.adapter_linear(x[:num_rows], prepared, bias, memory, build_adapter_batch([-1] * num_rows), SITES)
    assert multiplied == [8, 8, 9, 9]
    assert torch.equal(ops.linear(x[:7], prepared, bias), cpu.linear(x[:7], cpu.prepare_weight(weight), bias))
    assert torch.equal(ops.embedding(torch.tensor([5, 0, NUM_OUT - 1]), prepared), weight[[5, 0, NUM_OUT - 1]])


def test_it_cannot_be_recorded(cpu_library):
    ops = Operators(OneDnnOperators(Recorder(cpu_library)))
    with pytest.raises(ValueError, match="a product of oneDNN cannot be recorded"):
        ops.linear(torch.randn(2, NUM_IN), ops.prepare_weight(torch.randn(NUM_OUT, NUM_IN)))


def test_a_given_product_must_be_whole(cpu_library):
    issuer = Immediate(cpu_library)
    x, weight, bias = few_inputs(torch.float32, 4)
    with pytest.raises(ValueError, match="contiguous"):
        linear.linear(issuer, x, linear.prepare_weight(issuer, weight), bias, torch.float32, torch.randn(NUM_OUT, 4).T)


def test_a_type_without_instructions_is_unavailable_and_left_to_the_compiled_operator(cpu_library, monkeypatch):
    def refuse(weight: Tensor) -> Tensor:
        raise RuntimeError("bf16 path needs the cpu support\nand a stack of frames")

    assert "float16" in str(unavailable(torch.float16))
    monkeypatch.setattr(onednn, "_pack", refuse)
    assert unavailable(torch.bfloat16) == "bf16 path needs the cpu support"
    ops = Operators(OneDnnOperators(Immediate(cpu_library)))
    x, weight, bias = few_inputs(torch.bfloat16, 5)
    prepared = ops.prepare_weight(weight)
    assert prepared.large is None
    close(ops.linear(x, prepared, bias), REFERENCE.linear(x, Weight.plain(weight), bias), torch.bfloat16)


def test_torch_without_onednn_has_none(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert unavailable(torch.float32) == "torch was built without oneDNN"
