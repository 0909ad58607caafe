"""Bias, penalties and min_tokens in the engine: what a step is told of them, and that nothing the engine does meanwhile shows."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import BLOCK, CONFIG, REFERENCE, TinyEngine, adapter_memory, random_adapter

from graftwork_adapters.base_spec import PROJECTIONS
from graftwork_engine.batch import BatchBuilder, StepBatch, StepCapacity
from graftwork_engine.errors import ErrorCode, RequestRejected
from graftwork_engine.messages import Sampling
from graftwork_engine.request import Request, RequestId
from graftwork_engine.sched.plan import BASE, ScheduledRequest, StepPlan
from graftwork_engine.token_controls import TokenCounts
from graftwork_kernels.layout import AdapterMemory, empty_adapter_memory
from graftwork_kernels.ops import Operators
from scripted_engine import VOCAB_SIZE, Bench

PLAIN = Sampling(max_tokens=8, seed=0, temperature=0.0)
PROMPT = [5, 90, 17, 33, 61, 2, 44, 8, 71, 29, 13]
INF = float("inf")


def with_fields(**changes: object) -> Sampling:
    return msgspec.structs.replace(PLAIN, **changes)


@pytest.fixture(scope="module")
def memory() -> AdapterMemory:
    return adapter_memory([random_adapter(1, 3, PROJECTIONS), random_adapter(2, 5, ["self_attn.k_proj", "mlp.down_proj"])])


class TestTokenCounts:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6))
    def test_counting_bit_by_bit_is_counting_at_once(self, prompt: list[int], parts: list[list[int]]) -> None:
        counts, output = TokenCounts(prompt), []
        for part in parts:
            output += part
            counts.catch_up(output)
        due = Counter(output)
        assert dict(zip(counts.token_ids, counts.counts, strict=True)) == {token: due[token] for token in {*prompt, *output}}
        assert len(counts.token_ids) == len({*prompt, *output})

    def test_a_step_looks_at_new_tokens_only(self) -> None:
        class Watched(list[int]):
            num_read = 0

            def __getitem__(self, key: int | slice) -> int | list[int]:  # type: ignore[override]
                part = super().__getitem__(key)
                Watched.num_read += 1 if isinstance(part, int) else len(part)
                return part

        output = Watched(range(1000))
        counts = TokenCounts()
        counts.catch_up(output)
        for token in range(50):
            output.append(token)
            counts.catch_up(output)
        assert Watched.num_read == 1050
        assert list(counts.counts) == [2] * 50 + [1] * 950

    def test_the_prompt_is_listed_only_for_a_repetition_penalty(self) -> None:
        for field, listed in (("repetition_penalty", [1, 2, 3]), ("frequency_penalty", [3]), ("presence_penalty", [3])):
            request = Request(RequestId("r"), [1, 2, 2], with_fields(**{field: 0.5}), b"", "", 0.0, output_ids=[3, 3])
            counts = request.token_counts()
            assert counts is not None
            assert counts.token_ids.tolist() == listed
            assert counts.counts.tolist()[-1] == 2


def batch_of(*requests: Request) -> StepBatch:
    parts = [ScheduledRequest(r, r.num_tokens - 1, 1, list(range(9)), BASE, samples=True) for r in requests]
    builder = BatchBuilder(REFERENCE, empty_adapter_memory(CONFIG.num_sites), BLOCK, StepCapacity(9, 9, 9))
    return builder.build(StepPlan(parts))


def request_with(prompt: list[int], output: list[int], **changes: object) -> Request:
    return Request(RequestId("r"), prompt, with_fields(**changes), b"", "", 0.0, output_ids=output)


class TestBatch:
    def test_a_step_without_controls_carries_none(self) -> None:
        batch = batch_of(request_with([1, 2], []), request_with([1], [4], stop_token_ids=(4,)))
        assert batch.logit_bias is None
        assert batch.penalties is None

    def test_every_tensor_of_a_mixed_step(self) -> None:
        batch = batch_of(
            request_with([1, 2, 2], [2, 7], repetition_penalty=1.5, logit_bias={9: 2.5, 3: -1.0}),
            request_with([1], []),
            request_with([5, 6], [8, 8, 6], frequency_penalty=0.5, presence_penalty=-0.25),
            request_with([5], [4], min_tokens=2, stop_token_ids=(11, 3), logit_bias={3: 50.0}),
            request_with([5], [4, 4], min_tokens=2, stop_token_ids=(11, 3), logit_bias={3: 50.0}),
        )
        bias, penalties = batch.logit_bias, batch.penalties
        assert bias is not None
        assert penalties is not None
        assert bias.row_start.tolist() == [0, 2, 2, 2, 4, 5]
        assert bias.token_id.tolist() == [9, 3, 3, 11, 3]
        assert bias.value.tolist() == [2.5, -1.0, -INF, -INF, 50.0]  # up to min_tokens the ban wins over a bias
        assert penalties.row_start.tolist() == [0, 3, 3, 5, 5, 5]
        assert penalties.token_id.tolist() == [1, 2, 7, 8, 6]
        assert penalties.output_count.tolist() == [0, 1, 1, 2, 1]
        assert penalties.repetition.tolist() == [1.5, 1.0, 1.0, 1.0, 1.0]
        assert penalties.frequency.tolist() == [0.0, 0.0, 0.5, 0.0, 0.0]
        assert penalties.presence.tolist() == [0.0, 0.0, -0.25, 0.0, 0.0]
        assert {bias.row_start.dtype, bias.token_id.dtype, penalties.row_start.dtype} == {torch.int32}
        assert {penalties.token_id.dtype, penalties.output_count.dtype} == {torch.int32}
        assert {bias.value.dtype, penalties.repetition.dtype} == {torch.float32}

    def test_it_can_be_built_again_and_goes_on_with_the_output(self) -> None:
        request = request_with([1], [3], frequency_penalty=1.0, min_tokens=2, stop_token_ids=(6,))
        for _ in range(2):
            penalties = batch_of(request).penalties
            assert penalties is not None
            assert penalties.output_count.tolist() == [1]
        request.output_ids += [3, 5]
        batch = batch_of(request)
        assert batch.penalties is not None
        assert batch.penalties.output_count.tolist() == [2, 1]
        assert batch.logit_bias is None  # min_tokens has been reached


class TestRejection:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"logit_bias": {VOCAB_SIZE: 1.0}}, rf"logit_bias: token id {VOCAB_SIZE} is not in 0\.\.{VOCAB_SIZE - 1}"),
            ({"logit_bias": {-1: 1.0}}, "logit_bias: token id -1"),
            ({"logit_bias": {3: float("nan")}}, "logit_bias of token 3 is nan"),
            ({"logit_bias": {3: -INF}}, "logit_bias of token 3 is -inf"),
            ({"logit_bias": {3: 1e39}}, "logit_bias of token 3 is 1e"),
            ({"min_tokens": 9}, r"min_tokens is 9: it must be in 0\.\.8"),
            ({"min_tokens": -1}, "min_tokens is -1"),
            ({"min_tokens": 1, "stop_token_ids": (VOCAB_SIZE,)}, f"stop_token_ids: token id {VOCAB_SIZE}"),
            ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
            ({"frequency_penalty": INF}, "frequency_penalty is inf"),
            ({"frequency_penalty": -1e39}, "frequency_penalty is -1e"),
            ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
            ({"repetition_penalty": -1.0}, "repetition_penalty is -1"),
            ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
            ({"temperature": float("nan")}, "temperature is nan"),
            ({"temperature": -0.5}, "temperature is -0.5"),
            ({"top_p": float("nan")}, "top_p is nan"),
            ({"min_p": 1.5}, "min_p is 1.5"),
            ({"top_k": -1}, "top_k is -1"),
            ({"top_k": 2**31}, "top_k is 2147483648"),
            ({"seed": -1}, "seed is -1"),
            ({"seed": 2**64}, "seed is 18446744073709551616"),
            ({"choice": 2**31}, "choice is 2147483648"),
            ({"logprobs": VOCAB_SIZE + 1}, f"logprobs is {VOCAB_SIZE + 1}"),
            ({"prompt_logprobs": -2}, "prompt_logprobs is -2"),
        ],
    )
    def test_the_field_is_named_and_nothing_is_kept(self, changes: dict[str, object], message: str) -> None:
        bench = Bench()
        request = Request(RequestId("r"), [1, 2], with_fields(**changes), b"", "", 0.0)
        with pytest.raises(RequestRejected, match=message) as caught:
            bench.core.add(request)
        assert caught.value.code is ErrorCode.BAD_REQUEST
        bench.check_idle()

    def test_the_largest_values_run(self, memory: AdapterMemory) -> None:
        """What is let in cannot make a step fail, though a row of it may overflow."""
        engine = TinyEngine(memory)
        extremes = with_fields(
            seed=2**64 - 1,
            choice=2**31 - 1,
            top_k=2**31 - 1,
            temperature=3e38,
            top_p=1e30,
            min_p=1.0,
            min_tokens=8,
            stop_token_ids=tuple(range(96)),
            logprobs=CONFIG.vocab_size,
        )
        assert engine.generate(PROMPT, extremes) == [96] * 8
        for changes in (
            {"logit_bias": {3: 3e38}, "presence_penalty": -3e38},
            {"repetition_penalty": 1e-300},
            {"repetition_penalty": 3e38, "frequency_penalty": 3e38},
            {"temperature": 1e-300, "top_p": 0.0},
        ):
            neighbour = engine.add(PROMPT, PLAIN)
            engine.add(PROMPT, msgspec.structs.replace(with_fields(temperature=1.0), **changes))
            engine.run()
            assert engine.items[neighbour][-1].finish == "length"


class TestMinTokens:
    def test_a_stop_token_is_held_back_and_then_stops(self, memory: AdapterMemory) -> None:
        engine = TinyEngine(memory)
        free = engine.generate(PROMPT, PLAIN)
        stop = free[0]
        assert engine.generate(PROMPT, with_fields(stop_token_ids=(stop,))) == [stop]
        for least in (1, 3, 8):
            tokens = engine.generate(PROMPT, with_fields(stop_token_ids=(stop,), min_tokens=least))
            assert len(tokens) >= least
            assert stop not in tokens[:least]

    def test_a_favoured_stop_token_comes_right_after_the_last_held_back(self, memory: AdapterMemory) -> None:
        engine = TinyEngine(memory, chunk=3)
        sampling = with_fields(stop_token_ids=(7, 30), min_tokens=5, logit_bias={7: 1000.0}, temperature=0.7)
        whole = engine.generate(PROMPT, sampling)
        assert (len(whole), whole[-1]) == (6, 7)
        for sent in range(1, 6):  # tokens from before a resumption count
            assert engine.generate(PROMPT, sampling, output=whole[:sent]) == whole[sent:]

    def test_logprobs_are_of_the_raw_logits(self, memory: AdapterMemory) -> None:
        engine = TinyEngine(memory)
        plain = engine.add(PROMPT, with_fields(logprobs=3))
        engine.run()
        best = engine.items[plain][0].logprobs
        favoured = (engine.tokens(plain)[0] + 1) % 97
        engine = TinyEngine(memory)  # without a prefix to find, the prompt is computed with the same rounding
        controlled = engine.add(
            PROMPT, with_fields(logprobs=3, logit_bias={favoured: 90.0}, repetition_penalty=1.7, presence_penalty=2.0)
        )
        engine.run()
        first = engine.items[controlled][0]
        assert first.token_ids == [favoured]
        assert best is not None
        assert first.logprobs is not None
        assert first.logprobs[0].top_ids == best[0].top_ids
        assert first.logprobs[0].top_logprobs == best[0].top_logprobs
        assert first.logprobs[0].logprob < best[0].logprob

    def test_a_request_that_bans_every_token_ends_alone(self, memory: AdapterMemory) -> None:
        engine = TinyEngine(memory)
        expected = engine.generate(PROMPT, PLAIN)
        neighbour = engine.add(PROMPT, PLAIN)
        for temperature in (0.0, 1.0):
            everything = with_fields(min_tokens=1, stop_token_ids=tuple(range(97)), temperature=temperature, logprobs=1)
            banned = engine.add(PROMPT, everything)
            engine.run()
            (item,) = engine.items[banned]
            assert (item.finish, item.token_ids) == ("error", [])
            assert item.error is not None
            assert item.error.code == ErrorCode.NOTHING_TO_DRAW
            assert "min_tokens" in item.error.message
        assert engine.tokens(neighbour) == expected


def random_sampling(dice: random.Random, **changes: object) -> Sampling:
    """Every control at once, each often off."""
    fields: dict[str, object] = {
        "temperature": dice.choice([0.6, 1.0, 1.4]),
        "top_k": dice.choice([0, 0, 12]),
        "top_p": dice.choice([1.0, 0.95]),
        "presence_penalty": dice.choice([0.0, 0.8, -0.5]),
        "frequency_penalty": dice.choice([0.0, 0.6]),
        "repetition_penalty": dice.choice([1.0, 1.3]),
        "logit_bias": dice.choice([{}, {3: 3.0, 40: -100.0, 77: 2.0}]),
        "min_tokens": dice.choice([0, 6]),
        "stop_token_ids": tuple(dice.sample(range(97), 4)),
        "seed": dice.getrandbits(64),
        "max_tokens": 12,
    }
    return with_fields(**{**fields, **changes})


def test_the_same_tokens_alone_in_company_preempted_and_resumed(memory: AdapterMemory) -> None:
    dice = random.Random(5)
    wanted = [
        (PROMPT[: dice.randint(1, 11)], random_sampling(dice), dice.choice([None, 0, 1]))
        for _ in range(14)
    ]  # fmt: skip
    alone = [TinyEngine(memory).generate(*request) for request in wanted]
    assert len({tuple(tokens) for tokens in alone}) > 10
    for settings_ in ({"budget": 5}, {"num_blocks": 11, "chunk": 3}, {"num_seqs": 3}):
        engine = TinyEngine(memory, **settings_)
        names = [engine.add(*request) for request in wanted]
        engine.run()
        assert [engine.tokens(name) for name in names] == alone
        assert engine.core.stats()["preemptions_total"] > 0 or "num_blocks" not in settings_
    engine = TinyEngine(memory, num_blocks=13)
    cuts = [dice.randint(1, len(tokens)) for tokens in alone]
    names = [
        engine.add(*request, output=tokens[:cut]) for request, tokens, cut in zip(wanted, alone, cuts, strict=True)
    ]  # fmt: skip
    engine.run()
    assert [engine.tokens(name) for name in names] == [tokens[cut:] for tokens, cut in zip(alone, cuts, strict=True)]


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_a_seed_gives_one_output_however_often_and_in_whatever_company(memory: AdapterMemory, seed: int) -> None:
    dice = random.Random(seed)
    sampling = with_fields(temperature=1.0, seed=seed, presence_penalty=0.3, logit_bias={8: 1.5}, max_tokens=5)
    engine = TinyEngine(memory)
    first = engine.generate(PROMPT, sampling, 0)
    for _ in range(10):
        assert engine.generate(PROMPT, sampling, 0) == first
    for _ in range(10):
        others = [(PROMPT[: dice.randint(1, 11)], random_sampling(dice, max_tokens=8), dice.choice([None, 0, 1])) for _ in range(3)]
        others.insert(dice.randint(0, 3), (PROMPT, sampling, 0))
        names = [engine.add(*request) for request in others]
        engine.run()
        assert [engine.tokens(n) for n, (_, s, _) in zip(names, others, strict=True) if s is sampling] == [first]


def test_choice_and_seed_change_the_noise(memory: AdapterMemory) -> None:
    engine = TinyEngine(memory)
    varied = [with_fields(temperature=1.5, seed=s, choice=c) for s, c in ((0, 0), (0, 1), (0, 2), (2**63, 0), (2**64 - 1, 0))]
    names = [engine.add(PROMPT, sampling) for sampling in varied]
    engine.run()
    assert len({tuple(engine.tokens(name)) for name in names}) == len(varied)


def test_a_step_without_controls_makes_nothing_for_them(memory: AdapterMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither operator runs, and no row of logits is copied."""
    engine = TinyEngine(memory)
    seen: list[tuple[int, int]] = []

    def sample(logits: torch.Tensor, batch: object) -> torch.Tensor:
        seen.append((logits.data_ptr(), made[-1]))
        return original(logits, batch)  # type: ignore[arg-type]

    def head(ops: Operators, hidden: torch.Tensor, *_: object) -> torch.Tensor:
        logits = project(ops, hidden)
        made.append(logits.data_ptr())
        return logits

    made: list[int] = []
    original, project = REFERENCE.sample, engine.runner._model.logits
    monkeypatch.setattr(REFERENCE, "sample", sample)
    monkeypatch.setattr(engine.runner._model, "logits", head)
    for name in ("apply_logit_bias", "apply_penalties"):
        monkeypatch.setattr(REFERENCE, name, lambda *_: pytest.fail("called without need"))
    engine.generate(PROMPT, with_fields(stop_token_ids=(1,), max_tokens=3))
    assert len(seen) == 3
    assert all(sampled == given for sampled, given in seen)


def test_draws_under_bias_and_penalties_follow_the_exact_distribution(memory: AdapterMemory) -> None:
    """Chi-squared of 3000 seeds over the likely tokens, against the 99.9th percentile of their number less one."""
    shared = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {3: 2.0, 13: -1.0}}
    output = [8, 8, 3]
    engine = TinyEngine(memory, num_seqs=128, budget=512)
    logits = raw_logits(engine, output).double()
    for token, value in {3: 2.0, 13: -1.0}.items():
        logits[token] += value
    for token in {*PROMPT, *output}:
        logits[token] = logits[token] / 1.4 if logits[token] > 0 else logits[token] * 1.4
    for token, count in Counter(output).items():
        logits[token] -= 0.3 * count + 0.5
    probabilities = (logits / 1.2).softmax(-1)

    names = [engine.add(PROMPT, with_fields(temperature=1.2, max_tokens=4, seed=s, **shared), 0, output) for s in range(3000)]
    engine.run()
    drawn = torch.tensor([engine.tokens(name)[0] for name in names]).bincount(minlength=97).double()
    expected = probabilities * len(names)
    likely = expected >= 8
    cells = [*zip(drawn[likely].tolist(), expected[likely].tolist(), strict=True)]
    cells.append((float(drawn[~likely].sum()), float(expected[~likely].sum())))
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    degrees = len(cells) - 1
    assert degrees > 10
    # Wilson and Hilferty: the cube root of a chi-squared over its degrees is nearly normal; 3.09 is its 99.9th percentile.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3


def raw_logits(engine: TinyEngine, output: list[int]) -> torch.Tensor:
    """The row that follows prompt and output on adapter 0, as the model gives it."""
    kept: list[torch.Tensor] = []
    model = engine.runner._model
    project = model.logits

    def head(ops: Operators, hidden: torch.Tensor, *_: object) -> torch.Tensor:
        kept.append(project(ops, hidden))
        return kept[-1]

    model.logits = head  # type: ignore[method-assign]
    engine.generate(PROMPT, with_fields(max_tokens=4), 0, output)  # no controls, so that the row stays as it is
    model.logits = project  # type: ignore[method-assign]
    return kept[-1][0]


def test_every_field_reaches_the_draw(memory: AdapterMemory) -> None:
    """One control at a time changes greedy output in the direction it says."""
    engine = TinyEngine(memory)
    free = engine.generate(PROMPT, with_fields(max_tokens=24))
    most = Counter(free).most_common(1)[0][1]
    assert most > 2, "the model must repeat itself for this test to mean something"
    for field in ("presence_penalty", "frequency_penalty"):
        assert len(set(engine.generate(PROMPT, with_fields(max_tokens=24, **{field: 1e6})))) == 24
    again = engine.generate(PROMPT, with_fields(max_tokens=24, repetition_penalty=1e6))
    assert len({*again, *PROMPT}) == 24 + len(PROMPT)
    assert engine.generate(PROMPT, with_fields(logit_bias={55: 1e6})) == [55] * 8
    favoured = engine.generate(PROMPT, with_fields(max_tokens=24, presence_penalty=-1e6))
    assert all(one == other for one, other in pairwise(favoured))
