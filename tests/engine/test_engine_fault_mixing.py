"""Public faults in which one tenant's adapter or cached prefix shows in another's answer, each as a recipe that would show it.

Every answer is compared with what the same request gets when it is alone in an engine without a prefix cache.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import count, permutations
from pathlib import Path

import pytest
from tiny_engine import ADAPTERS, BLOCK_BYTES, VOCAB_SIZE, Solo, TinyEngine, TinyModel, make_tiny_model

LONG_PROMPT = [(13 * i * i + 5 * i + 1) % VOCAB_SIZE for i in range(400)]
SHORT_PROMPT = LONG_PROMPT[:13]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def solo(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Solo]:
    reference = Solo(tiny, tmp_path_factory.mktemp("solo"))
    yield reference
    reference.close()


@pytest.fixture
def start(tiny: TinyModel, tmp_path: Path) -> Iterator[Callable[..., TinyEngine]]:
    engines: list[TinyEngine] = []
    numbers = count()

    def build(**settings: object) -> TinyEngine:
        engines.append(TinyEngine(tiny, tmp_path / f"cache-{next(numbers)}", **settings))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def test_the_adapters_differ_so_that_a_mix_up_shows(solo: Solo) -> None:
    for prompt in (SHORT_PROMPT, LONG_PROMPT):
        outputs = [tuple(solo(adapter, prompt, 8)) for adapter in (None, *ADAPTERS)]
        assert len(set(outputs)) == len(outputs)


@pytest.mark.parametrize("order", list(permutations(("A", "B", None))), ids=str)
def test_a_long_prompt_under_one_adapter_after_another(start, solo, order: tuple[str | None, ...]) -> None:
    """Fault kind of vllm#3264 and llama.cpp#26207: KV computed under A answers for B."""
    engine = start()
    for adapter in (*order, *order):
        (output,) = engine.run((adapter, LONG_PROMPT, 6))
        assert output == solo(adapter, LONG_PROMPT, 6)
    assert [engine.cached.get(f"r{n}", 0) for n in range(6)] == [0, 0, 0, 396, 396, 396], "each found its own prefix, and no other"


def test_a_long_prompt_under_all_adapters_in_one_batch(start, solo) -> None:
    """Fault kind of vllm#3264, inside one batch and with the prompt in chunks of several steps."""
    engine = start(kv_memory_bytes=1000 * BLOCK_BYTES, max_num_batched_tokens=96, prefill_chunk_size=24)
    adapters = ["A", "B", None, "A", None, "B"]
    for _ in range(2):
        outputs = engine.run(*((adapter, LONG_PROMPT, 6) for adapter in adapters))
        assert outputs == [solo(adapter, LONG_PROMPT, 6) for adapter in adapters]


def test_a_new_version_does_not_answer_from_the_old_ones_prefix(start, solo) -> None:
    """Fault kind of vllm#42125: after an upload under the same name, long prompts still use the old version's KV."""
    engine = start()
    for version in ("A", "A@v2", "A"):
        (output,) = engine.run((version, LONG_PROMPT, 6))
        assert output == solo(version, LONG_PROMPT, 6)
    assert engine.cached == {"r2": 396}


def test_a_salt_that_is_an_adapters_key_opens_nothing(start, solo, tiny: TinyModel) -> None:
    """Fault kind of sglang#24638: a base request inside an adapter's cache, by a salt that looks like the adapter."""
    engine = start()
    engine.run(("A", LONG_PROMPT, 2))
    for salt in (str(tiny.keys["A"]).encode(), b"\x01" + str(tiny.keys["A"]).encode(), b"salt" + str(tiny.keys["A"]).encode()):
        for adapter in (None, "A"):
            name = engine.add(adapter, LONG_PROMPT, 6, salt=salt)
            engine.finish()
            assert engine.outputs[name] == solo(adapter, LONG_PROMPT, 6)
            assert name not in engine.cached


def test_running_adapters_while_others_are_loaded_and_evicted(start, solo, tiny: TinyModel) -> None:
    """Fault kind of vllm#47724: a running request goes on with another tenant's adapter after a load at run time."""
    engine = start(adapter_memory_bytes=tiny.room_for("A", "C", "B"))
    running = {adapter: engine.add(adapter, SHORT_PROMPT, 150) for adapter in ("A", "C")}
    while not all(engine.outputs[name] for name in running.values()):
        engine.step()
    loop: list[tuple[str, str, list[int]]] = []
    turn = 0
    while any(name not in engine.finished for name in running.values()):
        visitor = "BD"[turn % 2]
        name = engine.add(visitor, SHORT_PROMPT[turn % 3 :], 3)
        loop.append((name, visitor, SHORT_PROMPT[turn % 3 :]))
        while name not in engine.finished:
            engine.step()
            time.sleep(0.004)  # a load takes its time, and this engine's steps take less
        turn += 1
    engine.finish()
    for adapter, name in running.items():
        assert engine.outputs[name] == solo(adapter, SHORT_PROMPT, 150)
    for name, visitor, prompt in loop:
        assert engine.outputs[name] == solo(visitor, prompt, 3)
    assert engine.stat("adapter_device_evictions_total") >= 5


def test_batches_of_any_adapters_in_any_order(start, solo) -> None:
    """Fault kind of lorax#62 and lorax#525: segments that overlap or are out of step when adapters join and leave."""
    engine, chance = start(), random.Random(5)
    names = (None, *ADAPTERS)
    batches: list[list[str | None]] = [[None] * 5, ["B"] * 7, ["A"], ["A", None, "A", None], ["D", "C", "B", "A@v2", "A", None]]
    batches += [[chance.choice(names) for _ in range(chance.randrange(1, 12))] for _ in range(9)]
    for number, adapters in enumerate(batches):
        jobs = [
            (adapter, LONG_PROMPT[place % 3 : place % 3 + 1 + place % 5], 1 + (number + place) % 4)
            for place, adapter in enumerate(adapters)
        ]
        assert engine.run(*jobs) == [solo(*job) for job in jobs]


def test_adapters_alternate_on_a_long_shared_prefix(start, solo) -> None:
    """Fault kind of vllm#38606: a shared prefix, prompts in chunks, and another adapter every few milliseconds."""
    engine = start(prefill_chunk_size=64, max_num_batched_tokens=128, kv_memory_bytes=500 * BLOCK_BYTES, max_num_seqs=4)
    jobs = [("AB"[n % 2], [*LONG_PROMPT, n % 7], 4) for n in range(36)]
    names = []
    for job in jobs:
        names.append(engine.add(*job))
        engine.step()
    engine.finish()
    assert [engine.outputs[name] for name in names] == [solo(*job) for job in jobs]
    assert len(engine.cached) > 25, "the prefix was shared"


def test_preempted_with_an_adapter(start, solo) -> None:
    """Fault kind of vllm#546, vllm#9640 and vllm#13394, with LoRA: KV for one request and a half, and four of them."""
    engine = start(kv_memory_bytes=18 * BLOCK_BYTES)
    jobs = [(adapter, SHORT_PROMPT, 35) for adapter in ("A", "B", "C", "D")]
    engine.run(*((adapter, SHORT_PROMPT, 1) for adapter, _, _ in jobs))  # adapters first, so that all start together
    assert engine.run(*jobs) == [solo(*job) for job in jobs]
    assert engine.stat("preemptions_total") >= 2


def test_loaded_one_by_one_and_again_in_reverse(start, solo, tiny: TinyModel) -> None:
    """Fault kinds of vllm#12199 and sglang#8263: a later adapter answers like the first, or a reloaded one like its predecessor.

    There is room for one adapter at a time, on the host too.
    """
    largest = max(tiny.num_bytes.values())
    engine = start(
        adapter_memory_bytes=largest * 4 // 3, adapter_host_bytes=largest, adapter_disk_bytes=1, enable_prefix_caching=False
    )
    for order in (list(ADAPTERS), list(reversed(ADAPTERS)), list(ADAPTERS)):
        for adapter in order:
            (output,) = engine.run((adapter, SHORT_PROMPT, 6))
            assert output == solo(adapter, SHORT_PROMPT, 6)
    assert engine.stat("adapter_device_evictions_total") >= 8
    assert engine.stat("adapter_host_evictions_total") >= 8


def test_an_adapter_that_is_deleted_while_it_runs(start, solo, tmp_path: Path, tiny: TinyModel) -> None:
    """Fault kind of dynamo#11520 and sglang#9084: what runs ends with the adapter it began with; the next one is told."""
    store = tmp_path / "store"
    shutil.copytree(tiny.store_dir, store)
    engine = start(store={"url": str(store)}, adapter_memory_bytes=tiny.room_for("A"))
    name = engine.add("A", SHORT_PROMPT, 60)
    while len(engine.outputs[name]) < 20:
        engine.step()
    shutil.rmtree(store / "packed")
    engine.finish()
    assert engine.outputs[name] == solo("A", SHORT_PROMPT, 60)
    gone = engine.add("A@v2", SHORT_PROMPT, 4)
    engine.finish()
    assert engine.finished[gone] == "adapter_missing"
    (again,) = engine.run(("A", SHORT_PROMPT, 6))
    assert again == solo("A", SHORT_PROMPT, 6), "it is still on the device, and nobody else's bytes came there"


def test_a_rank_above_the_largest_is_not_loaded(start, solo) -> None:
    """The kernels keep room for the largest rank that is served, and have nobody to tell of a larger one."""
    engine = start(max_adapter_rank=7)
    refused = engine.add("B", SHORT_PROMPT, 6)
    served = engine.add("D", SHORT_PROMPT, 6)
    engine.finish()
    assert engine.finished[refused] == "adapter_too_large"
    assert engine.outputs[refused] == []
    assert engine.outputs[served] == solo("D", SHORT_PROMPT, 6)
