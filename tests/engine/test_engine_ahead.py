"""An engine that is a step ahead of what it knows, and one whose steps are captured, give what one gives that does neither."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from device_twins import TwinCapture, mirror_io
from tiny_model import BLOCK, CONFIG, REFERENCE, TinyEngine, adapter_memory, random_adapter

from graftwork_adapters.base_spec import PROJECTIONS
from graftwork_adapters.whole_memory import DeviceWholes
from graftwork_adapters.wholes import WholeFacts
from graftwork_engine.batch import BatchBuilder, StepCapacity
from graftwork_engine.graphs import capturing, graph_sizes
from graftwork_engine.messages import Sampling
from graftwork_kernels.cpu.build import build_library
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.layout import AdapterMemory, empty_adapter_memory
from graftwork_kernels.ops import Operators
from graftwork_kernels.triton.operators import TritonOperators

CAPACITY = StepCapacity(128, 64, 30)  # as `tiny_model.make_runner` has it for 30 blocks


@pytest.fixture(scope="module")
def library(shared_kernels: Path) -> Library:
    return Library(build_library(shared_kernels))


@pytest.fixture(scope="module")
def memory() -> AdapterMemory:
    return adapter_memory([random_adapter(seed, rank, PROJECTIONS) for seed, rank in enumerate((2, 7, 16))])


def sampling_of(number: int, dice: random.Random) -> Sampling:
    """Every kind of control, most often none."""
    wish: dict[str, Any] = dice.choice(
        [
            {},
            {},
            {"temperature": 0.9, "top_p": 0.8},
            {"repetition_penalty": 1.3},
            {"frequency_penalty": 0.4, "presence_penalty": 0.3, "temperature": 0.7},
            {"logit_bias": {3: 4.0, 9: -100.0}},
            {"min_tokens": 4, "stop_token_ids": tuple(range(0, CONFIG.vocab_size, 3))},
            {"stop_token_ids": tuple(range(0, CONFIG.vocab_size, 5))},
            {"prompt_logprobs": 1},
            {"logprobs": 3},
        ]
    )
    sampling = {"max_tokens": dice.randint(1, 12), "seed": number, "temperature": 0.0, "logprobs": 0, **wish}
    return Sampling(**{**sampling, "min_tokens": min(sampling.get("min_tokens", 0), sampling["max_tokens"])})


def load(engine: TinyEngine, seed: int, num_requests: int = 24) -> list[str]:
    """Prompts of all lengths, bases and adapters, joining and aborted while others run."""
    dice = random.Random(seed)
    names: list[str] = []
    for number in range(num_requests):
        prompt = [dice.randrange(CONFIG.vocab_size) for _ in range(dice.randint(1, 30))]
        names.append(engine.add(prompt, sampling_of(number, dice), dice.choice([None, 0, 1, 2])))
        for _ in range(dice.randint(0, 2)):
            for item in engine.core.step():
                engine.items[item.request_id].append(item)
        if number % 7 == 6:
            engine.core.abort(gone := names.pop())
            engine.items[gone].clear()
    engine.run()
    return names


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_mirrored", [False, True])
def test_ahead_gives_what_an_engine_gives_that_waits(library: Library, memory: AdapterMemory, seed: int, is_mirrored: bool) -> None:
    """Few blocks, so that requests are preempted with a token on its way, and then computed in other chunks."""
    ops = Operators(CpuOperators(Immediate(library)))
    limits: dict[str, Any] = {"num_blocks": 30, "budget": 24, "num_seqs": 9, "chunk": 7, "ops": ops}
    plain = TinyEngine(memory, **limits)
    ahead = TinyEngine(memory, is_ahead=True, io=mirror_io(CAPACITY.num_bytes) if is_mirrored else None, **limits)
    for first, second in zip(load(plain, seed), load(ahead, seed), strict=True):
        assert plain.tokens(first) == ahead.tokens(second)
        assert plain.logprobs(first) == pytest.approx(ahead.logprobs(second), abs=1e-4)
        assert plain.items[first][-1].finish == ahead.items[second][-1].finish
    assert ahead.core.stats()["preemptions_total"] > 0


def test_captured_steps_follow_every_mix(monkeypatch: pytest.MonkeyPatch, memory: AdapterMemory) -> None:
    """Requests come and go while others run, so that every size is replayed with several mixes, and padded."""
    capture = TwinCapture(monkeypatch)
    options: dict[str, Any] = {
        "ops": Operators(TritonOperators(1, 16, has_e4m3=False, is_exact=True, is_wide=True)),
        "io": mirror_io(CAPACITY.num_bytes),
        "make_forward": capturing([1, 4], capture),
    }
    plain, captured = TinyEngine(memory, num_blocks=30), TinyEngine(memory, num_blocks=30, is_ahead=True, **options)
    names: list[list[str]] = [[], []]
    for engine, mine in zip((plain, captured), names, strict=True):
        for number, adapter in enumerate((2, None, 0, 2)):
            sampling = Sampling(max_tokens=7 - number, seed=number, temperature=0.9 * (number % 2), logprobs=0)
            mine.append(engine.add([9 + number], sampling, adapter))
            for item in engine.core.step():
                engine.items[item.request_id].append(item)
        engine.run()
    for first, second in zip(*names, strict=True):
        assert plain.tokens(first) == captured.tokens(second)
        assert plain.logprobs(first) == pytest.approx(captured.logprobs(second), abs=1e-4)
    assert capture.num_launches > 0
    assert capture.num_replays >= 7
    # Of each size: 3 lists of work, a last norm; of each layer 4 norms, rotary, 2 of attention, a gate, 8 of adapters.
    assert capture.num_launches == 2 * (3 + 16 * CONFIG.num_layers + 1)


def test_captured_steps_are_used_beside_those_with_wholes(monkeypatch: pytest.MonkeyPatch, memory: AdapterMemory) -> None:
    """A step with an adapter that brings norms is called, padded as it may be; heads are no business of the graph."""
    dice = torch.Generator().manual_seed(5)
    norm, head = (torch.randn(shape, generator=dice) for shape in ((32,), (CONFIG.vocab_size, 32)))
    wholes = {
        0: DeviceWholes({"model.norm.weight": norm, "model.layers.1.self_attn.q_norm.weight": norm[:8]}, WholeFacts(256, None)),
        1: DeviceWholes({"lm_head.weight": head}, WholeFacts(12416, CONFIG.vocab_size)),
    }
    capture = TwinCapture(monkeypatch)
    options: dict[str, Any] = {"io": mirror_io(CAPACITY.num_bytes), "make_forward": capturing([4], capture)}
    options["ops"] = Operators(TritonOperators(1, 16, has_e4m3=False, is_exact=True, is_wide=True))
    plain = TinyEngine(memory, num_blocks=30, wholes=wholes)
    captured = TinyEngine(memory, num_blocks=30, is_ahead=True, wholes=wholes, **options)
    for engine in (plain, captured):
        for number, adapter in enumerate((0, 2, 1)):
            engine.add([9 + number], Sampling(max_tokens=2 + number, seed=number, temperature=0.0, logprobs=0), adapter)
        engine.run()
    for name in plain.items:
        assert plain.tokens(name) == captured.tokens(name)
        assert plain.logprobs(name) == pytest.approx(captured.logprobs(name), abs=1e-4)
    assert capture.num_replays == 4 - 2  # after the first two, which have norms of their own


def test_sizes_of_graphs() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(256)[-3:] == [240, 248, 256]


@pytest.mark.parametrize("capacity", [StepCapacity(1, 1, 1), StepCapacity(7, 3, 5), StepCapacity(2048, 256, 512)])
def test_arrays_fit_into_what_is_reckoned_for_them(capacity: StepCapacity) -> None:
    def build(num_bytes: int) -> None:
        BatchBuilder(REFERENCE, empty_adapter_memory(CONFIG.num_sites), BLOCK, capacity, mirror_io(num_bytes))

    build(capacity.num_bytes)
    if capacity.num_rows > 2000:  # of which alignment is a small part
        with pytest.raises(ValueError, match="does not fit"):
            build(int(capacity.num_bytes * 0.99))
