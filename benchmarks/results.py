"""What a benchmark hands on: claims with their bars, the readings behind them, and the machine they are of. Measures nothing.

A claim is a ratio or a time with the bar it is held against. It is made of pairs that were measured one after the other, so that a
machine that slows down slows both down; the median of their ratios is the figure.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Direction = Literal["at least", "at most"]

FORMAT = 2
"""Of the JSON; files of another one are refused."""

REPEATS, NEAR_REPEATS = 5, 7
"""Readings that a claim needs, and how many where the bar is a ratio within `NEAR` of 1."""

NEAR = 0.05


class BenchmarkFailed(Exception):
    """A measurement did not take place; the message says why and what to do next."""


def needed_repeats(bar: float | None, unit: str) -> int:
    """Readings without which a claim with this bar is a short one; 0 where there is no bar."""
    if bar is None:
        return 0
    return NEAR_REPEATS if unit == "×" and abs(bar - 1) <= NEAR + 1e-9 else REPEATS


@dataclass(frozen=True)
class Claim:
    """One line of a table. ``least`` and ``most`` are the extremes of the ``readings`` whose median is ``value``.

    ``row`` names what was measured and ``against`` what it was held beside, "" for nothing. Fewer ``readings`` than ``needed`` make
    a short measurement. It is enough if the ``alternative`` holds. ``note`` says how the load differs from what the row promises.
    """

    row: str
    against: str
    value: float
    unit: str
    least: float
    most: float
    bar: float | None = None
    direction: Direction = "at least"
    readings: int = 1
    needed: int = 0
    note: str = ""
    alternative: Claim | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the bar is met, or the alternative's; None without one. What is no finite number meets none."""
        if self.bar is None:
            return None
        if self.alternative is not None and self.alternative.holds:
            return True
        met = self.value >= self.bar if self.direction == "at least" else self.value <= self.bar
        return met and math.isfinite(self.value)

    @property
    def remarks(self) -> str:
        """What a reader must know before believing it; "" where nothing is amiss."""
        short = f"short: {self.readings} of {self.needed} repetitions" if self.readings < self.needed else ""
        return "; ".join(text for text in (short, self.note) if text)

    @property
    def cells(self) -> tuple[str, str, str, str, str, str]:
        """For a table: what was measured, against what, median, extremes, bar and verdict."""
        either = [self] if self.alternative is None else [self, self.alternative]
        values = " or ".join(amount(claim.value, claim.unit) for claim in either)
        spreads = " or ".join(f"{amount(claim.least, '')} … {amount(claim.most, '')}" for claim in either)
        bars = " or ".join(f"{c.direction} {amount(c.bar, c.unit)}" for c in either if c.bar is not None)
        return self.row, self.against, values, spreads, bars, {None: "", True: "yes", False: "no"}[self.holds]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, the verdict included."""
        alternative = None if self.alternative is None else self.alternative.as_json()
        return {**asdict(self), "alternative": alternative, "holds": self.holds, "remarks": self.remarks}

    @classmethod
    def of(
        cls,
        row: str,
        against: str,
        readings: Sequence[float],
        unit: str,
        bar: float | None = None,
        direction: Direction = "at least",
        *,
        needed: int | None = None,
        note: str = "",
        alternative: Claim | None = None,
    ) -> Claim:
        """The median of ``readings``, of which there is at least one; ``needed`` is `needed_repeats` unless given."""
        middle, least, most = statistics.median(readings), min(readings), max(readings)
        wanted = needed_repeats(bar, unit) if needed is None else needed
        return cls(row, against, middle, unit, least, most, bar, direction, len(readings), wanted, note, alternative)


@dataclass
class Part:
    """What one run found of one row, group or case: it is replaced as a whole. ``readings`` are the benchmark's own, plain JSON.

    ``machine`` are the rates of that run and ``settings`` what else the figures depend on.
    """

    name: str
    machine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    readings: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Report:
    """All that is known of one benchmark over one ``base``, by part, from one run or several."""

    benchmark: str
    base: str
    parts: list[Part] = field(default_factory=list)

    @property
    def claims(self) -> list[Claim]:
        """Of all parts."""
        return [claim for part in self.parts for claim in part.claims]

    @property
    def readings(self) -> list[dict[str, Any]]:
        """Of all parts."""
        return [reading for part in self.parts for reading in part.readings]

    def put(self, part: Part) -> None:
        """Add a part, or replace the one of its name."""
        for place, other in enumerate(self.parts):
            if other.name == part.name:
                self.parts[place] = part
                return
        self.parts.append(part)

    def as_json(self) -> str:
        """One JSON object; what is no finite number becomes null."""
        parts = [{**vars(part), "claims": [claim.as_json() for claim in part.claims]} for part in self.parts]
        content = {"format": FORMAT, "benchmark": self.benchmark, "base": self.base, "parts": parts}
        return as_text(content)

    @classmethod
    def read(cls, path: Path) -> Report:
        """A report that `as_json` wrote; raises `BenchmarkFailed` for anything else."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if "benchmark" in content and content.get("format") != FORMAT:
                raise BenchmarkFailed(f"{path} was written by another version of the benchmarks; remove it and measure again")
            parts = [
                Part(part["name"], part["machine"], part["settings"], [_claim(c) for c in part["claims"]], part["readings"])
                for part in content["parts"]
            ]
            return cls(content["benchmark"], content["base"], parts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchmarkFailed(f"{path} is no result of a benchmark ({error!r}); make it with --out") from error


class Results:
    """A report that is written to a file, where one is named, each time that it learns something.

    Parts that the file has already stay unless they are measured again. Raises `BenchmarkFailed` for a file that cannot be written,
    is none of this benchmark, or is of another base.
    """

    def __init__(self, benchmark: str, base: str, out: Path | None) -> None:
        self.report, self._out = Report(benchmark, base), out
        if out is None:
            return
        if out.exists():
            self.report = Report.read(out)
            if (self.report.benchmark, self.report.base) != (benchmark, base):
                found = f"{self.report.benchmark} over {self.report.base}"
                raise BenchmarkFailed(f"{out} holds results of {found}, not of {benchmark} over {base}; name another --out")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._write(out)
        except OSError as error:
            raise BenchmarkFailed(f"--out {out} cannot be written: {error}") from error

    def put(self, part: Part) -> None:
        """Add or replace a part, and write."""
        self.report.put(part)
        if self._out is not None:
            self._write(self._out)

    def _write(self, out: Path) -> None:
        """All or nothing: whoever is killed meanwhile leaves what was there."""
        unfinished = out.with_name(f".{out.name}.{os.getpid()}")
        unfinished.write_text(self.report.as_json() + "\n", encoding="utf-8")
        unfinished.replace(out)


def _claim(content: dict[str, Any]) -> Claim:
    """A claim of `Claim.as_json`, in which null stands for what is no finite number."""
    value, least, most = (math.nan if content[key] is None else float(content[key]) for key in ("value", "least", "most"))
    row, against, unit, bar, direction = (content[key] for key in ("row", "against", "unit", "bar", "direction"))
    readings, needed, note, other = (content[key] for key in ("readings", "needed", "note", "alternative"))
    alternative = None if other is None else _claim(other)
    return Claim(row, against, value, unit, least, most, bar, direction, readings, needed, note, alternative)


def paired_ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """first / second, pair by pair; raises ValueError for lists of different lengths and for a second that is 0."""
    ratios = []
    for a, b in zip(first, second, strict=True):
        if b == 0:
            raise ValueError("nothing can be measured against 0")
        ratios.append(a / b)
    return ratios


def percentile(values: Sequence[float], q: float) -> float:
    """The value that a share ``q`` of ``values`` is below; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else math.nan


def median(values: Sequence[float]) -> float:
    """NaN of none."""
    return statistics.median(values) if values else math.nan


def show(report: Report, *, as_json: bool, only: Iterable[str] | None = None) -> None:
    """Print a report as JSON, or its claims as a table: those of the parts ``only``, or all."""
    if as_json:
        print(report.as_json())
        return
    chosen = None if only is None else set(only)
    parts = [part for part in report.parts if chosen is None or part.name in chosen]
    console = Console(width=None if sys.stdout.isatty() else 160)
    for facts in {json.dumps(part.machine): part.machine for part in parts}.values():
        console.print("  ".join(f"{name} {value}" for name, value in facts.items() if not isinstance(value, (list, dict))))
    table = Table()
    for title in ("row", "against", "median", "least … most", "bar", "holds", "remarks"):
        table.add_column(title, justify="left" if title in ("row", "against", "remarks") else "right")
    for claim in (claim for part in parts for claim in part.claims):
        table.add_row(*claim.cells, claim.remarks)
    console.print(table)


def amount(value: float, unit: str) -> str:
    """Three significant figures and the unit; a dash for what is no finite number."""
    if not math.isfinite(value):
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f} {unit}".rstrip()


def as_text(content: Any) -> str:
    """JSON, in which what is no finite number becomes null."""
    return json.dumps(_finite(content), indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
