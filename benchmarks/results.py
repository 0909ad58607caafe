"""What a benchmark hands on: claims with their bars, the readings behind them, and the machine they are of. Measures nothing.

A claim is a ratio or a time with the bar it is held against. It is made of pairs that were measured one after the other, so that a
machine that slows down slows both down; the median of their ratios is the figure.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Direction = Literal["at least", "at most"]


class BenchmarkFailed(Exception):
    """A measurement did not take place; the message says why and what to do next."""


@dataclass(frozen=True)
class Claim:
    """One line of a table. ``least`` and ``most`` are the extremes of the readings whose median is ``value``; no bar: a reading.

    ``row`` names what was measured and ``against`` what it was held beside, "" for nothing.
    """

    row: str
    against: str
    value: float
    unit: str
    least: float
    most: float
    bar: float | None = None
    direction: Direction = "at least"

    @property
    def holds(self) -> bool | None:
        """Whether the bar is met; None without one. What is no number meets none."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.direction == "at least" else self.value <= self.bar

    @classmethod
    def of(
        cls,
        row: str,
        against: str,
        readings: Sequence[float],
        unit: str,
        bar: float | None = None,
        direction: Direction = "at least",
    ) -> Claim:
        """The median of ``readings``, of which there is at least one."""
        return cls(row, against, statistics.median(readings), unit, min(readings), max(readings), bar, direction)


@dataclass
class Report:
    """All that one run of a benchmark found. ``readings`` are its own, plain JSON."""

    benchmark: str
    machine: dict[str, Any]
    claims: list[Claim] = field(default_factory=list)
    readings: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> str:
        """One JSON object; what is no number becomes null."""
        claims = [{**asdict(claim), "holds": claim.holds} for claim in self.claims]
        content = {"benchmark": self.benchmark, "machine": self.machine, "claims": claims, "readings": self.readings}
        return json.dumps(_finite(content), indent=1)

    @classmethod
    def read(cls, path: Path) -> Report:
        """A report that `as_json` wrote; raises `BenchmarkFailed` for anything else."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            claims = [_claim(claim) for claim in content["claims"]]
            return cls(content["benchmark"], content["machine"], claims, content["readings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchmarkFailed(f"{path} is no result of a benchmark ({error!r}); make it with --out") from error


def _claim(content: dict[str, Any]) -> Claim:
    """A claim of `Report.as_json`, in which null stands for what is no number."""
    value, least, most = (math.nan if content[key] is None else float(content[key]) for key in ("value", "least", "most"))
    row, against, unit, bar, direction = (content[key] for key in ("row", "against", "unit", "bar", "direction"))
    return Claim(row, against, value, unit, least, most, bar, direction)


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


def show(report: Report, *, as_json: bool, out: Path | None) -> None:
    """Print a report as a table or as JSON, and write the JSON to ``out``."""
    text = report.as_json()
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
        return
    console = Console(width=None if sys.stdout.isatty() else 132)
    console.print("  ".join(f"{name} {value}" for name, value in report.machine.items() if not isinstance(value, (list, dict))))
    table = Table()
    for title in ("row", "against", "median", "least … most", "bar", "holds"):
        table.add_column(title, justify="left" if title in ("row", "against") else "right")
    for claim in report.claims:
        table.add_row(
            claim.row,
            claim.against,
            amount(claim.value, claim.unit),
            f"{amount(claim.least, '')} … {amount(claim.most, '')}",
            "" if claim.bar is None else f"{claim.direction} {amount(claim.bar, claim.unit)}",
            {None: "", True: "yes", False: "no"}[claim.holds],
        )
    console.print(table)


def amount(value: float, unit: str) -> str:
    """Three significant figures and the unit; a ratio has none and "×" before it would say nothing."""
    if not math.isfinite(value):
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f} {unit}".rstrip()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
