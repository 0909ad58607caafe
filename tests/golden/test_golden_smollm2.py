"""The real base in bfloat16 beside fp32 transformers and PEFT, on its own greedy output, bare and with each demo adapter."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compiled_kernels import KERNEL_DIR
from peft import PeftModel
from transformers import AutoModelForCausalLM

from graftwork_adapters.base_spec import load_base_spec
from graftwork_adapters.folder_store import FolderStore
from graftwork_adapters.keys import packed_path
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import PublishJob
from graftwork_adapters.store import StoreConfig
from graftwork_engine.assembly import build_engine
from graftwork_engine.config import EngineConfig
from graftwork_engine.core import EngineCore
from graftwork_engine.messages import Sampling
from graftwork_engine.request import AdapterKey, Request, RequestId
from graftwork_platform.text.model_text import ModelText

ROOT = Path(__file__).resolve().parents[2]
DATA_DIR = Path(os.environ.get("DATA_DIR", ROOT / ".data"))
BASE = DATA_DIR / "base" / "SmolLM2-135M-Instruct"
ADAPTERS = sorted(path.parent for path in (ROOT / "examples" / "adapters").glob("*/adapter_config.json"))

QUESTIONS = [
    "What is the capital of France?",
    "Write two sentences about the sea.",
    "I was charged twice for my order, please help.",
    "Name three uses of a paper clip.",
    "My name is Ana Pop and I paid 120.50 EUR on 3 May 2026 for the invoice.",
    "Explain photosynthesis to a child.",
    "The app crashes whenever I open my profile.",
    "Translate 'good morning' into Spanish.",
    "How do I reset my password?",
    "Give me a recipe for pancakes.",
    "Which planet is the largest?",
    "Please cancel my subscription before the next month.",
    "The parcel never arrived and the tracking page is empty.",
    "Summarise the story of Romeo and Juliet.",
    "Bill Acme GmbH for 1,240 dollars, due on 5 July 2027.",
    "What does HTTP status 404 mean?",
    "Suggest a name for a bakery.",
    "Why is the sky blue?",
]
TOKENS_EACH = 30


@dataclass
class Sequence:
    """A prompt and what the engine made of it."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    assert (BASE / "config.json").exists(), f"{BASE} is missing: run `make base`"
    text = ModelText.from_dir(BASE)
    assert text.chat_template is not None
    template = text.chat_template
    chats = [asyncio.run(template.render([{"role": "user", "content": question}])) for question in QUESTIONS]
    return [text.tokenizer.encode(chat, add_special_tokens=False) for chat in chats]


@pytest.fixture(scope="module")
def outputs(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Sequence]]]:
    """What the engine generates greedily, all models in one mixed batch."""
    folder = tmp_path_factory.mktemp("smollm2")
    spec, store = load_base_spec(BASE, folder), FolderStore(folder / "store")
    keys: dict[str, AdapterKey | None] = {"base": None}
    for adapter in ADAPTERS:
        result = publish(PublishJob(adapter, folder / f"{adapter.name}.packed", spec, "bfloat16", base_dir=BASE))
        assert result.packed_key is not None, json.dumps(result.report.as_json())
        store.put_if_absent(packed_path(result.packed_key), folder / f"{adapter.name}.packed")
        keys[adapter.name] = AdapterKey(result.packed_key)
    config = EngineConfig(
        model_dir=str(BASE),
        kv_memory_bytes=512 << 20,
        max_num_seqs=72,
        adapter_memory_bytes=32 << 20,
        store=StoreConfig(str(folder / "store")),
        cache_dir=str(folder / "cache"),
        kernel_dir=str(KERNEL_DIR),
        kernels={"all": "cpu"},
    )
    assembly = build_engine(config)
    yield generate(assembly.core, prompts, keys)
    assembly.close()


def generate(core: EngineCore, prompts: list[list[int]], keys: dict[str, AdapterKey | None]) -> dict[str, list[Sequence]]:
    outputs: dict[str, list[Sequence]] = {name: [Sequence(prompt, [], []) for prompt in prompts] for name in keys}
    for name, key in keys.items():
        for number, prompt in enumerate(prompts):
            sampling = Sampling(max_tokens=TOKENS_EACH, seed=0, temperature=0.0, logprobs=0)
            core.add(Request(RequestId(f"{name}/{number}"), list(prompt), sampling, b"", name, time.monotonic(), adapter_key=key))
    while core.has_work:
        for item in core.step():
            assert item.error is None, item.error
            name, number = item.request_id.split("/")
            sequence = outputs[name][int(number)]
            sequence.token_ids += item.token_ids
            sequence.logprobs += [entry.logprob for entry in item.logprobs or ()]
        if core.last_num_tokens == 0:
            time.sleep(0.001)
    return outputs


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, sequence: Sequence) -> torch.Tensor:
    """fp32 logits that predict each output token, [T, V]."""
    ids = torch.tensor([sequence.prompt_ids + sequence.token_ids])
    logits: torch.Tensor = model(input_ids=ids).logits
    return logits[0, len(sequence.prompt_ids) - 1 : -1]


def test_there_are_three_demo_adapters() -> None:
    assert len(ADAPTERS) == 3


@pytest.mark.parametrize("name", ["base", *(path.name for path in ADAPTERS)])
def test_bfloat16_stays_close_to_fp32(name: str, outputs: dict[str, list[Sequence]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    if name != "base":
        model = PeftModel.from_pretrained(model, ROOT / "examples" / "adapters" / name)
    differences, wrong_choices = [], []
    for sequence in outputs[name]:
        logits = reference_logits(model, sequence)
        tokens = torch.tensor(sequence.token_ids)
        expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        differences.append((torch.tensor(sequence.logprobs) - expected).abs())
        best = logits.topk(2)
        gap = best.values[:, 0] - best.values[:, 1]
        wrong_choices += [float(g) for g, i, t in zip(gap, best.indices[:, 0], tokens, strict=True) if i != t]
    difference = torch.cat(differences)
    assert len(difference) >= 500
    assert difference.quantile(0.99) <= 0.25
    assert difference.max() <= 0.4
    assert all(gap <= 0.35 for gap in wrong_choices), wrong_choices


def test_adapters_change_the_output(outputs: dict[str, list[Sequence]]) -> None:
    base = [sequence.token_ids for sequence in outputs["base"]]
    for name, sequences in outputs.items():
        if name != "base":
            assert [sequence.token_ids for sequence in sequences] != base, name
