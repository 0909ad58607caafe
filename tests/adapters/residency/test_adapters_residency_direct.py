"""From the local disk straight to the device: in one turn of the engine's thread, in few operations, and never unverified."""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork_adapters import packed
from graftwork_adapters.device_copy import HostCopier
from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.direct_copy import DirectCopy
from graftwork_adapters.fetcher import Fetcher, HostAdapter
from graftwork_adapters.host_cache import HostCopy
from graftwork_adapters.keys import packed_path
from graftwork_adapters.page_table import Extent, PageTable, Placement, plan_pages
from graftwork_adapters.residency import AdapterResidency

PAGE = 512
NUM_PAGES = 16


class Rig:
    """A residency that is run by hand over a disk that has every adapter of ``names`` already, and a store that counts."""

    def __init__(self, store, new_executor, packed_of, folder: Path, num_pages: int = NUM_PAGES, host_bytes: int = 1 << 20) -> None:
        self.store, self.cache = store, folder / "cache"
        self.adapters = {name: packed_of(name, num_bytes=2 * PAGE) for name in "abcd"}
        self.adapters["big"] = packed_of("big", num_bytes=8 * PAGE)
        first = Fetcher(store, self.cache, 1 << 30)
        for adapter in self.adapters.values():
            first.abandon(first.fetch(store.add(adapter, folder)))
        store.fetched.clear()
        self.changes: list[None] = []
        self.loads, self.fetches, self.copies = new_executor(), new_executor(), new_executor()
        self.pool = DevicePool(num_pages * PAGE, 4, 256, page_bytes=PAGE, max_rows=64 * num_pages)
        self.residency = AdapterResidency(
            Fetcher(store, self.cache, 1 << 30),
            self.pool,
            host_bytes,
            on_change=lambda: self.changes.append(None),
            load_executor=self.loads,
            store_executor=self.fetches,
            copy_executor=self.copies,
        )

    def key(self, name: str) -> str:
        return self.adapters[name].key

    def ask(self, name: str) -> None:
        """A request comes and would run at once."""
        self.residency.hold(self.key(name))
        assert self.residency.acquire(self.key(name)) is None

    def bring(self, name: str) -> int:
        """A request that runs."""
        self.ask(name)
        self.run()
        index = self.residency.acquire(self.key(name))
        assert index is not None
        self.residency.drop(self.key(name))
        return index

    def run(self) -> None:
        while lanes := [lane for lane in (self.loads, self.fetches, self.copies) if lane.jobs]:
            lanes[0].run()
            self.residency.poll()

    def is_sound(self) -> bool:
        entries = self.residency._entries.items()
        return not self.residency.discrepancies({k: e.holds for k, e in entries}, {k: e.references for k, e in entries})

    def spoil(self, name: str) -> None:
        """Flip the last byte of the cached file."""
        (file,) = self.cache.glob(f"{self.key(name)}-*")
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.fixture
def rig_of(memory_store, new_executor, packed_of, tmp_path) -> Callable[..., Rig]:
    return lambda **settings: Rig(memory_store, new_executor, packed_of, tmp_path, **settings)


def test_one_turn_of_the_engines_thread_brings_what_the_disk_has_to_the_device(rig_of, kernel_sees) -> None:
    rig = rig_of()
    rig.ask("a")
    (_,) = rig.loads.jobs
    assert rig.is_sound()
    rig.loads.run()
    (_,) = rig.copies.jobs
    assert (rig.changes, rig.residency.poll()) == ([], False)
    rig.copies.run()
    assert len(rig.changes) == 1
    assert rig.residency.poll()
    index = rig.residency.acquire(rig.key("a"))
    assert index is not None
    kernel_sees(rig.residency.memory, index, rig.adapters["a"])
    stats = rig.residency.stats()
    assert (stats["adapter_device_bytes"], stats["adapter_host_bytes"]) == (2 * PAGE, 2 * PAGE), "what it needs and no more"
    assert (stats["adapter_loads_total"], stats["adapter_copies_total"]) == (1, 1)
    assert rig.store.fetched == []
    assert rig.is_sound()


def test_rows_that_fail_their_check_are_never_used_though_their_copy_had_begun(rig_of, kernel_sees) -> None:
    rig = rig_of()
    rig.spoil("a")
    rig.ask("a")
    rig.loads.run()
    (_,) = rig.copies.jobs
    rig.copies.run()
    assert rig.residency.poll()
    assert rig.residency.acquire(rig.key("a")) is None
    assert rig.residency.stats()["adapter_device_bytes"] == rig.residency.stats()["adapter_host_bytes"] == 0
    assert rig.is_sound()
    rig.run()
    assert rig.store.fetched == [packed_path(rig.key("a"))]
    index = rig.residency.acquire(rig.key("a"))
    assert index is not None
    kernel_sees(rig.residency.memory, index, rig.adapters["a"])
    assert rig.is_sound()


def test_a_spoilt_file_that_nobody_wants_any_more_is_not_fetched_again(rig_of) -> None:
    rig = rig_of()
    rig.spoil("a")
    rig.ask("a")
    rig.residency.drop(rig.key("a"))
    rig.run()
    assert rig.store.fetched == []
    assert rig.residency._entries == {}
    assert rig.is_sound()


def test_a_copy_whose_asker_left_stays_evictable(rig_of) -> None:
    rig = rig_of(num_pages=6)
    rig.ask("a")
    rig.residency.drop(rig.key("a"))
    rig.run()
    assert rig.is_sound()
    for name in "bcd":
        rig.bring(name)
    assert rig.residency.stats()["adapter_device_evictions_total"] == 1
    assert rig.is_sound()


def test_without_room_it_is_read_and_waits_its_turn(rig_of) -> None:
    rig = rig_of(num_pages=3)
    rig.bring("a")
    rig.ask("b")
    rig.loads.run()
    assert rig.copies.jobs == []
    rig.residency.poll()
    assert rig.residency.needs_room(rig.key("b"))
    rig.residency.release(rig.key("a"))
    rig.run()
    assert rig.residency.acquire(rig.key("b")) is not None
    assert rig.is_sound()


def test_whoever_waits_for_room_comes_before_what_is_still_read(rig_of) -> None:
    rig = rig_of(num_pages=9)
    rig.bring("a")
    rig.ask("big")
    rig.run()
    assert rig.residency.needs_room(rig.key("big"))
    rig.ask("b")  # which would fit
    rig.run()
    assert rig.residency.acquire(rig.key("b")) is None
    rig.residency.release(rig.key("a"))
    rig.run()
    assert rig.residency.acquire(rig.key("big")) is not None
    assert rig.residency.acquire(rig.key("b")) is None
    assert rig.is_sound()


def test_the_place_goes_back_before_the_store_is_asked_again(rig_of) -> None:
    """A store may take its time, and others could use the room."""
    rig = rig_of(host_bytes=2 * PAGE)  # the file is larger, so that it is found first and then read
    rig.ask("a")
    rig.loads.run()
    rig.residency.poll()
    assert rig.residency.stats()["adapter_device_bytes"] == 2 * PAGE
    rig.spoil("a")
    rig.loads.run()
    rig.copies.run()
    rig.residency.poll()
    assert len(rig.fetches.jobs) == 1
    assert rig.residency.stats()["adapter_device_bytes"] == 0
    assert rig.is_sound()
    rig.run()
    assert rig.residency.acquire(rig.key("a")) is not None
    assert rig.is_sound()


def test_asking_once_it_is_read_copies_it_as_ever(rig_of) -> None:
    rig = rig_of()
    rig.residency.hold(rig.key("a"))
    rig.loads.run()
    assert rig.residency.acquire(rig.key("a")) is None  # the place comes too late for the load, which nobody has taken in yet
    assert rig.copies.jobs == []
    rig.residency.poll()
    assert rig.is_sound()
    rig.run()
    assert rig.residency.acquire(rig.key("a")) is not None
    assert rig.residency.stats()["adapter_copies_total"] == 1


def test_the_records_of_the_evicted_are_reset_before_another_may_have_their_index(rig_of, kernel_sees) -> None:
    rig = rig_of(num_pages=4)
    for name in "abcdabcd":
        index = rig.bring(name)
        kernel_sees(rig.residency.memory, index, rig.adapters[name])
        rig.residency.release(rig.key(name))
        assert rig.is_sound()
    assert rig.residency.stats()["adapter_device_evictions_total"] > 0


def test_a_file_larger_than_what_is_left_of_host_memory_takes_the_way_through_the_queue(rig_of) -> None:
    rig = rig_of(host_bytes=2 * PAGE)  # the rows fit, the file does not
    rig.bring("a")
    assert rig.store.fetched == []
    assert rig.is_sound()


def test_a_file_that_grew_after_room_was_made_for_it_gets_room_of_its_own_size(
    rig_of, kernel_sees, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_of()
    monkeypatch.setattr(Fetcher, "cached_bytes", lambda *_: PAGE)
    index = rig.bring("a")
    kernel_sees(rig.residency.memory, index, rig.adapters["a"])
    assert rig.residency.stats()["adapter_host_bytes"] == 2 * PAGE
    assert rig.store.fetched == []
    assert rig.is_sound()


class Lane:
    """An executor that keeps what it is given."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None]) -> str:
        self.jobs.append(job)
        return "copied"


def test_a_copy_starts_once_and_only_where_it_fits(packed_of) -> None:
    adapter = packed_of("a", num_bytes=2 * PAGE)
    copy = HostCopy(HostAdapter(adapter.index, adapter.rows), plan_pages(adapter.index.row_bytes, PAGE))
    place = Placement(3, 10, 40, (5, 1, 2))
    written: list[Placement] = []
    lane = Lane()
    for placement, is_copied in ((None, False), (Placement(3, 10, 40, (5,)), False), (place, True)):
        direct = DirectCopy(Extent(3, 40), lane, lambda at, _: written.append(at))
        direct.offer(copy)  # nobody has given it a place yet
        direct.placement = placement
        direct.offer(copy)
        direct.offer(copy)
        assert (direct.copied is not None) == is_copied
    (job,) = lane.jobs
    job()
    assert written == [Placement(3, 10, 16, (5, 1))]


@given(
    sizes=st.lists(st.integers(1, 16).map(lambda n: 64 * n), min_size=1, max_size=60),
    page=st.sampled_from([1024, 2048, 4096]),
    header=st.integers(0, 5000),
)
def test_no_adapter_takes_more_pages_than_its_size_says(sizes: list[int], page: int, header: int) -> None:
    needed = plan_pages(np.array(sizes, dtype=np.int64), page).extent.num_pages
    table = PageTable(num_pages=1000, max_rows=8000, max_adapters=1)
    guess = table.most_needed(sum(sizes) + header, page, 1024)
    assert needed <= guess.num_pages <= 2 * (sum(sizes) + header) // page + 1
    assert guess.num_rows == 8 * guess.num_pages


def test_a_place_that_is_trimmed_gives_back_the_rest() -> None:
    table = PageTable(num_pages=8, max_rows=64, max_adapters=2)
    whole = table.place(Extent(5, 40))
    assert whole is not None
    kept = table.trim(whole, Extent(2, 7))
    assert kept == Placement(whole.index, whole.first_row, 7, whole.pages[:2])
    assert table.discrepancies({"a": kept}) == []
    assert table.place(Extent(6, 57)) is not None
    with pytest.raises(AssertionError, match="does not fit"):
        table.trim(kept, Extent(3, 7))


def test_a_load_opens_its_file_once_and_reads_it_in_three_pieces(rig_of, monkeypatch) -> None:
    calls: list[str] = []

    class Counted(FileIO):
        def __init__(self, path: Path) -> None:
            calls.append("open")
            super().__init__(path)

        def read(self, size: int = -1) -> bytes | None:
            calls.append("read")
            return super().read(size)

        def readinto(self, buffer) -> int | None:
            calls.append("rows")
            return super().readinto(buffer)

    rig = rig_of()
    monkeypatch.setattr(packed, "FileIO", Counted)
    rig.bring("a")
    assert calls == ["open", "read", "read", "rows"]


class CountingCopier(HostCopier):
    """Notes the bytes of each copy."""

    def __init__(self) -> None:
        self.copied: list[int] = []

    def copy(self, destination, source) -> None:
        self.copied.append(source.nbytes)
        super().copy(destination, source)


@pytest.mark.parametrize("apart", [False, True], ids=["pages side by side", "pages apart"])
def test_the_number_of_copies_depends_on_pages_and_not_on_rows(packed_of, apart) -> None:
    many, few = packed_of("many", (64, 64, 64, 64), row_bytes=(64, 64)), packed_of("few", (8, 8, 8, 8), row_bytes=(512, 512))
    assert many.index.num_rows > 5 * few.index.num_rows
    for adapter in (many, few):
        copier = CountingCopier()
        pool = DevicePool(1 << 20, 4, 512, page_bytes=4096, new_copier=lambda _, copier=copier: copier)
        if apart:
            single = [pool.place(Extent(1, 0)) for _ in range(pool.table.num_pages)]
            for placement in single[::2]:
                pool.free(placement)
        layout = pool.plan(adapter.index)
        pool.write(pool.place(layout.extent), layout, HostAdapter(adapter.index, adapter.rows))
        *rows, offsets, sites = copier.copied
        assert len(rows) == (layout.extent.num_pages if apart else 1)
        assert sum(rows) == adapter.rows.nbytes
        assert (offsets, sites) == (8 * adapter.index.num_rows, 4 * 6 * 8)


def test_a_start_looks_into_none_of_the_files(memory_store, tmp_path, monkeypatch) -> None:
    """What the disk has is verified when it is used: a start costs a line of a folder's listing for each."""

    def refuse(*_: object) -> None:
        raise AssertionError("a file was opened")

    keys = [f"{n:064x}" for n in range(200)]
    (tmp_path / "cache").mkdir()
    for key in keys:
        (tmp_path / "cache" / f"{key}-{'0' * 32}.safetensors").write_bytes(b"not looked at")
    monkeypatch.setattr(packed, "FileIO", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    fetcher = Fetcher(memory_store, tmp_path / "cache", 1 << 30)
    assert {fetcher.cached_bytes(key) for key in keys} == {13}
    assert memory_store.fetched == []
