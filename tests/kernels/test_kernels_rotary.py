"""Rotary embedding against transformers' Llama, and what the same operator writes into the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from graftwork_kernels.ops import Operators

DTYPES = [torch.float32, torch.bfloat16]
HEAD_DIMS = [2, 6, 16, 24, 26, 64, 80]


def llama_cos_sin(head_dim: int, num_positions: int) -> tuple[LlamaRotaryEmbedding, Tensor]:
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim)
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1), torch.arange(num_positions)[None])
    return embedding, torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)


@dataclass
class Cache:
    """Four blocks of five tokens, all 7, and what rows at the slots 0, 1, 2, … leave there."""

    keys: Tensor
    values: Tensor

    @classmethod
    def filled(cls, num_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Cache:
        return cls(*torch.full((2, 4, num_heads, 5, head_dim), 7.0, dtype=dtype))

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        keys, values = (cache.transpose(1, 2).flatten(0, 1)[:num_rows] for cache in (self.keys, self.values))
        return keys, values


def turn(ops: Operators, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """The turned q, and the turned k out of the cache."""
    cache = Cache.filled(k.shape[1], k.shape[2], k.dtype)
    slots = torch.arange(len(k))
    turned = ops.rotary_and_write_kv(q, k, torch.zeros_like(k), positions, cos_sin, cache.keys, cache.values, slots)
    return turned, cache.rows(len(k))[0]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotary_is_llamas(ops, head_dim):
    embedding, cos_sin = llama_cos_sin(head_dim, 64)
    q, k = torch.randn(7, 6, head_dim), torch.randn(7, 2, head_dim)
    positions = torch.tensor([0, 63, 5, 5, 17, 1, 40])
    cos, sin = embedding(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    actual_q, actual_k = turn(ops, q, k, positions, cos_sin)
    torch.testing.assert_close(actual_q, expected_q[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual_k, expected_k[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", [16, 26])
def test_rotary_in_bf16_is_the_fp32_result_rounded(ops, head_dim):
    _, cos_sin = llama_cos_sin(head_dim, 64)
    q, k, positions = torch.randn(4, 3, head_dim).bfloat16(), torch.randn(4, 1, head_dim).bfloat16(), torch.tensor([3, 60, 0, 9])
    wide_q, wide_k = turn(ops, q.float(), k.float(), positions, cos_sin)
    narrow_q, narrow_k = turn(ops, q, k, positions, cos_sin)
    assert torch.equal(narrow_q, wide_q.bfloat16())
    assert torch.equal(narrow_k, wide_k.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_a_packed_projection(ops, dtype):
    _, cos_sin = llama_cos_sin(16, 8)
    packed, positions = torch.randn(3, 64).to(dtype), torch.tensor([1, 2, 3])
    views = packed[:, :32].view(3, 2, 16), packed[:, 32:48].view(3, 1, 16), packed[:, 48:].view(3, 1, 16)
    one, other = Cache.filled(1, 16, dtype), Cache.filled(1, 16, dtype)
    slots = torch.tensor([6, 0, 19])
    actual = ops.rotary_and_write_kv(*views, positions, cos_sin, one.keys, one.values, slots)
    copies = [view.contiguous() for view in views]
    expected = ops.rotary_and_write_kv(*copies, positions, cos_sin, other.keys, other.values, slots)
    assert actual.is_contiguous()
    assert torch.equal(actual, expected)
    assert torch.equal(one.keys, other.keys)
    assert torch.equal(one.values, other.values)
    assert torch.equal(one.values[1, :, 1], views[2][0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_named_slots_alone_are_written(ops, dtype):
    _, cos_sin = llama_cos_sin(8, 8)
    q, k, v = torch.randn(3, 3, 2, 8).to(dtype)
    positions = torch.tensor([0, 5, 2])
    _, turned = turn(ops, q, k, positions, cos_sin)
    cache = Cache.filled(2, 8, dtype)
    ops.rotary_and_write_kv(q, k, v, positions, cos_sin, cache.keys, cache.values, torch.tensor([11, -1, 19]))
    for written, rows in ((cache.keys, turned), (cache.values, v)):
        expected = torch.full_like(written, 7.0)
        expected[2, :, 1], expected[3, :, 4] = rows[0], rows[2]
        assert torch.equal(written, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_keeps_every_bit_whatever_its_neighbours(ops, dtype):
    _, cos_sin = llama_cos_sin(26, 40)
    q, k, positions = torch.randn(19, 5, 26).to(dtype), torch.randn(19, 2, 26).to(dtype), torch.arange(19) * 2
    together = turn(ops, q, k, positions, cos_sin)
    for row in range(19):
        part = slice(row, row + 1)
        alone = turn(ops, q[part], k[part], positions[part], cos_sin)
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, together, strict=True))


@pytest.mark.parametrize(("positions", "slots"), [([0, 8], [0, 1]), ([-1, 0], [0, 1]), ([0, 1], [20, 1]), ([0, 1], [0, 1 << 40])])
def test_a_value_beyond_its_table_is_refused(host_ops, positions, slots):
    _, cos_sin = llama_cos_sin(8, 8)
    cache = Cache.filled(1, 8)
    heads = torch.zeros(2, 1, 8)
    with pytest.raises(IndexError):
        host_ops.rotary_and_write_kv(
            heads, heads, heads, torch.tensor(positions), cos_sin, cache.keys, cache.values, torch.tensor(slots)
        )


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("q", {"q": torch.zeros(2, 4)}),
        ("q", {"q": torch.zeros(2, 1, 5)}),
        ("k", {"k": torch.zeros(2, 3, 4)}),
        ("v", {"v": torch.zeros(2, 2, 4).bfloat16()}),
        ("positions", {"positions": torch.zeros(2, dtype=torch.int32)}),
        ("cos_sin", {"cos_sin": torch.zeros(4, 8)}),
        ("kv_slot", {"kv_slot": torch.zeros(2, dtype=torch.int32)}),
    ],
)
def test_a_wrong_argument_is_named(ops, argument, change):
    arguments = {
        "q": torch.zeros(2, 4, 4),
        "k": torch.zeros(2, 2, 4),
        "v": torch.zeros(2, 2, 4),
        "positions": torch.zeros(2, dtype=torch.int64),
        "cos_sin": torch.zeros(4, 4),
        "k_cache": torch.zeros(3, 2, 5, 4),
        "v_cache": torch.zeros(3, 2, 5, 4),
        "kv_slot": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=f"^{argument}:"):
        ops.rotary_and_write_kv(**(arguments | change))
