"""Norms and activations against transformers' Llama modules, and each row against the same row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.ops import Operators

DTYPES = [torch.float32, torch.bfloat16]


def llama_norm(weight: Tensor, eps: float) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(weight.numel(), eps)
    norm.weight.data = weight
    return norm


def assert_is_norm(actual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Whether ``actual`` is the norm of ``x``, its normalised values being those of an fp32 computation.

    That is within 2**-21 of the exact one, which on the border of two values of the type leaves either; all the rest is exact.
    """
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    ends = [(exact * (1 + shift)).float().to(weight.dtype) * weight for shift in (-(2.0**-21), 2.0**-21)]
    assert actual.dtype == weight.dtype
    assert actual.shape == x.shape
    assert ((torch.minimum(*ends) <= actual) & (actual <= torch.maximum(*ends))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (3, 4, 64), (1, 33), (2, 1), (3, 7), (2, 576), (2, 3, 5, 16), (9,), (0, 8), (2, 4097)])
def test_rms_norm_is_llamas(ops: Operators, dtype, shape):
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    actual = ops.rms_norm(x, weight, 1e-5)
    assert_is_norm(actual, x, weight, 1e-5)
    with torch.no_grad():
        torch.testing.assert_close(actual, llama_norm(weight, 1e-5)(x), rtol=2**-21 if dtype == torch.float32 else 2**-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 17), (4, 1001)])
@pytest.mark.parametrize("has_residual", [True, False])
def test_add_rms_norm_is_the_norm_of_the_sum(ops: Operators, dtype, shape, has_residual):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    residual = torch.randn(shape) if has_residual else None
    before = torch.zeros(shape) if residual is None else residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert total.dtype == torch.float32
    assert torch.equal(total, before + x)
    assert_is_norm(normed, total, weight, 1e-5)
    assert residual is None or torch.equal(residual, before)


def test_norms_and_activations_take_fp16(ops: Operators):
    x, residual, weight = torch.randn(3, 32).half(), torch.randn(3, 32), torch.randn(32).half()
    assert_is_norm(ops.rms_norm(x, weight, 1e-5), x, weight, 1e-5)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert_is_norm(normed, total, weight, 1e-5)
    assert ops.silu_and_mul(x).dtype == ops.gelu_and_mul(x).dtype == torch.float16


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_packed_rows_are_read_where_they_lie(ops: Operators, dtype):
    """Queries, keys and their neighbours of one packed projection: what lies between is never read into a result."""
    packed = torch.full((3, 100), float("nan")).to(dtype)
    packed[:, 8:56] = torch.randn(3, 48).to(dtype)
    heads, flat, weight = packed[:, 8:56].view(3, 3, 16), packed[:, 8:56], torch.randn(16).to(dtype)
    residual = torch.full((3, 70), float("nan"))
    residual[:, 11:59] = torch.randn(3, 48)
    wide_weight = torch.randn(48).to(dtype)
    assert torch.equal(ops.rms_norm(heads, weight, 1e-5), ops.rms_norm(heads.contiguous(), weight, 1e-5))
    views = ops.add_rms_norm(flat, residual[:, 11:59], wide_weight, 1e-5)
    copies = ops.add_rms_norm(flat.contiguous(), residual[:, 11:59].contiguous(), wide_weight, 1e-5)
    assert all(torch.equal(view, copy) for view, copy in zip(views, copies, strict=True))
    assert torch.equal(ops.silu_and_mul(flat), ops.silu_and_mul(flat.contiguous()))
    assert torch.equal(ops.gelu_and_mul(flat), ops.gelu_and_mul(flat.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001])
def test_nan_stays_nan_and_in_its_row(ops: Operators, dtype, bits):
    """Whatever its bits: some would turn into numbers if they were rounded to bf16 as numbers are."""
    poison = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    x, residual, weight = torch.randn(3, 40).to(dtype), torch.randn(3, 40), torch.ones(40).to(dtype)
    clean, clean_total = ops.add_rms_norm(x, residual, weight, 1e-5)
    residual[1, 7] = poison
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert normed[1].isnan().all()
    assert total[1].isnan().nonzero().tolist() == [[7]]
    assert torch.equal(normed[[0, 2]], clean[[0, 2]])
    assert torch.equal(total[[0, 2]], clean_total[[0, 2]])
    x[1, 3] = float("nan")
    for activated in (ops.silu_and_mul(x), ops.gelu_and_mul(x)):
        assert activated.isnan().nonzero().tolist() == [[1, 3]]


def test_infinity_makes_a_norm_nan_where_it_stands(ops: Operators):
    x = torch.ones(1, 8).bfloat16()
    x[0, 2] = float("inf")
    normed = ops.rms_norm(x, torch.ones(8).bfloat16(), 1e-5)
    assert normed.isnan().nonzero().tolist() == [[0, 2]]
    assert (normed[0, 3:] == 0).all()


def test_eps_counts_for_small_rows(ops: Operators):
    x, weight = torch.full((1, 8), 1e-3), torch.ones(8)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), x / (1e-6 + 1e-5) ** 0.5)


def activate(ops: Operators, name: str, gate_up: Tensor) -> Tensor:
    return {"silu": ops.silu_and_mul, "gelu_pytorch_tanh": ops.gelu_and_mul}[name](gate_up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("shape", [(5, 64), (1, 2), (3, 22), (2, 2098), (2, 3, 16), (0, 4)])
def test_activations_are_transformers(ops: Operators, name, dtype, shape):
    gate_up = (torch.randn(shape) * 3).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = ACT2FN[name](gate) * up
    actual = activate(ops, name, gate_up)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_activations_of_every_magnitude(ops: Operators, name):
    """All values that bf16 has, as fp32: nothing becomes NaN, nor passes a gate that is shut, where the exponential ends."""
    gate = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    gate = gate[gate.isfinite()]
    gate = gate[gate.abs() < 1e18].unsqueeze(0)  # its cube is no number in fp32
    actual = activate(ops, name, torch.cat((gate, torch.ones_like(gate)), dim=-1))
    expected = ACT2FN[name](gate.double())
    torch.testing.assert_close(actual.double(), expected, rtol=3e-6, atol=3e-7)


def test_bf16_results_are_the_fp32_results_rounded(host_ops: Operators):
    """To the nearest, halves to even. The gate is so wide that silu is the identity to the bit."""
    up = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    up = up[up.isfinite()].unsqueeze(0)
    gate = torch.full_like(up, 88.5)
    expected = (gate.float() * up.float()).bfloat16()
    assert torch.equal(host_ops.silu_and_mul(torch.cat((gate, up), dim=-1)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_keeps_every_bit_whatever_its_neighbours(ops: Operators, dtype):
    x, residual, weight = torch.randn(33, 130).to(dtype), torch.randn(33, 130), torch.randn(130).to(dtype)

    def all_operators(rows: slice) -> list[Tensor]:
        normed, total = ops.add_rms_norm(x[rows], residual[rows], weight, 1e-5)
        return [ops.rms_norm(x[rows], weight, 1e-5), normed, total, ops.silu_and_mul(x[rows]), ops.gelu_and_mul(x[rows])]

    together = all_operators(slice(None))
    for row in range(33):
        alone = all_operators(slice(row, row + 1))
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(cpu_library: Library, dtype):
    one, two = (Operators(CpuOperators(Immediate(cpu_library, threads))) for threads in (1, 2))
    x, residual, weight = torch.randn(7, 2500).to(dtype), torch.randn(7, 2500), torch.randn(2500).to(dtype)
    for rows in (x[:1], x):
        assert torch.equal(one.silu_and_mul(rows), two.silu_and_mul(rows))
        assert torch.equal(one.rms_norm(rows, weight, 1e-5), two.rms_norm(rows, weight, 1e-5))
        pairs = zip(*(ops.add_rms_norm(rows, residual[: len(rows)], weight, 1e-5) for ops in (one, two)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda ops: ops.rms_norm(torch.zeros(2, 9), torch.zeros(8), 1e-5)),
        ("x", lambda ops: ops.rms_norm(torch.zeros(2, 8, dtype=torch.int32), torch.zeros(8), 1e-5)),
        ("weight", lambda ops: ops.rms_norm(torch.zeros(2, 8), torch.zeros(8).bfloat16(), 1e-5)),
        ("residual", lambda ops: ops.add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(8), 1e-5)),
        ("residual", lambda ops: ops.add_rms_norm(torch.zeros(2, 8), torch.zeros(2, 8).bfloat16(), torch.zeros(8), 1e-5)),
        ("gate_up", lambda ops: ops.silu_and_mul(torch.zeros(2, 7))),
        ("gate_up", lambda ops: ops.gelu_and_mul(torch.zeros(2, 8, dtype=torch.int64))),
    ],
)
def test_a_wrong_argument_is_named(ops: Operators, argument, call):
    with pytest.raises(ValueError, match=f"^{argument}:"):
        call(ops)


def test_a_wide_residual_keeps_what_bf16_sums_round_away(ops: Operators) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(64, generator=generator).bfloat16()
    terms = [torch.randn(3, 64, generator=generator).bfloat16() for _ in range(30)]
    residual = torch.zeros(3, 64)
    exact = torch.zeros(3, 64, dtype=torch.float64)
    for term in terms:
        normed, residual = ops.add_rms_norm(term, residual, weight, 1e-6)
        exact += term.double()
    assert residual.dtype == torch.float32
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(residual.double(), exact, rtol=0, atol=1e-5)
    assert_is_norm(normed, residual, weight, 1e-6)
