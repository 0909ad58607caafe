"""A whole engine over a tiny random Llama and adapters in PEFT's format, stepped by hand.

What a request gets when it is alone in an engine without a prefix cache is what it must get in any company.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from compiled_kernels import KERNEL_DIR
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from graftwork_adapters.base_spec import BaseSpec, load_base_spec
from graftwork_adapters.folder_store import FolderStore
from graftwork_adapters.keys import packed_path
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import PublishJob
from graftwork_adapters.store import StoreConfig
from graftwork_engine.assembly import build_engine
from graftwork_engine.config import EngineConfig
from graftwork_engine.messages import OutItem, Sampling, TokenLogprob
from graftwork_engine.request import AdapterKey, Request, RequestId

VOCAB_SIZE = 96
HIDDEN, INNER, KV = 32, 48, 16
BLOCK = 4
BLOCK_BYTES = 2 * 2 * KV * BLOCK * 4
"""Keys and values, layers, KV width, tokens, fp32."""

SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
ADAPTERS = {
    "A": (4, ("self_attn.k_proj", "self_attn.v_proj")),
    "A@v2": (4, ("self_attn.k_proj", "self_attn.v_proj")),  # the same shape: all that differs is its bytes
    "B": (8, tuple(SHAPES)),
    "C": (2, ("self_attn.q_proj", "mlp.down_proj")),
    "D": (7, tuple(SHAPES)),
}


@dataclass(frozen=True)
class TinyModel:
    """Folders of the base and of the store, and the adapters' keys by name (None: the base)."""

    model_dir: Path
    store_dir: Path
    keys: dict[str | None, AdapterKey | None]
    num_bytes: dict[str, int]

    def room_for(self, *adapters: str) -> int:
        """Bytes of device memory that these adapters fit in together, the ends of their pages included."""
        return sum(self.num_bytes[adapter] for adapter in adapters) * 4 // 3


class Solo:
    """Greedy output of requests that are alone in a roomy engine without a prefix cache; computed once."""

    def __init__(self, model: TinyModel, folder: Path) -> None:
        self._engine = TinyEngine(model, folder, enable_prefix_caching=False, max_num_batched_tokens=4096)
        self._known: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}

    def __call__(self, adapter: str | None, prompt: Sequence[int], max_tokens: int) -> list[int]:
        key = adapter, tuple(prompt)
        if len(self._known.get(key, ())) < max_tokens:
            (self._known[key],) = self._engine.run((adapter, prompt, max_tokens))
        return self._known[key][:max_tokens]

    def close(self) -> None:
        """Stop the engine's loading threads."""
        self._engine.close()


def make_tiny_model(folder: Path) -> TinyModel:
    """Save the base, publish its adapters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,  # wide enough that greedy choices are not near ties
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    spec = load_base_spec(folder / "base")
    store = FolderStore(folder / "store")
    keys: dict[str | None, AdapterKey | None] = {None: None}
    sizes = {}
    for seed, (name, (rank, projections)) in enumerate(ADAPTERS.items()):
        keys[name], sizes[name] = _publish(folder / name, seed, rank, projections, spec, store)
    return TinyModel(folder / "base", folder / "store", keys, sizes)


def _publish(
    folder: Path, seed: int, rank: int, projections: Sequence[str], spec: BaseSpec, store: FolderStore
) -> tuple[AdapterKey, int]:
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for projection in projections:
            width_in, width_out = SHAPES[projection]
            name = f"base_model.model.model.layers.{layer}.{projection}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, width_in, generator=generator) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(width_out, rank, generator=generator) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({projection.split(".")[1] for projection in projections})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    packed = folder.with_suffix(".packed")
    result = publish(PublishJob(folder, packed, spec, "float32", base_dir=folder.parent / "base"))
    assert result.packed_key is not None, result.report
    store.put_if_absent(packed_path(result.packed_key), packed)
    return AdapterKey(result.packed_key), result.num_bytes


class TinyEngine:
    """``outputs`` holds all tokens by request name, ``finished`` why each ended."""

    def __init__(self, model: TinyModel, cache_dir: Path, **settings: object) -> None:
        self.keys = model.keys
        defaults: dict[str, object] = {
            "model_dir": str(model.model_dir),
            "dtype": "float32",
            "block_size": BLOCK,
            "kv_memory_bytes": 400 * BLOCK_BYTES,
            "adapter_memory_bytes": 1 << 20,
            "adapter_page_bytes": 512,
            "store": StoreConfig(str(model.store_dir)),
            "cache_dir": str(cache_dir),
            "kernel_dir": str(KERNEL_DIR),
            "kernels": {"all": "cpu"},
        }
        self.now = 0.0
        self.assembly = build_engine(msgspec.convert({**defaults, **settings}, EngineConfig), lambda: self.now)
        self.core = self.assembly.core
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}

    def add(
        self,
        adapter: str | None,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        output: Sequence[int] = (),
        salt: bytes = b"salt",
        time_limit: float | None = None,
        adapter_start: int = 0,
        vocab_size: int | None = None,
        sampling: Sampling | None = None,
        flow: str = "flow",
    ) -> str:
        """Add a request, a greedy one unless ``sampling`` says otherwise; gives its name."""
        name = f"r{len(self.outputs)}"
        self.outputs[name] = list(output)
        request = Request(
            RequestId(name),
            list(prompt),
            sampling or Sampling(max_tokens, 1, temperature=0.0),
            salt,
            flow,
            self.now,
            adapter_key=self.keys[adapter],
            adapter_start=adapter_start,
            vocab_size=vocab_size,
            deadline=None if time_limit is None else self.now + time_limit,
            output_ids=list(output),
            num_resumed_tokens=len(output),
        )
        self.core.add(request)
        return name

    def step(self) -> list[OutItem]:
        """One step of the core, its items taken in; rests a little when every request waits for an adapter."""
        items = self.core.step()
        for item in items:
            assert item.first_output_index == len(self.outputs[item.request_id])
            self.outputs[item.request_id] += item.token_ids
            self.logprobs.setdefault(item.request_id, []).extend(item.logprobs or ())
            if item.prompt_logprobs is not None:
                self.prompt_logprobs[item.request_id] = item.prompt_logprobs
            if item.error is not None:
                self.errors[item.request_id] = item.error.message
            if item.cached_tokens:
                self.cached[item.request_id] = item.cached_tokens
            if item.finish is not None:
                self.finished[item.request_id] = item.finish if item.error is None else item.error.code
        if not items and not self.core.last_num_tokens:
            time.sleep(0.0005)
        return items

    def finish(self) -> None:
        """Step until nothing is left, then recount."""
        give_up = time.monotonic() + 60
        while self.core.has_work:
            assert time.monotonic() < give_up, "it does not come to an end"
            self.step()
        self.check_idle()

    def check_idle(self) -> None:
        """Wait for loads that nobody wants any more; then everything is back, and no recount finds anything."""
        assert not self.core.has_work
        give_up = time.monotonic() + 60
        while self.stat("adapters_loading"):
            assert time.monotonic() < give_up
            self.core.take_in_loads()
            time.sleep(0.001)
        assert self.core.check_integrity() == []
        for name in ("kv_blocks_used", "adapter_holds", "adapter_device_references", "requests_running", "requests_waiting"):
            assert self.stat(name) == 0, name

    def run(self, *jobs: tuple[str | None, Sequence[int], int]) -> list[list[int]]:
        """Run (adapter, prompt, max_tokens) together; their outputs."""
        names = [self.add(*job) for job in jobs]
        self.finish()
        assert all(self.finished[name] == "length" for name in names), self.finished
        return [self.outputs[name] for name in names]

    def stat(self, name: str) -> float:
        """One of the engine's readings."""
        return self.assembly.stats()[name]

    def close(self) -> None:
        """Stop the loading threads."""
        self.assembly.close()
