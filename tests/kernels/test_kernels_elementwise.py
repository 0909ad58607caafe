"""Norms, rotary and activations against transformers' Llama modules, and each row against the same row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from graftwork_kernels import ops

DTYPES = [torch.float32, torch.bfloat16]


def llama_norm(weight: Tensor, eps: float) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(weight.numel(), eps)
    norm.weight.data = weight
    return norm


def llama_cos_sin(head_dim: int, num_positions: int) -> tuple[LlamaRotaryEmbedding, Tensor]:
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim)
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1), torch.arange(num_positions)[None])
    return embedding, torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (3, 4, 64), (1, 33)])
def test_rms_norm_is_llamas_to_the_bit(dtype, shape):
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    with torch.no_grad():
        expected = llama_norm(weight, 1e-5)(x)
    actual = ops.rms_norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_is_the_norm_of_the_sum(dtype):
    x, residual, weight = torch.randn(5, 96).to(dtype), torch.randn(5, 96).to(dtype), torch.randn(96).to(dtype)
    before = residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, before + x)
    assert torch.equal(normed, ops.rms_norm(before + x, weight, 1e-5))
    assert torch.equal(residual, before)


def test_eps_counts_for_small_rows():
    x, weight = torch.full((1, 8), 1e-3), torch.ones(8)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), x / (1e-6 + 1e-5) ** 0.5)


@pytest.mark.parametrize("head_dim", [16, 64])
def test_rotary_is_llamas(head_dim):
    embedding, cos_sin = llama_cos_sin(head_dim, 64)
    q, k = torch.randn(7, 6, head_dim), torch.randn(7, 2, head_dim)
    positions = torch.tensor([0, 63, 5, 5, 17, 1, 40])
    cos, sin = embedding(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    actual_q, actual_k = ops.rotary(q, k, positions, cos_sin)
    torch.testing.assert_close(actual_q, expected_q[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual_k, expected_k[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_rotary_in_bf16_is_the_fp32_result_rounded():
    _, cos_sin = llama_cos_sin(16, 64)
    q, k, positions = torch.randn(4, 3, 16).bfloat16(), torch.randn(4, 1, 16).bfloat16(), torch.tensor([3, 60, 0, 9])
    wide_q, wide_k = ops.rotary(q.float(), k.float(), positions, cos_sin)
    narrow_q, narrow_k = ops.rotary(q, k, positions, cos_sin)
    assert torch.equal(narrow_q, wide_q.bfloat16())
    assert torch.equal(narrow_k, wide_k.bfloat16())


def test_rotary_takes_views_of_a_packed_projection():
    _, cos_sin = llama_cos_sin(16, 8)
    packed, positions = torch.randn(3, 64), torch.tensor([1, 2, 3])
    q, k = packed[:, :32].view(3, 2, 16), packed[:, 32:48].view(3, 1, 16)
    actual = ops.rotary(q, k, positions, cos_sin)
    expected = ops.rotary(q.contiguous(), k.contiguous(), positions, cos_sin)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("operator", "name"), [(ops.silu_and_mul, "silu"), (ops.gelu_and_mul, "gelu_pytorch_tanh")])
def test_activations_are_transformers(operator, name, dtype):
    gate_up = (torch.randn(5, 64) * 3).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = ACT2FN[name](gate) * up
    actual = operator(gate_up)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_keeps_every_bit_whatever_its_neighbours(dtype):
    x, residual, weight = torch.randn(33, 130).to(dtype), torch.randn(33, 130).to(dtype), torch.randn(130).to(dtype)
    _, cos_sin = llama_cos_sin(26, 40)
    positions = torch.arange(33)
    heads = x.view(33, 5, 26)

    def all_operators(rows: slice) -> list[Tensor]:
        q, k = ops.rotary(heads[rows], heads[rows, :2], positions[rows], cos_sin)
        normed, total = ops.add_rms_norm(x[rows], residual[rows], weight, 1e-5)
        return [ops.rms_norm(x[rows], weight, 1e-5), normed, total, q, k, ops.silu_and_mul(x[rows]), ops.gelu_and_mul(x[rows])]

    together = all_operators(slice(None))
    for row in range(33):
        alone = all_operators(slice(row, row + 1))
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda: ops.rms_norm(torch.zeros(2, 9), torch.zeros(8), 1e-5)),
        ("x", lambda: ops.rms_norm(torch.zeros(2, 8, dtype=torch.int32), torch.zeros(8), 1e-5)),
        ("weight", lambda: ops.rms_norm(torch.zeros(2, 8), torch.zeros(8).bfloat16(), 1e-5)),
        ("residual", lambda: ops.add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(8), 1e-5)),
        ("residual", lambda: ops.add_rms_norm(torch.zeros(2, 8), torch.zeros(2, 8).bfloat16(), torch.zeros(8), 1e-5)),
        ("q", lambda: ops.rotary(torch.zeros(2, 8), torch.zeros(2, 1, 8), torch.zeros(2).long(), torch.zeros(4, 8))),
        ("k", lambda: ops.rotary(torch.zeros(2, 1, 8), torch.zeros(3, 1, 8), torch.zeros(2).long(), torch.zeros(4, 8))),
        ("positions", lambda: ops.rotary(torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), torch.zeros(2).int(), torch.zeros(4, 8))),
        ("cos_sin", lambda: ops.rotary(torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), torch.zeros(2).long(), torch.zeros(4, 4))),
        ("gate_up", lambda: ops.silu_and_mul(torch.zeros(2, 7))),
        ("gate_up", lambda: ops.gelu_and_mul(torch.zeros(2, 8, dtype=torch.int64))),
    ],
)
def test_a_wrong_argument_is_named(argument, call):
    with pytest.raises(ValueError, match=f"^{argument}:"):
        call()


def test_a_wide_residual_keeps_what_bf16_sums_round_away() -> None:
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
    expected = (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight
    torch.testing.assert_close(normed, expected, rtol=2**-7, atol=0)
