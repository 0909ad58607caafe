"""Bias, penalties and min_tokens against Hugging Face's own processors: the same greedy tokens, and logprobs of the raw logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from compiled_kernels import KERNEL_DIR
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from graftwork_adapters.store import StoreConfig
from graftwork_engine.assembly import build_engine
from graftwork_engine.config import EngineConfig
from graftwork_engine.messages import Sampling
from graftwork_engine.request import Request, RequestId

PROMPT = [11, 250, 3, 77, 140, 9, 9, 201, 64, 5, 300, 18, 42]
MAX_TOKENS = 10
STOPS = (17, 200)
FAVOURED = {9: 5.5, 64: 5.2, 300: 5.9}
"""A bias under which these random models repeat themselves, so that penalties have something to do."""

CONTROLS: dict[str, dict[str, object]] = {
    "none": {},
    "bias": {"logit_bias": FAVOURED},
    "repetition": {"logit_bias": FAVOURED, "repetition_penalty": 1.8},
    "presence": {"logit_bias": FAVOURED, "presence_penalty": 3.0},
    "frequency": {"logit_bias": FAVOURED, "frequency_penalty": 1.37},
    "min-tokens": {"min_tokens": 7, "stop_token_ids": STOPS, "logit_bias": {17: 60.0, 200: 50.0, 9: -100.0}},
    "all": {
        "repetition_penalty": 0.8,
        "presence_penalty": 2.0,
        "frequency_penalty": -0.5,
        "logit_bias": FAVOURED,
        "min_tokens": 5,
        "stop_token_ids": (300,),
    },
}
ADAPTERS = (None, "rank8-rslora")


@dataclass(frozen=True)
class Reference:
    """What Hugging Face gives for one adapter and one set of controls."""

    token_ids: list[int]
    logprobs: list[float]


class PresenceAndFrequency:
    """The documented formula in plain torch: both over the tokens that came after the prompt."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._prompt_length, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = input_ids[0, self._prompt_length :].bincount(minlength=scores.shape[1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


def processors(sampling: Sampling) -> LogitsProcessorList:
    made = LogitsProcessorList()
    if sampling.logit_bias:
        made.append(SequenceBiasLogitsProcessor({(token,): value for token, value in sampling.logit_bias.items()}))
    if sampling.repetition_penalty != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    made.append(PresenceAndFrequency(len(PROMPT), sampling.presence_penalty, sampling.frequency_penalty))
    if sampling.min_tokens:
        made.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), sampling.min_tokens, list(sampling.stop_token_ids)))
    return made


@torch.inference_mode()
def reference(model: torch.nn.Module, sampling: Sampling) -> Reference:
    """One whole forward pass for each token, without a cache."""
    process, tokens, logprobs = processors(sampling), list(PROMPT), []
    while len(logprobs) < sampling.max_tokens and (not logprobs or tokens[-1] not in sampling.stop_token_ids):
        ids = torch.tensor([tokens])
        raw = model(input_ids=ids).logits[:, -1]
        best = process(ids, raw.clone())[0].topk(2)
        assert best.values[0] - best.values[1] > 5e-4, "a near tie: the reference itself is not sure of this token"
        tokens.append(int(best.indices[0]))
        logprobs.append(float(raw[0].log_softmax(-1)[tokens[-1]]))
    return Reference(tokens[len(PROMPT) :], logprobs)


def sampling_of(name: str, **changes: object) -> Sampling:
    fields = {"max_tokens": MAX_TOKENS, "seed": 0, "temperature": 0.0, "logprobs": 0, **CONTROLS[name], **changes}
    return msgspec.convert(fields, Sampling)


Case = tuple[str | None, str]
CASES: list[Case] = [(adapter, name) for adapter in ADAPTERS for name in CONTROLS]


@pytest.fixture(scope="module")
def references(golden) -> Mapping[Case, Reference]:
    found = {}
    for adapter in ADAPTERS:
        model = AutoModelForCausalLM.from_pretrained(golden.model_dir, dtype=torch.float32)
        model = (model if adapter is None else PeftModel.from_pretrained(model, golden.adapters[adapter])).eval()
        found.update({(adapter, name): reference(model, sampling_of(name)) for name in CONTROLS})
    return found


Run = Callable[..., list[Reference]]


@pytest.fixture
def run(golden, tmp_path: Path) -> Iterator[Run]:
    """Runs cases together on a new engine with the settings given, and looks that nothing is left over."""
    engines = []

    def on_engine(cases: list[Case], outputs: list[list[int]] | None = None, *, preempts: bool = False, **settings: object):
        config = {
            "model_dir": str(golden.model_dir),
            "dtype": "float32",
            "block_size": 4,
            "kv_memory_bytes": 1 << 20,
            "adapter_memory_bytes": 8 << 20,
            "adapter_page_bytes": 4096,
            "store": StoreConfig(str(golden.store_dir)),
            "cache_dir": str(tmp_path / f"cache-{len(engines)}"),
            "kernel_dir": str(KERNEL_DIR),
            "kernels": {"all": "cpu"},
            **settings,
        }
        engines.append(build_engine(msgspec.convert(config, EngineConfig)))
        # Adapters come to the device first, so that all cases start together and no load decides who meets whom.
        generate([(adapter, "none") for adapter in dict.fromkeys(adapter for adapter, _ in cases)], None, b"first")
        answers = generate(cases, outputs, b"salt")
        assert (engines[-1].stats()["preemptions_total"] > 0) == preempts
        return answers

    def generate(cases: list[Case], outputs: list[list[int]] | None, salt: bytes) -> list[Reference]:
        core, made = engines[-1].core, {}
        for number, (adapter, name) in enumerate(cases):
            output = outputs[number] if outputs else []
            request = Request(
                RequestId(str(number)), list(PROMPT), sampling_of(name), salt, "flow", 0.0, golden.keys[adapter], 0, None,
                list(output), len(output),
            )  # fmt: skip
            core.add(request)
            made[str(number)] = Reference([], [])
        give_up = time.monotonic() + 60
        while core.has_work:
            assert time.monotonic() < give_up
            for item in core.step():
                assert item.error is None, item.error
                made[item.request_id].token_ids.extend(item.token_ids)
                made[item.request_id].logprobs.extend(logprob.logprob for logprob in item.logprobs or ())
        assert core.check_integrity() == []
        return list(made.values())

    yield on_engine
    for engine in engines:
        engine.close()


def assert_equal(cases: list[Case], answers: list[Reference], due: list[Reference]) -> None:
    for case, answer, expected in zip(cases, answers, due, strict=True):
        assert answer.token_ids == expected.token_ids, case
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4), case


def test_every_control_changes_the_output(references) -> None:
    """So that nothing below can pass by doing nothing, and each ends where it should."""
    for name in CONTROLS.keys() - {"none"}:
        without = "none" if name in ("bias", "min-tokens") else "bias"
        changed = [references[adapter, name].token_ids != references[adapter, without].token_ids for adapter in ADAPTERS]
        assert any(changed), name
    for adapter in ADAPTERS:
        held_back = references[adapter, "min-tokens"].token_ids
        assert len(held_back) == 8
        assert held_back[-1] == 17


@pytest.mark.parametrize("chunk", [1, 6])
def test_together_in_chunks_of_any_size(references, run, chunk) -> None:
    assert_equal(CASES, run(CASES, prefill_chunk_size=chunk), [references[case] for case in CASES])


def test_with_preemption(golden, references, run) -> None:
    """Fourteen requests of up to six blocks each, and 45 blocks."""
    size = 45 * 4 * golden.kv_bytes_per_token
    answers = run(CASES, preempts=True, kv_memory_bytes=size, enable_prefix_caching=False)
    assert_equal(CASES, answers, [references[case] for case in CASES])


def test_resumed_in_the_middle_and_after_prefix_hits(references, run) -> None:
    cases, outputs, due = [], [], []
    for case in CASES:
        whole = references[case]
        for sent in {1, 4, len(whole.token_ids) - 1}:
            cases.append(case)
            outputs.append(whole.token_ids[:sent])
            due.append(Reference(whole.token_ids[sent:], whole.logprobs[sent:]))
    assert_equal(cases, run(cases, outputs, prefill_chunk_size=5, max_num_seqs=9), due)
