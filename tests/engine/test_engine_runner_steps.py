"""The runner on hand-made plans: however a sequence is cut into steps and blocks, its tokens and logprobs are the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tiny_model import BLOCK, CONFIG, REFERENCE, adapter_memory, make_runner, random_adapter

from graftwork_adapters.base_spec import PROJECTIONS
from graftwork_engine.batch import BatchBuilder, StepBatch, StepCapacity
from graftwork_engine.messages import Sampling, TokenLogprob
from graftwork_engine.request import Request, RequestId
from graftwork_engine.runner import ModelRunner
from graftwork_engine.sched.plan import BASE, RequestResult, ScheduledRequest, StepPlan
from graftwork_kernels.layout import AdapterMemory, empty_adapter_memory

GREEDY = Sampling(max_tokens=8, seed=0, temperature=0.0, logprobs=2)
PROMPT = [5, 90, 17, 33, 61, 2, 44, 8, 71, 29, 13]


@pytest.fixture(scope="module")
def memory() -> AdapterMemory:
    return adapter_memory([random_adapter(1, 3, PROJECTIONS), random_adapter(2, 5, ["self_attn.k_proj", "mlp.down_proj"])])


def make_request(sampling: Sampling = GREEDY, prompt: Sequence[int] = PROMPT, adapter_start: int = 0) -> Request:
    return Request(RequestId("r"), list(prompt), sampling, b"", "", 0.0, adapter_start=adapter_start)


def part(request: Request, start: int, end: int, blocks: Sequence[int], adapter: int = BASE) -> ScheduledRequest:
    return ScheduledRequest(request, start, end - start, list(blocks), adapter, samples=end == request.num_tokens)


def build_batch(plan: StepPlan, memory: AdapterMemory) -> StepBatch:
    return BatchBuilder(REFERENCE, memory, BLOCK, StepCapacity(20, 3, 4)).build(plan)


def generate(
    runner: ModelRunner, request: Request, blocks: Sequence[int], adapter: int = BASE, chunk: int = 64, steps: int = 6
) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
    """Run alone, the prompt in chunks; (logprobs of the output, logprobs of the prompt)."""
    drawn: list[TokenLogprob] = []
    prompt: list[TokenLogprob] = []
    start = 0
    while len(drawn) < steps:
        end = min(start + chunk, request.num_tokens)
        (result,) = runner.execute(StepPlan([part(request, start, end, blocks, adapter)]))
        prompt += result.prompt_logprobs or []
        start = end
        if result.token_id is not None:
            request.output_ids.append(result.token_id)
            assert result.logprob is not None
            drawn.append(result.logprob)
    return drawn, prompt


def assert_close(ours: Sequence[TokenLogprob], theirs: Sequence[TokenLogprob]) -> None:
    assert [x.top_ids for x in ours] == [x.top_ids for x in theirs]
    assert [x.logprob for x in ours] == pytest.approx([x.logprob for x in theirs], abs=1e-5)


@pytest.mark.parametrize("adapter", [BASE, 0, 1])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 10])
def test_chunks_and_block_order_change_nothing(memory: AdapterMemory, adapter: int, chunk: int) -> None:
    sampling = replace_sampling(prompt_logprobs=1)
    whole, cut = make_request(sampling), make_request(sampling)
    expected = generate(make_runner(memory), whole, range(5), adapter)
    got = generate(make_runner(memory), cut, [30, 2, 17, 9, 4], adapter, chunk)
    assert cut.output_ids == whole.output_ids
    assert_close(got[0], expected[0])
    assert_close(got[1], expected[1])


def replace_sampling(**changes: object) -> Sampling:
    return Sampling(**{**{f: getattr(GREEDY, f) for f in GREEDY.__struct_fields__}, **changes})


def test_a_mixed_batch_gives_each_request_what_it_gets_alone(memory: AdapterMemory) -> None:
    prompts = [PROMPT, PROMPT[:7], PROMPT[3:], [12]]
    adapters = [0, BASE, 1, 0]
    alone = []
    for prompt, adapter in zip(prompts, adapters, strict=True):
        request = make_request(prompt=prompt)
        alone.append((generate(make_runner(memory), request, range(6), adapter, steps=5)[0], request.output_ids))
    runner = make_runner(memory)
    together = [make_request(prompt=prompt) for prompt in prompts]
    blocks = [range(6 * i, 6 * i + 6) for i in range(4)]
    first = [part(r, 0, len(r.prompt_ids), b, a) for r, b, a in zip(together, blocks, adapters, strict=True)]
    results = runner.execute(StepPlan(first))
    drawn = [[r.logprob] for r in results]
    for _ in range(4):
        for request, result in zip(together, results, strict=True):
            assert result.token_id is not None
            request.output_ids.append(result.token_id)
        plan = [part(r, r.num_tokens - 1, r.num_tokens, b, a) for r, b, a in zip(together, blocks, adapters, strict=True)]
        results = runner.execute(StepPlan(plan))
        for logprobs, result in zip(drawn, results, strict=True):
            logprobs.append(result.logprob)
    for request, logprobs, (expected, tokens) in zip(together, drawn, alone, strict=True):
        assert request.output_ids == tokens[:4]
        assert_close([x for x in logprobs if x is not None], expected)
    assert len({tuple(tokens) for _, tokens in alone}) == 4


def test_an_adapter_applies_from_its_start(memory: AdapterMemory) -> None:
    """Before `adapter_start` the prompt scores as on the base; from there on it scores as nothing else."""
    sampling = replace_sampling(prompt_logprobs=0)
    _, base = generate(make_runner(memory), make_request(sampling), range(5), BASE, steps=1)
    _, late = generate(make_runner(memory), make_request(sampling, adapter_start=6), range(5), 0, chunk=4, steps=1)
    _, full = generate(make_runner(memory), make_request(sampling), range(5), 0, steps=1)
    assert_close(late[:6], base[:6])
    for ours, other in ((late[6:], base[6:]), (late[6:], full[6:])):
        assert all(abs(x.logprob - y.logprob) > 1e-3 for x, y in zip(ours, other, strict=True))


def test_one_step_may_score_a_prompt_and_continue_another(memory: AdapterMemory) -> None:
    scoring = replace_sampling(prompt_logprobs=3, logprobs=None)
    plain = replace_sampling(logprobs=None)
    runner = make_runner(memory)
    scored, other = make_request(scoring), make_request(plain, prompt=PROMPT[:5])
    first, second = runner.execute(StepPlan([part(scored, 0, 8, range(3), 1), part(other, 0, 5, range(3, 6))]))
    assert (first.token_id, first.logprob) == (None, None)
    assert first.prompt_logprobs is not None
    assert [len(x.top_ids) for x in first.prompt_logprobs] == [3] * 8
    assert second.token_id is not None
    assert (second.logprob, second.prompt_logprobs) == (None, None)
    last, _ = runner.execute(StepPlan([part(scored, 8, 11, range(3), 1), part(other, 4, 5, range(3, 6))]))
    assert last.token_id is not None
    assert last.prompt_logprobs is not None
    assert len(last.prompt_logprobs) == 2  # the last prompt token scores an output token, not a prompt token


def test_a_request_that_goes_on_does_not_score_its_prompt_again(memory: AdapterMemory) -> None:
    scoring = replace_sampling(prompt_logprobs=1)
    first, resumed = make_request(scoring), make_request(scoring)
    drawn, prompt = generate(make_runner(memory), first, range(5), steps=6)
    assert len(prompt) == len(PROMPT) - 1
    resumed.output_ids += first.output_ids[:2]
    plan = StepPlan([part(resumed, 0, len(PROMPT) + 2, range(5))])
    assert build_batch(plan, memory).prompt_rows.tolist() == []
    rest, again = generate(make_runner(memory), resumed, range(5), steps=4)
    assert again == []
    assert resumed.output_ids == first.output_ids
    assert_close(rest, drawn[2:])


def test_the_same_seed_and_position_draw_the_same_token(memory: AdapterMemory) -> None:
    hot = replace_sampling(temperature=1.5, seed=2**64 - 3)
    first, resumed = make_request(hot), make_request(hot)
    generate(make_runner(memory), first, range(5), 0, steps=6)
    resumed.output_ids += first.output_ids[:3]
    generate(make_runner(memory), resumed, range(5), 0, chunk=5, steps=3)
    assert resumed.output_ids == first.output_ids
    other = make_request(replace_sampling(temperature=1.5, seed=4))
    generate(make_runner(memory), other, range(5), 0, steps=6)
    assert other.output_ids != first.output_ids


def test_the_drawn_tokens_logprob_stands_beside_the_best_ones(memory: AdapterMemory) -> None:
    request = make_request(replace_sampling(logprobs=4))
    drawn, _ = generate(make_runner(memory), request, range(5), steps=2)
    for token, logprob in zip(request.output_ids, drawn, strict=True):
        assert logprob.top_ids[0] == token
        assert logprob.top_logprobs[0] == logprob.logprob
        assert list(logprob.top_logprobs) == sorted(logprob.top_logprobs, reverse=True)


def test_an_empty_plan_runs_nothing(memory: AdapterMemory) -> None:
    assert make_runner(memory).execute(StepPlan([])) == []


def test_results_come_in_the_plans_order_with_rows_that_do_not_sample(memory: AdapterMemory) -> None:
    runner = make_runner(memory)
    chunk, whole = make_request(), make_request(prompt=PROMPT[:3])
    results = runner.execute(StepPlan([part(chunk, 0, 4, [0, 1]), part(whole, 0, 3, [2]), part(chunk, 4, 6, [0, 1])]))
    assert [r.token_id is not None for r in results] == [False, True, False]
    assert results[0] == RequestResult()


def test_batch_of_a_plan() -> None:
    """Every tensor of a small plan, written out."""
    scoring = Sampling(max_tokens=4, seed=2**63 + 1, choice=2, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, prompt_logprobs=0)
    plain = Sampling(max_tokens=4, seed=7)
    whole = make_request(scoring, prompt=[10, 11, 12, 13, 14], adapter_start=3)
    decode = make_request(plain, prompt=[20, 21])
    decode.output_ids += [22, 23, 24]
    plan = StepPlan([part(whole, 1, 5, [7, 3], 4), part(decode, 4, 5, [6, 5, 9], BASE)])
    batch = build_batch(plan, empty_adapter_memory(CONFIG.num_sites))
    forward, attention = batch.forward, batch.forward.attention
    assert batch.token_ids.tolist() == [11, 12, 13, 14, 24]
    assert forward.positions.tolist() == [1, 2, 3, 4, 4]
    assert forward.adapters.token_adapter.tolist() == [-1, -1, 4, 4, -1]
    assert forward.adapters.token_adapter.dtype == torch.int32
    assert attention.query_start.tolist() == [0, 4, 5]
    assert attention.context_len.tolist() == [5, 5]
    assert attention.block_table.tolist() == [[7, 3, 0, 0], [6, 5, 0, 0]]
    assert attention.kv_slot.tolist() == [29, 30, 31, 12, 20]
    assert (attention.max_query_len, attention.max_context_len) == (4, 5)
    assert (attention.query_start.dtype, attention.block_table.dtype, attention.kv_slot.dtype) == (
        torch.int32,
        torch.int32,
        torch.int64,
    )
    assert batch.sample_rows.tolist() == [3, 4]
    assert batch.prompt_rows.tolist() == [0, 1, 2]
    assert batch.prompt_targets.tolist() == [12, 13, 14]
    sampling = batch.sampling
    assert sampling.seed.tolist() == [2**63 + 1 - 2**64, 7]
    assert sampling.position.tolist() == [0, 3]
    assert sampling.choice.tolist() == [2, 0]
    assert sampling.top_k.tolist() == [3, 0]
    assert sampling.temperature.tolist() == [0.5, 1.0]
    assert sampling.top_p.tolist() == pytest.approx([0.9, 1.0])
    assert sampling.min_p.tolist() == pytest.approx([0.1, 0.0])
