"""Measures our server beside other servers, and its adapters beside its base: the same load on each in turn, again and again.

    serving.py --base DIR [--rows 32x32,base-8] [--peer vllm=VENV] [--peer llamacpp=FOLDER] [--peer peft] [--out FILE] [--json]

Each repetition has a new seed and gives the load to all of a row, one after the other. Ratios are taken within a repetition; the
table shows their medians. One configuration of our server serves all rows.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import machine
from arena import Arena, Peer
from load import Felt
from make_adapters import vocabulary, write_adapters
from results import BenchmarkFailed, Claim, Report, paired_ratios, show
from servers import Contender, workspace
from serving_rows import ADAPTERS, NUM_ADAPTERS, NUM_SMALL, RANK, ROWS, SMALL, SMALL_RANK, Mix, Row, Size, choose_rows, load_of

NOISE = 0.02
"""Of one core: what the servers that wait may use while one is measured before a reading is marked."""

Say = Callable[[str], None]


class Measuring:
    """One run: rows on contenders, and what came of it, so far, in ``report``."""

    def __init__(
        self, arena: Arena, report: Report, floors: machine.Machine, size: Size, repeats: int, seed: int, say: Say
    ) -> None:
        self._arena, self.report, self._floors, self._say = arena, report, floors, say
        self._size, self._repeats, self._seed = size, repeats, seed

    def row(self, row: Row, number: int, adapter_bytes: float, on_done: Callable[[], None]) -> None:
        """Measure a row and add its claims."""
        ours = self._arena.ours.contender
        beside: list[tuple[str, Contender, Mix]] = [("", ours, row.mix)]
        if row.own is not None:
            beside.append(("own", ours, row.own))
        if row.peers:
            beside += [(kind, contender, row.mix) for kind, contender in self._arena.peers_for(row, self._size, self._say)]
        for _, contender, mix in beside:
            self._warm(row, contender, mix)
        felt: dict[int, list[Felt]] = {place: [] for place in range(len(beside))}
        for repetition in range(self._repeats):
            seed = self._seed + 1000 * number + repetition
            for place, (kind, contender, mix) in enumerate(beside):
                felt[place].append(self._reading(row, kind, contender, mix, seed, on_done))
        for place, (kind, contender, mix) in enumerate(beside):
            if place:
                self._claim(row, kind, contender, mix, felt[0], felt[place], adapter_bytes)
        self._claim_best(row, beside, felt)

    def _warm(self, row: Row, contender: Contender, mix: Mix) -> None:
        """One short request for each stream: what is done once is not a part of any reading."""
        load = load_of(row, mix, replace(self._size, requests_per_stream=1, output=2), self._seed - 1 - hash_of(row.name))
        self._accept(contender, contender.measure(load, _nothing))

    def _reading(self, row: Row, kind: str, contender: Contender, mix: Mix, seed: int, on_done: Callable[[], None]) -> Felt:
        load = load_of(row, mix, self._size, seed)
        waiting = [other for other in self._arena.contenders() if other is not contender]
        before = sum(other.cpu_seconds() for other in waiting)
        felt = contender.measure(load, on_done)
        others = (sum(other.cpu_seconds() for other in waiting) - before) / felt.seconds
        if others > NOISE:
            self._say(f"servers that waited used {others:.0%} of a core while {contender.name} was measured")
        self._accept(contender, felt)
        reading = {"row": row.name, "kind": kind, "server": contender.name, "mix": mix.title, "streams": row.streams, "seed": seed}
        self.report.readings.append({**reading, **asdict(felt), "others_cpu": round(others, 3)})
        self._say(f"{row.name}: {contender.name}, {mix.title}: {felt.output_tokens_per_s:.1f} tokens/s in {felt.seconds:.1f} s")
        return felt

    def _accept(self, contender: Contender, felt: Felt) -> None:
        if felt.errors:
            raise BenchmarkFailed(f"{len(felt.errors)} requests to {contender.name} failed, the first with {felt.errors[0]}")

    def _claim(
        self, row: Row, kind: str, contender: Contender, mix: Mix, first: list[Felt], second: list[Felt], adapter_bytes: float
    ) -> None:
        ratios = paired_ratios([f.output_tokens_per_s for f in first], [f.output_tokens_per_s for f in second])
        if kind != "own":
            self.report.claims.append(Claim.of(row.title, contender.name, ratios, "×", dict(row.peer_bars).get(kind)))
            return
        against = f"our own, {mix.title}"
        self.report.claims.append(Claim.of(row.title, against, ratios, "×", row.own_bar))
        if row.added_adapters:
            added = [a.inter_token_ms[0] - b.inter_token_ms[0] for a, b in zip(first, second, strict=True) if a.inter_token_ms]
            bar = 1.6e3 * row.added_adapters * adapter_bytes / self._floors.read_bandwidth + 2
            self.report.claims.append(Claim.of(f"{row.title}: added time a step", against, added, "ms", bar, "at most"))

    def _claim_best(self, row: Row, beside: list[tuple[str, Contender, Mix]], felt: dict[int, list[Felt]]) -> None:
        """Our throughput to the best peer's, that one with which the median of ratios is least."""
        bar = dict(row.peer_bars).get("best")
        rates = [[f.output_tokens_per_s for f in felt[place]] for place in range(len(beside))]
        peers = [(paired_ratios(rates[0], rates[i]), kind) for i, (kind, _, _) in enumerate(beside) if kind not in ("", "own")]
        if bar is not None and peers:
            claims = [Claim.of(row.title, "the best peer", ratios, "×", bar) for ratios, _ in peers]
            self.report.claims.append(min(claims, key=lambda claim: claim.value))


def hash_of(text: str) -> int:
    """A small number that is the same in every process."""
    return sum(ord(letter) * (i + 1) for i, letter in enumerate(text))


def _nothing() -> None:
    """Warming up is no progress."""


def num_measurements(rows: Sequence[Row], peers: Sequence[Peer], size: Size, repeats: int) -> int:
    """Requests of a whole run, warming up and probing left out: what the progress bar counts to."""
    return sum(
        repeats * row.streams * size.requests_per_stream * (1 + (row.own is not None) + (len(peers) if row.peers else 0))
        for row in rows
    )


def measure(options: argparse.Namespace, report: Report, console: Console) -> None:
    """Everything, into ``report``; raises `BenchmarkFailed` with what was measured until then in it."""
    rows: list[Row] = options.rows
    size = Size(options.requests_per_stream, options.input, options.output, vocabulary(options.base))
    say: Say = partial(console.print, style="dim", markup=False, highlight=False)
    say("measuring the machine")
    floors = machine.measure()
    report.machine = {**floors.as_json(), **report.machine}
    with workspace(options.work) as work:
        say("writing adapters")
        names = frozenset[str]().union(*(row.adapters for row in rows))
        folders = dict(zip(ADAPTERS, write_adapters(options.base, work / "adapters", NUM_ADAPTERS, [RANK]), strict=True))
        if names & set(SMALL):
            small = write_adapters(options.base, work / "adapters", NUM_SMALL, [SMALL_RANK], stem="s")
            folders.update(zip(SMALL, small, strict=True))
        adapter_bytes = (folders[ADAPTERS[0]] / "adapter_model.safetensors").stat().st_size
        with (
            Progress(
                *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn()),
                console=console,
                disable=not console.is_terminal,
            ) as progress,
            Arena.open(options.base, work, folders, names, options.peers, options.serve_options, say) as arena,
        ):
            task = progress.add_task("", total=num_measurements(rows, options.peers, size, options.repeats))
            run = Measuring(arena, report, floors, size, options.repeats, options.seed, say)
            for row in rows:
                progress.update(task, description=row.name)
                run.row(row, ROWS.index(row), adapter_bytes, lambda: progress.advance(task))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Measure our server beside peers, and its adapters beside its base.",
        epilog="rows: " + "; ".join(f"{row.name} ({row.title})" for row in ROWS),
    )
    parser.add_argument("--base", type=Path, required=True, help="the base model's folder")
    parser.add_argument("--rows", default="all", help="comma list of rows, or all")
    parser.add_argument("--peer", action="append", default=[], metavar="KIND[=WHERE]", help="vllm=VENV, llamacpp=FOLDER or peft")
    parser.add_argument("--vllm-slots", default="8,16,32", help="numbers of adapter slots to try; the fastest is measured")
    parser.add_argument("--llama-python", type=Path, default=Path(sys.executable), help="runs llama.cpp's converters")
    parser.add_argument("--repeats", type=int, default=5, help="how often each load is put on each")
    parser.add_argument("--requests-per-stream", type=int, default=4)
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="of the first repetition")
    parser.add_argument("--serve-options", default="", help="more options of graftwork serve, in one argument")
    parser.add_argument("--work", type=Path, help="folder that keeps adapters, data and converted files for the next run")
    parser.add_argument("--out", type=Path, help="write the result as JSON here, also when the run is cut short")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        options.rows = choose_rows(options.rows)
        options.peers = [Peer.parse(text, options.vllm_slots, options.llama_python) for text in options.peer]
    except ValueError as error:
        parser.error(str(error))
    if not (options.base / "config.json").is_file():
        parser.error(f"--base {options.base} has no config.json; `make base` prepares one in .data/base")
    for name in ("repeats", "requests_per_stream", "input", "output"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give at least 1")
    options.base = options.base.absolute()
    options.serve_options = options.serve_options.split()
    return options


def main(arguments: Sequence[str]) -> int:
    """Print a table or JSON; 1 if the measurement failed, 130 if it was interrupted."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Terminated"))  # not without ending the servers
    facts = {"base": options.base.name, "input": options.input, "output": options.output}
    report = Report("serving", {**facts, "requests_per_stream": options.requests_per_stream, "repeats": options.repeats})
    status = 0
    try:
        measure(options, report, Console(stderr=True))
    except BenchmarkFailed as error:
        print(f"Error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("Interrupted; what was measured:", file=sys.stderr)
        status = 130
    show(report, as_json=options.json, out=options.out)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
