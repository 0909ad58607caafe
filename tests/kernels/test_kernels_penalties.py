"""Logit bias and penalties against a plain loop and Hugging Face's processor, each row against the same row alone."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from graftwork_kernels.layout import LogitBias, Penalties, SamplingBatch
from graftwork_kernels.ops import Operators

VOCAB = 23
INF = float("inf")


def csr(rows: list[dict[int, float]], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Row starts, token ids and values of a list of dictionaries laid end to end."""
    starts = torch.tensor([0] + [len(row) for row in rows]).cumsum(0).to(torch.int32)
    ids = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    return starts, ids, torch.tensor([value for row in rows for value in row.values()], dtype=dtype)


def bias_of(rows: list[dict[int, float]]) -> LogitBias:
    return LogitBias(*csr(rows, torch.float32))


def penalties_of(counts: list[dict[int, int]], **columns: float | list[float]) -> Penalties:
    wanted = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0, **columns}
    filled = {
        name: torch.tensor(value if isinstance(value, list) else [value] * len(counts), dtype=torch.float32)
        for name, value in wanted.items()
    }
    return Penalties(*csr(counts, torch.int32), **filled)


def fp32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def naive(row: list[float], counts: dict[int, int], repetition: float, frequency: float, presence: float) -> list[float]:
    """The three lines of the contract, one token after another, rounded to fp32 after each operation."""
    made = list(row)
    for token, count in counts.items():
        x = fp32(made[token] / repetition) if made[token] > 0 else fp32(made[token] * repetition)
        x = fp32(x - fp32(frequency * count))
        made[token] = fp32(x - presence) if count else x
    return made


numbers = st.floats(-30, 30, width=32)
counts_of_a_row = st.dictionaries(st.integers(0, VOCAB - 1), st.integers(0, 5), max_size=VOCAB)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.lists(numbers, min_size=VOCAB, max_size=VOCAB), counts_of_a_row, st.floats(0.25, 4, width=32), numbers, numbers
        ),
        min_size=1,
        max_size=5,
    )
)
def test_penalties_are_the_contracts_bit_by_bit(ops: Operators, rows):
    logits = torch.tensor([row for row, *_ in rows])
    ops.apply_penalties(
        logits,
        penalties_of(
            [counts for _, counts, *_ in rows],
            repetition=[row[2] for row in rows],
            frequency=[row[3] for row in rows],
            presence=[row[4] for row in rows],
        ),
    )
    assert logits.tolist() == [naive(*row) for row in rows]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.integers(0, VOCAB - 1), numbers, max_size=VOCAB), min_size=1, max_size=5), st.integers(0, 99))
def test_bias_is_added_to_its_tokens_alone(ops: Operators, rows, seed):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = [
        [fp32(value + row.get(token, 0.0)) for token, value in enumerate(old)]
        for row, old in zip(rows, logits.tolist(), strict=True)
    ]
    ops.apply_logit_bias(logits, bias_of(rows))
    assert logits.tolist() == expected


@pytest.mark.parametrize("penalty", [0.6, 1.0, 1.3, 2.0])
def test_repetition_is_hugging_faces(ops: Operators, penalty):
    logits, history = torch.randn(4, VOCAB) * 5, torch.randint(0, VOCAB, (4, 30))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits.clone())
    ops.apply_penalties(logits, penalties_of([dict.fromkeys(row.tolist(), 0) for row in history], repetition=penalty))
    assert torch.equal(logits, expected)


def test_frequency_and_presence_are_openais_formula(ops: Operators):
    """``mu[j] -= c[j] * alpha_frequency + (c[j] > 0) * alpha_presence`` over the output's counts c."""
    logits, output = torch.randn(3, VOCAB), torch.randint(0, VOCAB, (3, 40))
    counts = torch.stack([row.bincount(minlength=VOCAB) for row in output])
    expected = logits - counts * 0.7 - (counts > 0) * 1.1
    listed = [{token: int(row[token]) for token in row.nonzero()[:, 0].tolist()} for row in counts]
    ops.apply_penalties(logits, penalties_of(listed, frequency=0.7, presence=1.1))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_tokens_of_the_prompt_alone_are_untouched_by_frequency_and_presence(ops: Operators):
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    ops.apply_penalties(logits, penalties_of([{3: 0, 4: 2}], frequency=5.0, presence=3.0))
    assert (logits != before).nonzero().tolist() == [[0, 4]]


def test_a_banned_token_stays_banned_and_is_never_drawn(ops: Operators):
    """Whatever else is said about it: -inf takes no sum, quotient or product back, and makes no NaN."""
    count = 60
    logits = torch.randn(count, 8) / 4  # so many draws are enough for every token
    ops.apply_logit_bias(logits, bias_of([{2: -INF, 5: 80.0}] * count))
    repetition = [0.5, 1.0, 3.0] * (count // 3)
    ops.apply_penalties(logits, penalties_of([{2: 4, 5: 0}] * count, repetition=repetition, frequency=-9.0, presence=-9.0))
    assert (logits[:, 2] == -INF).all()
    assert ops.finite_rows(logits).all()
    logits[:, 5] = 0.0
    column = torch.ones(count)
    zeros = torch.zeros(count).int()
    batch = SamplingBatch(column, zeros, column, column * 0, torch.arange(count), zeros, zeros)
    assert set(ops.sample(logits, batch).tolist()) == {0, 1, 3, 4, 5, 6, 7}


def test_rows_without_entries_keep_every_bit_nan_included(ops: Operators):
    logits = torch.randn(4, VOCAB)
    logits[1] = float("nan")
    logits[2, :3] = torch.tensor([INF, -INF, -0.0])
    before = logits.clone()
    ops.apply_logit_bias(logits, bias_of([{0: 1.0}, {}, {}, {}]))
    ops.apply_penalties(logits, penalties_of([{}, {}, {}, {7: 1}], repetition=[2.0] * 4, frequency=1.0, presence=1.0))
    assert torch.equal(logits[1:3].view(torch.int32), before[1:3].view(torch.int32))
    assert int((logits != before).sum()) == 2 + VOCAB  # NaN differs from itself


def test_no_entries_at_all(ops: Operators):
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    ops.apply_logit_bias(logits, bias_of([{}, {}]))
    ops.apply_penalties(logits, penalties_of([{}, {}], repetition=2.0))
    assert torch.equal(logits, before)


def test_a_row_ignores_its_neighbours(ops: Operators):
    """A third of the neighbours hold NaN, as those of a broken adapter would."""
    rows = [{(3 * r + i) % VOCAB: i % 3 for i in range(r)} for r in range(12)]
    biases = [{(5 * r + i) % VOCAB: i - 1.5 for i in range(r % 4)} for r in range(12)]
    clean = torch.randn(12, VOCAB)
    logits = clean.clone()
    logits[::3] = float("nan")
    repetition = [1.0 + r / 10 for r in range(12)]
    ops.apply_logit_bias(logits, bias_of(biases))
    ops.apply_penalties(logits, penalties_of(rows, repetition=repetition, frequency=0.3, presence=0.2))
    for row in range(12):
        alone = clean[row : row + 1].clone()
        ops.apply_logit_bias(alone, bias_of([biases[row]]))
        ops.apply_penalties(alone, penalties_of([rows[row]], repetition=[repetition[row]], frequency=0.3, presence=0.2))
        assert row % 3 == 0 or torch.equal(alone[0], logits[row])


def test_finite_rows(ops: Operators):
    logits = torch.zeros(7, 5)
    logits[0, 4] = float("nan")
    logits[1, 0] = INF
    logits[2] = -INF
    logits[3, :4] = -INF  # one token left
    logits[4] = torch.tensor([float("nan"), INF, -INF, 0, 0])
    logits[5] = 3e38
    assert ops.finite_rows(logits).tolist() == [False, False, False, True, False, True, True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.2)])
def test_a_row_with_nothing_left_draws_an_id_in_range_and_does_not_raise(ops: Operators, temperature, filters):
    top_k, top_p, min_p = filters
    logits = torch.randn(3, 40)
    batch = SamplingBatch(
        torch.tensor([temperature] * 3),
        torch.tensor([top_k] * 3, dtype=torch.int32),
        torch.tensor([top_p] * 3),
        torch.tensor([min_p] * 3),
        torch.arange(3),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
    )
    clean = ops.sample(logits, batch)
    logits[1] = -INF
    tokens = ops.sample(logits, batch)
    assert 0 <= int(tokens[1]) < 40
    assert tokens[[0, 2]].tolist() == clean[[0, 2]].tolist()


ONE = {"row_start": torch.tensor([0, 1], dtype=torch.int32), "token_id": torch.zeros(1, dtype=torch.int32)}
LONG = torch.tensor([0, 1])
FLOATS = {name: torch.ones(1) for name in ("repetition", "frequency", "presence")}
COUNT = torch.ones(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("logits", lambda ops, x: ops.apply_logit_bias(x.double(), LogitBias(**ONE, value=torch.ones(1)))),
        ("logits", lambda ops, x: ops.finite_rows(x[0])),
        ("bias.row_start", lambda ops, x: ops.apply_logit_bias(x, LogitBias(LONG, ONE["token_id"], torch.ones(1)))),
        ("bias.row_start", lambda ops, x: ops.apply_logit_bias(x[:0], LogitBias(**ONE, value=torch.ones(1)))),
        ("bias.token_id", lambda ops, x: ops.apply_logit_bias(x, LogitBias(ONE["row_start"], LONG, torch.ones(1)))),
        ("bias.value", lambda ops, x: ops.apply_logit_bias(x, LogitBias(**ONE, value=torch.ones(2)))),
        ("bias.value", lambda ops, x: ops.apply_logit_bias(x, LogitBias(**ONE, value=COUNT))),
        ("penalties.output_count", lambda ops, x: ops.apply_penalties(x, Penalties(**ONE, output_count=torch.ones(1), **FLOATS))),
        (
            "penalties.frequency",
            lambda ops, x: ops.apply_penalties(x, Penalties(**ONE, output_count=COUNT, **{**FLOATS, "frequency": COUNT})),
        ),
        (
            "penalties.presence",
            lambda ops, x: ops.apply_penalties(x, Penalties(**ONE, output_count=COUNT, **{**FLOATS, "presence": torch.ones(2)})),
        ),
    ],
)
def test_a_wrong_argument_is_named(ops: Operators, argument, call):
    with pytest.raises(ValueError, match=f"^{argument}:"):
        call(ops, torch.zeros(1, VOCAB))
