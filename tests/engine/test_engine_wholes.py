"""Adapters that bring tensors whole, in mixed steps: each gives what a plain model gives into which its tensors were put."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_twins import TwinDevice
from tiny_engine import BLOCK, BLOCK_BYTES, VOCAB_SIZE, TinyEngine
from whole_adapters import WIDE, WholeModel, make_whole_model

from graftwork_engine import assembly
from graftwork_engine.errors import RequestRejected
from graftwork_engine.messages import Sampling

KINDS = ("embedding", "head", "norms", "linears", "tokens", "lora", "wide", "narrow", "everything", "plain")
TOKENS = 6
PROMPT = [(5 * i * i + 3) % 90 for i in range(21)]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WholeModel:
    return make_whole_model(tmp_path_factory.mktemp("wholes"), is_tied=request.param)


@pytest.fixture
def start(model: WholeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TinyEngine]]:
    engines: list[TinyEngine] = []

    def begin(*, is_ahead: bool = False, **settings: Any) -> TinyEngine:
        if is_ahead:
            monkeypatch.setattr(assembly, "open_device", lambda _: TwinDevice())
        engines.append(TinyEngine(model.tiny, tmp_path / f"cache{len(engines)}", **settings))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def add(engine: TinyEngine, model: WholeModel, adapter: str | None, prompt: list[int], start: int = 0, **controls: Any) -> str:
    sampling = Sampling(**{"max_tokens": TOKENS, "seed": 1, "temperature": 0.0, "logprobs": 0, **controls})
    vocab_size = model.adapters[adapter].vocab_size
    return engine.add(adapter, prompt, TOKENS, adapter_start=start, vocab_size=vocab_size, sampling=sampling)


def check(engine: TinyEngine, model: WholeModel, name: str, adapter: str | None, prompt: list[int], start: int = 0) -> None:
    expected = model.run(adapter, prompt, len(engine.outputs[name]), start)
    assert engine.outputs[name] == expected.tokens, (name, adapter)
    assert [entry.logprob for entry in engine.logprobs[name]] == pytest.approx(expected.logprobs, abs=1e-4), adapter


def prompt_of(model: WholeModel, adapter: str | None, number: int) -> list[int]:
    """Alike at the beginning, with tokens that only this adapter knows, if it brings some."""
    own = model.adapters[adapter].vocab_size or VOCAB_SIZE
    return [*PROMPT[: 9 + number % 4], number % own, own - 1, *PROMPT[:number]]


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waits", "ahead"])
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_each_kind_in_one_step_with_all_others(
    model: WholeModel, start: Callable[..., TinyEngine], kernels: str, is_ahead: bool
) -> None:
    """Chunks of prompts, single tokens, base rows and every kind of adapter side by side; those with wholes come and go."""
    engine = start(is_ahead=is_ahead, kernels={"all": kernels}, max_num_batched_tokens=64, prefill_chunk_size=7)
    jobs = [(adapter, prompt_of(model, adapter, number)) for number, adapter in enumerate([*KINDS, None, "wide", None, *KINDS])]
    names = []
    for adapter, prompt in jobs:
        names.append(add(engine, model, adapter, prompt, max_tokens=TOKENS - len(names) % 3))
        engine.step()
    engine.finish()
    for name, (adapter, prompt) in zip(names, jobs, strict=True):
        check(engine, model, name, adapter, prompt)
    assert engine.stat("cached_tokens_total") > 0  # the second of each kind finds blocks of the first
    assert engine.stat("adapter_whole_bytes") > 0


def test_little_memory_of_every_kind(model: WholeModel, start: Callable[..., TinyEngine]) -> None:
    """Preemption, eviction and reload: room for the largest wholes and little more, for few blocks and few adapters on the host."""
    largest = max(adapter.whole_bytes for adapter in model.adapters.values())
    engine = start(
        kv_memory_bytes=16 * BLOCK_BYTES,
        adapter_whole_bytes=largest + 4096,
        adapter_host_bytes=3 * max(model.tiny.num_bytes.values()),
        max_num_batched_tokens=24,
        max_num_seqs=4,
    )
    jobs = [(adapter, prompt_of(model, adapter, number)) for number, adapter in enumerate([*KINDS, None, *KINDS])]
    names = [add(engine, model, adapter, prompt, max_tokens=12) for adapter, prompt in jobs]
    engine.finish()
    for name, (adapter, prompt) in zip(names, jobs, strict=True):
        check(engine, model, name, adapter, prompt)
    assert engine.stat("preemptions_total") > 0
    assert engine.stat("adapter_device_evictions_total") > 0
    assert engine.stat("adapter_whole_bytes") <= largest + 4096


def test_one_resumes_where_it_was(model: WholeModel, start: Callable[..., TinyEngine]) -> None:
    engine = start()
    whole = model.run("wide", PROMPT, TOKENS, 5).tokens
    sampling = Sampling(TOKENS, 1, temperature=0.0)
    name = engine.add("wide", PROMPT, TOKENS, output=whole[:3], adapter_start=5, vocab_size=WIDE, sampling=sampling)
    engine.finish()
    assert engine.outputs[name] == whole


def test_a_base_in_bf16_has_them_in_bf16(model: WholeModel, start: Callable[..., TinyEngine]) -> None:
    """Packed in fp32 here, and cast at load; what is rounded shows in the third digit, what is wrong in the first."""
    engine = start(dtype="bfloat16")
    names = {kind: add(engine, model, kind, prompt_of(model, kind, 2), prompt_logprobs=0, max_tokens=1) for kind in (None, *KINDS)}
    engine.finish()
    tensors = [tensor for brought in engine.assembly.residency._pool.wholes.values() for tensor in brought.tensors.values()]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16, torch.float32, torch.int64}
    errors = {}
    for kind, name in names.items():
        expected = model.run(kind, prompt_of(model, kind, 2), 1).prompt_logprobs
        got = [entry.logprob for entry in engine.prompt_logprobs[name] if entry is not None]
        errors[kind] = sum(abs(a - b) for a, b in zip(got, expected, strict=True)) / len(expected)
    assert max(errors.values()) < 3 * errors[None] < 0.6, errors


# The vocabulary.


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waits", "ahead"])
def test_controls_reach_added_tokens(model: WholeModel, start: Callable[..., TinyEngine], is_ahead: bool) -> None:
    """A bias that makes an added token certain, a penalty that takes it away again, logprobs and the prompt's: beside base rows."""
    engine = start(is_ahead=is_ahead)
    added, prompt = WIDE - 1, [*PROMPT[:7], WIDE - 1, 4]
    biased = add(engine, model, "wide", prompt, logit_bias={added: 1000.0}, max_tokens=3)
    punished = add(engine, model, "wide", prompt, logit_bias={added: 1000.0}, frequency_penalty=900.0, logprobs=WIDE, max_tokens=2)
    stopped = add(engine, model, "wide", prompt, logit_bias={added: 1000.0}, stop_token_ids=(added,), min_tokens=1, max_tokens=4)
    scored = add(engine, model, "wide", prompt, prompt_logprobs=2)
    base = add(engine, model, None, PROMPT, logprobs=VOCAB_SIZE)
    sampled = [add(engine, model, "wide", prompt, temperature=1.0, top_k=3, seed=seed, max_tokens=1) for seed in range(8)]
    engine.finish()
    assert engine.outputs[biased] == [added] * 3
    assert engine.outputs[punished][0] == added
    first = engine.logprobs[punished][0]
    raw = model.run("wide", prompt, 1).logits[0].log_softmax(-1)
    assert sorted(first.top_ids) == list(range(WIDE))
    assert first.logprob == pytest.approx(float(raw[added]), abs=1e-4)
    assert engine.finished[stopped] in ("stop", "length")
    assert added not in engine.outputs[stopped][:1]
    expected = model.run("wide", prompt, 1).prompt_logprobs
    got = engine.prompt_logprobs[scored]
    assert [entry.logprob for entry in got if entry is not None] == pytest.approx(expected, abs=1e-4)
    check(engine, model, base, None, PROMPT)
    assert sorted(engine.logprobs[base][0].top_ids) == list(range(VOCAB_SIZE))
    likely = set(raw.topk(3).indices.tolist())
    assert all(set(engine.outputs[name]) <= likely for name in sampled)


def test_ids_are_bound_by_what_the_request_knows(model: WholeModel, start: Callable[..., TinyEngine]) -> None:
    engine = start()
    for adapter, prompt, offset, controls, finding in (
        ("wide", [WIDE], 0, {}, f"token id {WIDE} is not in 0..{WIDE - 1}"),
        ("wide", [3], 0, {"logit_bias": {WIDE: 1.0}}, f"logit_bias: token id {WIDE} is not"),
        ("wide", [3], 0, {"min_tokens": 1, "stop_token_ids": (WIDE,)}, f"stop_token_ids: token id {WIDE} is not"),
        ("wide", [3], 0, {"logprobs": WIDE + 1}, "logprobs is"),
        ("wide", [VOCAB_SIZE, 3], 1, {}, f"before the adapter applies: token id {VOCAB_SIZE} is not in 0..{VOCAB_SIZE - 1}"),
        (None, [VOCAB_SIZE], 0, {}, f"token id {VOCAB_SIZE} is not"),
        ("narrow", [VOCAB_SIZE - 1], 0, {}, f"token id {VOCAB_SIZE - 1} is not in 0..{VOCAB_SIZE - 6}"),
        ("wide", [3, 4], 3, {}, "adapter_start is 3: it must be in 0..2"),
        ("wide", [3, 4], -1, {}, "adapter_start is -1: it must be in 0..2"),
    ):
        with pytest.raises(RequestRejected, match=finding):
            add(engine, model, adapter, prompt, offset, **controls)
    with pytest.raises(RequestRejected, match="vocab_size is that of an adapter, and the request names none"):
        engine.add(None, [1], 1, vocab_size=WIDE)
    with pytest.raises(RequestRejected, match="vocab_size is 0: it must be above 0"):
        engine.add("wide", [1], 1, vocab_size=0)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waits", "ahead"])
def test_a_wrong_vocabulary_fails_the_request_alone(model: WholeModel, start: Callable[..., TinyEngine], is_ahead: bool) -> None:
    engine = start(is_ahead=is_ahead)
    wrong = [
        engine.add(adapter, [3, known - 1], 4, vocab_size=known)
        for adapter, known in (("wide", WIDE + 5), ("wide", WIDE - 1), ("plain", WIDE), ("head", WIDE), ("narrow", VOCAB_SIZE))
    ]
    wrong.append(engine.add("wide", [3], 4))
    right = add(engine, model, "wide", PROMPT)
    engine.finish()
    for name in wrong:
        assert engine.finished[name] == "internal_error"
        assert "tokens, the request takes it to know" in engine.errors[name]
    check(engine, model, right, "wide", PROMPT)


def test_rows_that_are_not_finite_draw_nothing_that_the_next_step_cannot_look_up(
    model: WholeModel, start: Callable[..., TinyEngine]
) -> None:
    """A base row beside another's wider logits may draw any of those, and in a step ahead that is looked up before it is known."""
    engine = start(is_ahead=True)
    runner = engine.core._runner  # type: ignore[attr-defined]
    operators, width = runner._ops, []

    def draw_the_last(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        width.append(logits.shape[1])
        return torch.full((len(logits),), logits.shape[1] - 1)

    operators.sample = draw_the_last
    names = [add(engine, model, adapter, PROMPT) for adapter in ("wide", None, "narrow", "everything")]
    engine.finish()
    assert max(width) == WIDE
    last = [WIDE - 1, VOCAB_SIZE - 1, VOCAB_SIZE - 6, WIDE - 2]
    assert [engine.outputs[name] for name in names] == [[token] * TOKENS for token in last]


# An adapter that starts later.


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waits", "ahead"])
def test_what_comes_before_the_start_is_shared_with_the_base(
    model: WholeModel, start: Callable[..., TinyEngine], is_ahead: bool
) -> None:
    """The base computes a prompt; adapters that start in it find all full blocks before, wherever in a block that is."""
    engine = start(is_ahead=is_ahead)
    base = add(engine, model, None, PROMPT)
    engine.finish()
    check(engine, model, base, None, PROMPT)
    for adapter in ("plain", "linears", "wide", "head"):
        for begin in (3, 8, 10, 19, len(PROMPT)):
            name = add(engine, model, adapter, PROMPT, begin)
            engine.finish()
            check(engine, model, name, adapter, PROMPT, begin)
            shared = min(begin, len(PROMPT) - 1) // BLOCK * BLOCK
            assert engine.cached.get(name, 0) == shared, (adapter, begin)


def test_two_adapters_share_what_comes_before_and_nothing_else(model: WholeModel, start: Callable[..., TinyEngine]) -> None:
    engine = start()
    names = []
    for adapter in ("lora", "wide", "lora"):
        names.append(add(engine, model, adapter, PROMPT, 10))
        engine.finish()
        check(engine, model, names[-1], adapter, PROMPT, 10)
    assert [engine.cached.get(name, 0) for name in names] == [0, 8, 20]


def test_starts_of_all_kinds_in_chunks_and_under_preemption(model: WholeModel, start: Callable[..., TinyEngine]) -> None:
    engine = start(kv_memory_bytes=18 * BLOCK_BYTES, max_num_batched_tokens=16, max_num_seqs=4, prefill_chunk_size=5)
    jobs = [(adapter, PROMPT[: 12 + number % 9], 3 + number) for number, adapter in enumerate(KINDS)]
    names = [add(engine, model, adapter, prompt, begin, max_tokens=10) for adapter, prompt, begin in jobs]
    names += [add(engine, model, None, prompt, max_tokens=10) for _, prompt, _ in jobs[:3]]
    engine.finish()
    for name, (adapter, prompt, begin) in zip(names, [*jobs, *((None, job[1], 0) for job in jobs[:3])], strict=True):
        check(engine, model, name, adapter, prompt, begin)
    assert engine.stat("preemptions_total") > 0


# Everything at once.


def test_whatever_comes_each_request_gets_its_own(model: WholeModel, start: Callable[..., TinyEngine]) -> None:
    """Everything too small, requests of all kinds that start anywhere, some aborted, some resumed; a step ahead where the base is
    tied."""
    largest = max(adapter.whole_bytes for adapter in model.adapters.values())
    engine = start(
        is_ahead=model.plain[None].config.tie_word_embeddings,
        kv_memory_bytes=12 * BLOCK_BYTES,
        adapter_memory_bytes=model.tiny.room_for("wide", "plain"),
        adapter_whole_bytes=largest + 3000,
        adapter_host_bytes=3 * max(model.tiny.num_bytes.values()),
        adapter_disk_bytes=4 * max(model.tiny.num_bytes.values()),
        max_num_batched_tokens=24,
        max_num_seqs=4,
        prefill_chunk_size=10,
    )
    chance = random.Random(11)
    prompts = [PROMPT[:length] for length in (1, 6, 14, 21)]
    solo = {}
    for kind in (None, *KINDS):
        for prompt in prompts:
            begin = chance.choice((0, 0, len(prompt) // 2, len(prompt)))
            solo[kind, len(prompt)] = prompt, begin, model.run(kind, prompt, 12, begin).tokens
    asked, aborted = {}, set()
    for _ in range(70):
        (kind, _), (prompt, begin, whole) = chance.choice(list(solo.items()))
        max_tokens = chance.randrange(1, 13)
        sent = whole[: chance.randrange(max_tokens)] if chance.random() < 0.2 else []
        known = model.adapters[kind].vocab_size
        asked[engine.add(kind, prompt, max_tokens, output=sent, adapter_start=begin, vocab_size=known)] = whole[:max_tokens]
        if chance.random() < 0.15:
            gone = chance.choice([name for name in asked if name not in engine.finished])
            if engine.core.abort(gone) is not None:
                aborted.add(gone)
        for _ in range(chance.randrange(6)):
            engine.step()
    engine.finish()
    for name, tokens in asked.items():
        assert engine.outputs[name] == (tokens[: len(engine.outputs[name])] if name in aborted else tokens), name
    for name in ("preemptions_total", "adapter_device_evictions_total", "adapter_host_evictions_total", "cached_tokens_total"):
        assert engine.stat(name) > 0, name
    assert engine.stat("adapter_load_failures_total") == 0
    assert len(aborted) > 2
