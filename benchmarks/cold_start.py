"""Measures what a first use costs: an adapter that is not in memory yet, and a server's start with few or many adapters.

    cold_start.py --base DIR [--loads 20] [--registered 1000] [--starts 5] [--work DIR] [--out FILE] [--json]

A cold request is the first for its adapter since the server started; its packed file lies on the local disk, mostly in the system's
page cache. A warm one follows at once, for the same adapter with another prompt. Once they have the server to themselves: their
difference is what the load takes. Once streams of the base run all the while, and the longest pause that they see during the cold
request is held beside the one during the warm request; there a load also waits for the end of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import machine
from graftwork_server import OurServer, our_server, publish
from load import FIRST_TOKEN_ID, Outcome, Prompt, Target, client_of, send
from make_adapters import vocabulary, write_adapters
from results import BenchmarkFailed, Claim, Part, Results, median, paired_ratios
from runs import add_base, add_output, check_base, conclude
from workspace import workspace

RANK, SMALL_RANK = 16, 4
LOADS, REGISTERED = 20, 1000
"""What the bars are for."""

BACKGROUND_OUTPUT = 512


@dataclass(frozen=True)
class Loaded:
    """One adapter: seconds to the first token when it was cold and when it was warm, and others' longest pause meanwhile."""

    cold_s: float
    warm_s: float
    cold_pause_s: float
    warm_pause_s: float


class Background:
    """Streams of the base that begin again whenever they end; remembers when each token came."""

    def __init__(self, target: Target, streams: int, vocab: int, rng: random.Random) -> None:
        self._target, self._streams, self._vocab, self._rng = target, streams, vocab, rng
        self.times: list[list[float]] = [[] for _ in range(streams)]

    async def run(self) -> None:
        """Until it is cancelled; raises `BenchmarkFailed` for a stream that fails."""
        if self._streams == 0:
            await asyncio.Event().wait()
        async with client_of(self._target) as client, asyncio.TaskGroup() as group:

            async def stream(place: int) -> None:
                while True:
                    outcome = Outcome(chunk_times=self.times[place])
                    outcome = await send(
                        client, self._target, prompt_of("base", 32, self._vocab, self._rng), BACKGROUND_OUTPUT, outcome
                    )
                    if outcome.error:
                        raise BenchmarkFailed(f"a stream in the background failed: {outcome.error}")

            for place in range(self._streams):
                group.create_task(stream(place))

    def longest_pause(self, begin: float, end: float) -> float:
        """Seconds between two tokens of one stream, of which the second came after ``begin`` and the first before ``end``."""
        return max((b - a for times in self.times for a, b in pairwise(times) if b > begin and a < end), default=0.0)

    def usual_pause(self) -> float:
        """The median over all streams."""
        pauses = [b - a for times in self.times for a, b in pairwise(times)]
        return median(pauses) if pauses else 0.0


def prompt_of(model: str, length: int, vocab: int, rng: random.Random) -> Prompt:
    """Random token ids."""
    return Prompt(model, [rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(length)])


async def measure_loads(
    server: OurServer, names: Sequence[str], streams: int, vocab: int, rng: random.Random
) -> tuple[list[Loaded], float]:
    """Each adapter cold, then warm, beside ``streams`` others; and the usual time between two of their tokens."""
    others = Background(server.target, streams, vocab, rng)
    running = asyncio.create_task(others.run())
    loads = []
    try:
        async with client_of(server.target) as client:

            async def once(name: str) -> tuple[float, float]:
                outcome = await send(client, server.target, prompt_of(name, 32, vocab, rng), 4)
                if outcome.error:
                    raise BenchmarkFailed(f"a request for {name} failed: {outcome.error}; see {server.log}")
                first = outcome.chunk_times[0]
                while any(not times or times[-1] <= first for times in others.times) and not running.done():
                    await asyncio.sleep(0.001)  # the pause that the request fell into has to end
                return first - outcome.began, others.longest_pause(outcome.began, first)

            while not all(others.times) and not running.done():
                await asyncio.sleep(0.01)
            await once("base")
            for name in names:
                if running.done():
                    break
                (cold, cold_pause), (warm, warm_pause) = await once(name), await once(name)
                loads.append(Loaded(cold, warm, cold_pause, warm_pause))
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await running
            except* BenchmarkFailed as group:
                raise BenchmarkFailed(str(group.exceptions[0])) from group
    if len(loads) < len(names):
        raise BenchmarkFailed(f"the streams in the background ended after {len(loads)} of {len(names)} adapters; see {server.log}")
    return loads, others.usual_pause()


def load_claims(alone: Sequence[Loaded], beside: Sequence[Loaded], streams: int, usual_s: float) -> list[Claim]:
    """What a cold adapter costs the one who asks for it, ``alone`` and ``beside`` so many streams, and the others."""
    pauses = [(one.cold_pause_s - one.warm_pause_s) / usual_s for one in beside]
    title, among = "first token of a cold adapter", f"beside {streams} streams"
    return [
        Claim.of(title, "a warm one", _later_ms(alone), "ms", 15.0, "at most", needed=LOADS),
        Claim.of(f"{title}, {among}", "a warm one", _later_ms(beside), "ms"),
        Claim.of("others' longest pause while it loads", "while it is warm", pauses, "steps", 1.0, "at most", needed=LOADS),
        Claim.of("usual pause between tokens meanwhile", "", [1e3 * usual_s], "ms"),
    ]


def _later_ms(loads: Sequence[Loaded]) -> list[float]:
    return [1e3 * (one.cold_s - one.warm_s) for one in loads]


def measure(options: argparse.Namespace, results: Results) -> None:
    """Loads, then starts, into ``results``."""
    vocab = vocabulary(options.base)
    with workspace(options.work, options.base) as work:
        print("measuring the machine", file=sys.stderr)
        facts = machine.measure().as_json()
        if options.loads:
            results.put(_loads(options, work, facts, vocab))
        if options.starts:
            results.put(_starts(options, work, facts))


def _loads(options: argparse.Namespace, work: Path, facts: dict[str, Any], vocab: int) -> Part:
    """Each adapter cold and warm, on a server whose local disk has them all."""
    rng, names = random.Random(options.seed), [f"a{i}" for i in range(options.loads)]
    folders = dict(zip(names, write_adapters(options.base, work / "adapters", options.loads, [RANK]), strict=True))
    with our_server(options.base, work / "cold") as server:
        print(f"publishing {options.loads} adapters", file=sys.stderr)
        publish(server, folders)
        asyncio.run(measure_loads(server, names, 0, vocab, rng))  # brings their packed files to the local disk
    print(f"loading {options.loads} adapters", file=sys.stderr)
    with our_server(options.base, work / "cold") as server:
        alone, _ = asyncio.run(measure_loads(server, names, 0, vocab, rng))
    print(f"loading them beside {options.streams} streams", file=sys.stderr)
    with our_server(options.base, work / "cold") as server:
        beside, usual_s = asyncio.run(measure_loads(server, names, options.streams, vocab, rng))
    claims = load_claims(alone, beside, options.streams, usual_s)
    part = Part("loads", facts, {"loads": options.loads, "streams": options.streams}, claims)
    for streams, loads in ((0, alone), (options.streams, beside)):
        part.readings += [{"streams": streams, **vars(one)} for one in loads]
    return part


def _starts(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> Part:
    """Starts over two data directories in turn, one with one adapter and one with many."""
    part = Part("starts", facts, {"starts": options.starts, "registered": options.registered})
    small = write_adapters(options.base, work / "adapters", options.registered, [SMALL_RANK], stem="s")
    counts = {1: work / "start-1", options.registered: work / f"start-{options.registered}"}
    for count, folder in counts.items():
        print(f"publishing {count} adapters", file=sys.stderr)
        with our_server(options.base, folder) as server:
            publish(server, {path.name: path for path in small[:count]})
    times: dict[int, list[float]] = {count: [] for count in counts}
    for number in range(options.starts):
        for count, folder in counts.items():
            with our_server(options.base, folder) as server:
                times[count].append(server.start_s)
            part.readings.append({"registered": count, "seconds": times[count][-1]})
            print(f"start {number + 1} of {options.starts} with {count}: {times[count][-1]:.2f} s", file=sys.stderr)
    first, many = times.values()
    name = f"start with {options.registered} adapters"
    note = "" if options.registered >= REGISTERED else f"{options.registered} of {REGISTERED:,} adapters"
    part.claims.append(Claim.of(name, "with 1", paired_ratios(many, first), "×", 1.1, "at most", note=note))
    part.claims.append(Claim.of(f"{name}, seconds", "", many, "s"))
    return part


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure cold adapters, and starts with few and many adapters.")
    add_base(parser, "")
    parser.add_argument("--loads", type=int, default=LOADS, help="cold adapters; 0 leaves them out")
    parser.add_argument("--streams", type=int, default=4, help="streams of the base that run meanwhile")
    parser.add_argument("--starts", type=int, default=5, help="starts of each kind; 0 leaves them out")
    parser.add_argument("--registered", type=int, default=REGISTERED, help="adapters of the full server that is started")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--work", type=Path, help="folder that keeps adapters and data for the next run")
    add_output(parser)
    options = parser.parse_args(arguments)
    for name, least in (("loads", 0), ("streams", 1), ("starts", 0), ("registered", 2)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: give at least {least}")
    if not (options.loads or options.starts):
        parser.error("--loads 0 and --starts 0 leave nothing to measure")
    check_base(parser, options)
    return options


def main(arguments: Sequence[str]) -> int:
    """Print a table or JSON; 1 if the measurement failed, 130 if it was interrupted."""
    options = parse(arguments)
    return conclude("cold_start", options.base.name, options, lambda results: measure(options, results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
