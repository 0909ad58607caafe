"""CPU time of a decode step outside the model: the engine's own steps around a forward pass, head and sampler that cost nothing.

    schedule ─▶ batch ─▶ (forward) ─▶ sample ─▶ results ─▶ update ─▶ hand over ╎ route + encode
    ╰──────────────────────── engine thread ─────────────────────────────────╯ ╎ ╰ socket thread ╯

The loop's thread is measured by its own clock of CPU time, so that neighbours on the machine count less; every part is the median
over the steps. ``sample`` is what the engine does around the head and the sampler, the search for rows that are not finite
included. ``total`` is all of it, the socket thread's part too, since both threads share one interpreter; left out is what the
operating system takes to write to the socket.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from graftwork_adapters.wholes import WholeFacts
from graftwork_engine.core import EngineCore
from graftwork_engine.kv.manager import KVCacheManager
from graftwork_engine.kv_memory import KvCache, allocate_kv_cache
from graftwork_engine.messages import Add, Out, OutItem, Ready, Sampling, encode
from graftwork_engine.model.config import ModelConfig, RopeConfig
from graftwork_engine.model.layers import ForwardBatch, Placement
from graftwork_engine.model.llama import Llama
from graftwork_engine.model.wholes import WholeGroup
from graftwork_engine.request import AdapterKey, Request, RequestId
from graftwork_engine.runner import ModelRunner
from graftwork_engine.sched.limits import SchedulerLimits
from graftwork_engine.sched.plan import AdapterFailure, RequestResult, StepPlan
from graftwork_engine.sched.scheduler import Scheduler
from graftwork_engine.server import EngineServer
from graftwork_engine.sessions import Session, SessionTable
from graftwork_kernels.implementation import Implementation
from graftwork_kernels.layout import SamplingBatch, empty_adapter_memory
from graftwork_kernels.ops import Operators
from results import REPEATS, Claim, Part, Results, percentile
from runs import add_output, conclude

VOCAB, HIDDEN, BLOCK, CONTEXT = 64, 576, 16, 8192
NUM_ADAPTERS = 32
PROMPT = 48
PARTS = ("schedule", "batch", "sample", "results", "update", "hand over", "route", "encode")

FIGURES = (*PARTS, "total", "least", "95th")
BARS_MS = {64: 1.0, 256: 2.0}
"""What the whole may take, by the number of running requests."""

ROUNDS, STEPS = REPEATS, 100
NO_BASE = "a model that costs nothing"

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_word_embeddings=True,
    max_position_embeddings=CONTEXT,
    eos_token_ids=(),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What the requests of a measurement have in common; ``lifetime`` is their output in tokens, None: longer than it takes."""

    name: str
    adapters: bool = False
    lifetime: int | None = None
    temperature: float = 0.0
    presence_penalty: float = 0.0


CASES = (
    Case("greedy"),
    Case("sampled", temperature=0.8),
    Case("adapters", adapters=True),
    Case("adapters, joins and leaves", adapters=True, lifetime=64),
    Case("penalties", temperature=0.8, presence_penalty=0.5),
)


class Marks:
    """The moments of one step, on the clock of the thread's CPU time."""

    def __init__(self) -> None:
        self.times: list[int] = []

    def set(self) -> None:
        """Now."""
        self.times.append(time.thread_time_ns())

    def take(self) -> list[float]:
        """Milliseconds between the moments so far."""
        times, self.times = self.times, []
        return [(after - before) / 1e6 for before, after in pairwise(times)]


class FreeModel(Llama):
    """Gives every step the same hidden states and logits."""

    def __init__(self, marks: Marks, num_rows: int) -> None:
        self.config, self.place, self._marks = CONFIG, Placement(torch.bfloat16, torch.device("cpu")), marks
        self._hidden = torch.randn(num_rows, HIDDEN).to(torch.bfloat16)
        self._logits = torch.randn(num_rows, VOCAB)

    def hidden_states(self, token_ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:  # noqa: ARG002 - the model's
        """Marks the end of ``batch``."""
        self._marks.set()
        return self._hidden[: len(token_ids)]

    def logits(
        self,
        ops: Operators,  # noqa: ARG002 - the model's
        hidden: Tensor,
        groups: Sequence[WholeGroup] = (),  # noqa: ARG002 - the model's
        num_logits: int = 0,  # noqa: ARG002 - the model's
    ) -> Tensor:
        """Of as many rows."""
        return self._logits[: len(hidden)]


def free_operators(marks: Marks, num_rows: int) -> Operators:
    """The operators that a sampler asks for; every row draws the same token."""
    tokens, finite = torch.full((num_rows,), 7), torch.ones(num_rows, dtype=torch.bool)

    def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:  # noqa: ARG001 - the operator's
        marks.set()
        return tokens[: len(logits)]

    def finite_rows(logits: Tensor) -> Tensor:
        return finite[: len(logits)]

    def unchanged(logits: Tensor, controls: object) -> None:
        """Biases and penalties cost nothing."""

    functions = {"apply_logit_bias": unchanged, "apply_penalties": unchanged}
    return Operators(cast(Implementation, SimpleNamespace(sample=sample, finite_rows=finite_rows, **functions)))


class ResidentGate:
    """Adapter "2" is at place 2 of memory, always there."""

    def hold(self, key: str) -> None:
        """It is there."""

    def drop(self, key: str) -> None:
        """It stays."""

    def acquire(self, key: str) -> int | None:
        """Its number."""
        return int(key)

    def release(self, key: str) -> None:
        """It stays."""

    def wholes(self, index: int) -> WholeFacts | None:  # noqa: ARG002 - the protocol's
        """None does."""
        return None

    def needs_room(self, key: str) -> bool:  # noqa: ARG002 - the protocol's
        """Never."""
        return False

    def failure(self, key: str) -> AdapterFailure | None:  # noqa: ARG002 - the protocol's
        """None."""
        return None

    def poll(self) -> bool:
        """Nothing runs in the background."""
        return False

    def discrepancies(self, holds: Mapping[str, int], references: Mapping[str, int]) -> list[str]:  # noqa: ARG002 - the protocol's
        """There is nothing to count."""
        return []


class MarkedRunner:
    """The engine's runner, between two marks."""

    def __init__(self, runner: ModelRunner, marks: Marks) -> None:
        self._runner, self._marks = runner, marks

    def execute(self, plan: StepPlan) -> Sequence[RequestResult | int]:
        """See `graftwork_engine.sched.plan.Runner`."""
        self._marks.set()
        results = self._runner.execute(plan)
        self._marks.set()
        return results


class Bench:
    """An engine of ``running`` requests that have their first token, with the socket thread's tables beside it."""

    def __init__(self, case: Case, running: int) -> None:
        self._case, self._running = case, running
        self.marks = Marks()
        self._numbers, self._rng = count(), random.Random(0)
        num_rows = running * PROMPT
        blocks_each = CONTEXT // BLOCK
        model, ops = FreeModel(self.marks, num_rows), free_operators(self.marks, num_rows)
        kv = allocate_kv_cache(CONFIG, running * blocks_each, BLOCK, torch.bfloat16)
        runner = ModelRunner(model, kv, empty_adapter_memory(CONFIG.num_sites), ops)
        gate = ResidentGate()
        limits = SchedulerLimits(num_rows, running, CONTEXT, VOCAB)
        self._scheduler = Scheduler(limits, KVCacheManager(kv.num_blocks, BLOCK, "base"), gate, time.monotonic)
        self._core = EngineCore(self._scheduler, MarkedRunner(runner, self.marks), gate)
        ready = Ready(0, "epoch", 0, "base", CONTEXT, CONTEXT)
        self._server = EngineServer("inproc://never-bound", ready)
        self._sessions = SessionTable()
        self._session = Session("client", b"identity", 0.0, None)
        self._sessions.open(self._session)
        for _ in range(running):
            self._add()
        self._finish(self._core.step())
        self.marks.take()

    def step(self) -> list[float]:
        """One step; milliseconds of each of `PARTS`."""
        self.marks.set()
        items = self._core.step()
        self.marks.set()
        self._server.send(Out("epoch", items))
        self.marks.set()
        routed = self._sessions.deliver(items)
        self.marks.set()
        frames = [encode(Out("epoch", part)) for part in routed.values()]
        self.marks.set()
        if len(frames) != 1 or len(items) < self._running:
            raise AssertionError("a request did not take part")
        parts = self.marks.take()
        self._finish(items)
        return parts

    def _finish(self, items: list[OutItem]) -> None:
        """Another request comes for each that ended."""
        for item in items:
            if item.finish is not None:
                if item.finish != "length":
                    raise AssertionError(f"a request ended by {item.finish}")
                self._add()

    def _add(self) -> None:
        number = next(self._numbers)
        # The first ones are spread, so that later each step has as many that end.
        lifetime = self._case.lifetime
        wanted = CONTEXT - PROMPT if lifetime is None else 1 + number % lifetime if number < self._running else lifetime
        message = Add(
            epoch="epoch",
            request_id=f"req_{number:032x}",
            # Of different lengths, so that each step has as many requests that need another block.
            prompt_ids=[self._rng.randrange(VOCAB) for _ in range(PROMPT - number % BLOCK)],
            sampling=Sampling(
                max_tokens=wanted,
                seed=number,
                temperature=self._case.temperature,
                top_p=0.9,
                stop_token_ids=(VOCAB + 1,),
                presence_penalty=self._case.presence_penalty,
            ),
            cache_salt=b"salt",
            flow=f"tenant-{number % 8}",
            adapter_key=str(number % NUM_ADAPTERS) if self._case.adapters else None,
        )
        self._sessions.own(self._session, message.request_id, 0)
        adapter_key = None if message.adapter_key is None else AdapterKey(message.adapter_key)
        request = Request(
            RequestId(message.request_id), message.prompt_ids, message.sampling, b"salt", message.flow, 0.0, adapter_key
        )
        self._core.add(request)


def measure(case: Case, running: int, steps: int) -> Part:
    """Milliseconds of each part and of the whole: medians of `ROUNDS` times ``steps`` steps, after some to warm up."""
    bench = Bench(case, running)
    for _ in range(10):
        bench.step()
    gc.collect()
    gc.freeze()  # as an engine does before it serves
    try:
        readings = [reading(bench, steps) for _ in range(ROUNDS)]
    finally:
        gc.unfreeze()
    note = f"{steps} of {STEPS} steps a repetition" if steps < STEPS else ""
    title = f"overhead of a step, {running} requests, {case.name}"
    claim = Claim.of(title, "", [one["total"] for one in readings], "ms", BARS_MS.get(running), "at most", note=note)
    named = [{"case": case.name, "running": running, **one} for one in readings]
    return Part(f"{case.name}, {running}", {}, {"steps": steps, "running": running}, [claim], named)


def reading(bench: Bench, steps: int) -> dict[str, float]:
    """Each of `FIGURES`, in milliseconds."""
    parts = [bench.step() for _ in range(steps)]
    totals = [sum(times) for times in parts]
    medians = {name: statistics.median(column) for name, column in zip(PARTS, zip(*parts, strict=True), strict=True)}
    figures = {**medians, "total": statistics.median(totals), "least": min(totals), "95th": percentile(totals, 0.95)}
    return {name: round(ms, 4) for name, ms in figures.items()}


def line(part: Part) -> str:
    """One line of the table: of each figure the median over the rounds."""
    first = part.readings[0]
    figures = [statistics.median(one[name] for one in part.readings) for name in FIGURES]
    return f"{first['case']:28}{first['running']:>11}" + "".join(f"{value:>11.3f}" for value in figures)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="64,256", help="comma list of numbers of running requests")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"measured in each case, {ROUNDS} times")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", help=f"list out of: {'; '.join(names)}, with a semicolon between them")
    add_output(parser)
    options = parser.parse_args(arguments)
    numbers = options.running.split(",")
    if not all(number.isascii() and number.isdigit() and int(number) > 0 for number in numbers):
        parser.error(f"--running {options.running}: give numbers above 0, as 64,256")
    options.running = [int(number) for number in numbers]
    wanted = names if options.cases is None else [name.strip() for name in options.cases.split(";")]
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--cases: no case is called {', '.join(map(repr, unknown))}; there are {'; '.join(names)}")
    options.cases = [case for case in CASES if case.name in wanted]
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: give at least 1")
    return options


def run(options: argparse.Namespace, results: Results) -> None:
    """Every case into ``results``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'case':28}{'running':>11}" + "".join(f"{name:>11}" for name in FIGURES), file=sys.stderr)
    for running in options.running:
        for case in options.cases:
            part = measure(case, running, options.steps)
            print(line(part), file=sys.stderr, flush=True)
            results.put(part)


def main(arguments: Sequence[str]) -> int:
    """Print a table or JSON; 1 if the result cannot be written, 130 if it was interrupted."""
    options = parse(arguments)
    return conclude("step", NO_BASE, options, lambda results: run(options, results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
