"""A model with random weights and adapters that lie in memory from the start, as a runner alone and as an engine around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from graftwork_adapters.base_spec import PROJECTIONS
from graftwork_adapters.whole_memory import DeviceWholes
from graftwork_adapters.wholes import WholeFacts
from graftwork_engine.ahead import AheadCore
from graftwork_engine.batch import StepCapacity
from graftwork_engine.core import EngineCore
from graftwork_engine.kv.manager import KVCacheManager
from graftwork_engine.kv_memory import KvCache, allocate_kv_cache
from graftwork_engine.messages import OutItem, Sampling
from graftwork_engine.model.config import ModelConfig, RopeConfig
from graftwork_engine.model.layers import Placement
from graftwork_engine.model.registry import build_model
from graftwork_engine.request import AdapterKey, Request, RequestId
from graftwork_engine.runner import ModelRunner
from graftwork_engine.sched.limits import SchedulerLimits
from graftwork_engine.sched.plan import AdapterFailure
from graftwork_engine.sched.scheduler import Scheduler
from graftwork_kernels import reference
from graftwork_kernels.layout import AdapterMemory, RowType, SiteField
from graftwork_kernels.ops import Operators

CPU = torch.device("cpu")
REFERENCE = Operators(reference)
BLOCK = 4
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
    tie_word_embeddings=False,
    max_position_embeddings=64,
    eos_token_ids=(),
)


def adapter_memory(adapters: Sequence[dict[int, tuple[Tensor, Tensor]]]) -> AdapterMemory:
    """fp32 rows of each adapter's A [rank, in] and B transposed [rank, out], by site, laid out one after the other."""
    rows: list[Tensor] = []
    sites = torch.full((len(adapters), CONFIG.num_sites, len(SiteField)), -1, dtype=torch.int64)
    sites[:, :, SiteField.RANK] = 0
    for index, adapter in enumerate(adapters):
        for site, (a, b) in adapter.items():
            record = {SiteField.A_ROW: len(rows), SiteField.B_ROW: len(rows) + len(a), SiteField.RANK: len(a)}
            for column, value in {**record, SiteField.ROW_TYPE: int(RowType.FP32)}.items():
                sites[index, site, column] = value
            rows += [*a, *b.T]
    padded = [torch.nn.functional.pad(row, (0, -len(row) % 16)) for row in rows]
    sizes = torch.tensor([0] + [row.numel() * 4 for row in padded])
    return AdapterMemory(torch.cat(padded).view(torch.uint8), sizes.cumsum(0)[:-1], sites)


def random_adapter(seed: int, rank: int, projections: Iterable[str]) -> dict[int, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    query, kv = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    inputs = (hidden, hidden, hidden, query, hidden, hidden, inner)
    outputs = (query, kv, kv, hidden, inner, inner, hidden)
    shapes = {name: shape for name, *shape in zip(PROJECTIONS, inputs, outputs, strict=True)}
    return {
        layer * len(PROJECTIONS) + PROJECTIONS.index(name): (
            torch.randn(rank, shapes[name][0], generator=generator) * 0.3,
            torch.randn(shapes[name][1], rank, generator=generator) * 0.3,
        )
        for layer in range(CONFIG.num_layers)
        for name in projections
    }


def make_kv(num_blocks: int = 32) -> KvCache:
    return allocate_kv_cache(CONFIG, num_blocks, BLOCK, torch.float32)


def make_runner(
    memory: AdapterMemory,
    num_blocks: int = 32,
    kv: KvCache | None = None,
    ops: Operators = REFERENCE,
    **options: Any,
) -> ModelRunner:
    model = build_model(CONFIG, 64, Placement(torch.float32, CPU))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.destinations():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0))
    model.prepare(ops)
    return ModelRunner(model, kv or make_kv(num_blocks), memory, ops, StepCapacity(128, 64, num_blocks), **options)


class ResidentGate:
    """Adapter "2" is the one at place 2 of memory, always there; ``facts`` of those that bring tensors whole, by place."""

    def __init__(self, facts: Mapping[int, WholeFacts] | None = None) -> None:
        self.facts = facts or {}

    def hold(self, key: str) -> None: ...

    def drop(self, key: str) -> None: ...

    def acquire(self, key: str) -> int | None:
        return int(key)

    def release(self, key: str) -> None: ...

    def wholes(self, index: int) -> WholeFacts | None:
        return self.facts.get(index)

    def needs_room(self, key: str) -> bool:
        return False

    def failure(self, key: str) -> AdapterFailure | None:
        return None

    def poll(self) -> bool:
        return False

    def discrepancies(self, holds: Mapping[str, int], references: Mapping[str, int]) -> list[str]:
        return []


class TinyEngine:
    """Scheduler, model and KV memory, stepped by hand. ``items`` keeps what each request was sent."""

    def __init__(
        self,
        memory: AdapterMemory,
        *,
        num_blocks: int = 64,
        budget: int = 64,
        num_seqs: int = 16,
        chunk: int | None = None,
        ops: Operators = REFERENCE,
        is_ahead: bool = False,
        wholes: Mapping[int, DeviceWholes] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.kv = make_kv(num_blocks)
        limits = SchedulerLimits(budget, num_seqs, CONFIG.max_position_embeddings, CONFIG.vocab_size, chunk)
        gate = ResidentGate({index: brought.facts for index, brought in wholes.items()})
        scheduler = Scheduler(limits, KVCacheManager(num_blocks, BLOCK, "base"), gate, lambda: 0.0)
        self.runner = make_runner(memory, num_blocks, self.kv, ops, is_ahead=is_ahead, wholes=wholes, **options)
        self.core = (AheadCore if is_ahead else EngineCore)(scheduler, self.runner, gate)
        self.items: dict[str, list[OutItem]] = {}
        self._numbers = count()

    def add(self, prompt: Sequence[int], sampling: Sampling, adapter: int | None = None, output: Sequence[int] = ()) -> str:
        name = f"r{next(self._numbers)}"
        self.items[name] = []
        request = Request(
            RequestId(name),
            list(prompt),
            sampling,
            b"salt",
            "flow",
            0.0,
            None if adapter is None else AdapterKey(str(adapter)),
            output_ids=list(output),
            num_resumed_tokens=len(output),
        )
        self.core.add(request)
        return name

    def run(self) -> None:
        """Step until all has ended; nothing may be left over."""
        for _ in range(500):
            if not self.core.has_work:
                break
            for item in self.core.step():
                self.items[item.request_id].append(item)
            assert self.core.check_integrity() == []
        assert not self.core.has_work
        assert self.core.stats()["kv_blocks_used"] == 0

    def tokens(self, name: str) -> list[int]:
        return [token for item in self.items[name] for token in item.token_ids]

    def logprobs(self, name: str) -> list[float]:
        return [logprob.logprob for item in self.items[name] for logprob in item.logprobs or ()]

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, adapter: int | None = None, output: Sequence[int] = ()
    ) -> list[int]:
        """Run one request alone; its new tokens."""
        name = self.add(prompt, sampling, adapter, output)
        self.run()
        return self.tokens(name)
