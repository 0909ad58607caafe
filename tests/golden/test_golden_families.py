"""The product's specification: in fp32, whatever the engine does meanwhile, a request gets what transformers and PEFT give it."""

from __future__ import annotations

from itertools import combinations

import pytest

SHORT = [11, 250, 3, 77, 140, 9, 9, 201, 64, 5, 300, 18, 42]
PROMPTS = [SHORT, [7], [(13 * i * i + 5 * i + 1) % 320 for i in range(41)]]


@pytest.fixture
def mixed(golden, job):
    """The short prompt for the base and for every adapter."""
    return [job(SHORT, name) for name in (None, *golden.adapters)]


def test_every_adapter_changes_the_base_in_its_own_way(golden) -> None:
    """So that nothing below can pass by doing nothing."""
    outputs = [golden.expected(name, SHORT) for name in (None, *golden.adapters)]
    for one, other in combinations(outputs, 2):
        assert max(abs(x - y) for x, y in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)) > 0.01


def test_base_alone(golden, job, start_engine, assert_matches) -> None:
    engine = start_engine(store=None)
    for prompt in PROMPTS:
        request = job(prompt, scores_prompt=True)
        (answer,) = engine.run(request)
        assert_matches(golden, request, answer)


def test_mixed_batch_of_adapters_and_base(golden, job, start_engine, assert_matches) -> None:
    jobs = [job(prompt, name, scores_prompt=True) for prompt in PROMPTS for name in (None, *golden.adapters)]
    for request, answer in zip(jobs, start_engine().run(*jobs), strict=True):
        assert_matches(golden, request, answer)


@pytest.mark.parametrize("chunk", range(1, len(SHORT) + 1))
def test_every_chunk_size(golden, job, start_engine, assert_matches, chunk) -> None:
    jobs = [job(SHORT, name, scores_prompt=True, max_tokens=3) for name in (None, *golden.adapters)]
    for request, answer in zip(jobs, start_engine(prefill_chunk_size=chunk).run(*jobs), strict=True):
        assert_matches(golden, request, answer)


def test_a_token_budget_smaller_than_the_batch(golden, job, start_engine, assert_matches) -> None:
    jobs = [job(prompt, name, scores_prompt=True) for prompt in PROMPTS for name in (None, *golden.adapters)]
    engine = start_engine(max_num_batched_tokens=24, max_num_seqs=9)
    for request, answer in zip(jobs, engine.run(*jobs), strict=True):
        assert_matches(golden, request, answer)


def test_prefix_hit_and_miss(golden, job, mixed, start_engine, assert_matches) -> None:
    engine = start_engine()
    first, again = engine.run(*mixed), engine.run(*mixed)
    for request, missed, hit in zip(mixed, first, again, strict=True):
        assert (missed.cached_tokens, hit.cached_tokens) == (0, 12)  # whole blocks of 4, never the last token
        assert_matches(golden, request, missed)
        assert_matches(golden, request, hit)
    forked = [job([*SHORT[:9], 17, 6], request.adapter) for request in mixed]
    for request, answer in zip(forked, engine.run(*forked), strict=True):
        assert answer.cached_tokens == 8
        assert_matches(golden, request, answer)
    stranger = job(SHORT, "rank4", cache_salt=b"another tenant")
    (answer,) = engine.run(stranger)
    assert answer.cached_tokens == 0
    assert_matches(golden, stranger, answer)


def test_preemption(golden, mixed, start_engine, assert_matches) -> None:
    """All prompts nearly fit at once, their outputs do not: 7 requests want 5 blocks of 4 tokens each, and there are 24."""
    engine = start_engine(kv_memory_bytes=24 * 4 * golden.kv_bytes_per_token, enable_prefix_caching=False)
    engine.run(*mixed)  # brings the adapters to the device, so that below all requests start together
    before = engine.stat("preemptions_total")
    answers = engine.run(*mixed)
    assert engine.stat("preemptions_total") > before
    for request, answer in zip(mixed, answers, strict=True):
        assert_matches(golden, request, answer)


def test_eviction_and_reload(golden, mixed, start_engine, assert_matches) -> None:
    """Device memory for the largest adapter and little more: they take turns, twice."""
    engine = start_engine(adapter_memory_bytes=golden.largest_adapter_bytes * 3 // 2, enable_prefix_caching=False)
    for _ in range(2):
        for request, answer in zip(mixed, engine.run(*mixed), strict=True):
            assert_matches(golden, request, answer)
    assert engine.stat("adapter_device_evictions_total") >= len(golden.adapters)


@pytest.mark.parametrize("sent", [1, 4, 7])
def test_resumption_after_tokens_already_sent(golden, job, mixed, start_engine, assert_matches, sent) -> None:
    jobs = [job(r.prompt, r.adapter, output_ids=golden.expected(r.adapter, r.prompt).token_ids[:sent]) for r in mixed]
    for request, answer in zip(jobs, start_engine(prefill_chunk_size=5).run(*jobs), strict=True):
        assert answer.first_output_index == sent
        assert_matches(golden, request, answer)


def test_drawn_tokens_are_the_same_alone_and_in_any_company(golden, job, start_engine) -> None:
    """The noise belongs to seed and position, so neither neighbours nor chunks nor preemption nor resumption show."""
    jobs = [job(SHORT, name, temperature=1.0, seed=7 + i) for i, name in enumerate((None, *golden.adapters))]
    engine = start_engine(enable_prefix_caching=False)
    alone = [engine.run(request)[0].token_ids for request in jobs]
    assert len({tuple(tokens) for tokens in alone}) == len(jobs)
    crowded = start_engine(kv_memory_bytes=24 * 4 * golden.kv_bytes_per_token, prefill_chunk_size=3)
    assert [answer.token_ids for answer in crowded.run(*jobs)] == alone
    resumed = [
        job(r.prompt, r.adapter, temperature=1.0, seed=r.seed, output_ids=tokens[:4]) for r, tokens in zip(jobs, alone, strict=True)
    ]
    assert [answer.token_ids for answer in crowded.run(*resumed)] == [tokens[4:] for tokens in alone]


def test_everything_comes_back(golden, mixed, start_engine) -> None:
    engine = start_engine()
    before = engine.stat("kv_blocks_free") + engine.stat("kv_blocks_cached")
    engine.run(*mixed)
    assert engine.stat("kv_blocks_free") + engine.stat("kv_blocks_cached") == before
    assert engine.stat("kv_blocks_used") == 0
