"""Which pages, row numbers, bytes for wholes and index each resident adapter has. Bookkeeping alone: moves no bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graftwork_adapters.errors import AdapterTooLarge
from graftwork_adapters.intervals import FreeIntervals
from graftwork_adapters.packed import ROW_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Extent:
    """How much room an adapter takes, wherever that is. ``num_whole_bytes``: of the memory for what it brings whole."""

    num_pages: int
    num_rows: int
    num_whole_bytes: int = 0


@dataclass(frozen=True, eq=False)
class PageLayout:
    """How an adapter's rows are cut into pages, wherever those will lie.

    ``row_page`` int64 [rows] numbers the adapter's own pages from 0, ``row_start`` int64 [rows] is a row's byte offset in its page,
    and ``page_runs`` holds for each page the (start, length) of its bytes in the packed rows. ``num_whole_bytes`` is what the
    tensors take that it brings whole.
    """

    row_page: npt.NDArray[np.int64]
    row_start: npt.NDArray[np.int64]
    page_runs: tuple[tuple[int, int], ...]
    num_whole_bytes: int = 0

    @property
    def extent(self) -> Extent:
        """The room that it takes."""
        return Extent(len(self.page_runs), len(self.row_page), self.num_whole_bytes)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an adapter lies: its index, its row numbers ``first_row .. first_row + num_rows``, its pages in order, and its bytes
    ``whole_start .. whole_start + num_whole_bytes`` of the memory for wholes.
    """

    index: int
    first_row: int
    num_rows: int
    pages: tuple[int, ...]
    whole_start: int = 0
    num_whole_bytes: int = 0

    def holds(self, extent: Extent) -> bool:
        """True if it has room for that much."""
        return (
            extent.num_pages <= len(self.pages)
            and extent.num_rows <= self.num_rows
            and extent.num_whole_bytes <= self.num_whole_bytes
        )

    def trimmed(self, extent: Extent) -> Placement:
        """Its beginning, which must hold that much."""
        if not self.holds(extent):
            raise AssertionError(
                f"{extent} does not fit into {len(self.pages)} pages, {self.num_rows} rows and {self.num_whole_bytes} bytes"
            )
        return replace(self, num_rows=extent.num_rows, pages=self.pages[: extent.num_pages], num_whole_bytes=extent.num_whole_bytes)


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
    """Free pages, free row numbers and free indices of a device pool, and free bytes of its memory for wholes."""

    def __init__(self, num_pages: int, max_rows: int, max_adapters: int, max_whole_bytes: int = 0) -> None:
        self.num_pages = num_pages
        self.max_rows = max_rows
        self.max_adapters = max_adapters
        self.max_whole_bytes = max_whole_bytes
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._free_indices = list(range(max_adapters - 1, -1, -1))
        self._rows = FreeIntervals(max_rows)
        self._wholes = FreeIntervals(max_whole_bytes)

    @property
    def num_free_pages(self) -> int:
        """Pages that no adapter has."""
        return len(self._free_pages)

    @property
    def num_free_whole_bytes(self) -> int:
        """Bytes for wholes that no adapter has."""
        return self._wholes.num_free

    def check_fits(self, name: str, layout: PageLayout, page_bytes: int) -> None:
        """Raise `AdapterTooLarge`, its message opening with ``name``, if it could not be placed even with all others gone."""
        num_pages, num_rows = layout.extent.num_pages, layout.extent.num_rows
        if num_pages > self.num_pages:
            needed, there = num_pages * page_bytes, self.num_pages * page_bytes
            raise AdapterTooLarge(f"{name} needs {needed} bytes in {num_pages} pages of adapter memory, there are {there}")
        if num_rows > self.max_rows:
            raise AdapterTooLarge(f"{name} has {num_rows} rows, adapter memory has room for {self.max_rows}")
        if layout.num_whole_bytes > self.max_whole_bytes:
            raise AdapterTooLarge(
                f"{name} brings tensors whole (head, embedding, norms or linears) that take {layout.num_whole_bytes} bytes, there "
                f"are {self.max_whole_bytes} for those of all adapters; raise the engine's adapter_whole_bytes"
            )
        if not self.max_adapters:
            raise AdapterTooLarge(f"{name} needs adapter memory, there is room for 0 adapters")

    def how_many(self, extent: Extent) -> int:
        """How many adapters of this extent can have a place at once, nothing else having one."""
        needs = (
            (1, self.max_adapters),
            (extent.num_pages, self.num_pages),
            (extent.num_rows, self.max_rows),
            (extent.num_whole_bytes, self.max_whole_bytes),
        )
        return min(there // needed for needed, there in needs if needed)

    def most_needed(self, num_bytes: int, page_bytes: int, max_row_bytes: int) -> Extent:
        """What an adapter of so many bytes, of which none are wholes, takes at most in pages, and its pages' share of all row
        numbers, which is nearly always more than it has rows."""
        # A page is left when the next row does not fit, so any but the last is full but for one row; and any two that follow each
        # other hold more than a page, since else the second would not have been begun.
        least = max(page_bytes - max_row_bytes + ROW_ALIGNMENT, page_bytes // 2)
        num_pages = min(num_bytes // least + 1, self.num_pages)
        return Extent(num_pages, num_pages * (self.max_rows // self.num_pages) if self.num_pages else 0)

    def place(self, extent: Extent) -> Placement | None:
        """Take what the adapter needs, row numbers and bytes for wholes as one interval each (first fit); None, with nothing
        taken, if it lacks room."""
        if extent.num_pages > len(self._free_pages) or not self._free_indices or not self._wholes.has(extent.num_whole_bytes):
            return None
        first_row = self._rows.take(extent.num_rows)
        if first_row is None:
            return None
        whole_start = self._wholes.take(extent.num_whole_bytes)
        if whole_start is None:
            raise AssertionError(f"{extent.num_whole_bytes} bytes for wholes were free and are not")
        pages = tuple(self._free_pages.pop() for _ in range(extent.num_pages))
        return Placement(self._free_indices.pop(), first_row, extent.num_rows, pages, whole_start, extent.num_whole_bytes)

    def helps(self, placement: Placement, extent: Extent) -> bool:
        """Whether ``extent`` lacks something, to be placed, of which ``placement`` would give back some."""
        return bool(
            not self._free_indices
            or (extent.num_pages > len(self._free_pages) and placement.pages)
            or (placement.num_rows and not self._rows.has(extent.num_rows))
            or (placement.num_whole_bytes and not self._wholes.has(extent.num_whole_bytes))
        )

    def trim(self, placement: Placement, extent: Extent) -> Placement:
        """Give back what ``placement`` has beyond ``extent``; what is left of it."""
        kept = placement.trimmed(extent)
        self._free_pages.extend(reversed(placement.pages[extent.num_pages :]))
        self._rows.give(placement.first_row + kept.num_rows, placement.num_rows - kept.num_rows)
        self._wholes.give(placement.whole_start + kept.num_whole_bytes, placement.num_whole_bytes - kept.num_whole_bytes)
        return kept

    def free(self, placement: Placement) -> None:
        """Give back everything `place` took."""
        self._free_pages.extend(reversed(placement.pages))
        self._free_indices.append(placement.index)
        self._rows.give(placement.first_row, placement.num_rows)
        self._wholes.give(placement.whole_start, placement.num_whole_bytes)

    def discrepancies(self, live: Mapping[str, Placement]) -> list[str]:
        """What is wrong with the books, given the placement of every adapter by its key; empty when all is well.

        Each page, row number, byte for wholes and index must have exactly one owner: an adapter or the free ones.
        """
        pages = [(page, "the free ones") for page in self._free_pages]
        pages += [(page, f"adapter {key}") for key, p in live.items() for page in p.pages]
        indices = [(index, "the free ones") for index in self._free_indices]
        indices += [(p.index, f"adapter {key}") for key, p in live.items()]
        rows = [(p.first_row, p.num_rows, f"adapter {key}") for key, p in live.items()]
        wholes = [(p.whole_start, p.num_whole_bytes, f"adapter {key}") for key, p in live.items()]
        return [
            *_not_owned_once("page", self.num_pages, pages),
            *_not_owned_once("adapter index", self.max_adapters, indices),
            *self._rows.discrepancies("rows", rows),
            *self._wholes.discrepancies("bytes for wholes", wholes),
        ]


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
