"""Times candidates that do the same work, in turn, so that what slows the machine down slows all of them. Knows no operator."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from machine import Machine
from results import NEAR_REPEATS, Claim, Direction

LEAST_ROUNDS, MOST_ROUNDS = 3, 50


@dataclass
class Timed:
    """Seconds of each round."""

    rounds: list[float] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        """Of the fastest round: what is above it is the machine's doing."""
        return min(self.rounds)

    @property
    def median_s(self) -> float:
        """Of the middle round."""
        return statistics.median(self.rounds)


class Bar(Protocol):
    """Something that the times of a case are held against."""

    def claim(self, case: str, timed: Mapping[str, Timed], floors: Machine) -> Claim:
        """The claim for the table."""
        ...


@dataclass(frozen=True)
class RatioBar:
    """Time of candidate ``above`` over that of ``below``, round by round; of both only what they take beyond ``without``."""

    what: str
    above: str
    below: str
    bar: float | None = None
    direction: Direction = "at least"
    without: str | None = None

    def claim(self, case: str, timed: Mapping[str, Timed], floors: Machine) -> Claim:  # noqa: ARG002 - the protocol's
        """See `Bar`."""
        above, below = timed[self.above].rounds, timed[self.below].rounds
        base = timed[self.without].rounds if self.without else [0.0] * len(above)
        ratios = [_ratio(a - c, b - c) for a, b, c in zip(above, below, base, strict=True)]
        return Claim.of(f"{case}: {self.what}", "", ratios, "×", self.bar, self.direction)


def _ratio(above: float, below: float) -> float:
    """Infinite where the second was lost in the noise: one such round moves no median, and a median of them meets no bar."""
    return above / below if below > 0 else math.inf


@dataclass(frozen=True)
class AddedBar:
    """What ``with_it`` takes longer than ``without``: at most ``factor`` times the reading of ``num_bytes``, and ``slack_ms``."""

    with_it: str
    without: str
    num_bytes: float
    factor: float
    slack_ms: float

    def claim(self, case: str, timed: Mapping[str, Timed], floors: Machine) -> Claim:
        """See `Bar`."""
        added = [1e3 * (a - b) for a, b in zip(timed[self.with_it].rounds, timed[self.without].rounds, strict=True)]
        bar = self.factor * 1e3 * self.num_bytes / floors.read_bandwidth + self.slack_ms
        return Claim.of(f"{case}: added by adapters", "", added, "ms", bar, "at most")


@dataclass(frozen=True)
class Case:
    """Candidates for one piece of work, and the bytes and operations that it takes at the least."""

    name: str
    candidates: Mapping[str, Callable[[], object]]
    num_bytes: float = 0.0
    flops: float = 0.0
    bars: tuple[Bar, ...] = ()


def run_case(case: Case, budget_s: float, clock: Callable[[], float] = time.perf_counter) -> dict[str, Timed]:
    """Rounds of all candidates until ``budget_s`` a candidate is used up, after one that warms up.

    Every other round goes backwards, so that a machine that slows down all the while favours nobody. A case with bars has never
    fewer than a bar near 1 needs.
    """
    timed = {name: Timed() for name in case.candidates}
    for work in case.candidates.values():
        work()
    began, order, least = clock(), list(case.candidates), NEAR_REPEATS if case.bars else LEAST_ROUNDS
    for number in range(MOST_ROUNDS):
        if number >= least and clock() - began >= budget_s * len(timed):
            break
        for name in order:
            start = clock()
            case.candidates[name]()
            timed[name].rounds.append(clock() - start)
        order.reverse()
    return timed
