"""The front door, step by step: what starts when, who is evicted, how failures come and go.

This file is long because every rule of the gate is told with the same few builders and reads on from the one before.
"""

from __future__ import annotations

import inspect
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from graftwork_adapters.device_pool import NUM_SITE_FIELDS, ROW_TYPE_CODE, DevicePool
from graftwork_adapters.errors import StoreUnavailable
from graftwork_adapters.fetcher import Fetcher
from graftwork_adapters.folder_store import FolderStore
from graftwork_adapters.keys import packed_path
from graftwork_adapters.load_failure import LoadFailure
from graftwork_adapters.packed import ROW_ALIGNMENT, write_packed
from graftwork_adapters.residency import AdapterResidency
from graftwork_engine.errors import ErrorCode
from graftwork_engine.sched.plan import AdapterGate
from graftwork_kernels import layout

PAGE = 512


@dataclass
class Rig:
    """A residency whose background work runs only when a test says so."""

    residency: AdapterResidency
    loads: object
    copies: object
    store: object
    pool: DevicePool
    changes: list[None] = field(default_factory=list)

    def run(self) -> None:
        """Run all background work there is, and what follows from it."""
        while self.loads.jobs or self.copies.jobs:
            while self.loads.jobs:
                self.loads.run()
            while self.copies.jobs:
                self.copies.run()
            self.residency.poll()

    def bring(self, key: str) -> int:
        """Hold and acquire, then drop the hold: a running request."""
        self.residency.hold(key)
        index = self.residency.acquire(key)
        if index is None:
            self.run()
            index = self.residency.acquire(key)
        assert index is not None
        self.residency.drop(key)
        return index


def assert_sound(residency: AdapterResidency, holds: int, references: int) -> None:
    """So many holds and references in all, and no recount finds anything."""
    entries = residency._entries.items()
    counted = {key: e.holds for key, e in entries}, {key: e.references for key, e in entries}
    assert (sum(counted[0].values()), sum(counted[1].values())) == (holds, references)
    assert residency.discrepancies(*counted) == []


@pytest.fixture
def rig_of(memory_store, new_executor, tmp_path):
    def build(num_pages: int = 8, host_bytes: int = 1 << 20, **settings) -> Rig:
        pool = DevicePool(num_pages * PAGE, 4, 256, page_bytes=PAGE, max_rows=512, max_adapters=settings.pop("max_adapters", 8))
        loads, copies, changes = new_executor(), new_executor(), []
        residency = AdapterResidency(
            Fetcher(memory_store, Path(tempfile.mkdtemp(dir=tmp_path)), 1 << 30),
            pool,
            host_bytes,
            on_change=lambda: changes.append(None),
            load_executor=loads,
            store_executor=loads,
            copy_executor=copies,
            **settings,
        )
        return Rig(residency, loads, copies, memory_store, pool, changes)

    return build


@pytest.fixture
def add(memory_store, packed_of, tmp_path):
    """Put adapters of so many bytes into the store, by name; gives their keys."""
    return lambda names, num_bytes=PAGE: [memory_store.add(packed_of(name, num_bytes=num_bytes), tmp_path) for name in names]


def test_from_hold_to_index(rig_of, add):
    rig = rig_of()
    (key,) = add("a")
    rig.residency.hold(key)
    assert rig.residency.acquire(key) is None
    assert len(rig.loads.jobs) == 1
    assert rig.store.fetched == []
    assert not rig.residency.poll()
    rig.loads.run()  # to disk
    assert rig.residency.poll()
    rig.loads.run()  # to memory, and on without another turn of the engine's thread
    assert not rig.residency.poll()
    assert len(rig.copies.jobs) == 1
    rig.copies.run()
    assert rig.residency.acquire(key) is None
    assert rig.residency.poll()
    index = rig.residency.acquire(key)
    assert index is not None
    assert rig.residency.acquire(key) == index
    assert len(rig.changes) == 2
    assert_sound(rig.residency, 1, 2)


def test_a_held_adapter_is_fetched_but_not_copied_until_someone_asks(rig_of, add):
    rig = rig_of()
    (key,) = add("a")
    rig.residency.hold(key)
    rig.run()
    stats = rig.residency.stats()
    assert (stats["adapters_on_host"], stats["adapters_on_device"]) == (1, 0)
    assert rig.residency.acquire(key) is None
    rig.run()
    assert rig.residency.stats()["adapters_on_device"] == 1


def test_one_load_for_many_holders(rig_of, add):
    rig = rig_of()
    (key,) = add("a")
    for _ in range(5):
        rig.residency.hold(key)
        rig.residency.acquire(key)
    rig.run()
    assert rig.store.fetched == [packed_path(key)]
    assert rig.residency.stats()["adapter_copies_total"] == 1
    assert_sound(rig.residency, 5, 0)


def test_loads_start_in_the_order_of_arrival_and_several_at_once(rig_of, add):
    rig = rig_of()
    keys = add("abc")
    for key in keys:
        rig.residency.hold(key)
    assert len(rig.loads.jobs) == 3
    rig.run()
    assert rig.store.fetched == [packed_path(key) for key in keys]


def test_every_byte_on_the_device_is_the_adapters_own_through_eviction_and_reload(
    rig_of, memory_store, packed_of, kernel_sees, tmp_path
):
    rig = rig_of(num_pages=6)
    adapters = [
        packed_of(name, ranks) for name, ranks in (("x", (2, 0, 3, 1)), ("y", (0, 1)), ("z", (1, 1, 1, 1)), ("w", (0, 0, 2)))
    ]
    for packed in adapters:
        memory_store.add(packed, tmp_path)
    for turn in (0, 1, 2, 3, 0, 2, 1, 3, 3, 0):
        index = rig.bring(adapters[turn].key)
        kernel_sees(rig.residency.memory, index, adapters[turn])
        rig.residency.release(adapters[turn].key)
        assert_sound(rig.residency, 0, 0)
    assert rig.residency.stats()["adapter_device_evictions_total"] > 0


def copies_for(rig: Rig, *keys: str) -> float:
    """How many copies to the device using these adapters takes, one after the other."""
    before = rig.residency.stats()["adapter_copies_total"]
    for key in keys:
        rig.bring(key)
        rig.residency.release(key)
    return rig.residency.stats()["adapter_copies_total"] - before


def test_the_least_recently_used_unreferenced_adapter_goes(rig_of, add):
    rig = rig_of(num_pages=3)
    a, b, c, d = add("abcd")
    for key in (a, b, c):
        rig.bring(key)
    for key in (b, a):  # c stays referenced
        rig.residency.release(key)
    assert copies_for(rig, d) == 1  # in the place of b
    assert copies_for(rig, a, c, d) == 0
    assert copies_for(rig, b) == 1  # in the place of a
    assert copies_for(rig, c, d, b) == 0


def test_a_hold_counts_as_use(rig_of, add):
    rig = rig_of(num_pages=2)
    a, b, c = add("abc")
    assert copies_for(rig, a, b) == 2
    rig.residency.hold(a)
    rig.residency.drop(a)
    assert copies_for(rig, c) == 1
    assert copies_for(rig, a) == 0
    assert copies_for(rig, b) == 1


def test_site_records_of_the_evicted_are_reset(rig_of, add):
    rig = rig_of(num_pages=2)
    small = add("ab")
    (big,) = add("c", num_bytes=2 * PAGE)
    indices = [rig.bring(key) for key in small]
    for key in small:
        rig.residency.release(key)
    kept = rig.bring(big)
    for index in set(indices) - {kept}:
        assert rig.residency.memory.sites[index].tolist() == [[-1, -1, 0, -1, -1, -1]] * 4


def test_a_referenced_adapter_is_never_evicted_and_needs_room_says_so(rig_of, add):
    rig = rig_of(num_pages=1)
    a, b = add("ab")
    rig.bring(a)
    rig.residency.hold(b)
    assert rig.residency.acquire(b) is None
    assert not rig.residency.needs_room(b)  # still being fetched
    rig.run()
    assert rig.residency.acquire(b) is None
    assert rig.residency.needs_room(b)
    rig.residency.release(a)
    assert not rig.residency.needs_room(b)  # being copied
    rig.run()
    assert not rig.residency.needs_room(b)
    assert rig.residency.acquire(b) is not None


def test_a_reference_may_be_given_back_long_after_its_request_ended(rig_of, memory_store, packed_of, kernel_sees, add, tmp_path):
    """As by an engine that learns only some steps later that a step has ended: until then its adapter lies where it lay."""
    rig = rig_of(num_pages=6)
    packed = packed_of("late")
    late, (other,) = memory_store.add(packed, tmp_path), add("b", 6 * PAGE)
    index = rig.bring(late)
    rig.residency.hold(other)
    for _ in range(3):
        assert rig.residency.acquire(other) is None
        rig.run()
        assert rig.residency.needs_room(other)
        assert not rig.residency.poll()
        kernel_sees(rig.residency.memory, index, packed)
    rig.residency.hold(late)  # and a new request for it starts and ends meanwhile
    assert rig.residency.acquire(late) == index
    rig.residency.drop(late)
    rig.residency.release(late)
    rig.run()
    assert rig.residency.needs_room(other)
    kernel_sees(rig.residency.memory, index, packed)
    assert_sound(rig.residency, 1, 1)
    rig.residency.release(late)
    rig.run()
    assert rig.residency.acquire(other) is not None
    assert_sound(rig.residency, 1, 1)


def test_two_waiters_for_room_for_one_both_get_their_turn(rig_of, add):
    rig = rig_of(num_pages=1)
    waiting = add("ab")
    for key in waiting:
        rig.residency.hold(key)
    served = []
    for _ in range(6):
        for key in list(waiting):  # a scheduler's step: ask for everyone, run whoever can run for one step
            if rig.residency.acquire(key) is not None:
                waiting.remove(key)
                rig.residency.drop(key)
                served.append(key)
                rig.residency.release(key)
        rig.run()
    assert len(served) == 2
    assert rig.residency.stats()["adapter_copies_total"] == 2
    assert_sound(rig.residency, 0, 0)


def test_an_asker_that_drops_before_its_turn_makes_way(rig_of, add):
    rig = rig_of(num_pages=1)
    a, b = add("ab")
    for key in (a, b):
        rig.residency.hold(key)
        rig.residency.acquire(key)
    rig.run()
    assert rig.residency.stats()["adapters_on_device"] == 1
    assert not rig.residency.needs_room(b)  # a is there for a holder that has not come yet, no reference is in the way
    rig.residency.drop(a)
    rig.run()
    assert rig.residency.acquire(b) is not None


def test_a_copy_made_for_holders_that_left_is_not_kept_for_later_ones(rig_of, add):
    rig = rig_of(num_pages=1)
    a, b = add("ab")
    rig.residency.hold(a)
    rig.residency.acquire(a)
    rig.run()
    rig.residency.drop(a)
    rig.residency.hold(a)  # has not asked for the device
    assert_sound(rig.residency, 1, 0)
    assert rig.bring(b) is not None


def test_small_adapters_do_not_keep_a_large_one_out(rig_of, add):
    rig = rig_of(num_pages=2)
    small = add("abc")
    (large,) = add("d", num_bytes=2 * PAGE)
    rig.bring(small[0])
    rig.residency.hold(large)
    rig.residency.acquire(large)
    rig.run()
    for key in small[1:]:
        rig.residency.hold(key)
        rig.residency.acquire(key)
        rig.run()
        assert rig.residency.acquire(key) is None
    rig.residency.release(small[0])
    rig.run()
    assert rig.residency.acquire(large) is not None


def test_a_holder_of_a_resident_adapter_needs_no_host_copy(rig_of, add):
    rig = rig_of(host_bytes=PAGE)
    a, b = add("ab")
    rig.bring(a)
    rig.residency.hold(a)
    rig.residency.hold(b)
    rig.run()
    assert rig.residency.stats()["adapter_host_evictions_total"] == 1
    assert len(rig.store.fetched) == 2
    assert rig.residency.acquire(a) is not None


def test_a_held_adapter_that_is_evicted_is_loaded_again(rig_of, add):
    rig = rig_of(num_pages=1, host_bytes=PAGE)
    a, b = add("ab")
    rig.bring(a)
    rig.residency.release(a)
    rig.residency.hold(a)  # on the device, nothing to do
    assert rig.loads.jobs == []
    rig.bring(b)
    rig.residency.release(b)
    assert rig.residency.acquire(a) is None
    rig.run()
    assert rig.residency.acquire(a) is not None
    assert_sound(rig.residency, 1, 1)


def test_host_memory_full_of_held_adapters_queues_the_rest_in_order(rig_of, add):
    rig = rig_of(host_bytes=2 * PAGE)
    a, b, c, d = add("abcd")
    for key in (a, b, c, d):
        rig.residency.hold(key)
    rig.run()
    stats = rig.residency.stats()
    assert (stats["adapters_on_host"], stats["adapters_loading"], stats["adapter_host_bytes"]) == (2, 2, 2 * PAGE)
    assert len(rig.store.fetched) == 4  # those that wait are on the disk already
    rig.residency.drop(b)
    rig.run()
    assert rig.residency.stats()["adapters_loading"] == 1  # c came in, d waits still
    for key in (c, a):
        assert rig.residency.acquire(key) is None
        rig.run()
        assert rig.residency.acquire(key) is not None
    assert rig.residency.stats()["adapters_loading"] == 0  # c left the host for the device, d came in
    assert_sound(rig.residency, 3, 2)


def test_dropping_while_it_waits_for_memory_lets_the_next_in(rig_of, add):
    rig = rig_of(host_bytes=PAGE)
    a, b, c = add("abc")
    for key in (a, b, c):
        rig.residency.hold(key)
    rig.run()
    rig.residency.drop(b)
    rig.residency.drop(a)
    rig.run()
    rig.residency.acquire(c)
    rig.run()
    assert rig.residency.acquire(c) is not None
    assert_sound(rig.residency, 1, 1)


def test_what_was_fetched_and_not_read_can_leave_the_disk(memory_store, new_executor, add, tmp_path):
    a, b, c = add("abc")
    loads, pool = new_executor(), DevicePool(8 * PAGE, 4, 256, page_bytes=PAGE)
    executors = {"load_executor": loads, "store_executor": loads, "copy_executor": loads}
    residency = AdapterResidency(Fetcher(memory_store, tmp_path / "cache", 1), pool, PAGE, **executors)
    rig = Rig(residency, loads, loads, memory_store, pool)
    for key in (a, b, c):
        residency.hold(key)
    rig.run()
    assert residency.stats()["adapter_disk_bytes"] > 1  # b and c wait for memory, and are kept for it
    for key in (b, c):
        residency.drop(key)
    rig.run()
    assert residency.stats()["adapter_disk_bytes"] == 0


@pytest.mark.parametrize("stage", range(4))
def test_dropping_at_any_stage_leaves_nothing_behind(rig_of, add, stage):
    rig = rig_of()
    (key,) = add("a")
    rig.residency.hold(key)
    rig.residency.acquire(key)
    for _ in range(stage):
        (rig.loads if rig.loads.jobs else rig.copies).run()
        rig.residency.poll()
    rig.residency.drop(key)
    rig.run()
    assert_sound(rig.residency, 0, 0)
    stats = rig.residency.stats()
    assert stats["adapters_loading"] == 0
    assert stats["adapter_device_bytes"] == (PAGE if stage >= 1 else 0)
    rig.bring(key)
    assert len(rig.store.fetched) == 1


def break_store(rig: Rig, key: str, code: str) -> None:
    """Make loading ``key`` fail with ``code``."""
    blob = rig.store.blobs[packed_path(key)]
    if code == "adapter_missing":
        del rig.store.blobs[packed_path(key)]
    elif code == "adapter_corrupt":
        rig.store.blobs[packed_path(key)] = blob[:-1] + bytes([blob[-1] ^ 1])
    else:
        rig.store.error = StoreUnavailable("no answer") if code == "store_unavailable" else RuntimeError("a bug")


@pytest.mark.parametrize("code", ["adapter_missing", "adapter_corrupt", "store_unavailable", "internal_error"])
def test_a_failure_fails_its_holders_alone_and_is_forgotten_with_the_last(rig_of, add, code):
    rig = rig_of()
    bad, good = add(["bad", "good"])
    blob = rig.store.blobs[packed_path(bad)]
    break_store(rig, bad, code)
    for _ in range(2):
        rig.residency.hold(bad)
    assert rig.residency.acquire(bad) is None
    assert rig.residency.failure(bad) is None
    rig.run()
    rig.store.error = None
    assert rig.residency.acquire(bad) is None
    failure = rig.residency.failure(bad)
    assert failure is not None
    assert failure.code == code
    assert bad in failure.message or code == "store_unavailable"
    assert rig.bring(good) is not None
    rig.residency.drop(bad)
    assert rig.residency.failure(bad) == failure
    rig.residency.drop(bad)
    assert rig.residency.failure(bad) is None
    rig.store.blobs[packed_path(bad)] = blob
    assert rig.bring(bad) is not None
    assert rig.residency.stats()["adapter_load_failures_total"] == 1
    assert_sound(rig.residency, 0, 2)


def test_too_large_for_either_memory_names_both_numbers(rig_of, add):
    (key,) = add("a", num_bytes=4 * PAGE)
    for rig, numbers in ((rig_of(num_pages=2), ("2048", "1024")), (rig_of(host_bytes=1000), ("2048", "1000"))):
        rig.residency.hold(key)
        rig.residency.acquire(key)
        rig.run()
        failure = rig.residency.failure(key)
        assert failure is not None
        assert failure.code == "adapter_too_large"
        assert all(number in failure.message for number in numbers)
        assert rig.residency.stats()["adapter_host_bytes"] == 0
        rig.residency.drop(key)
        assert_sound(rig.residency, 0, 0)


def test_an_adapter_of_another_base_is_refused(rig_of, memory_store, packed_of, tmp_path):
    rig = rig_of(base_id="ba5e")
    foreign, own = packed_of("a", base_id="other"), packed_of("a")
    for packed in (foreign, own):
        memory_store.add(packed, tmp_path)
    rig.residency.hold(foreign.key)
    rig.run()
    failure = rig.residency.failure(foreign.key)
    assert failure is not None
    assert failure.code == "adapter_corrupt"
    assert rig.bring(own.key) is not None


def test_a_copy_that_fails_gives_its_pages_back(rig_of, add, monkeypatch):
    rig = rig_of(num_pages=1)
    a, b = add("ab")

    def broken(*_):
        raise RuntimeError("device lost")

    monkeypatch.setattr(rig.pool, "write", broken)
    rig.residency.hold(a)
    rig.residency.acquire(a)
    rig.run()
    failure = rig.residency.failure(a)
    assert failure is not None
    assert failure.code == "internal_error"
    assert_sound(rig.residency, 1, 0)
    rig.residency.drop(a)
    monkeypatch.undo()
    rig.bring(b)
    assert_sound(rig.residency, 0, 1)


def test_unbalanced_calls_are_bugs(rig_of, add):
    rig = rig_of()
    (key,) = add("a")
    for call in (rig.residency.drop, rig.residency.release, rig.residency.acquire):
        with pytest.raises(AssertionError, match=key):
            call(key)
    rig.bring(key)
    assert rig.residency.discrepancies({}, {}) == [f"adapter {key} has 1 device references, 0 were taken"]


def test_many_adapters_over_one_index_each(rig_of, add):
    rig = rig_of(num_pages=8, max_adapters=2)
    keys = add("abcde")
    for key in keys * 2:
        assert rig.bring(key) in (0, 1)
        rig.residency.release(key)
    assert rig.residency.stats()["adapters_on_device"] == 2


def test_stats_do_not_grow_with_adapters(rig_of, add):
    rig = rig_of()
    before = set(rig.residency.stats())
    for key in add("abcdef"):
        rig.bring(key)
    stats = rig.residency.stats()
    assert set(stats) == before
    assert stats["adapters_on_device"] == stats["adapter_device_references"] == 6
    assert stats["adapter_device_bytes"] == 6 * PAGE


def test_real_threads_real_files_and_a_restart(packed_of, kernel_sees, tmp_path):
    store = FolderStore(tmp_path / "store")
    adapters = [packed_of(f"adapter {n}", (n % 3, 1, 0, n % 4)) for n in range(16)]
    for packed in adapters:
        write_packed(tmp_path / "source", packed.index, packed.rows)
        store.put_if_absent(packed_path(packed.key), tmp_path / "source")
    for _ in range(2):
        woken = threading.Event()
        pool = DevicePool(16 * PAGE, 4, 256, page_bytes=PAGE, max_rows=512)
        residency = AdapterResidency(Fetcher(store, tmp_path / "cache", 20_000), pool, 8_000, on_change=woken.set)
        waiting = {packed.key: packed for packed in adapters}
        for key in waiting:
            residency.hold(key)
        deadline = time.monotonic() + 60
        while waiting:
            assert time.monotonic() < deadline
            woken.wait(0.1)
            woken.clear()
            residency.poll()
            for key, packed in list(waiting.items()):
                index = residency.acquire(key)
                assert residency.failure(key) is None
                if index is not None:
                    kernel_sees(residency.memory, index, packed)
                    residency.drop(key)
                    residency.release(key)
                    del waiting[key]
        assert_sound(residency, 0, 0)
        residency.close()
        residency.close()


def test_it_is_the_engines_gate():
    for name, wanted in inspect.getmembers(AdapterGate, inspect.isfunction):
        if not name.startswith("_"):
            offered = getattr(AdapterResidency, name)
            assert list(inspect.signature(offered).parameters) == list(inspect.signature(wanted).parameters), name
    codes = {"adapter_missing", "adapter_corrupt", "adapter_too_large", "store_unavailable", "internal_error"}
    assert codes <= {str(code) for code in ErrorCode}
    assert set(LoadFailure.__dataclass_fields__) == {"code", "message"}


def test_the_tables_are_the_kernels_adapter_memory(rig_of, memory_store, packed_of, tmp_path):
    assert layout.ROW_ALIGNMENT == ROW_ALIGNMENT
    assert layout.NUM_SITE_FIELDS == NUM_SITE_FIELDS
    assert list(ROW_TYPE_CODE.values()) == [layout.RowType.BF16, layout.RowType.FP32, layout.RowType.INT8, layout.RowType.E4M3]
    rig = rig_of()
    packed = packed_of("a")
    memory_store.add(packed, tmp_path)
    index = rig.bring(packed.key)
    memory = layout.AdapterMemory(*rig.residency.memory)
    empty = layout.empty_adapter_memory(4)
    for ours, theirs in ((memory.pool, empty.pool), (memory.row_offset, empty.row_offset), (memory.sites, empty.sites)):
        assert (ours.dtype, ours.dim()) == (theirs.dtype, theirs.dim())
    site = packed.index.sites[0]
    record = memory.sites[index, site.index]
    expected = packed.rows_of(site)
    for part, row in (("a", layout.SiteField.A_ROW), ("b", layout.SiteField.B_ROW), ("scale", layout.SiteField.SCALE_ROW)):
        offset = int(memory.row_offset[record[row]])
        assert bytes(memory.pool[offset : offset + len(expected[part][0])].tolist()) == expected[part][0]
    assert int(record[layout.SiteField.BIAS_ROW]) == int(record[layout.SiteField.SCALE_ROW]) + 1
    assert int(record[layout.SiteField.RANK]) == site.rank
    assert int(record[layout.SiteField.ROW_TYPE]) == layout.RowType.BF16
