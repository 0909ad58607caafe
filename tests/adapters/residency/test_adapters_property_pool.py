"""Device memory under random use: rows never overlap, pages in use are never given away, and dirty pages never show.

Freed pages keep the bytes of whoever had them, and here they are filled with NaN besides: a row that an adapter lacks, or one byte
of a row that was not written, would be somebody's.
"""

from __future__ import annotations

from typing import ClassVar

import small_base as small
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from property_budget import budget

from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.errors import AdapterTooLarge
from graftwork_adapters.fetcher import HostAdapter
from graftwork_adapters.page_table import Placement

NUM_SITES, NAN = 4, 0xFF  # bytes of all ones are NaN in every row type but int8, where they are a scale of NaN
SHAPES = [(r0, r1, r2, r3) for r0 in (0, 1, 3) for r1 in (0, 2) for r2 in (0, 5) for r3 in (0, 1, 4)] + [(0, 0, 0, 64)]


class PoolMachine(RuleBasedStateMachine):
    """Adapters of any ranks come and go; some are in use and may not be touched."""

    adapters: ClassVar[list] = []  # these two come from fixtures
    kernel_sees = model_sees = staticmethod(lambda *_: None)

    @initialize(
        num_pages=st.integers(1, 9),
        page=st.sampled_from([256, 512, 1024]),
        rows=st.integers(4, 60),
        max_adapters=st.integers(1, 5),
        whole_bytes=st.integers(0, 1300),
    )
    def build(self, num_pages: int, page: int, rows: int, max_adapters: int, whole_bytes: int) -> None:
        limits = {"max_rows": rows, "max_adapters": max_adapters, "wholes": small.limits(whole_bytes)}
        self.pool = DevicePool(num_pages * page, NUM_SITES, 256, page_bytes=page, **limits)
        self.pool.tensors.pool.fill_(NAN)
        self.pool._wholes._memory.fill_(NAN)
        self.live: dict[int, tuple[Placement, object]] = {}
        self.num_placed = 0
        self.stale: list[int] = []
        self.before = self.pool.tensors.pool.clone()

    @rule(which=st.integers(0, 999))
    def place_and_write(self, which: int) -> None:
        packed = self.adapters[which % len(self.adapters)]
        try:
            layout = self.pool.plan(packed.index)
        except AdapterTooLarge:
            return
        free, free_whole = self.pool.table.num_free_pages, self.pool.table.num_free_whole_bytes
        placement = self.pool.place(layout.extent)
        if placement is None:
            assert self.live, "one that fits an empty pool was refused by an empty pool"
            assert (self.pool.table.num_free_pages, self.pool.table.num_free_whole_bytes) == (free, free_whole)
            return
        assert free_whole - self.pool.table.num_free_whole_bytes == layout.num_whole_bytes
        assert free - self.pool.table.num_free_pages == layout.extent.num_pages
        taken = {page for other, _ in self.live.values() for page in other.pages}
        assert not taken & set(placement.pages)
        self.pool.clear(self.stale)
        self.stale = []
        self.pool.write(placement, layout, HostAdapter(packed.index, packed.rows))
        outside = torch.ones(self.pool.table.num_pages, dtype=torch.bool)
        outside[list(placement.pages)] = False
        pages = self.pool.tensors.pool.view(-1, self.pool.page_bytes)
        assert torch.equal(pages[outside], self.before.view(-1, self.pool.page_bytes)[outside]), "another's page was written"
        self.live[self.num_placed] = placement, packed
        self.num_placed += 1
        self.before = self.pool.tensors.pool.clone()

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 9), dirty=st.booleans())
    def evict(self, place: int, dirty: bool) -> None:
        placement, _ = self.live.pop(sorted(self.live)[place % len(self.live)])
        self.pool.free(placement)
        self.stale.append(placement.index)
        if not dirty:  # otherwise its rows stay, as they do in the product
            self.pool.tensors.pool.view(-1, self.pool.page_bytes)[list(placement.pages)] = NAN
            self.before = self.pool.tensors.pool.clone()

    @invariant()
    def every_kernel_sees_its_own_rows(self) -> None:
        if not hasattr(self, "pool"):
            return
        live = {str(number): placement for number, (placement, _) in self.live.items()}
        assert self.pool.discrepancies(live, live.keys()) == []
        assert self.pool.used_bytes <= self.pool.capacity_bytes
        assert len({placement.index for placement in live.values()}) == len(live)
        for placement, packed in self.live.values():
            self.kernel_sees(self.pool.tensors, placement.index, packed)
            self.model_sees(self.pool.wholes, placement.index, packed)
        assert self.pool.used_whole_bytes <= self.pool.whole_capacity_bytes
        assert self.pool.wholes.keys() <= {placement.index for placement in live.values()}

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for placement, _ in self.live.values():
                self.pool.free(placement)
            assert self.pool.table.discrepancies({}) == []
            assert self.pool.used_bytes == self.pool.used_whole_bytes == len(self.pool.wholes) == 0


def test_any_order_of_loads_and_evictions(packed_of, kernel_sees, model_sees) -> None:
    """Fault kind of sglang#8103 and sglang#7426: an adapter in reused memory mixed with the one before it."""

    class Bound(PoolMachine):
        pass

    types = ("bfloat16", "float32", "int8", "e4m3")
    wholes = ((), small.NORM, (), small.HEAD, small.TOKENS, (), small.WIDE, small.NARROW_NORM + small.HEAD)
    Bound.adapters = [
        packed_of(f"adapter {n}", ranks, row_type=types[n % 4], wholes=wholes[n % 8]) for n, ranks in enumerate(SHAPES)
    ]
    Bound.adapters.append(packed_of("no rows", (0, 0, 0, 0), wholes=small.LINEAR + small.TOKENS))
    Bound.kernel_sees, Bound.model_sees = staticmethod(kernel_sees), staticmethod(model_sees)
    run_state_machine_as_test(Bound, settings=budget(50, steps=30))


def test_a_small_adapter_in_the_place_of_a_large_one_computes_as_on_a_fresh_device(packed_of) -> None:
    """Fault kind of sglang#8103: one place, first with all sites and a high rank, then with two sites and a low one."""
    large, small = packed_of("large", (6, 5, 4, 3)), packed_of("small", (0, 2, 0, 1))
    fresh, used = (DevicePool(16 * 512, NUM_SITES, 256, page_bytes=512, max_rows=64, max_adapters=1) for _ in range(2))
    used.tensors.pool.fill_(NAN)
    for packed in (large, small):
        layout = used.plan(packed.index)
        placement = used.place(layout.extent)
        used.write(placement, layout, HostAdapter(packed.index, packed.rows))
        used.free(placement)
    layout = fresh.plan(small.index)
    fresh.write(fresh.place(layout.extent), layout, HostAdapter(small.index, small.rows))
    assert torch.equal(fresh.tensors.sites, used.tensors.sites)
    for number, (a, b, rank, *_) in enumerate(fresh.tensors.sites[0].tolist()):
        assert rank == (0, 2, 0, 1)[number]
        for row in [*range(a, a + rank), *range(b, b + rank)]:
            start, dirty_start = (int(pool.tensors.row_offset[row]) for pool in (fresh, used))
            assert torch.equal(fresh.tensors.pool[start : start + 128], used.tensors.pool[dirty_start : dirty_start + 128])
