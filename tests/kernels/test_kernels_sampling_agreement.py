"""The compiled sampler against the reference: the same draws, row for row, where ties, masks and magnitudes are at their worst."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from graftwork_kernels import reference
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.layout import LogitBias, SamplingBatch
from graftwork_kernels.ops import Operators


@pytest.fixture
def ops(host_ops: Operators) -> Operators:
    """The interpreter takes a hundredth of a second for a row; its kernels have tests of fewer rows."""
    return host_ops


NUM_ROWS = 64
INF = float("inf")
ROW_TYPES = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int32, torch.int32)


def masked(logits: Tensor, value: float, share: float) -> Tensor:
    """All but ``share`` of the tokens put to ``value``; token 0 stays."""
    drop = torch.rand_like(logits) >= share
    drop[:, 0] = False
    return logits.masked_fill(drop, value)


KINDS = {
    "plain": lambda x: x,
    "wide": lambda x: x * 12,
    "flat": lambda x: x * 0.05,
    "ties": lambda x: (x * 2).round() / 2,
    "signed zeros": lambda x: torch.where(x > 0.5, x.round(), torch.where(x > 0, 0.0, -0.0)),
    "all equal": torch.zeros_like,
    "masked": lambda x: masked(x, -INF, 0.1),
    "one token left": lambda x: masked(x, -INF, 0.0),
    "masked by a number": lambda x: masked(x, -1e9, 0.4),
    "huge": lambda x: x.clamp(-3, 3) * 1e38,
    "tiny": lambda x: x * 1e-30,
    "denormal": lambda x: (x * 4).round() * 1e-45,
}


def pick(values: list[float], num_rows: int = NUM_ROWS) -> Tensor:
    """One of ``values`` for each row."""
    return torch.tensor(values)[torch.randint(0, len(values), (num_rows,))]


def random_batch(num_tokens: int) -> SamplingBatch:
    """Filters of every strength, some of which switch each other off."""
    return SamplingBatch(
        temperature=pick([0.0, 1e-30, 1e-6, 0.1, 0.7, 1.0, 1.3, 50.0]),
        top_k=pick([0, 0, 1, 2, 50, num_tokens - 1, num_tokens, num_tokens + 3]).int(),
        top_p=pick([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0]),
        min_p=pick([0.0, 0.0, 0.05, 0.3, 1.0]),
        seed=torch.randint(-(2**62), 2**62, (NUM_ROWS,)),
        choice=torch.randint(0, 9, (NUM_ROWS,)).int(),
        position=torch.randint(0, 9999, (NUM_ROWS,)).int(),
    )


def row_of(batch: SamplingBatch, row: int) -> SamplingBatch:
    return SamplingBatch(**{field.name: getattr(batch, field.name)[row : row + 1] for field in fields(batch)})


@pytest.fixture
def by_threads(cpu_library: Library) -> tuple[Operators, Operators]:
    """The compiled operators on one thread and on two."""
    one, two = (Operators(CpuOperators(Immediate(cpu_library, threads))) for threads in (1, 2))
    return one, two


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 9, 300, 9001])
def test_draws_are_the_references(by_threads, kind, num_tokens):
    """No row is excused: with these seeds, no draw falls on the border of two tokens. Threads and neighbours change nothing."""
    one, two = by_threads
    logits, batch = KINDS[kind](torch.randn(NUM_ROWS, num_tokens)), random_batch(num_tokens)
    before = logits.clone()
    tokens = one.sample(logits, batch)
    assert torch.equal(tokens, Operators(reference).sample(logits, batch))
    assert torch.equal(tokens, two.sample(logits, batch))
    for row in range(0, NUM_ROWS, 8):
        for ops in by_threads:
            assert ops.sample(logits[row : row + 1], row_of(batch, row)).tolist() == [int(tokens[row])]
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 9, 1300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_references(by_threads, kind, num_tokens, dtype):
    logits = KINDS[kind](torch.randn(8, num_tokens)).to(dtype)
    token_ids = torch.randint(0, num_tokens, (8,))
    for num_top in {0, 1, min(20, num_tokens), num_tokens}:
        expected = Operators(reference).token_logprobs(logits, token_ids, num_top)
        actual = by_threads[0].token_logprobs(logits, token_ids, num_top)
        assert torch.equal(actual[1], expected[1])
        for one, other in ((actual[0], expected[0]), (actual[2], expected[2])):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-6, equal_nan=True)
        assert all(torch.equal(a, b) for a, b in zip(actual, by_threads[1].token_logprobs(logits, token_ids, num_top), strict=True))


@pytest.mark.parametrize("num_tokens", [1, 7, 300, 9001])
def test_rows_that_hold_no_distribution(by_threads, num_tokens):
    """NaN, +inf and nothing but -inf, here and there or throughout: an id in range, and the neighbours as they were."""
    logits, batch = torch.randn(NUM_ROWS, num_tokens), random_batch(num_tokens)
    clean = by_threads[0].sample(logits, batch)
    logits[::4] = float("nan")
    logits[1::4, num_tokens // 2] = float("nan")
    logits[2::8, num_tokens // 2] = INF
    logits[6::8] = -INF
    for ops in by_threads:
        tokens = ops.sample(logits, batch)
        assert ((tokens >= 0) & (tokens < num_tokens)).all()
        assert torch.equal(tokens[3::4], clean[3::4])
        logprobs, ids, tops = ops.token_logprobs(logits, tokens, min(20, num_tokens))
        assert ((ids >= 0) & (ids < num_tokens)).all()
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        assert logprobs[::4].isnan().all()
        assert logprobs[1::4].isnan().all()
        assert tops[::4].isnan().all()
        assert logprobs[3::4].isfinite().all()
        assert torch.equal(ops.finite_rows(logits), Operators(reference).finite_rows(logits))


def test_a_wide_row_is_searched_in_pieces(by_threads):
    """The largest in every piece in turn, and at the borders of pieces and blocks."""
    num_tokens = 3 * 8192 + 5
    for place in (0, 511, 512, 8191, 8192, 16383, 16384, num_tokens - 6, num_tokens - 1):
        logits = torch.randn(1, num_tokens)
        logits[0, place] = 9.0
        logits[0, place + 1 :][logits[0, place + 1 :] > 2] = 9.0  # equals that come later
        for ops in by_threads:
            greedy = SamplingBatch(*(torch.zeros(1, dtype=kind) for kind in ROW_TYPES))
            assert ops.sample(logits, greedy).tolist() == [place]


@pytest.mark.parametrize(
    ("row_start", "token_id"), [([0, 1, 2], [0, 8]), ([0, 1, 2], [-1, 3]), ([0, 1, 3], [0, 1]), ([-1, 1, 2], [0, 1])]
)
def test_an_entry_outside_is_refused(by_threads, row_start, token_id):
    starts, ids = torch.tensor(row_start, dtype=torch.int32), torch.tensor(token_id, dtype=torch.int32)
    for ops in by_threads:
        with pytest.raises(IndexError):
            ops.apply_logit_bias(torch.zeros(2, 8), LogitBias(starts, ids, torch.ones(2)))


def test_logprobs_take_fp16(by_threads):
    logits, token_ids = torch.randn(3, 40).half(), torch.tensor([0, 7, 39])
    expected = by_threads[0].token_logprobs(logits.float(), token_ids, 5)
    for one, other in zip(by_threads[0].token_logprobs(logits, token_ids, 5), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-6)


def test_a_token_outside_has_no_logprob(by_threads):
    for token in (-1, 8):
        with pytest.raises(IndexError):
            by_threads[0].token_logprobs(torch.zeros(1, 8), torch.tensor([token]), 0)
