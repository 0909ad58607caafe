"""Whole steps of a real engine, without a server around it: decoding beside its linears, and a long prompt beside its arithmetic.

The engine is the one that `graftwork serve` runs, with the settings that it has by default.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from graftwork_engine.assembly import EngineAssembly, build_engine
from graftwork_engine.config import EngineConfig
from graftwork_engine.errors import ConfigError
from graftwork_engine.messages import Sampling
from graftwork_engine.request import Request, RequestId
from graftwork_kernels.ops import Operators
from machine import Machine
from operator_cases import ROWS, Shapes, linear_cases
from results import BenchmarkFailed, Claim
from timing import Case

CONTEXT, PROMPT = 256, 2048
MEASURED_STEPS = 16
"""Around `CONTEXT`: each makes every context one token longer."""

PROMPTS = 5


def step_claims(base: Path, shapes: Shapes, ops: Mapping[str, Operators], floors: Machine, kernel_dir: Path) -> Iterator[Claim]:
    """The decode step at 32 requests of 256 tokens, then a prompt of 2,048 tokens alone. Raises `BenchmarkFailed`.

    The engine's kernels are kept in ``kernel_dir``.
    """
    native = {name: one for name, one in ops.items() if name != "reference"}
    (case,) = linear_cases(shapes, native, batches=(ROWS,))
    try:
        engine = build_engine(EngineConfig(model_dir=str(base), kernel_dir=str(kernel_dir)))
    except ConfigError as error:
        raise BenchmarkFailed(str(error)) from error
    try:
        if engine.max_prompt_and_output <= PROMPT:
            raise BenchmarkFailed(
                f"{base} takes prompts of up to {engine.max_prompt_and_output} tokens; name one for {PROMPT} or more"
            )
        yield from _decode(engine, case, shapes.vocab)
        yield from _prefill(engine, shapes, floors)
    finally:
        engine.close()


def _decode(engine: EngineAssembly, linears: Case, vocab: int) -> Iterator[Claim]:
    """Decode steps, and after each the same linears by every candidate that may be the fastest; the ratio is to that one."""
    near = contenders(linears.candidates)
    ratios, steps = [], []
    for output in (1, MEASURED_STEPS + 1):  # once to have the prompts in the prefix cache, so that then all decode together
        for request in range(ROWS):
            _add(engine, f"decode-{request}", CONTEXT - MEASURED_STEPS // 2, output, vocab)
        while engine.core.has_work:
            seconds, rows = _step(engine)
            if output > 1 and rows == ROWS:
                fastest = min(_timed(work) for work in near)
                steps.append(seconds * 1e3)
                ratios.append(seconds / fastest)
    if not steps:
        raise BenchmarkFailed(f"no step of the engine had {ROWS} rows; prefix caching and at least {ROWS} sequences are needed")
    name = f"decode step, {ROWS} requests of about {CONTEXT} tokens"
    yield Claim.of(name, "", steps, "ms")
    yield Claim.of(f"{name}: time beside its linears", "", ratios, "×", 1.5, "at most")


def _prefill(engine: EngineAssembly, shapes: Shapes, floors: Machine) -> Iterator[Claim]:
    """From a prompt's arrival to its first token."""
    flops = 2.0 * PROMPT * shapes.layer_weights + shapes.attention_flops(PROMPT) + 2.0 * shapes.vocab * shapes.hidden
    times = []
    for number in range(PROMPTS):
        _add(engine, f"prefill-{number}", PROMPT, 1, shapes.vocab)
        began = time.perf_counter()
        while engine.core.has_work:
            engine.core.step()
        times.append(time.perf_counter() - began)
    name = f"prompt of {PROMPT} tokens alone"
    yield Claim.of(name, "", [1e3 * seconds for seconds in times], "ms")
    for dtype, rate in (("bf16", floors.gemm_bf16), ("fp32", floors.gemm_fp32)):
        shares = [100 * flops / seconds / rate for seconds in times]
        bar = 60.0 if rate == floors.gemm else None
        yield Claim.of(f"{name}: share of the {dtype} matrix-product rate", "", shares, "%", bar)


def contenders(candidates: Mapping[str, Callable[[], object]]) -> list[Callable[[], object]]:
    """Those that are less than twice as slow as the fastest: torch's bf16 takes seconds where the processor has none."""
    times = {}
    for name, work in candidates.items():
        work()
        times[name] = min(_timed(work) for _ in range(2))
    return [candidates[name] for name, seconds in times.items() if seconds < 2 * min(times.values())]


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _add(engine: EngineAssembly, name: str, prompt: int, output: int, vocab: int) -> None:
    rng = random.Random(name)
    engine.core.add(
        Request(
            request_id=RequestId(name),
            prompt_ids=[rng.randrange(vocab) for _ in range(prompt)],
            sampling=Sampling(max_tokens=output, seed=0, temperature=0.0),
            cache_salt=b"",
            flow="benchmark",
            arrival=time.monotonic(),
        )
    )


def _step(engine: EngineAssembly) -> tuple[float, int]:
    began = time.perf_counter()
    engine.core.step()
    return time.perf_counter() - began, engine.core.last_num_tokens
