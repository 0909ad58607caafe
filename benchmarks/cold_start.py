"""Measures what a first use costs: an adapter that is not in memory yet, and a server's start with few or many adapters.

    cold_start.py --base DIR [--loads 20] [--registered 1000] [--starts 5] [--work DIR] [--out FILE] [--json]

A cold request is the first for its adapter since the server started; its packed file lies on the local disk, mostly in the system's
page cache. A warm one follows at once, for the same adapter with another prompt. Streams of the base run all the while, and the
longest pause that they see during the cold request is held beside the one during the warm request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import machine
from graftwork_server import OurServer, our_server, publish
from load import FIRST_TOKEN_ID, Outcome, Prompt, Target, client_of, send
from make_adapters import vocabulary, write_adapters
from results import BenchmarkFailed, Claim, Report, median, paired_ratios, show
from servers import workspace

RANK, SMALL_RANK = 16, 4
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


def load_claims(loads: Sequence[Loaded], usual_s: float) -> list[Claim]:
    """What a cold adapter costs the one who asks for it, and the others."""
    later = [1e3 * (one.cold_s - one.warm_s) for one in loads]
    pauses = [(one.cold_pause_s - one.warm_pause_s) / usual_s for one in loads]
    return [
        Claim.of("first token of a cold adapter", "a warm one", later, "ms", 15.0, "at most"),
        Claim.of("others' longest pause while it loads", "while it is warm", pauses, "steps", 1.0, "at most"),
        Claim.of("usual pause between tokens meanwhile", "", [1e3 * usual_s], "ms"),
    ]


def measure(options: argparse.Namespace, report: Report) -> None:
    """Loads, then starts, into ``report``."""
    report.machine = {**machine.measure().as_json(), "base": options.base.name}
    rng, vocab = random.Random(options.seed), vocabulary(options.base)
    with workspace(options.work) as work:
        if options.loads:
            names = [f"a{i}" for i in range(options.loads)]
            folders = dict(zip(names, write_adapters(options.base, work / "adapters", options.loads, [RANK]), strict=True))
            with our_server(options.base, work / "cold") as server:
                publish(server, folders)
                asyncio.run(measure_loads(server, names, 0, vocab, rng))  # brings their packed files to the local disk
            with our_server(options.base, work / "cold") as server:
                loads, usual_s = asyncio.run(measure_loads(server, names, options.streams, vocab, rng))
            report.claims += load_claims(loads, usual_s)
            report.readings += [{"what": "load", **vars(one)} for one in loads]
        if options.starts:
            _starts(options, work, report)


def _starts(options: argparse.Namespace, work: Path, report: Report) -> None:
    """Starts over two data directories in turn, one with one adapter and one with many."""
    small = write_adapters(options.base, work / "adapters", options.registered, [SMALL_RANK], stem="s")
    counts = {1: work / "start-1", options.registered: work / f"start-{options.registered}"}
    for count, folder in counts.items():
        print(f"publishing {count} adapters", file=sys.stderr)
        with our_server(options.base, folder) as server:
            publish(server, {path.name: path for path in small[:count]})
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(options.starts):
        for count, folder in counts.items():
            with our_server(options.base, folder) as server:
                times[count].append(server.start_s)
            report.readings.append({"what": "start", "registered": count, "seconds": times[count][-1]})
    first, many = times.values()
    name = f"start with {options.registered} adapters"
    report.claims.append(Claim.of(name, "with 1", paired_ratios(many, first), "×", 1.1, "at most"))
    report.claims.append(Claim.of(f"{name}, seconds", "", many, "s"))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure cold adapters, and starts with few and many adapters.")
    parser.add_argument("--base", type=Path, required=True, help="the base model's folder")
    parser.add_argument("--loads", type=int, default=20, help="cold adapters; 0 leaves them out")
    parser.add_argument("--streams", type=int, default=4, help="streams of the base that run meanwhile")
    parser.add_argument("--starts", type=int, default=5, help="starts of each kind; 0 leaves them out")
    parser.add_argument("--registered", type=int, default=1000, help="adapters of the full server that is started")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--work", type=Path, help="folder that keeps adapters and data for the next run")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    for name, least in (("loads", 0), ("streams", 1), ("starts", 0), ("registered", 2)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: give at least {least}")
    if not (options.base / "config.json").is_file():
        parser.error(f"--base {options.base} has no config.json; `make base` prepares one in .data/base")
    options.base = options.base.absolute()
    return options


def main(arguments: Sequence[str]) -> int:
    """Print a table or JSON; 1 if the measurement failed, 130 if it was interrupted."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Terminated"))  # not without ending the servers
    report, status = Report("cold_start", {}), 0
    try:
        measure(options, report)
    except BenchmarkFailed as error:
        print(f"Error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    show(report, as_json=options.json, out=options.out)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
