"""Measures our server beside other servers, and its adapters beside its base: the same load on each in turn, again and again.

    serving.py --base DIR [--rows 32x32,base-8] [--peer vllm=VENV] [--peer llamacpp=FOLDER] [--peer peft] [--out FILE] [--json]

Each repetition has a new seed and gives the load to all of a row, one after the other. Ratios are taken within a repetition; the
table shows their medians. One configuration of our server serves all rows. The result is written after each row, and rows that
are measured again replace those of the same name.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import machine
from arena import Arena, Peer, accept, element_types, warm
from eta import Cell, Eta, Planned
from load import Felt
from make_adapters import adapter_bytes, vocabulary, write_adapters
from results import BenchmarkFailed, Part, Results
from runs import add_base, add_output, check_base, conclude
from servers import Contender
from serving_claims import Entry, row_claims
from serving_rows import (
    ADAPTERS,
    DORA,
    NUM_ADAPTERS,
    NUM_SMALL,
    PEER_NAMES,
    RANK,
    ROWS,
    SMALL,
    SMALL_RANK,
    Mix,
    Row,
    Size,
    choose_rows,
    load_of,
)
from workspace import workspace

NOISE = 0.02
"""Of one core: what the servers that wait may use while one is measured before a reading is marked."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How much is measured: ``repeats`` of every row (None: what its bars need), and less of peers that are slow, by their kind."""

    size: Size
    repeats: int | None = None
    peer_requests: Mapping[str, int] = field(default_factory=dict)
    peer_repeats: Mapping[str, int] = field(default_factory=dict)

    def size_for(self, kind: str) -> Size:
        """The load of one who takes part."""
        return replace(self.size, requests_per_stream=self.peer_requests.get(kind, self.size.requests_per_stream))

    def repeats_for(self, row: Row, kind: str) -> int:
        """The repetitions that one takes part in: the first ones of the row's."""
        of_row = self.repeats or row.repeats
        return min(of_row, self.peer_repeats.get(kind, of_row))

    def plan(self, rows: Sequence[Row], peers: Sequence[str]) -> dict[Cell, Planned]:
        """All readings, for `Eta`."""
        cells = [(row, kind) for row in rows for kind in ("", *(["own"] if row.own else []), *(peers if row.peers else ()))]
        return {
            (row.name, kind): Planned(
                self.repeats_for(row, kind), row.streams * self.size_for(kind).requests_per_stream * self.size.output
            )
            for row, kind in cells
        }


class Measuring:
    """One run over rows that come one after the other."""

    def __init__(
        self, arena: Arena, floors: machine.Machine, added_bytes: float, effort: Effort, seed: int, eta: Eta, say: Say
    ) -> None:
        self._arena, self._floors, self._added_bytes = arena, floors, added_bytes
        self._effort, self._seed, self._eta, self._say = effort, seed, eta, say

    def row(self, row: Row, number: int, part: Part, on_done: Callable[[], None] = lambda: None) -> None:
        """Measure a row into ``part``; ``number`` is its own among the rows. ``on_done`` is called after each request."""
        contenders, entries = self._entries(row)
        for contender, entry in zip(contenders, entries, strict=True):
            warm(contender, row, entry.mix, entry.size)
        for repetition in range(max(entry.repeats for entry in entries)):
            seed = self._seed + 1000 * number + repetition
            for contender, entry in zip(contenders, entries, strict=True):
                if repetition < entry.repeats:
                    felt, reading = self._reading(row, contender, entry, seed, on_done)
                    entry.felt.append(felt)
                    part.readings.append(reading)
        part.claims += row_claims(row, entries, self._added_bytes, self._floors.read_bandwidth)

    def _entries(self, row: Row) -> tuple[list[Contender], list[Entry]]:
        """Who takes part, us first."""
        ours, effort = self._arena.ours.contender, self._effort
        beside: list[tuple[str, Contender, Mix]] = [("", ours, row.mix)]
        if row.own is not None:
            beside.append(("own", ours, row.own))
        if row.peers:
            beside += [(kind, one, row.mix) for kind, one in self._arena.peers_for(row, effort.size, self._say)]
        entries = [Entry(kind, one.name, mix, effort.size_for(kind), effort.repeats_for(row, kind)) for kind, one, mix in beside]
        return [one for _, one, _ in beside], entries

    def _reading(
        self, row: Row, contender: Contender, entry: Entry, seed: int, on_done: Callable[[], None]
    ) -> tuple[Felt, dict[str, Any]]:
        waiting = [other for other in self._arena.contenders() if other is not contender]
        before = sum(other.cpu_seconds() for other in waiting)
        felt = contender.measure(load_of(row, entry.mix, entry.size, seed), on_done)
        accept(contender, felt)
        others = (sum(other.cpu_seconds() for other in waiting) - before) / felt.seconds
        if others > NOISE:
            self._say(f"servers that waited used {others:.0%} of a core while {entry.name} was measured")
        self._eta.done((row.name, entry.kind), felt.seconds)
        rate = f"{felt.output_tokens_per_s:.1f} tokens/s in {felt.seconds:.1f} s"
        self._say(f"{row.name}: {entry.name}, {entry.mix.title}: {rate}; {self._eta}")
        facts = {"row": row.name, "kind": entry.kind, "server": entry.name, "mix": entry.mix.title, "streams": row.streams}
        facts |= {"seed": seed, "requests_per_stream": entry.size.requests_per_stream}
        return felt, {**facts, **asdict(felt), "others_cpu": round(others, 3)}


def measure(options: argparse.Namespace, results: Results) -> None:
    """Every chosen row into ``results``."""
    console, rows = Console(stderr=True), list[Row](options.rows)
    size = Size(options.requests_per_stream, options.input, options.output, vocabulary(options.base))
    effort = Effort(size, options.repeats, options.peer_requests, options.peer_repeats)
    kinds = [peer.kind for peer in options.peers]
    eta = Eta(effort.plan(rows, kinds))
    say: Say = partial(console.print, style="dim", markup=False, highlight=False, soft_wrap=True)
    with workspace(options.work, options.base) as work:
        say("measuring the machine")
        floors = machine.measure()
        say("writing adapters")
        folders = write_folders(options.base, work / "adapters", rows)
        names = frozenset[str]().union(*(row.adapters for row in rows))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
        with (
            Progress(*columns, console=console, disable=not console.is_terminal) as progress,
            Arena.open(
                options.base, work, folders, names, options.peers, element_types(floors), options.serve_options, say
            ) as arena,
        ):
            total = sum(planned.readings * planned.tokens // size.output for planned in eta.plan.values())
            task = progress.add_task("", total=total)
            run = Measuring(arena, floors, adapter_bytes(options.base, RANK), effort, options.seed, eta, say)
            for row in rows:
                progress.update(task, description=row.name)
                part = Part(row.name, floors.as_json(), settings(options, effort, row, kinds))
                run.row(row, ROWS.index(row), part, lambda: progress.advance(task))
                results.put(part)


def write_folders(base: Path, out: Path, rows: Sequence[Row]) -> dict[str, Path]:
    """The adapters that rows need, by name; peers get all of the large ones."""
    folders = dict(zip(ADAPTERS, write_adapters(base, out, NUM_ADAPTERS, [RANK]), strict=True))
    if any(row.adapters & set(DORA) for row in rows):
        folders.update(zip(DORA, write_adapters(base, out, NUM_ADAPTERS, [RANK], stem="d", use_dora=True), strict=True))
    if any(row.adapters & set(SMALL) for row in rows):
        folders.update(zip(SMALL, write_adapters(base, out, NUM_SMALL, [SMALL_RANK], stem="s"), strict=True))
    return folders


def settings(options: argparse.Namespace, effort: Effort, row: Row, kinds: Sequence[str]) -> dict[str, Any]:
    """What a row's figures depend on, beside the machine."""
    peers = {
        kind: {"requests_per_stream": effort.size_for(kind).requests_per_stream, "repeats": effort.repeats_for(row, kind)}
        for kind in (kinds if row.peers else ())
    }
    own = {"requests_per_stream": effort.size.requests_per_stream, "repeats": effort.repeats_for(row, "")}
    return {"input": options.input, "output": options.output, **own, "peers": peers, "serve_options": options.serve_options}


def by_peer(texts: Sequence[str], option: str, peers: Sequence[Peer]) -> dict[str, int]:
    """``vllm=1`` and so on as numbers by kind; raises ValueError for others, and for peers that do not take part."""
    found: dict[str, int] = {}
    for text in ",".join(texts).split(",") if texts else ():
        kind, _, number = text.partition("=")
        if kind not in PEER_NAMES or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"{option} {text}: write a peer and a number above 0, as vllm=1; peers are {', '.join(PEER_NAMES)}")
        if kind not in {peer.kind for peer in peers}:
            raise ValueError(f"{option} {text}: there is no --peer {kind}")
        found[kind] = int(number)
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Measure our server beside peers, and its adapters beside its base.",
        epilog="Rows: " + "; ".join(f"{row.name}: {row.title}" for row in ROWS),
    )
    add_base(parser, "")
    parser.add_argument("--rows", default="bars", help="comma list of rows, in the order below; bars: those that have one; all")
    peer_help = "vllm=VENV, llamacpp=FOLDER or peft; may be given several times"
    parser.add_argument("--peer", action="append", default=[], metavar="PEER", help=peer_help)
    parser.add_argument("--vllm-slots", default="8,16,32", help="numbers of adapter slots to try; the fastest is measured")
    parser.add_argument("--llama-python", type=Path, default=Path(sys.executable), help="runs llama.cpp's converters")
    parser.add_argument("--repeats", type=int, help="how often each load is put on each; by default what a row's bars need, 5 or 7")
    parser.add_argument("--requests-per-stream", type=int, default=4)
    parser.add_argument("--peer-requests", action="append", default=[], metavar="PEER=N", help="requests a stream of a slow peer")
    parser.add_argument("--peer-repeats", action="append", default=[], metavar="PEER=N", help="repetitions with a slow peer")
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="of the first repetition")
    parser.add_argument("--serve-options", default="", help="more options of graftwork serve, in one argument")
    parser.add_argument(
        "--work", type=Path, help="folder that keeps adapters, data and converted files of this base for the next run"
    )
    add_output(parser)
    options = parser.parse_args(arguments)
    check_base(parser, options)
    for name in ("repeats", "requests_per_stream", "input", "output"):
        number = getattr(options, name)
        if number is not None and number < 1:
            parser.error(f"--{name.replace('_', '-')} {number}: give at least 1")
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: give 0 or more")
    try:
        options.rows = choose_rows(options.rows)
        options.peers = [Peer.parse(text, options.vllm_slots, options.llama_python) for text in options.peer]
        if len({peer.kind for peer in options.peers}) < len(options.peers):
            raise ValueError("--peer: name each kind of peer once")
        options.peer_requests = by_peer(options.peer_requests, "--peer-requests", options.peers)
        options.peer_repeats = by_peer(options.peer_repeats, "--peer-repeats", options.peers)
        for peer in options.peers:
            peer.check()
    except (ValueError, BenchmarkFailed) as error:
        parser.error(str(error))
    options.serve_options = options.serve_options.split()
    return options


def main(arguments: Sequence[str]) -> int:
    """Print a table or JSON; 1 if the measurement failed, 130 if it was interrupted."""
    options = parse(arguments)
    return conclude("serving", options.base.name, options, lambda results: measure(options, results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
