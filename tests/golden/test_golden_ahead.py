"""The specification again, of an engine put together as for a GPU: a step ahead, its numbers mirrored, warmed up at the start."""

from __future__ import annotations

import pytest
from device_twins import TwinDevice

SHORT = [11, 250, 3, 77, 140, 9, 9, 201, 64, 5, 300, 18, 42]
PROMPTS = [SHORT, [7], [(13 * i * i + 5 * i + 1) % 320 for i in range(41)]]

pytestmark = pytest.mark.parametrize("golden", ["llama-tied", "qwen3"], indirect=True)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> TwinDevice:
    twin = TwinDevice()
    monkeypatch.setattr("graftwork_engine.assembly.open_device", lambda _config: twin)
    return twin


@pytest.fixture
def mixed(golden, job):
    """The short prompt for the base and for every adapter."""
    return [job(SHORT, name) for name in (None, *golden.adapters)]


@pytest.mark.parametrize("chunk", [None, 3])
def test_mixed_batch_of_adapters_and_base(golden, job, start_engine, assert_matches, device, chunk) -> None:
    jobs = [job(prompt, name, scores_prompt=True) for prompt in PROMPTS for name in (None, *golden.adapters)]
    engine = start_engine(prefill_chunk_size=chunk, max_num_batched_tokens=48, max_num_seqs=9)
    for request, answer in zip(jobs, engine.run(*jobs), strict=True):
        assert_matches(golden, request, answer)
    assert device.num_measured == 1


def test_prefix_hit_and_miss(golden, mixed, start_engine, assert_matches) -> None:
    engine = start_engine()
    first, again = engine.run(*mixed), engine.run(*mixed)
    for request, missed, hit in zip(mixed, first, again, strict=True):
        assert (missed.cached_tokens, hit.cached_tokens) == (0, 12)
        assert_matches(golden, request, missed)
        assert_matches(golden, request, hit)


def test_preemption(golden, mixed, start_engine, assert_matches) -> None:
    engine = start_engine(kv_memory_bytes=24 * 4 * golden.kv_bytes_per_token, enable_prefix_caching=False)
    engine.run(*mixed)
    before = engine.stat("preemptions_total")
    answers = engine.run(*mixed)
    assert engine.stat("preemptions_total") > before
    for request, answer in zip(mixed, answers, strict=True):
        assert_matches(golden, request, answer)


def test_eviction_and_reload(golden, mixed, start_engine, assert_matches) -> None:
    """An adapter's pages are given to the next one as soon as no step that was launched reads them."""
    engine = start_engine(adapter_memory_bytes=golden.largest_adapter_bytes * 3 // 2, enable_prefix_caching=False)
    for _ in range(3):
        for request, answer in zip(mixed, engine.run(*mixed), strict=True):
            assert_matches(golden, request, answer)
    assert engine.stat("adapter_device_evictions_total") >= len(golden.adapters)


@pytest.mark.parametrize("sent", [1, 7])
def test_resumption_after_tokens_already_sent(golden, job, mixed, start_engine, assert_matches, sent) -> None:
    jobs = [job(r.prompt, r.adapter, output_ids=golden.expected(r.adapter, r.prompt).token_ids[:sent]) for r in mixed]
    for request, answer in zip(jobs, start_engine(prefill_chunk_size=5).run(*jobs), strict=True):
        assert answer.first_output_index == sent
        assert_matches(golden, request, answer)
