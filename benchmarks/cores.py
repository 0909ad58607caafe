"""What the API process takes from the engine where both want the cores: a whole server beside the same engine alone.

    cores.py --base DIR [--streams 64] [--repeats 5] [--work DIR] [--out FILE] [--json]

The engine alone is one process that is handed all prompts at once and has nobody to tell its tokens. Servers are started as
`graftwork serve` starts by default, and with threads dealt in other ways; all get the same short prompts in turn, so that most
steps are decode steps of all streams, in which the API process has the most to do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen

import machine
from graftwork_engine.assembly import EngineAssembly, build_engine
from graftwork_engine.config import EngineConfig
from graftwork_engine.messages import Sampling
from graftwork_engine.request import Request, RequestId
from graftwork_kernels.cpu.build import default_cache_dir
from graftwork_platform.settings import engine_environment
from graftwork_server import our_server
from load import Load, prompts
from make_adapters import vocabulary
from results import REPEATS, BenchmarkFailed, Claim, Part, Results, paired_ratios
from runs import add_base, add_output, check_base, conclude
from servers import Contender, end_session, read_line
from workspace import workspace

ALONE = "the engine alone"
WAYS: dict[str, tuple[str, ...]] = {
    "as by default": (),
    "--api-nice 0": ("--api-nice", "0"),
    "--threads 1": ("--threads", "1"),
}
"""How a server's threads are dealt: options of `graftwork serve`."""


@dataclass(frozen=True)
class Alone:
    """The engine in a process of its own, with the environment that `graftwork serve` gives it."""

    child: Popen[str]

    def seconds(self, load: Load) -> float:
        """From the arrival of all prompts until the last token. Raises `BenchmarkFailed`."""
        if self.child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                numbers = [load.requests, load.seed, load.input, load.output, load.vocab]
                print(json.dumps(numbers), file=self.child.stdin, flush=True)
        return float(self.answer())

    def answer(self) -> str:
        """The next line that it says. Raises `BenchmarkFailed` if it ended instead."""
        answer = read_line(self.child.stdout)
        if not answer:
            raise BenchmarkFailed(f"{ALONE} ended with {self.child.wait()}; its errors stand above")
        return answer


@contextlib.contextmanager
def engine_alone(options: argparse.Namespace) -> Iterator[Alone]:
    """Up, and ended with the block. Nobody else may be started before: it measures its kernels on a quiet machine."""
    sizes = ["--streams", str(options.streams), "--kernel-dir", str(options.kernel_dir)]
    command = [sys.executable, __file__, "--base", str(options.base), *sizes, "--alone"]
    environment = {**os.environ, **engine_environment()}
    child = Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=environment, start_new_session=True)
    try:
        alone = Alone(child)
        alone.answer()
        yield alone
    finally:
        if child.stdin is not None:
            child.stdin.close()
        end_session(child)


def serve_alone(options: argparse.Namespace) -> None:
    """The other end of `Alone`: a line says that it is up, then loads come and their seconds go, a line each."""
    kernels = str(options.kernel_dir)
    engine = build_engine(EngineConfig(model_dir=str(options.base), max_num_seqs=options.streams, kernel_dir=kernels))
    try:
        print("up", flush=True)
        for line in sys.stdin:
            requests, seed, prompt, output, vocab = json.loads(line)
            print(_run(engine, Load(("base",), requests, requests, seed, input=prompt, output=output, vocab=vocab)), flush=True)
    finally:
        engine.close()


def _run(engine: EngineAssembly, load: Load) -> float:
    """As a server would with `ignore_eos`: the engine itself knows no end of sequence."""
    began = time.perf_counter()
    for number, prompt in enumerate(prompts(load)):
        engine.core.add(
            Request(
                request_id=RequestId(f"{load.seed}-{number}"),
                prompt_ids=prompt.token_ids,
                sampling=Sampling(max_tokens=load.output, seed=0, temperature=0.0),
                cache_salt=b"",
                flow="benchmark",
                arrival=time.monotonic(),
            )
        )
    while engine.core.has_work:
        engine.core.step()
    return time.perf_counter() - began


def measure(options: argparse.Namespace, results: Results) -> None:
    """All ways in turn, as often as was asked for."""
    print("measuring the machine", file=sys.stderr)
    facts = machine.measure().as_json()
    vocab, rng = vocabulary(options.base), random.Random(options.seed)
    shape = {"streams": options.streams, "input": options.input, "output": options.output}
    part = Part("cores", facts, shape)
    rates: dict[str, list[float]] = {way: [] for way in (ALONE, *WAYS)}
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(workspace(options.work, options.base))
        alone = stack.enter_context(engine_alone(options))
        servers: dict[str, Contender] = {}
        for number, (way, dealt) in enumerate(WAYS.items()):
            print(f"starting a server, {way}", file=sys.stderr)
            sizes = ("--max-num-seqs", str(options.streams), "--kernel-dir", str(options.kernel_dir))
            servers[way] = stack.enter_context(our_server(options.base, work / f"cores-{number}", (*sizes, *dealt))).contender
        for repeat in range(-1, options.repeats):  # once to warm up
            load = Load(("base",), options.streams, options.streams, rng.randrange(1 << 31), **_lengths(options), vocab=vocab)
            for way, kept in rates.items():
                rate = _rate(alone if way == ALONE else servers[way], load)
                print(f"{repeat + 1} of {options.repeats}, {way}: {rate:.1f} tokens/s", file=sys.stderr)
                if repeat >= 0:
                    kept.append(rate)
                    part.readings.append({"way": way, "output_tokens_per_s": rate})
    for way in WAYS:
        ratios = paired_ratios(rates[way], rates[ALONE])
        part.claims.append(Claim.of(f"{options.streams} streams, {way}: throughput", ALONE, ratios, "×", needed=REPEATS))
    results.put(part)


def _lengths(options: argparse.Namespace) -> dict[str, int]:
    return {"input": options.input, "output": options.output}


def _rate(who: Alone | Contender, load: Load) -> float:
    """Output tokens a second."""
    if isinstance(who, Alone):
        return load.requests * load.output / who.seconds(load)
    felt = who.measure(load, lambda: None)
    if felt.errors:
        raise BenchmarkFailed(f"{len(felt.errors)} requests failed, the first with {felt.errors[0]}")
    return load.requests * load.output / felt.seconds


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure what the API process takes from the engine.")
    add_base(parser, "")
    parser.add_argument("--streams", type=int, default=64, help="requests that run together")
    parser.add_argument("--input", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="readings of each way")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--work", type=Path, help="folder that keeps data for the next run")
    parser.add_argument("--kernel-dir", type=Path, default=default_cache_dir(), help="where the compiled kernels are kept")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    add_output(parser)
    options = parser.parse_args(arguments)
    for name in ("streams", "input", "output", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: give at least 1")
    check_base(parser, options)
    options.kernel_dir = options.kernel_dir.absolute()
    return options


def main(arguments: Sequence[str]) -> int:
    """Print a table or JSON; 1 if the measurement failed, 130 if it was interrupted."""
    options = parse(arguments)
    if options.alone:
        serve_alone(options)
        return 0
    return conclude("cores", options.base.name, options, lambda results: measure(options, results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
