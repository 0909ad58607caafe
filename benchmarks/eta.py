"""Says how long a run will still take, from the readings so far. Starts of servers are not counted."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

Cell = tuple[str, str]
"""A row's name and the kind of who is measured."""


@dataclass(frozen=True)
class Planned:
    """Readings that a cell will have, and the output tokens of each."""

    readings: int
    tokens: int


@dataclass
class Eta:
    """A run's plan, and the seconds of what is done."""

    plan: Mapping[Cell, Planned]
    _seconds: dict[Cell, list[float]] = field(default_factory=dict)

    def done(self, cell: Cell, seconds: float) -> None:
        """A reading of a planned cell took so long."""
        self._seconds.setdefault(cell, []).append(seconds)

    @property
    def left_s(self) -> float | None:
        """Seconds until the end; None before the first reading.

        A cell without a reading is taken to be as fast, per token, as its kind elsewhere, or as the slowest of all.
        """
        if not self._seconds:
            return None
        return sum(self._left(cell, planned) for cell, planned in self.plan.items())

    def _left(self, cell: Cell, planned: Planned) -> float:
        return (planned.readings - len(self._seconds.get(cell, ()))) * self._per_token(cell) * planned.tokens

    def _per_token(self, cell: Cell) -> float:
        rates = {seen: statistics.mean(seconds) / self.plan[seen].tokens for seen, seconds in self._seconds.items()}
        of_kind = [rate for (_, kind), rate in rates.items() if kind == cell[1]]
        return rates.get(cell) or max(of_kind or rates.values())

    def __str__(self) -> str:
        num_done = sum(len(seconds) for seconds in self._seconds.values())
        total = sum(planned.readings for planned in self.plan.values())
        return f"{num_done} of {total} readings, {_duration(self.left_s)} to go"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "an unknown time"
    minutes = round(seconds / 60)
    return f"about {minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"about {minutes} min" if minutes else "seconds"
