"""The device memory of adapters: one buffer cut into pages, the tables by which kernels find rows, and beside them the memory for
what adapters bring whole. Knows no references.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graftwork_adapters.device_copy import Copier, copier_for
from graftwork_adapters.errors import AdapterTooLarge, BlobCorrupt
from graftwork_adapters.fetcher import HostAdapter
from graftwork_adapters.keys import RowTypeName
from graftwork_adapters.packed import ABSENT, ROW_ALIGNMENT, PackedIndex
from graftwork_adapters.page_table import (
    Extent,
    PageLayout,
    PageTable,
    Placement,
    page_copies,
    page_size,
    plan_pages,
    row_numbers,
)
from graftwork_adapters.tensor_values import row_size
from graftwork_adapters.whole_memory import DeviceWholes, WholeLimits, WholeMemory

NUM_SITE_FIELDS = 6
"""Columns of a site record: first A row, first B row, rank, row type, scale row, bias row."""

ROW_TYPE_CODE: dict[RowTypeName, int] = {"bfloat16": 0, "float32": 1, "int8": 2, "e4m3": 3}
"""The row type column; the kernels' own `RowType` (a test holds the two together)."""

_NO_SITE = (ABSENT, ABSENT, 0, ABSENT, ABSENT, ABSENT)


class PoolTensors(NamedTuple):
    """What kernels read; the tensors stay where they are for the life of the pool.

    ``pool`` uint8 [pages * page_bytes]; ``row_offset`` int64 [max_rows], byte offsets into ``pool``; ``sites`` int64
    [max_adapters, num_sites, `NUM_SITE_FIELDS`], where an absent site has rank 0 and -1 elsewhere.
    """

    pool: Tensor
    row_offset: Tensor
    sites: Tensor


class DevicePool:
    """Pages for adapters' rows, and the tables that point into them.

    ``widths`` are each site's input and output features, which an adapter's rows must have room for (None: not compared).
    ``max_rank`` is the largest that the kernels which read the pool have room for (None: any).
    ``max_row_bytes`` is the longest row the base can have; a page is at least that. Row numbers and adapter indices are bounded
    too: by default one row number per 128 bytes, and one index per page up to 1024. ``wholes`` is what adapters may bring whole, by
    default nothing. ``new_copier`` makes the way to ``device``. `place` and `free` keep the books and belong
    to one thread; `clear` and `write` move bytes and belong to one other thread. A page may be written again as soon as it is
    freed, so an adapter is freed only when no kernel that reads it is still running.
    """

    def __init__(
        self,
        pool_bytes: int,
        num_sites: int,
        max_row_bytes: int,
        *,
        page_bytes: int = 64 * 1024,
        max_rows: int | None = None,
        max_adapters: int | None = None,
        widths: Sequence[tuple[int, int]] | None = None,
        max_rank: int | None = None,
        wholes: WholeLimits | None = None,
        device: torch.device | str = "cpu",
        new_copier: Callable[[torch.device], Copier] = copier_for,
    ) -> None:
        self.page_bytes = page_size(page_bytes, max_row_bytes)
        num_pages = pool_bytes // self.page_bytes
        device = torch.device(device)
        self._wholes = WholeMemory(wholes or WholeLimits(), device)
        self.table = PageTable(
            num_pages,
            row_numbers(pool_bytes) if max_rows is None else max_rows,
            min(num_pages, 1024) if max_adapters is None else max_adapters,
            self._wholes.capacity_bytes,
        )
        self._num_sites = num_sites
        self._max_row_bytes = max_row_bytes
        self._widths = None if widths is None else np.array(widths, dtype=np.int64)
        self._max_rank = max_rank
        self._no_sites = np.tile(np.array(_NO_SITE, dtype=np.int64), (num_sites, 1))
        self.tensors = PoolTensors(
            pool=torch.zeros(num_pages * self.page_bytes, dtype=torch.uint8, device=device),
            row_offset=torch.zeros(self.table.max_rows, dtype=torch.int64, device=device),
            sites=torch.tensor(_NO_SITE, dtype=torch.int64, device=device).repeat(self.table.max_adapters, num_sites, 1),
        )
        self._copier = new_copier(device)  # last: what it copies comes after the zeros

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all pages."""
        return self.table.num_pages * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that adapters have."""
        return (self.table.num_pages - self.table.num_free_pages) * self.page_bytes

    @property
    def whole_capacity_bytes(self) -> int:
        """Bytes for what adapters bring whole."""
        return self.table.max_whole_bytes

    @property
    def used_whole_bytes(self) -> int:
        """Bytes of those that adapters have."""
        return self.table.max_whole_bytes - self.table.num_free_whole_bytes

    @property
    def wholes(self) -> Mapping[int, DeviceWholes]:
        """By index what adapters on the device bring whole, those alone that bring something; always the same mapping."""
        return self._wholes.by_index

    def plan(self, index: PackedIndex) -> PageLayout:
        """Cut an adapter's rows into pages. Any thread may call it.

        Raises `AdapterTooLarge` if it can never fit or a rank is above the largest, `BlobCorrupt` if its index would lead a kernel
        outside its own rows, or names a whole that does not fit the base.
        """
        _check_index(index, self._num_sites)
        if self._widths is not None:
            _check_widths(index, self._widths)
        if self._max_rank is not None:
            _check_rank(index, self._max_rank)
        layout = replace(plan_pages(index.row_bytes, self.page_bytes), num_whole_bytes=self._wholes.num_bytes(index))
        self.table.check_fits(f"adapter {index.key}", layout, self.page_bytes)
        return layout

    def how_many(self, row_bytes: npt.NDArray[np.int64]) -> int:
        """How many adapters with rows of so many bytes each, int64 [rows], can be here at once when there is nothing else."""
        return self.table.how_many(plan_pages(row_bytes, self.page_bytes).extent)

    def most_needed(self, num_bytes: int) -> Extent:
        """The room for an adapter of which no more is known than its size, and that it brings nothing whole."""
        return self.table.most_needed(num_bytes, self.page_bytes, self._max_row_bytes)

    def place(self, extent: Extent) -> Placement | None:
        """Take pages, row numbers, an index and bytes for wholes for an adapter; None if they are not free now."""
        return self.table.place(extent)

    def trim(self, placement: Placement, extent: Extent) -> Placement:
        """Give back what an adapter turned out not to need; the rest of its place."""
        return self.table.trim(placement, extent)

    def free(self, placement: Placement) -> None:
        """Give them back. The index's site records are reset by the next `clear` or `write`."""
        self._wholes.forget(placement.index)
        self.table.free(placement)

    def clear(self, indices: Sequence[int]) -> None:
        """Reset the site records of freed indices."""
        for index in indices:
            self._copier.copy(self.tensors.sites[index], self._no_sites)
        self._copier.finish()

    def write(self, placement: Placement, layout: PageLayout, adapter: HostAdapter) -> None:
        """Copy an adapter's rows into its pages, write the tables that lead to them, and copy what it brings whole; everything is
        there when it returns. Raises `BlobCorrupt` for values that would lead the model outside its own.

        One copy for each run of pages that lie side by side, and one for each table, however many rows and sites there are.
        """
        self._wholes.write(placement, adapter, self._copier)
        pages = np.array(placement.pages, dtype=np.int64)
        offsets = pages[layout.row_page] * self.page_bytes + layout.row_start
        first, end = placement.first_row, placement.first_row + placement.num_rows
        for run in page_copies(placement, layout, self.page_bytes):
            rows = adapter.rows[run.from_byte : run.from_byte + run.num_bytes]
            self._copier.copy(self.tensors.pool[run.to_byte : run.to_byte + run.num_bytes], rows)
        self._copier.copy(self.tensors.row_offset[first:end], offsets)
        self._copier.copy(self.tensors.sites[placement.index], self._site_records(adapter.index, first))
        self._copier.finish()

    def discrepancies(self, live: Mapping[str, Placement], complete: Collection[str]) -> list[str]:
        """Recount pages, row numbers and indices, given every adapter's placement by key; empty when all is well.

        Of the ``complete`` ones, whose copy has ended, it also follows the tables as a kernel does: rows lie in their own pages
        and site records lead to their own rows.
        """
        found = self.table.discrepancies(live) + self._wholes.discrepancies({key: live[key] for key in complete})
        for key in complete:
            place = live[key]
            end = place.first_row + place.num_rows
            pages = torch.unique(self.tensors.row_offset[place.first_row : end] // self.page_bytes).tolist()
            if strange := sorted(set(pages) - set(place.pages)):
                found.append(f"rows of adapter {key} lie in pages {strange}, which are not its own")
            records = self.tensors.sites[place.index]
            for first, count in ((0, 2), (1, 2), (4, None), (5, None)):
                rows = records[:, first]
                lengths = records[:, count] if count is not None else torch.ones_like(rows)
                used = (rows != ABSENT) & (lengths > 0)
                if bool((used & ((rows < place.first_row) | (rows + lengths > end))).any()):
                    found.append(f"site records of adapter {key} lead outside its own rows")
                    break
        return found

    def _site_records(self, index: PackedIndex, first_row: int) -> npt.NDArray[np.int64]:
        records = self._no_sites.copy()
        number, rank, *rows = index.site_table.T
        a, b, scale, bias = (np.where(row == ABSENT, ABSENT, first_row + row) for row in rows)
        records[number] = np.stack([a, b, rank, np.full_like(rank, ROW_TYPE_CODE[index.row_type]), scale, bias], axis=1)
        return records


def _check_index(index: PackedIndex, num_sites: int) -> None:
    # The rows have a checksum, the index only a key: a wrong one must not send a kernel into another adapter's rows.
    for count, size in set(index.row_runs):
        if count < 1 or size < ROW_ALIGNMENT or size % ROW_ALIGNMENT:
            raise BlobCorrupt(f"packed adapter {index.key} has rows of {size} bytes, {count} times")
    number, rank, a, b, scale, bias = index.site_table.T
    if len(np.unique(number)) != len(number):
        raise BlobCorrupt(f"packed adapter {index.key} lists a site twice")
    inside = (number >= 0) & (number < num_sites) & (rank >= 0)
    for rows, length, used in ((scale, 1, scale != ABSENT), (bias, 1, bias != ABSENT), (a, rank, rank != 0), (b, rank, rank != 0)):
        # Compared with what is left, since a sum of two such numbers might wrap.
        inside &= ~used | ((rows >= 0) & (length <= index.num_rows) & (rows <= index.num_rows - length))
    if not inside.all():
        site = number[~inside][0]
        raise BlobCorrupt(f"packed adapter {index.key}: site {site} of {num_sites} points outside its {index.num_rows} rows")


def _check_widths(index: PackedIndex, widths: npt.NDArray[np.int64]) -> None:
    # A kernel reads as many elements of a row as the projection has: of a shorter row, on into whoever's row lies behind it.
    number, rank, a, b, scale, bias = index.site_table.T
    num_in, num_out = widths[number].T
    for first, count, num_elements, row_type in (
        (a, rank, num_in, index.row_type),
        (b, rank, num_out, index.row_type),
        (scale, (scale != ABSENT).astype(np.int64), num_out, "float32"),
        (bias, (bias != ABSENT).astype(np.int64), num_out, "float32"),
    ):
        site = np.repeat(np.arange(len(number)), count)
        place = np.arange(len(site)) - (count.cumsum() - count)[site]
        distinct, which = np.unique(num_elements, return_inverse=True)  # a handful, of hundreds of sites
        needed = np.array([row_size(row_type, elements) for elements in distinct.tolist()], dtype=np.int64)[which]
        if short := np.flatnonzero(index.row_bytes[first[site] + place] < needed[site]).tolist():
            raise BlobCorrupt(f"packed adapter {index.key}: a row of site {number[site[short[0]]]} is shorter than its projection")


def _check_rank(index: PackedIndex, max_rank: int) -> None:
    # A kernel has nobody to tell: what one rank too many adds would be written past the room for all of them.
    rank = int(index.site_table[:, 1].max(initial=0))
    if rank > max_rank:
        raise AdapterTooLarge(
            f"adapter {index.key} has rank {rank}, served are ranks up to {max_rank}; train it with a lower one, or raise the "
            "engine's max_adapter_rank (graftwork serve --max-lora-rank)"
        )
