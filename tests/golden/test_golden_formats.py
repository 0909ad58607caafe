"""Every format of adapter that is served, mixed with all others and the base in one engine: PEFT's own answers, token by token."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_recipes import EXACT, INVOCATION
from peft_zoo import BASES, VOCAB_SIZE, Made, Recipe, last_start, make_adapter, make_base

from graftwork_adapters.base_spec import load_base_spec
from graftwork_adapters.folder_store import FolderStore
from graftwork_adapters.keys import RowTypeName, packed_path
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import AdapterTraits, PublishJob, PublishResult
from graftwork_engine.request import AdapterKey

BLOCK = 4  # the engine fixture's
SHORT = [11, 150, 3, 140, *INVOCATION, 101, 64, 5, 42, 18]  # whole blocks
LONG = [(13 * i * i + 5 * i + 1) % VOCAB_SIZE for i in range(17)] + INVOCATION + [9, 9, 12, *INVOCATION, 3]
PROMPTS = [SHORT, [7], LONG]
OUTPUT_TOKENS = 6
TIE = 2e-4
"""Two logits of the reference that are this near: either token is right."""


@dataclass
class Served:
    """A base and all its adapters, published with rows of one type."""

    model_dir: Path
    store_dir: Path
    adapters: dict[str | None, Made]  # None: the base alone
    keys: dict[str | None, AdapterKey | None] = field(default_factory=lambda: {None: None})
    traits: dict[str | None, AdapterTraits] = field(default_factory=lambda: {None: AdapterTraits()})
    results: dict[str, PublishResult] = field(default_factory=dict)

    def job(self, job: type[Any], prompt: list[int], adapter: str | None, **settings: object) -> Any:
        """A request as the API makes it of these prompt and adapter; the base's where an aLoRA is not invoked."""
        traits = self.traits[adapter]
        start = 0
        if traits.invocation_token_ids:
            found = last_start(prompt, list(traits.invocation_token_ids))
            if found is None:
                return job(prompt, None, max_tokens=OUTPUT_TOKENS, **settings)
            start = found
        return job(prompt, adapter, adapter_start=start, vocab_size=traits.vocab_size, max_tokens=OUTPUT_TOKENS, **settings)

    def jobs(self, job: type[Any], **settings: object) -> list[Any]:
        """Every prompt for the base and for every adapter."""
        return [self.job(job, prompt, name, **settings) for name in self.adapters for prompt in (*PROMPTS, *self._added(name))]

    def _added(self, adapter: str | None) -> list[list[int]]:
        """A prompt with tokens that the base does not have, where the adapter has them."""
        size = self.adapters[adapter].recipe.vocab_size
        return [[11, *range(VOCAB_SIZE, size), 3]] if size > VOCAB_SIZE else []


def _serve(base: str, row_type: RowTypeName, folder: Path, made: dict[str | None, Made]) -> Served:
    """What is refused is left out, for `test_every_format_is_taken_whole` to name: it must not hide all others."""
    store = FolderStore(folder / "store")
    model_dir = made[None].base_dir
    served = Served(model_dir, folder / "store", {None: made[None]})
    spec = load_base_spec(model_dir)
    for name, adapter in made.items():
        if name is None:
            continue
        out = folder / f"{name}.packed"
        result = publish(PublishJob(adapter.upload_dir, out, spec, row_type, base_dir=model_dir))
        served.results[name] = result
        if result.packed_key is not None:
            store.put_if_absent(packed_path(result.packed_key), out)
            served.adapters[name] = adapter
            served.keys[name] = AdapterKey(result.packed_key)
            served.traits[name] = result.traits
    return served


@pytest.fixture(scope="module", params=list(BASES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str | None, Made]]:
    """A base and PEFT's adapters for it."""
    folder = tmp_path_factory.mktemp(request.param)
    base_dir = folder / "base"
    make_base(request.param, base_dir)
    base = Made(Recipe("base", "", {}, request.param), base_dir, None, base_dir)
    recipes = [recipe for recipe in EXACT if recipe.base == request.param]
    yield {None: base} | {recipe.name: make_adapter(recipe, base_dir, folder / recipe.name) for recipe in recipes}
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def served(made: dict[str | None, Made], tmp_path_factory: pytest.TempPathFactory) -> Served:
    """All of them in a store, as fp32 rows."""
    return _serve("fp32", "float32", tmp_path_factory.mktemp("fp32"), made)


@pytest.fixture(scope="module")
def roomy(served: Served, engine: type[Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine with room for everything; tests ask it one after the other."""
    started = engine(
        served, tmp_path_factory.mktemp("cache"), kv_memory_bytes=4 << 20, max_num_seqs=256, max_num_batched_tokens=512
    )
    yield started
    started.close()


def check(made: Made, job: Any, answer: Any, tolerance: float = 1e-4, tie: float = TIE) -> None:
    """Each token is the reference's choice after those before it, or as good, and its logprob is the reference's."""
    where = (made.base_dir.parent.name, made.recipe.name, job.prompt)
    token_ids = [*job.output_ids, *answer.token_ids]
    assert len(token_ids) == OUTPUT_TOKENS, where
    split = len(job.prompt)
    logits = made.logits([*job.prompt, *token_ids], split)[:-1]
    logprobs = logits.log_softmax(-1)
    for place in range(len(job.output_ids), len(token_ids)):
        best = logits[split - 1 + place].max() - logits[split - 1 + place][token_ids[place]]
        assert best <= tie, (where, place, float(best))
    expected = logprobs.gather(1, torch.tensor([*job.prompt, *token_ids][1:])[:, None])[:, 0].tolist()
    assert answer.logprobs == pytest.approx(expected[split - 1 + len(job.output_ids) :], abs=tolerance), where
    if job.scores_prompt:
        assert answer.prompt_logprobs == pytest.approx(expected[: split - 1], abs=tolerance), where


def check_all(served: Served, jobs: list[Any], answers: list[Any]) -> None:
    """`check` on each, the failures of all adapters together: one wrong format must not hide another."""
    wrong = []
    for job, answer in zip(jobs, answers, strict=True):
        try:
            check(served.adapters[job.adapter], job, answer)
        except AssertionError as error:
            wrong.append(f"{job.adapter}: {str(error)[:300]}")
    assert wrong == [], "\n".join(wrong)


def test_every_format_is_taken_whole(served: Served) -> None:
    for name, result in served.results.items():
        assert result.ok, (name, [finding for finding in result.report.findings if finding.result == "fail"])
        [applied] = [finding.message for finding in result.report.findings if finding.message.startswith("applied ")]
        words = applied.split()
        assert (words[1], words[4]) == (words[3], "tensors"), (name, applied)


def test_every_adapter_changes_the_base(made: dict[str | None, Made]) -> None:
    """So that nothing below can pass by doing nothing."""
    for name, adapter in made.items():
        if name is not None:
            base, changed = made[None].logits(SHORT, len(SHORT)), adapter.logits(SHORT, len(SHORT))
            assert (base[-1] - changed[-1, :VOCAB_SIZE]).abs().max() > 0.3, name


@pytest.mark.parametrize("made", ["qwen2"], indirect=True)
def test_the_same_tensors_with_and_without_rslora_are_two_adapters(made: dict[str | None, Made], served: Served) -> None:
    """Each is compared with its own reference below; here, that the two are not one."""
    plain, rslora = made["rank64"], made["rank64-rslora"]
    weights = "adapter_model.safetensors"
    assert (plain.upload_dir / weights).read_bytes() == (rslora.upload_dir / weights).read_bytes()
    assert served.keys["rank64"] != served.keys["rank64-rslora"]
    difference = plain.logits(SHORT, len(SHORT)) - rslora.logits(SHORT, len(SHORT))
    assert difference.abs().max() > 0.3


def test_mixed_batch(served: Served, roomy: Any, job: type[Any]) -> None:
    jobs = served.jobs(job, scores_prompt=True)
    check_all(served, jobs, roomy.run(*jobs))


def test_prefix_hits(served: Served, roomy: Any, job: type[Any]) -> None:
    """A second time, all that lies in whole blocks comes from the cache, except the last token."""
    jobs = served.jobs(job)
    roomy.run(*jobs)
    answers = roomy.run(*jobs)
    assert [answer.cached_tokens for answer in answers] == [(len(each.prompt) - 1) // BLOCK * BLOCK for each in jobs]
    check_all(served, jobs, answers)


def test_chunked_prefill(served: Served, engine: type[Any], job: type[Any], tmp_path: Path) -> None:
    """Three tokens of each prompt at a time, so that steps hold pieces of prompts beside tokens that are drawn."""
    started = engine(served, tmp_path, kv_memory_bytes=4 << 20, prefill_chunk_size=3, max_num_seqs=256, max_num_batched_tokens=96)
    jobs = served.jobs(job)
    answers = started.run(*jobs)
    started.close()
    check_all(served, jobs, answers)


def test_preemption(served: Served, engine: type[Any], job: type[Any], tmp_path: Path) -> None:
    """All prompts fit at once, the first tokens of half of them do not. In both orders: the last to come are the first to go."""
    jobs = [served.job(job, SHORT, name) for name in served.adapters]
    config = BASES[served.adapters[None].recipe.base]()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4 * BLOCK
    num_blocks = len(jobs) * (len(SHORT) // BLOCK) + len(jobs) // 2
    tight = engine(
        served,
        tmp_path,
        kv_memory_bytes=num_blocks * block_bytes,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    tight.run(*jobs)  # brings the adapters to the device, so that below all requests start together
    for order in (jobs, jobs[::-1]):
        before = tight.stat("preemptions_total")
        answers = tight.run(*order)
        assert tight.stat("preemptions_total") - before >= len(jobs) // 4
        check_all(served, order, answers)
    tight.close()


@pytest.mark.parametrize("sent", [1, 4])
def test_restart_after_tokens_already_sent(served: Served, roomy: Any, job: type[Any], sent: int) -> None:
    """What an engine gets whose predecessor died: the tokens that the client has, to be gone on from."""
    jobs = served.jobs(job)
    before = roomy.run(*jobs)
    resumed = [
        served.job(job, each.prompt, each.adapter, output_ids=answer.token_ids[:sent])
        for each, answer in zip(jobs, before, strict=True)
    ]
    answers = roomy.run(*resumed)
    assert {answer.first_output_index for answer in answers} == {sent}
    check_all(served, resumed, answers)


def test_bfloat16_stays_close_to_fp32(made: dict[str | None, Made], engine: type[Any], job: type[Any], tmp_path: Path) -> None:
    served = _serve("bf16", "bfloat16", tmp_path, made)
    started = engine(served, tmp_path / "cache", dtype="bfloat16", max_num_seqs=256, max_num_batched_tokens=512)
    jobs = served.jobs(job)
    answers = started.run(*jobs)
    started.close()
    differences = []
    for each, answer in zip(jobs, answers, strict=True):
        token_ids = [*each.prompt, *answer.token_ids]
        logits = served.adapters[each.adapter].logits(token_ids, len(each.prompt))[len(each.prompt) - 1 : -1]
        tokens = torch.tensor(answer.token_ids)[:, None]
        difference = (torch.tensor(answer.logprobs) - logits.log_softmax(-1).gather(1, tokens)[:, 0]).abs()
        gap = logits.max(-1).values - logits.gather(1, tokens)[:, 0]
        assert gap.max() <= 0.35, (each.adapter, each.prompt, gap)
        assert difference.max() <= 0.4, (each.adapter, each.prompt, difference)
        differences.append(difference)
    assert torch.cat(differences).quantile(0.99) <= 0.25


WITH_ALORA = sorted({recipe.base for recipe in EXACT if recipe.invocation})


@pytest.fixture
def aloras(made: dict[str | None, Made]) -> list[str]:
    """Names of the base's adapters that are switched on by tokens of the prompt."""
    return [name for name, adapter in made.items() if name is not None and adapter.recipe.invocation]


@pytest.mark.parametrize("made", WITH_ALORA, indirect=True)
def test_an_alora_reads_the_bases_cache_up_to_its_invocation(
    served: Served, aloras: list[str], engine: type[Any], job: type[Any], tmp_path: Path
) -> None:
    shared = last_start(LONG, INVOCATION)
    for number, name in enumerate(aloras):
        started = engine(served, tmp_path / str(number))
        on_base = job(LONG, None, max_tokens=OUTPUT_TOKENS)
        invoked = served.job(job, LONG, name)
        assert invoked.adapter_start == shared
        jobs = [on_base, invoked, invoked, on_base]
        answers = [started.run(each)[0] for each in jobs]
        started.close()
        whole = (len(LONG) - 1) // BLOCK * BLOCK
        assert [answer.cached_tokens for answer in answers] == [0, shared // BLOCK * BLOCK, whole, whole]
        check_all(served, jobs, answers)


@pytest.mark.parametrize("made", WITH_ALORA, indirect=True)
def test_the_base_reads_what_an_alora_computed_before_its_invocation(
    served: Served, aloras: list[str], engine: type[Any], job: type[Any], tmp_path: Path
) -> None:
    for number, name in enumerate(aloras):
        started = engine(served, tmp_path / str(number))
        jobs = [served.job(job, LONG, name), job(LONG, None, max_tokens=OUTPUT_TOKENS)]
        answers = [started.run(each)[0] for each in jobs]
        started.close()
        assert [answer.cached_tokens for answer in answers] == [0, jobs[0].adapter_start // BLOCK * BLOCK]
        check_all(served, jobs, answers)


@pytest.mark.parametrize("made", WITH_ALORA, indirect=True)
def test_an_alora_that_is_not_invoked_is_the_base(made: dict[str | None, Made], aloras: list[str]) -> None:
    """PEFT's own answer where the prompt lacks the tokens: what the API asks the engine for then."""
    for name in aloras:
        assert torch.equal(made[name].logits([7, 11, 3], 3), made[None].logits([7, 11, 3], 3))
