"""Tiny random models of every family with PEFT adapters, what transformers and PEFT make of them, and an engine that must agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec
import pytest
import torch
from compiled_kernels import KERNEL_DIR
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedConfig, Qwen2Config, Qwen3Config

from graftwork_adapters.base_spec import load_base_spec
from graftwork_adapters.folder_store import FolderStore
from graftwork_adapters.keys import packed_path
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import PublishJob
from graftwork_adapters.store import StoreConfig
from graftwork_engine.assembly import build_engine
from graftwork_engine.config import EngineConfig
from graftwork_engine.messages import OutItem, Sampling
from graftwork_engine.request import AdapterKey, Request, RequestId

OUTPUT_TOKENS = 8

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # wide enough that greedy choices are not near ties
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # so short that every one of its three ranges of wavelengths is met
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama-tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-untied": lambda: LlamaConfig(**{**SHAPE, "num_hidden_layers": 3}, tie_word_embeddings=False),
    "llama3-rope": lambda: LlamaConfig(**SHAPE, rope_parameters=dict(LLAMA3_ROPE)),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True),
    "phi3": lambda: Phi3Config(**SHAPE, pad_token_id=None),
}
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
"""What PEFT finds in a Phi3 in their place."""

ALL_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS: dict[str, Callable[[], LoraConfig]] = {
    "rank4": lambda: LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    "rank8-rslora": lambda: LoraConfig(r=8, lora_alpha=12, use_rslora=True, target_modules="all-linear", init_lora_weights=False),
    "rank16": lambda: LoraConfig(r=16, lora_alpha=16, target_modules=["o_proj", "up_proj", "down_proj"], init_lora_weights=False),
    "rank24-pattern": lambda: LoraConfig(
        r=3,
        lora_alpha=6,
        rank_pattern={"q_proj": 24, "layers.1.mlp.gate_proj": 7},
        alpha_pattern={"q_proj": 32, "down_proj": 1},
        target_modules=ALL_PROJECTIONS,
        init_lora_weights=False,
    ),
    "rank5-one-layer": lambda: LoraConfig(
        r=5, lora_alpha=10, target_modules=["gate_proj", "up_proj"], layers_to_transform=[1], init_lora_weights=False
    ),
    "k-only": lambda: LoraConfig(r=4, lora_alpha=16, target_modules=["k_proj"], init_lora_weights=False),
}


@dataclass(frozen=True)
class Expected:
    """What transformers (with PEFT, for an adapter) gives for one prompt: greedy tokens, their logprobs, and the prompt's."""

    token_ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]  # of prompt tokens 1, 2, …


@dataclass(frozen=True, eq=False)
class Golden:
    """A family's model folder, and its adapters as PEFT saved them."""

    family: str
    model_dir: Path
    adapters: dict[str, Path]
    store_dir: Path
    keys: dict[str | None, AdapterKey | None]  # of the packed forms in the store; None for the base
    largest_adapter_bytes: int
    kv_bytes_per_token: int
    _known: dict[tuple[str | None, tuple[int, ...]], Expected] = field(default_factory=dict)

    def expected(self, adapter: str | None, prompt: list[int]) -> Expected:
        """The reference, with no cache and no batch: one whole forward pass for each token."""
        key = (adapter, tuple(prompt))
        if key not in self._known:
            model = _reference_model(self.model_dir, None if adapter is None else self.adapters[adapter])
            self._known[key] = _greedy(model, prompt)
        return self._known[key]


@cache
def _reference_model(model_dir: Path, adapter_dir: Path | None) -> torch.nn.Module:
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return (base if adapter_dir is None else PeftModel.from_pretrained(base, adapter_dir)).eval()


@torch.inference_mode()
def _greedy(model: torch.nn.Module, prompt: list[int]) -> Expected:
    tokens = list(prompt)
    for _ in range(OUTPUT_TOKENS):
        best = model(input_ids=torch.tensor([tokens])).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 5e-4, "a near tie: the reference itself is not sure of this token"
        tokens.append(int(best.indices[0]))
    logprobs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    of_next = logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    split = len(prompt) - 1
    return Expected(tokens[len(prompt) :], of_next[split:], of_next[:split])


def fuse_targets(lora: LoraConfig) -> None:
    """Let it name the projections of a Phi3."""
    if not isinstance(lora.target_modules, str):
        lora.target_modules = {FUSED.get(name, name) for name in lora.target_modules or ()}
    for patterns in (lora.rank_pattern, lora.alpha_pattern):
        for name, value in list(patterns.items()):
            head, dot, last = name.rpartition(".")
            patterns[head + dot + FUSED.get(last, last)] = patterns.pop(name) and value


def _make_golden(family: str, folder: Path) -> Golden:
    torch.manual_seed(0)  # one that gives no near ties anywhere below
    config = FAMILIES[family]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # biases start as zeros and norms as ones: a fault in either would not show
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder / "base")
    adapters = {}
    for name, adapter in ADAPTERS.items():
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        lora = adapter()
        if family == "phi3":
            fuse_targets(lora)
        get_peft_model(base, lora).save_pretrained(folder / name)
        adapters[name] = folder / name
    store = FolderStore(folder / "store")
    spec = load_base_spec(folder / "base")
    keys: dict[str | None, AdapterKey | None] = {None: None}
    sizes = []
    for name, upload in adapters.items():
        result = publish(PublishJob(upload, folder / f"{name}.packed", spec, "float32", base_dir=folder / "base"))
        assert result.packed_key is not None, result.report
        store.put_if_absent(packed_path(result.packed_key), folder / f"{name}.packed")
        keys[name] = AdapterKey(result.packed_key)
        sizes.append(result.num_bytes)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4
    return Golden(family, folder / "base", adapters, folder / "store", keys, max(sizes), kv_bytes)


@pytest.fixture(scope="session", params=list(FAMILIES))
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    """Each family in turn; the session keeps it, so its references are computed once."""
    yield _make_golden(request.param, tmp_path_factory.mktemp(request.param))
    _reference_model.cache_clear()


@dataclass(frozen=True)
class Job:
    """One request to an engine: a prompt, the adapter's name or None for the base, and what is set off the defaults."""

    prompt: list[int]
    adapter: str | None = None
    output_ids: list[int] = field(default_factory=list)
    cache_salt: bytes = b"salt"
    temperature: float = 0.0
    seed: int = 0
    scores_prompt: bool = False
    max_tokens: int = OUTPUT_TOKENS
    adapter_start: int = 0
    vocab_size: int | None = None  # of the adapter, where it is not the base's


@dataclass
class Answer:
    """All that came back for one job."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    first_output_index: int | None = None
    cached_tokens: int = 0


class Model(Protocol):
    """What an engine is started over."""

    model_dir: Path
    store_dir: Path
    keys: dict[str | None, AdapterKey | None]


class Engine:
    """A whole engine without its process: scheduler, model, adapter store and residency, stepped by hand."""

    def __init__(self, golden: Model, cache_dir: Path, **settings: object) -> None:
        self._keys = golden.keys
        defaults: dict[str, object] = {
            "model_dir": str(golden.model_dir),
            "dtype": "float32",
            "block_size": 4,
            "kv_memory_bytes": 1 << 20,
            "adapter_memory_bytes": 8 << 20,
            "adapter_page_bytes": 4096,
            "store": StoreConfig(str(golden.store_dir)),
            "cache_dir": str(cache_dir),
            "kernel_dir": str(KERNEL_DIR),
            "kernels": {"all": "cpu"},
        }
        self._assembly = build_engine(msgspec.convert({**defaults, **settings}, EngineConfig))
        self._num_jobs = 0

    def run(self, *jobs: Job) -> list[Answer]:
        """Run the jobs together until all have ended."""
        core = self._assembly.core
        answers: dict[str, Answer] = {}
        for job in jobs:
            self._num_jobs += 1
            request_id = RequestId(f"job-{self._num_jobs}")
            answers[request_id] = Answer()
            core.add(self._request(request_id, job))
        unfinished = set(answers)
        give_up = time.monotonic() + 300  # interpreted kernels on a busy machine take a while
        while unfinished:
            assert time.monotonic() < give_up, f"{unfinished} never ended"
            for item in core.step():
                assert item.error is None, item.error
                _take_in(answers[item.request_id], item)
                if item.finish is not None:
                    assert item.finish == "length"
                    unfinished.remove(item.request_id)
            if core.last_num_tokens == 0:
                time.sleep(0.001)  # every request waits for an adapter
        assert core.check_integrity() == []
        return list(answers.values())

    def stat(self, name: str) -> float:
        """One of the engine's counters or gauges."""
        return self._assembly.stats()[name]

    def close(self) -> None:
        """Stop the loading threads."""
        self._assembly.close()

    def _request(self, request_id: RequestId, job: Job) -> Request:
        sampling = Sampling(
            max_tokens=job.max_tokens,
            seed=job.seed,
            temperature=job.temperature,
            logprobs=0,
            prompt_logprobs=0 if job.scores_prompt else None,
        )
        return Request(
            request_id,
            list(job.prompt),
            sampling,
            job.cache_salt,
            flow="tenant",
            arrival=time.monotonic(),
            adapter_key=self._keys[job.adapter],
            adapter_start=job.adapter_start,
            vocab_size=job.vocab_size,
            output_ids=list(job.output_ids),
            num_resumed_tokens=len(job.output_ids),
        )


def _take_in(answer: Answer, item: OutItem) -> None:
    if answer.first_output_index is None:
        answer.first_output_index = item.first_output_index
    assert item.first_output_index == answer.first_output_index + len(answer.token_ids)
    answer.token_ids += item.token_ids
    answer.logprobs += [x.logprob for x in item.logprobs or ()]
    if item.prompt_logprobs is not None:
        assert item.prompt_logprobs[0] is None
        answer.prompt_logprobs += [x.logprob for x in item.prompt_logprobs if x is not None]
    answer.cached_tokens = max(answer.cached_tokens, item.cached_tokens)


@pytest.fixture(scope="session")
def job() -> type[Job]:
    """The class of jobs: tests of this layout cannot import a neighbour."""
    return Job


@pytest.fixture(scope="session")
def engine() -> type[Engine]:
    """The class of engines, for tests that bring their own models."""
    return Engine


@pytest.fixture
def start_engine(golden: Golden, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Builds engines over the family's model and adapters, with the settings given; they are closed afterwards."""
    numbers = count()  # a disk cache belongs to one engine
    with ExitStack() as stack:

        def start(**settings: object) -> Engine:
            engine = Engine(golden, tmp_path / f"cache-{next(numbers)}", **settings)
            stack.callback(engine.close)
            return engine

        yield start


@pytest.fixture(scope="session")
def assert_matches() -> Callable[[Golden, Job, Answer], None]:
    """Greedy tokens are equal to the reference's and logprobs within 1e-4 of them."""

    def check(golden: Golden, job: Job, answer: Answer) -> None:
        expected = golden.expected(job.adapter, job.prompt)
        start = len(job.output_ids)
        assert answer.token_ids == expected.token_ids[start : job.max_tokens], (golden.family, job)
        assert answer.logprobs == pytest.approx(expected.logprobs[start : job.max_tokens], abs=1e-4), (golden.family, job)
        if job.scores_prompt:
            assert answer.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=1e-4), (golden.family, job)

    return check
