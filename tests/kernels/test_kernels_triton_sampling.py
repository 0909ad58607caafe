"""Sampling and log probabilities of the Triton kernels, interpreted, against the reference on the same rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graftwork_kernels import reference
from graftwork_kernels.layout import SamplingBatch
from graftwork_kernels.ops import Operators
from graftwork_kernels.triton import select
from graftwork_kernels.triton.linear import Form
from graftwork_kernels.triton.vocabulary import CHUNK

WIDTHS = [1, 2, 16, 17, CHUNK, CHUNK + 1, 2 * CHUNK + 809]

FILTERS = [
    (0.0, 0, 1.0, 0.0),  # temperature, top-k, top-p, min-p
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 40, 0.6, 0.02),
    (0.9, 0, 1.0, 0.1),
    (1.0, 1, 0.0, 0.0),
    (2.0, 3000, 0.99, 0.0),
]


@pytest.fixture
def triton_ops(make_interpreted) -> Operators:
    return Operators(make_interpreted(Form.TWO))


def batch_of(filters: list[tuple[float, int, float, float]]) -> SamplingBatch:
    temperature, top_k, top_p, min_p = zip(*filters, strict=True)
    count = len(filters)
    return SamplingBatch(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=torch.tensor(top_p),
        min_p=torch.tensor(min_p),
        seed=torch.arange(count) * 7919 - 3,
        choice=torch.arange(count, dtype=torch.int32) % 3,
        position=torch.arange(count, dtype=torch.int32) * 5,
    )


def rows_in_poison(logits: Tensor) -> Tensor:
    """The same rows in memory that is NaN around them."""
    whole = torch.full((logits.shape[0] + 2, logits.shape[1] + 13), torch.nan)
    whole[1:-1, 7:-6] = logits
    return whole[1:-1, 7:-6]


@pytest.mark.parametrize("num_tokens", WIDTHS)
def test_every_filter_draws_the_references_token(triton_ops, num_tokens):
    logits, batch = torch.randn(len(FILTERS), num_tokens) * 3, batch_of(FILTERS)
    drawn = triton_ops.sample(rows_in_poison(logits), batch)
    assert drawn.tolist() == reference.sample(logits, batch).tolist()


def test_a_band_too_wide_to_copy_is_searched_where_it_lies(triton_ops, monkeypatch):
    logits, batch = torch.randn(len(FILTERS), 2 * CHUNK + 9) * 3, batch_of(FILTERS)
    copied = triton_ops.sample(logits, batch)
    monkeypatch.setattr(select, "CAPACITY", 16)
    assert triton_ops.sample(logits, batch).tolist() == copied.tolist() == reference.sample(logits, batch).tolist()


@pytest.mark.parametrize("num_tokens", [40, CHUNK + 40])
@pytest.mark.parametrize("limit", [1, 7, 30])
def test_equal_logits_are_cut_at_the_lowest_ids(triton_ops, num_tokens, limit):
    """The equals lie on both sides of a chunk's end; only so many of them may be drawn, and those with the lowest ids."""
    logits = torch.full((12, num_tokens), -2.0)
    equal = torch.arange(num_tokens - 37, num_tokens, 1)[: limit + 4]
    logits[:, equal] = torch.tensor([0.0, -0.0] * len(equal))[: len(equal)]
    for top_k, top_p in ((limit, 1.0), (limit + 4, limit / (limit + 4) - 1e-3)):
        batch = replace(batch_of([(1.0, top_k, top_p, 0.0)] * 12), seed=torch.arange(12))
        drawn = triton_ops.sample(logits, batch)
        assert drawn.tolist() == reference.sample(logits, batch).tolist()
        assert set(drawn.tolist()) <= set(equal[:limit].tolist())


def test_rows_without_a_number_draw_an_id_in_range(triton_ops):
    logits = torch.randn(6, CHUNK + 3)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, CHUNK] = torch.inf
    logits[3, 5] = torch.nan
    logits[4, 1:] = -torch.inf
    for filters in FILTERS:
        drawn = triton_ops.sample(logits, batch_of([filters] * 6))
        assert ((drawn >= 0) & (drawn < logits.shape[1])).all()
        assert drawn[4] == 0
    assert triton_ops.finite_rows(logits).tolist() == [False, False, False, False, True, True]


def test_a_row_keeps_every_bit_whatever_its_neighbours(triton_ops):
    logits, batch = torch.randn(len(FILTERS), CHUNK + 70), batch_of(FILTERS)
    together = triton_ops.sample(logits, batch)
    logprobs = triton_ops.token_logprobs(logits, together, 4)
    for row in range(len(FILTERS)):
        part = slice(row, row + 1)
        alone = SamplingBatch(*(getattr(batch, name)[part] for name in SamplingBatch.__dataclass_fields__))
        assert triton_ops.sample(logits[part], alone) == together[row]
        single = triton_ops.token_logprobs(logits[part], together[part], 4)
        assert all(torch.equal(one[0], many[row]) for one, many in zip(single, logprobs, strict=True))


def test_the_noise_is_the_references_bit_by_bit(triton_ops):
    seeds = torch.cat((torch.tensor([0, -1, 1 << 63 - 1, 1 << 40]), torch.randint(-(2**62), 2**62, (300,))))
    choice, position = torch.randint(0, 2**31 - 1, (2, len(seeds))).int()
    assert torch.equal(triton_ops.philox_uniform(seeds, choice, position), reference.philox_uniform(seeds, choice, position))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "num_top"), [(1, 1), (17, 17), (CHUNK, 0), (CHUNK + 9, 6)])
def test_logprobs_are_the_references(triton_ops, dtype, num_tokens, num_top):
    logits = (torch.randn(3, num_tokens) * 4).to(dtype)  # of the short types many are equal
    token_ids = torch.randint(0, num_tokens, (3,))
    ours, expected = (each.token_logprobs(logits, token_ids, num_top) for each in (triton_ops, reference))
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(ours[1], expected[1])
    torch.testing.assert_close(ours[2], expected[2], rtol=1e-5, atol=1e-5)


def test_no_rows(triton_ops):
    batch = batch_of(FILTERS)
    none = SamplingBatch(*(getattr(batch, name)[:0] for name in SamplingBatch.__dataclass_fields__))
    assert triton_ops.sample(torch.zeros(0, 5), none).shape == (0,)
    assert triton_ops.finite_rows(torch.zeros(0, 5)).shape == (0,)
    assert [part.shape[0] for part in triton_ops.token_logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 2)] == [
        0,
        0,
        0,
    ]
