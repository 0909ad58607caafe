"""A forward pass that is replayed gives every request what it gets when each operator is called, whatever else is in the step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny_model import CONFIG, REFERENCE, TinyEngine, adapter_memory, random_adapter

from graftwork_adapters.base_spec import PROJECTIONS
from graftwork_engine.forward import replaying
from graftwork_engine.messages import Sampling
from graftwork_kernels.cpu.build import build_library
from graftwork_kernels.cpu.capture import Recorder
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.layout import AdapterMemory
from graftwork_kernels.ops import Operators


@pytest.fixture(scope="module")
def library(shared_kernels: Path) -> Library:
    return Library(build_library(shared_kernels))


@pytest.fixture(scope="module")
def memory() -> AdapterMemory:
    return adapter_memory([random_adapter(seed, rank, PROJECTIONS) for seed, rank in enumerate((2, 7, 16))])


def engines(library: Library, memory: AdapterMemory, **limits: int) -> tuple[TinyEngine, TinyEngine]:
    """One that calls the compiled operators, one that replays them."""
    immediate = Operators(CpuOperators(Immediate(library)))
    recorder = Recorder(library)
    recorded = replaying(recorder, Operators(CpuOperators(recorder)))
    return (
        TinyEngine(memory, ops=immediate, **limits),
        TinyEngine(memory, ops=immediate, make_forward=recorded, **limits),
    )


def load(engine: TinyEngine, seed: int) -> list[str]:
    """Prompts of all lengths, bases and adapters, greedy and drawn, joining while others run."""
    dice = random.Random(seed)
    names = []
    for number in range(24):
        prompt = [dice.randrange(CONFIG.vocab_size) for _ in range(dice.randint(1, 30))]
        sampling = Sampling(max_tokens=dice.randint(1, 12), seed=number, temperature=dice.choice([0.0, 0.9]), logprobs=1)
        names.append(engine.add(prompt, sampling, dice.choice([None, 0, 1, 2])))
        for _ in range(dice.randint(0, 2)):
            for item in engine.core.step():
                engine.items[item.request_id].append(item)
    engine.run()
    return names


@pytest.mark.parametrize("seed", range(3))
def test_replayed_and_called_agree_to_the_bit(library: Library, memory: AdapterMemory, seed: int) -> None:
    """Few blocks, so that requests are preempted; small chunks, so that prompts meet decoding rows."""
    called, replayed = engines(library, memory, num_blocks=40, budget=24, num_seqs=9, chunk=7)
    for first, second in zip(load(called, seed), load(replayed, seed), strict=True):
        assert called.tokens(first) == replayed.tokens(second)
        assert called.logprobs(first) == replayed.logprobs(second)


def test_a_request_has_the_same_bits_alone_and_in_any_company(library: Library, memory: AdapterMemory) -> None:
    """What no BLAS gives: logprobs of a request in a crowd are equal to those of the same request alone."""
    _, crowd = engines(library, memory)
    prompt, sampling = [5, 9, 33, 2, 60], Sampling(max_tokens=10, seed=1, temperature=0.0, logprobs=1)
    for adapter in (None, 0, 2):
        _, alone = engines(library, memory)
        alone.generate(prompt, sampling, adapter)
        others = [crowd.add([7 + n, 3, n], Sampling(max_tokens=12, seed=n, temperature=0.8), n % 3) for n in range(12)]
        name = crowd.add(prompt, sampling, adapter)
        crowd.run()
        assert len(others) == 12
        assert crowd.logprobs(name) == alone.logprobs("r0")


def test_it_agrees_with_the_reference(library: Library, memory: AdapterMemory) -> None:
    _, replayed = engines(library, memory)
    plain = TinyEngine(memory, ops=REFERENCE)
    for first, second in zip(load(plain, 11), load(replayed, 11), strict=True):
        assert plain.tokens(first) == replayed.tokens(second)
        assert plain.logprobs(first) == pytest.approx(replayed.logprobs(second), abs=1e-4)
