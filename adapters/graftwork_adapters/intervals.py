"""Numbers 0 .. size that are given out as intervals and come back. Bookkeeping alone: knows not what is numbered."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class FreeIntervals:
    """Which of ``size`` numbers are free. One who takes some gets them side by side, the first that are enough."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts = [0] if size else []  # ascending and never adjacent
        self._lengths = [size] if size else []

    @property
    def num_free(self) -> int:
        """Numbers that nobody has."""
        return sum(self._lengths)

    def has(self, count: int) -> bool:
        """Whether `take` would succeed."""
        return not count or any(length >= count for length in self._lengths)

    def take(self, count: int) -> int | None:
        """Take ``count`` numbers; the first of them, or None, with nothing taken, if no free interval is that long."""
        if not count:
            return 0
        for place, length in enumerate(self._lengths):
            if length >= count:
                start = self._starts[place]
                if length == count:
                    del self._starts[place], self._lengths[place]
                else:
                    self._starts[place] += count
                    self._lengths[place] -= count
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Give ``count`` numbers from ``start`` on back."""
        if not count:
            return
        place = bisect_left(self._starts, start)
        if place < len(self._starts) and start + count == self._starts[place]:
            count += self._lengths[place]
            del self._starts[place], self._lengths[place]
        if place and self._starts[place - 1] + self._lengths[place - 1] == start:
            self._lengths[place - 1] += count
        else:
            self._starts.insert(place, start)
            self._lengths.insert(place, count)

    def discrepancies(self, what: str, taken: Iterable[tuple[int, int, str]]) -> list[str]:
        """What is wrong with the books, given (start, count, owner) of all that is taken; empty when all is well. ``what`` is
        numbered, each by one owner: somebody, or the free ones.
        """
        owned = [(start, length, "the free ones") for start, length in zip(self._starts, self._lengths, strict=False)]
        owned += [(start, count, owner) for start, count, owner in taken if count]
        found = []
        end, before = 0, "the beginning"
        for start, length, owner in sorted(owned):
            if start > end:
                found.append(f"{what} {end} to {start} belong to nobody")
            elif start < end:
                found.append(f"{what} {start} to {min(end, start + length)} belong to {before} and to {owner}")
            if start + length > end:
                end, before = start + length, owner
        if end != self.size:
            found.append(f"{what} end at {end}, there are {self.size}")
        return found
