"""Device memory: page bookkeeping as a property, bytes as a kernel sees them, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork_adapters.base_spec import BaseSpec, Site
from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.errors import AdapterTooLarge, BlobCorrupt
from graftwork_adapters.fetcher import HostAdapter
from graftwork_adapters.pack import longest_row_bytes
from graftwork_adapters.page_table import PageTable, Placement, page_copies, plan_pages

row_sizes = st.lists(st.integers(1, 8).map(lambda n: n * 64), max_size=60)


@settings(max_examples=50, deadline=None)
@given(row_sizes)
def test_a_plan_keeps_every_row_in_one_page_and_overlaps_none(sizes):
    layout = plan_pages(np.array(sizes, dtype=np.int64), 512)
    starts = np.cumsum([0, *sizes])
    assert layout.extent.num_rows == len(sizes)
    for row, size in enumerate(sizes):
        page, start = int(layout.row_page[row]), int(layout.row_start[row])
        run_start, run_length = layout.page_runs[page]
        assert run_start + start == starts[row]
        assert start + size <= run_length <= 512
    covered = [byte for start, length in layout.page_runs for byte in range(start, start + length)]
    assert covered == list(range(sum(sizes)))


@settings(max_examples=50, deadline=None)
@given(row_sizes)
def test_a_plan_starts_a_page_only_when_the_next_row_does_not_fit(sizes):
    layout = plan_pages(np.array(sizes, dtype=np.int64), 512)
    for page in range(1, layout.extent.num_pages):
        first_row = int(np.argmax(layout.row_page == page))
        assert layout.page_runs[page - 1][1] + sizes[first_row] > 512


def test_a_row_longer_than_a_page_is_refused():
    with pytest.raises(AdapterTooLarge, match=r"576.*512"):
        plan_pages(np.array([64, 576], dtype=np.int64), 512)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_placements_never_overlap_and_everything_comes_back(data):
    table = PageTable(num_pages=12, max_rows=64, max_adapters=5)
    live = []
    for _ in range(data.draw(st.integers(1, 40))):
        if live and data.draw(st.booleans()):
            table.free(live.pop(data.draw(st.integers(0, len(live) - 1))))
        else:
            layout = plan_pages(np.full(data.draw(st.integers(0, 30)), 128, dtype=np.int64), 512)
            placement = table.place(layout.extent)
            if placement is not None:
                assert len(placement.pages) == layout.extent.num_pages
                live.append(placement)
            else:
                taken = {row for p in live for row in range(p.first_row, p.first_row + p.num_rows)}
                rows = "".join("x" if row in taken else "." for row in range(64))
                no_interval = "." * layout.extent.num_rows not in rows
                assert sum(len(p.pages) for p in live) + layout.extent.num_pages > 12 or len(live) == 5 or no_interval
        assert table.discrepancies({str(n): p for n, p in enumerate(live)}) == []
    for placement in live:
        table.free(placement)
    assert table.discrepancies({}) == []
    assert table.place(plan_pages(np.full(48, 128, dtype=np.int64), 512).extent) is not None


def test_integrity_names_what_is_off():
    table = PageTable(num_pages=4, max_rows=16, max_adapters=2)
    placement = table.place(plan_pages(np.full(4, 128, dtype=np.int64), 512).extent)
    assert table.discrepancies({"a": placement}) == []
    assert table.discrepancies({}) == [
        "page 0 belongs to nobody",
        "adapter index 0 belongs to nobody",
        "rows 0 to 4 belong to nobody",
    ]
    for change, found in (
        ({"index": 1}, ["adapter index 0 belongs to nobody", "adapter index 1 belongs to the free ones and to adapter a"]),
        ({"index": 2}, ["adapter index 2 of adapter a does not exist", "adapter index 0 belongs to nobody"]),
        ({"first_row": 1}, ["rows 0 to 1 belong to nobody", "rows 4 to 5 belong to adapter a and to the free ones"]),
        ({"num_rows": 3}, ["rows 3 to 4 belong to nobody"]),
        ({"pages": (2,)}, ["page 0 belongs to nobody", "page 2 belongs to the free ones and to adapter a"]),
    ):
        assert table.discrepancies({"a": replace(placement, **change)}) == found
    table._rows._lengths[-1] -= 1
    assert table.discrepancies({"a": placement}) == ["rows end at 15, there are 16"]


@settings(max_examples=100, deadline=None)
@given(row_sizes, st.permutations(range(60)), st.booleans())
def test_copies_bring_every_byte_of_a_page_to_its_place_and_are_as_few_as_can_be(sizes, pages, ascending):
    layout = plan_pages(np.array(sizes, dtype=np.int64), 512)
    own = sorted(pages[: layout.extent.num_pages]) if ascending else pages[: layout.extent.num_pages]
    copies = page_copies(Placement(0, 0, len(sizes), tuple(own)), layout, 512)
    moved = {c.to_byte + n: c.from_byte + n for c in copies for n in range(c.num_bytes)}
    runs = list(zip(own, layout.page_runs, strict=True))
    assert moved == {page * 512 + n: start + n for page, (start, length) in runs for n in range(length)}
    assert sum(c.num_bytes for c in copies) == len(moved)
    assert all(after.to_byte != c.to_byte + c.num_bytes for c, after in itertools.pairwise(copies))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(1, 30), st.integers(0, 20), st.integers(0, 80), st.integers(0, 5))
def test_as_many_adapters_of_one_kind_fit_as_is_said(size, num_rows, num_pages, max_rows, max_adapters):
    layout = plan_pages(np.full(num_rows, 64 * size, dtype=np.int64), 512)
    table = PageTable(num_pages, max_rows, max_adapters)
    said = table.how_many(layout.extent)
    assert [table.place(layout.extent) is not None for _ in range(said + 1)] == [True] * said + [False]


def pool_of(num_pages: int, **settings) -> DevicePool:
    return DevicePool(num_pages * 512, 4, 256, page_bytes=512, **({"max_rows": 64} | settings))


def load(pool: DevicePool, packed):
    layout = pool.plan(packed.index)
    placement = pool.place(layout.extent)
    assert placement is not None
    pool.write(placement, layout, HostAdapter(packed.index, packed.rows))
    return placement


def test_page_size_is_at_least_the_longest_row_and_a_multiple_of_64():
    assert DevicePool(1 << 20, 1, 100).page_bytes == 64 * 1024
    assert DevicePool(1 << 20, 1, 100, page_bytes=65).page_bytes == 128
    assert DevicePool(1 << 20, 1, 100_001).page_bytes == 100_032
    assert DevicePool(100, 1, 100).capacity_bytes == 0


def test_the_longest_row_of_a_base_is_one_of_fp32_whatever_the_type_of_an_adapter():
    for features, expected in (((200, 300), 1216), ((4000, 300), 16000)):
        sites = (Site(0, 0, "a", "m.a", *features, False), Site(1, 0, "b", "m.b", 100, 50, False))
        assert longest_row_bytes(BaseSpec("id", "name", "arch", 1, sites, frozenset())) == expected


@pytest.mark.parametrize("row_type", ["bfloat16", "float32", "int8", "e4m3"])
def test_a_kernel_sees_exactly_the_packed_rows(packed_of, kernel_sees, row_type):
    pool = pool_of(12)
    for name, ranks in (("one", (2, 0, 3, 1)), ("two", (0, 1, 0, 0))):
        packed = packed_of(name, ranks, row_type=row_type)
        kernel_sees(pool.tensors, load(pool, packed).index, packed)


def test_pages_need_not_be_adjacent(packed_of, kernel_sees):
    pool = pool_of(6)
    small = [packed_of(name, (0, 1), row_bytes=(64, 64)) for name in "abcdef"]
    placements = [load(pool, packed) for packed in small]
    for place in (0, 2, 4):
        pool.free(placements[place])
    big = packed_of("big", (0, 4), row_bytes=(128, 128))
    placement = load(pool, big)
    assert len(placement.pages) == 2
    assert abs(placement.pages[0] - placement.pages[1]) != 1
    kernel_sees(pool.tensors, placement.index, big)
    for place in (1, 3, 5):
        kernel_sees(pool.tensors, placements[place].index, small[place])


def test_nothing_of_an_evicted_adapter_leaks_into_the_next(packed_of, kernel_sees):
    pool = pool_of(6, max_adapters=1)
    pool.tensors.pool.fill_(0xAB)
    wide = packed_of("wide", (3, 3, 3, 3), row_bytes=(64, 64))
    first = load(pool, wide)
    kernel_sees(pool.tensors, first.index, wide)
    pool.free(first)
    narrow = packed_of("narrow", (0, 1, 0, 0))
    second = load(pool, narrow)
    assert second.index == first.index
    assert set(second.pages) <= set(first.pages)
    kernel_sees(pool.tensors, second.index, narrow)


def test_freed_records_are_reset_and_tables_stay_where_they_are(packed_of):
    pool = pool_of(12)
    pointers = [tensor.data_ptr() for tensor in pool.tensors]
    empty = pool.tensors.sites.clone()
    placement = load(pool, packed_of("one"))
    assert not torch.equal(pool.tensors.sites, empty)
    pool.free(placement)
    pool.clear([placement.index])
    assert torch.equal(pool.tensors.sites, empty)
    assert pool.used_bytes == 0
    assert [tensor.data_ptr() for tensor in pool.tensors] == pointers


def test_what_can_never_fit_is_refused_with_both_numbers(packed_of):
    with pytest.raises(AdapterTooLarge, match=r"needs 2560 bytes.*there are 1024"):
        pool_of(2).plan(packed_of("one").index)
    with pytest.raises(AdapterTooLarge, match=r"14 rows.*room for 13"):
        pool_of(12, max_rows=13).plan(packed_of("one").index)
    with pytest.raises(AdapterTooLarge, match="0 adapters"):
        pool_of(12, max_adapters=0).plan(packed_of("one").index)
    with pytest.raises(AdapterTooLarge, match=r"640.*512"):
        pool_of(12).plan(packed_of("long", (1,), row_bytes=(640, 64)).index)


def test_a_rank_above_the_largest_is_refused_with_both_numbers(packed_of):
    """At any site, the last one too; an adapter without any rank has none above it."""
    index = packed_of("one", (2, 0, 1, 3)).index
    with pytest.raises(
        AdapterTooLarge, match=r"rank 3, served are ranks up to 2; train it with a lower one, or raise.*max_adapter_rank"
    ):
        pool_of(12, max_rank=2).plan(index)
    assert pool_of(12, max_rank=3).plan(index)
    assert pool_of(12, max_rank=1).plan(packed_of("none", (0,)).index)


@pytest.mark.parametrize(
    "change",
    [
        {"index": 4},
        {"index": -1},
        {"rank": -1},
        {"rank": 13},
        {"a_row": -1},
        {"a_row": 13},
        {"b_row": 99},
        {"scale_row": 14},
        {"bias_row": -2},
    ],
)
def test_an_index_that_points_outside_its_rows_is_corrupt(packed_of, change):
    index = packed_of("one").index
    broken = replace(index, sites=(replace(index.sites[0], **change), *index.sites[1:]))
    with pytest.raises(BlobCorrupt):
        pool_of(12).plan(broken)


@pytest.mark.parametrize("part", ["a_row", "b_row", "scale_row", "bias_row"])
def test_a_row_shorter_than_its_projection_is_corrupt(packed_of, part):
    """A kernel would read on, into the row of another adapter."""
    index = packed_of("one").index
    fitting = [
        (int(index.row_bytes[site.a_row]) // 4 if site.rank else 1, int(index.row_bytes[site.b_row]) // 4 if site.rank else 1)
        for site in (next((s for s in index.sites if s.index == number), index.sites[0]) for number in range(4))
    ]
    index = replace(index, row_type="float32", sites=tuple(replace(s, scale_row=-1, bias_row=-1) for s in index.sites))
    assert pool_of(12, widths=fitting).plan(index)
    site = next(s for s in index.sites if s.rank)
    wide = [(num_in + 64 * (part == "a_row"), num_out + 64 * (part != "a_row")) for num_in, num_out in fitting]
    if part in ("scale_row", "bias_row"):
        index = replace(index, sites=(replace(site, rank=0, **{part: site.b_row}),))
    with pytest.raises(BlobCorrupt, match="shorter than its projection"):
        pool_of(12, widths=wide).plan(index)


@pytest.mark.parametrize("run", [(1, 0), (1, 65), (1, -64), (0, 64), (-1, 64)])
def test_rows_of_impossible_sizes_are_corrupt(packed_of, run):
    index = packed_of("one").index
    with pytest.raises(BlobCorrupt):
        pool_of(12).plan(replace(index, row_runs=(*index.row_runs, run)))


def test_a_site_listed_twice_is_corrupt(packed_of):
    index = packed_of("one").index
    with pytest.raises(BlobCorrupt, match="twice"):
        pool_of(12).plan(replace(index, sites=(*index.sites, index.sites[0])))


def test_an_adapter_without_rows_takes_an_index_and_no_page(packed_of, kernel_sees):
    pool = pool_of(2)
    nothing = packed_of("nothing", (0, 0, 0, 0))
    placement = load(pool, nothing)
    assert placement.pages == ()
    kernel_sees(pool.tensors, placement.index, nothing)
    pool.free(placement)
    assert pool.table.discrepancies({}) == []
