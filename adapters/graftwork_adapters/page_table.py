"""Which pages, row numbers and index each resident adapter has. Bookkeeping alone: knows no tensors and moves no bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graftwork_adapters.errors import AdapterTooLarge
from graftwork_adapters.packed import ROW_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Extent:
    """How much room an adapter takes, wherever that is."""

    num_pages: int
    num_rows: int


@dataclass(frozen=True, eq=False)
class PageLayout:
    """How an adapter's rows are cut into pages, wherever those will lie.

    ``row_page`` int64 [rows] numbers the adapter's own pages from 0, ``row_start`` int64 [rows] is a row's byte offset in its page,
    and ``page_runs`` holds for each page the (start, length) of its bytes in the packed rows.
    """

    row_page: npt.NDArray[np.int64]
    row_start: npt.NDArray[np.int64]
    page_runs: tuple[tuple[int, int], ...]

    @property
    def extent(self) -> Extent:
        """The room that it takes."""
        return Extent(len(self.page_runs), len(self.row_page))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an adapter lies: its index, its row numbers ``first_row .. first_row + num_rows``, and its pages in order."""

    index: int
    first_row: int
    num_rows: int
    pages: tuple[int, ...]

    def holds(self, extent: Extent) -> bool:
        """True if it has room for that much."""
        return extent.num_pages <= len(self.pages) and extent.num_rows <= self.num_rows

    def trimmed(self, extent: Extent) -> Placement:
        """Its beginning, which must hold that much."""
        if not self.holds(extent):
            raise AssertionError(f"{extent} does not fit into {len(self.pages)} pages and {self.num_rows} rows")
        return replace(self, num_rows=extent.num_rows, pages=self.pages[: extent.num_pages])


def plan_pages(row_bytes: npt.NDArray[np.int64], page_bytes: int) -> PageLayout:
    """Fill pages with rows in order (next fit), none straddling two. Raises `AdapterTooLarge` for a row longer than a page."""
    if len(row_bytes) and row_bytes.max() > page_bytes:
        raise AdapterTooLarge(f"a row of {row_bytes.max()} bytes is longer than a page of {page_bytes} bytes")
    ends = np.cumsum(row_bytes)
    row_page = np.zeros(len(row_bytes), dtype=np.int64)
    runs: list[tuple[int, int]] = []
    row, start = 0, 0
    while row < len(row_bytes):
        next_row = int(np.searchsorted(ends, start + page_bytes, side="right"))
        row_page[row:next_row] = len(runs)
        end = int(ends[next_row - 1])
        runs.append((start, end - start))
        row, start = next_row, end
    page_starts = np.array([start for start, _ in runs], dtype=np.int64)
    return PageLayout(row_page, ends - row_bytes - page_starts[row_page], tuple(runs))


class PageCopy(NamedTuple):
    """``num_bytes`` of the packed rows from ``from_byte`` on, which go to ``to_byte`` of the pool as they are."""

    to_byte: int
    from_byte: int
    num_bytes: int


def page_copies(placement: Placement, layout: PageLayout, page_bytes: int) -> list[PageCopy]:
    """The copies that bring an adapter to its place, as few as there can be: pages side by side are one, if they are full."""
    copies: list[PageCopy] = []
    for page, (start, length) in zip(placement.pages, layout.page_runs, strict=True):
        to_byte = page * page_bytes
        if copies and copies[-1].to_byte + copies[-1].num_bytes == to_byte:
            before = copies.pop()  # which ended where this one starts, in the rows too: runs follow each other there
            copies.append(before._replace(num_bytes=before.num_bytes + length))
        else:
            copies.append(PageCopy(to_byte, start, length))
    return copies


def page_size(page_bytes: int, max_row_bytes: int) -> int:
    """Bytes of a page: what is asked for, but never less than the longest row, and a multiple of `ROW_ALIGNMENT`."""
    return -(-max(page_bytes, max_row_bytes) // ROW_ALIGNMENT) * ROW_ALIGNMENT


def row_numbers(pool_bytes: int) -> int:
    """Row numbers that a pool has unless told otherwise: one per 128 bytes."""
    return pool_bytes // 128


class PageTable:
    """Free pages, free row numbers and free indices of a device pool."""

    def __init__(self, num_pages: int, max_rows: int, max_adapters: int) -> None:
        self.num_pages = num_pages
        self.max_rows = max_rows
        self.max_adapters = max_adapters
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._free_indices = list(range(max_adapters - 1, -1, -1))
        self._row_starts = [0] if max_rows else []  # free intervals of row numbers, ascending and never adjacent
        self._row_lengths = [max_rows] if max_rows else []

    @property
    def num_free_pages(self) -> int:
        """Pages that no adapter has."""
        return len(self._free_pages)

    def check_fits(self, name: str, layout: PageLayout, page_bytes: int) -> None:
        """Raise `AdapterTooLarge`, its message opening with ``name``, if it could not be placed even with all others gone."""
        num_pages, num_rows = layout.extent.num_pages, layout.extent.num_rows
        if num_pages > self.num_pages:
            needed, there = num_pages * page_bytes, self.num_pages * page_bytes
            raise AdapterTooLarge(f"{name} needs {needed} bytes in {num_pages} pages of adapter memory, there are {there}")
        if num_rows > self.max_rows:
            raise AdapterTooLarge(f"{name} has {num_rows} rows, adapter memory has room for {self.max_rows}")
        if not self.max_adapters:
            raise AdapterTooLarge(f"{name} needs adapter memory, there is room for 0 adapters")

    def how_many(self, extent: Extent) -> int:
        """How many adapters of this extent can have a place at once, nothing else having one."""
        needs = ((1, self.max_adapters), (extent.num_pages, self.num_pages), (extent.num_rows, self.max_rows))
        return min(there // needed for needed, there in needs if needed)

    def most_needed(self, num_bytes: int, page_bytes: int, max_row_bytes: int) -> Extent:
        """What an adapter of so many bytes takes at most in pages, and its pages' share of all row numbers, which is nearly always
        more than it has rows."""
        # A page is left when the next row does not fit, so any but the last is full but for one row; and any two that follow each
        # other hold more than a page, since else the second would not have been begun.
        least = max(page_bytes - max_row_bytes + ROW_ALIGNMENT, page_bytes // 2)
        num_pages = min(num_bytes // least + 1, self.num_pages)
        return Extent(num_pages, num_pages * (self.max_rows // self.num_pages) if self.num_pages else 0)

    def place(self, extent: Extent) -> Placement | None:
        """Take what the adapter needs, its row numbers as one interval (first fit); None, with nothing taken, if it lacks room."""
        if extent.num_pages > len(self._free_pages) or not self._free_indices:
            return None
        first_row = self._take_rows(extent.num_rows)
        if first_row is None:
            return None
        pages = tuple(self._free_pages.pop() for _ in range(extent.num_pages))
        return Placement(self._free_indices.pop(), first_row, extent.num_rows, pages)

    def trim(self, placement: Placement, extent: Extent) -> Placement:
        """Give back what ``placement`` has beyond ``extent``; what is left of it."""
        kept = placement.trimmed(extent)
        self._free_pages.extend(reversed(placement.pages[extent.num_pages :]))
        self._give_rows(placement.first_row + kept.num_rows, placement.num_rows - kept.num_rows)
        return kept

    def free(self, placement: Placement) -> None:
        """Give back everything `place` took."""
        self._free_pages.extend(reversed(placement.pages))
        self._free_indices.append(placement.index)
        self._give_rows(placement.first_row, placement.num_rows)

    def discrepancies(self, live: Mapping[str, Placement]) -> list[str]:
        """What is wrong with the books, given the placement of every adapter by its key; empty when all is well.

        Each page, row number and index must have exactly one owner: an adapter or the free ones.
        """
        pages = [(page, "the free ones") for page in self._free_pages]
        pages += [(page, f"adapter {key}") for key, p in live.items() for page in p.pages]
        indices = [(index, "the free ones") for index in self._free_indices]
        indices += [(p.index, f"adapter {key}") for key, p in live.items()]
        rows = [(start, length, "the free ones") for start, length in zip(self._row_starts, self._row_lengths, strict=False)]
        rows += [(p.first_row, p.num_rows, f"adapter {key}") for key, p in live.items() if p.num_rows]
        found = _not_owned_once("page", self.num_pages, pages) + _not_owned_once("adapter index", self.max_adapters, indices)
        end, before = 0, "the beginning"
        for start, length, owner in sorted(rows):
            if start > end:
                found.append(f"rows {end} to {start} belong to nobody")
            elif start < end:
                found.append(f"rows {start} to {min(end, start + length)} belong to {before} and to {owner}")
            if start + length > end:
                end, before = start + length, owner
        if end != self.max_rows:
            found.append(f"rows end at {end}, there are {self.max_rows}")
        return found

    def _take_rows(self, count: int) -> int | None:
        if not count:
            return 0
        for place, length in enumerate(self._row_lengths):
            if length >= count:
                start = self._row_starts[place]
                if length == count:
                    del self._row_starts[place], self._row_lengths[place]
                else:
                    self._row_starts[place] += count
                    self._row_lengths[place] -= count
                return start
        return None

    def _give_rows(self, start: int, count: int) -> None:
        if not count:
            return
        place = bisect_left(self._row_starts, start)
        if place < len(self._row_starts) and start + count == self._row_starts[place]:
            count += self._row_lengths[place]
            del self._row_starts[place], self._row_lengths[place]
        if place and self._row_starts[place - 1] + self._row_lengths[place - 1] == start:
            self._row_lengths[place - 1] += count
        else:
            self._row_starts.insert(place, start)
            self._row_lengths.insert(place, count)


def _not_owned_once(what: str, count: int, owned: Iterable[tuple[int, str]]) -> list[str]:
    """A complaint for each of ``count`` numbered things that has no owner or several, and for each that does not exist."""
    owners: list[list[str]] = [[] for _ in range(count)]
    found = []
    for number, owner in owned:
        if 0 <= number < count:
            owners[number].append(owner)
        else:
            found.append(f"{what} {number} of {owner} does not exist")
    for number, names in enumerate(owners):
        if not names:
            found.append(f"{what} {number} belongs to nobody")
        elif len(names) > 1:
            found.append(f"{what} {number} belongs to {' and to '.join(names)}")
    return found
