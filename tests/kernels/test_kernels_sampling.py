"""Sampling against pure-Python Philox, Random123's vectors and a naive filter, and each row against the same row alone."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graftwork_kernels.layout import SamplingBatch
from graftwork_kernels.ops import Operators
from graftwork_kernels.reference.philox import philox4x32


@pytest.fixture
def ops(host_ops: Operators) -> Operators:
    """The interpreter takes a hundredth of a second for a row; its kernels have tests of fewer rows."""
    return host_ops


def python_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python's own integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 % 2**32, (p0 >> 32) ^ c[3] ^ k1, p0 % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def signed(seed: int) -> int:
    """The bits of an unsigned 64-bit value as int64."""
    return seed - 2**64 if seed >= 2**63 else seed


def sampling_batch(num_rows: int, **columns: object) -> SamplingBatch:
    """Plain sampling with seeds 0, 1, 2, …, but for the columns given (a value for all, or one a row)."""
    defaults = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": list(range(num_rows)),
        "choice": 0,
        "position": 0,
    }
    kinds = {"top_k": torch.int32, "seed": torch.int64, "choice": torch.int32, "position": torch.int32}
    return SamplingBatch(
        **{
            name: torch.tensor(value if isinstance(value, list) else [value] * num_rows, dtype=kinds.get(name, torch.float32))
            for name, value in (defaults | columns).items()
        }
    )


def rows_of(batch: SamplingBatch, rows: list[int]) -> SamplingBatch:
    return SamplingBatch(**{field.name: getattr(batch, field.name)[rows] for field in fields(batch)})


def allowed_tokens(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """What the three filters keep, one token after another, with the renormalised probabilities; in fp64."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    largest = max(logits)
    weight = [math.exp((logit - largest) / temperature) for logit in logits]
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        needed, kept, mass = top_p * sum(weight[token] for token in order), [], 0.0
        for token in order:
            kept.append(token)
            mass += weight[token]
            if mass >= needed:
                break
        order = kept
    order = [token for token in order if weight[token] >= min_p]
    total = sum(weight[token] for token in order)
    return {token: weight[token] / total for token in sorted(order)}


def are_draws_of(allowed: dict[int, float], tokens: list[int], uniforms: list[float]) -> bool:
    """Whether each token is the inverse CDF of its uniform, or the neighbour of a step within 1e-5 of it."""
    ends = dict(zip(allowed, accumulate(allowed.values()), strict=True))
    return all(
        token in allowed and ends[token] - allowed[token] - 1e-5 <= uniform < ends[token] + 1e-5
        for token, uniform in zip(tokens, uniforms, strict=True)
    )


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """The three vectors for philox4x32-10 that come with Random123."""
    words = philox4x32(tuple(torch.tensor([word]) for word in key), tuple(torch.tensor([word]) for word in counter))
    assert [int(word) for word in words] == expected
    assert python_philox(counter, key) == expected


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=8))
@example([(2**64 - 1, 0, 0), (2**63, 1, 2**31 - 1), (0x1234567890ABCDEF, 3, 77)])
def test_uniform_is_philox_of_seed_choice_and_position(ops: Operators, rows):
    seeds, choices, positions = zip(*rows, strict=True)
    actual = ops.philox_uniform(
        torch.tensor([signed(seed) for seed in seeds]),
        torch.tensor(choices, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
    )
    expected = [
        (python_philox([choice, position, 0, 0], [seed % 2**32, seed >> 32])[0] >> 8) / 2**24 for seed, choice, position in rows
    ]
    assert actual.dtype == torch.float32
    assert actual.tolist() == expected
    assert all(0 <= value < 1 for value in expected)


def test_greedy_takes_the_lowest_of_equals(ops: Operators):
    logits = torch.zeros(4, 1000)
    logits[0, [7, 700]] = 1.0
    logits[1, [0, 999]] = 2.0
    logits[3] = -torch.inf
    logits[3, 500:] = -5.0
    assert ops.sample(logits, sampling_batch(4, temperature=0.0)).tolist() == [7, 0, 0, 500]


def test_greedy_and_drawn_rows_side_by_side(ops: Operators):
    logits = torch.randn(6, 50)
    before = logits.clone()
    tokens = ops.sample(logits, sampling_batch(6, temperature=[0.0, 1.0, 0.0, 2.0, 0.5, 0.0], top_k=[0, 5, 3, 0, 0, 1]))
    assert torch.equal(logits, before)
    assert torch.equal(tokens[[0, 2, 5]], logits[[0, 2, 5]].argmax(-1))
    assert tokens.dtype == torch.int64


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    logits=st.lists(st.integers(-16, 16).map(lambda value: value / 4), min_size=1, max_size=30),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 32),
    top_p=st.sampled_from([0.0, 0.1, 0.53, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.31, 1.0]),
)
def test_filters_keep_what_the_naive_ones_keep(ops: Operators, logits, temperature, top_k, top_p, min_p):
    """Quarter-steps make ties common. 48 draws cover the CDF of whatever stays."""
    num_rows = 48
    batch = sampling_batch(num_rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens = ops.sample(torch.tensor(logits).repeat(num_rows, 1), batch).tolist()
    # Where a filter's edge lies within rounding of a token, both sides of the edge are right.
    candidates = [
        allowed_tokens(
            logits, temperature, top_k, top_p * (1 + shift) if 0 < top_p < 1 else top_p, min_p * (1 + shift) if min_p < 1 else min_p
        )
        for shift in (-1e-6, 1e-6)
    ]
    uniforms = ops.philox_uniform(batch.seed, batch.choice, batch.position).tolist()
    assert any(are_draws_of(allowed, tokens, uniforms) for allowed in candidates)


@pytest.mark.parametrize("vocabulary", [300, 5000])
@pytest.mark.parametrize(
    "options", [{"top_p": 0.97}, {"top_p": 0.9999}, {"top_k": 290}, {"top_k": 290, "top_p": 0.8}, {"min_p": 0.02}]
)
def test_nuclei_wider_than_the_first_look(ops: Operators, vocabulary, options):
    num_rows = 40
    logits = torch.randn(vocabulary)
    batch = sampling_batch(num_rows, **options)
    tokens = ops.sample(logits.repeat(num_rows, 1), batch).tolist()
    allowed = allowed_tokens(logits.tolist(), **({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options))
    uniforms = ops.philox_uniform(batch.seed, batch.choice, batch.position).tolist()
    assert are_draws_of(allowed, tokens, uniforms)


def test_equal_logits_are_cut_at_the_lowest_ids(ops: Operators):
    """A flat row: any filter keeps a beginning of the ids."""
    logits = torch.zeros(512, 100)
    for options, kept in (({"top_k": 7}, 7), ({"top_p": 0.25}, 25), ({"top_k": 40, "top_p": 0.5}, 20), ({"min_p": 1.0}, 100)):
        tokens = ops.sample(logits, sampling_batch(512, **options))
        assert sorted(set(tokens.tolist())) == list(range(kept))


def test_masked_tokens_are_never_drawn(ops: Operators):
    logits = torch.randn(256, 64)
    logits[:, ::2] = -torch.inf
    logits[:, -1] = -torch.inf
    for options in ({}, {"top_k": 60}, {"top_p": 0.999999}, {"temperature": 50.0}):
        tokens = ops.sample(logits, sampling_batch(256, **options))
        assert (tokens % 2 == 1).all()
        assert (tokens != 63).all()


def test_the_noise_at_its_ends_and_on_a_step(ops: Operators):
    """Seeds found by search whose noise is exactly 0, 1/2 and the largest below 1."""
    batch = sampling_batch(3, seed=[12121362, 515707, 16390493])
    assert ops.philox_uniform(batch.seed, batch.choice, batch.position).tolist() == [0.0, 0.5, 1 - 2**-24]
    logits = torch.zeros(3, 4)
    logits[:, [0, 3]] = -torch.inf
    # 0 skips the impossible first token, 1/2 on the step between two takes the second, the largest stays before the last.
    assert ops.sample(logits, batch).tolist() == [1, 2, 2]


def test_a_temperature_near_zero_is_greedy(ops: Operators):
    logits = torch.randn(32, 64) * 30
    assert torch.equal(ops.sample(logits, sampling_batch(32, temperature=1e-30)), logits.argmax(-1))


def test_draws_follow_the_distribution(ops: Operators):
    """Chi-squared over a fixed set of seeds, against the 99.9th percentile of 18 degrees of freedom."""
    probabilities = torch.arange(1, 20, dtype=torch.float32)
    probabilities /= probabilities.sum()
    num_rows = 8000
    tokens = ops.sample(probabilities.log().repeat(num_rows, 1), sampling_batch(num_rows))
    counts = tokens.bincount(minlength=19).double()
    expected = probabilities.double() * num_rows
    assert float(((counts - expected) ** 2 / expected).sum()) < 42.31


def test_choice_and_position_change_the_draw(ops: Operators):
    logits = torch.zeros(64, 50000)
    by_choice = ops.sample(logits, sampling_batch(64, seed=5, choice=list(range(64))))
    by_position = ops.sample(logits, sampling_batch(64, seed=5, position=list(range(64))))
    assert len(set(by_choice.tolist())) > 60
    assert len(set(by_position.tolist())) > 60


def test_a_draw_ignores_its_neighbours(ops: Operators):
    num_rows = 24
    logits = torch.randn(num_rows, 1031) * 3
    batch = sampling_batch(
        num_rows,
        temperature=[0.0, 0.7, 1.3] * 8,
        top_k=[0, 0, 50, 3] * 6,
        top_p=[1.0, 0.9, 1.0, 0.5, 0.99, 1.0] * 4,
        min_p=[0.0, 0.0, 0.1] * 8,
        position=list(range(num_rows)),
    )
    together = ops.sample(logits, batch)
    for row in range(num_rows):
        assert ops.sample(logits[row : row + 1], rows_of(batch, [row])).tolist() == [int(together[row])]
    order = torch.randperm(num_rows).tolist()
    assert torch.equal(ops.sample(logits[order], rows_of(batch, order)), together[order])


def test_a_row_of_nan_stays_in_range_and_to_itself(ops: Operators):
    logits = torch.randn(6, 40)
    batch = sampling_batch(6, top_p=[1.0, 0.9, 1.0, 1.0, 0.9, 1.0], top_k=[0, 0, 4, 0, 0, 4])
    clean = ops.sample(logits, batch)
    logits[:3] = float("nan")
    tokens = ops.sample(logits, batch)
    assert ((tokens >= 0) & (tokens < 40)).all()
    assert torch.equal(tokens[3:], clean[3:])


def test_logprobs_of_a_row_with_nan_and_equals_keep_to_themselves(ops: Operators):
    logits = torch.randn(3, 40)
    token_ids = torch.tensor([1, 2, 3])
    clean = ops.token_logprobs(logits, token_ids, 5)
    logits[1] = 1.0
    logits[1, 7] = float("nan")
    found = ops.token_logprobs(logits, token_ids, 5)
    assert found[0][1].isnan()
    assert ((found[1] >= 0) & (found[1] < 40)).all()
    for one, other in zip(found, clean, strict=True):
        assert torch.equal(one[::2], other[::2])


def naive_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[list[float], list[list[int]], list[list[float]]]:
    logprobs = logits.double().log_softmax(-1)
    chosen = [float(logprobs[row, token]) for row, token in enumerate(token_ids.tolist())]
    order = [sorted(range(logits.shape[1]), key=lambda token: (-row[token], token))[:num_top] for row in logits.tolist()]
    return chosen, order, [[float(logprobs[row, token]) for token in tokens] for row, tokens in enumerate(order)]


@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 64])
@pytest.mark.parametrize("step", [None, 0.5])
def test_logprobs_and_their_order(ops: Operators, num_top, step):
    """``step`` rounds the logits, so that equals lie both inside the top and across its edge."""
    logits = torch.randn(12, 64)
    if step is not None:
        logits = (logits / step).round() * step
    token_ids = torch.randint(0, 64, (12,))
    logprobs, top_ids, top_logprobs = ops.token_logprobs(logits, token_ids, num_top)
    chosen, order, values = naive_logprobs(logits, token_ids, num_top)
    assert (logprobs.dtype, top_ids.dtype, top_logprobs.dtype) == (torch.float32, torch.int64, torch.float32)
    assert top_ids.tolist() == order
    torch.testing.assert_close(logprobs.double(), torch.tensor(chosen, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        top_logprobs.double(), torch.tensor(values, dtype=torch.float64).view(12, num_top), rtol=1e-5, atol=1e-5
    )


def test_logprobs_keep_every_bit_whatever_the_neighbours(ops: Operators):
    logits, token_ids = torch.randn(9, 1031), torch.arange(9)
    together = ops.token_logprobs(logits, token_ids, 3)
    for row in range(9):
        alone = ops.token_logprobs(logits[row : row + 1], token_ids[row : row + 1], 3)
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("logits", lambda ops: ops.sample(torch.zeros(2, 8).bfloat16(), sampling_batch(2))),
        ("batch.temperature", lambda ops: ops.sample(torch.zeros(2, 8), sampling_batch(3))),
        ("logits", lambda ops: ops.token_logprobs(torch.zeros(8), torch.zeros(1).long(), 0)),
        ("token_ids", lambda ops: ops.token_logprobs(torch.zeros(2, 8), torch.zeros(3).long(), 0)),
        ("token_ids", lambda ops: ops.token_logprobs(torch.zeros(2, 8), torch.zeros(2).int(), 0)),
        ("logits", lambda ops: ops.sample(torch.zeros(2, 0), sampling_batch(2))),
        ("logits", lambda ops: ops.finite_rows(torch.zeros(2, 0))),
        ("logits", lambda ops: ops.token_logprobs(torch.zeros(2, 0), torch.zeros(2).long(), 0)),
        ("num_top", lambda ops: ops.token_logprobs(torch.zeros(2, 8), torch.zeros(2).long(), 9)),
        ("seed", lambda ops: ops.philox_uniform(torch.zeros(2), torch.zeros(2).int(), torch.zeros(2).int())),
        ("choice", lambda ops: ops.philox_uniform(torch.zeros(2).long(), torch.zeros(3).int(), torch.zeros(2).int())),
    ],
)
def test_a_wrong_argument_is_named(ops: Operators, argument, call):
    with pytest.raises(ValueError, match=f"^{argument}:"):
        call(ops)
