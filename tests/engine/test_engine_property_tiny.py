"""A long random run of a real engine in which everything is too small: what ends has its own output, and all comes back each time.

KV memory for a request or two, device room for two adapters, host room for three, disk room for four: eviction, preemption and
reload happen all the time, while requests are added, aborted, resumed and run out of time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tiny_engine import ADAPTERS, BLOCK_BYTES, VOCAB_SIZE, Solo, TinyEngine, TinyModel, make_tiny_model

PROMPTS = [[(7 * i * i + 3 * i + 2) % VOCAB_SIZE for i in range(length)] for length in (1, 6, 14, 23)]
PROMPTS.append([*PROMPTS[3][:12], 5])  # shares a prefix
MAX_OUTPUT = 14
NUM_SEEDS = max(1, settings().max_examples // 100)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-random"))


@pytest.fixture(scope="module")
def solo(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Solo]:
    reference = Solo(tiny, tmp_path_factory.mktemp("solo-random"))
    yield reference
    reference.close()


class RandomRun:
    """Chance decides what comes next; ``asked`` remembers what each request must get."""

    def __init__(self, engine: TinyEngine, solo: Solo, chance: random.Random) -> None:
        self.engine, self.solo, self.chance = engine, solo, chance
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.aborted: set[str] = set()
        self.timed: set[str] = set()

    def add(self) -> None:
        chance = self.chance
        adapter, prompt = chance.choice((None, *ADAPTERS)), chance.choice(PROMPTS)
        whole = self.solo(adapter, prompt, MAX_OUTPUT)
        max_tokens = chance.randrange(1, MAX_OUTPUT + 1)
        sent = whole[: chance.randrange(max_tokens)] if chance.random() < 0.2 else []
        is_timed = chance.random() < 0.1
        name = self.engine.add(adapter, prompt, max_tokens, output=sent, time_limit=chance.uniform(1, 20) if is_timed else None)
        self.asked[name] = whole, max_tokens
        if is_timed:
            self.timed.add(name)

    def abort(self) -> None:
        name = self.chance.choice([name for name in self.asked if name not in self.engine.finished and name not in self.aborted])
        if self.engine.core.abort(name) is not None:
            self.aborted.add(name)

    def settle(self) -> None:
        self.engine.finish()
        for name, (whole, max_tokens) in self.asked.items():
            output, finish = self.engine.outputs[name], self.engine.finished.get(name)
            assert output == whole[: len(output)], name
            if name in self.aborted:
                assert finish is None
            elif finish != "length":
                assert finish == "timeout"
                assert name in self.timed
            else:
                assert len(output) == max_tokens


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_whatever_comes_each_request_gets_its_own(tiny: TinyModel, solo: Solo, tmp_path: Path, seed: int) -> None:
    sizes = tiny.num_bytes
    engine = TinyEngine(
        tiny,
        tmp_path / "cache",
        kv_memory_bytes=14 * BLOCK_BYTES,
        adapter_memory_bytes=tiny.room_for("B", "A"),
        adapter_host_bytes=sizes["B"] + sizes["D"] + sizes["A"],
        adapter_disk_bytes=2 * sizes["B"] + sizes["A"] + 4000,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        prefill_chunk_size=10,
        num_adapter_loaders=2,
    )
    run = RandomRun(engine, solo, random.Random(seed))
    for turn in range(120):
        run.add()
        if run.chance.random() < 0.2:
            run.abort()
        for _ in range(run.chance.randrange(5)):
            engine.step()
            engine.now += 0.2
        if turn % 40 == 39:
            run.settle()
    run.settle()
    assert len(run.aborted) > 5
    for name in ("preemptions_total", "adapter_device_evictions_total", "adapter_host_evictions_total", "cached_tokens_total"):
        assert engine.stat(name) > 5, name
    assert engine.stat("adapter_load_failures_total") == 0
    engine.close()
