"""The recount of adapter memory finds each way in which its books can be off, and nothing where there is nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.fetcher import Fetcher
from graftwork_adapters.residency import AdapterResidency

PAGE = 512


class Rig:
    """One adapter in each place: ``running`` on the device, ``idle`` there too, ``waiting`` on the host, ``coming`` on the disk."""

    def __init__(self, folder: Path, store, loads, packed_of) -> None:
        self.folder = folder
        sizes = {"running": 2 * PAGE, "idle": PAGE, "waiting": PAGE, "coming": 4 * PAGE}
        self.running, self.idle, self.waiting, self.coming = (
            store.add(packed_of(name, num_bytes=size), folder) for name, size in sizes.items()
        )
        self.pool = DevicePool(8 * PAGE, 4, 256, page_bytes=PAGE, max_rows=64, max_adapters=5)
        self.fetcher = Fetcher(store, folder / "cache", 1 << 20)
        executors = {"load_executor": loads, "store_executor": loads, "copy_executor": loads}
        self.residency = AdapterResidency(self.fetcher, self.pool, 4 * PAGE, **executors)
        for key in (self.running, self.idle, self.waiting, self.coming):
            self.residency.hold(key)
            while loads.jobs or (self.residency.acquire(key) if key in (self.running, self.idle) else 1) is None:
                while loads.jobs:
                    loads.run()
                self.residency.poll()
        for key in (self.running, self.idle):
            self.residency.drop(key)
        self.residency.release(self.idle)

    def discrepancies(self) -> list[str]:
        return self.residency.discrepancies({self.waiting: 1, self.coming: 1}, {self.running: 1})

    def entry(self, name: str):
        return self.residency._entries[getattr(self, name)]

    def file_of(self, name: str) -> Path:
        (path,) = (self.folder / "cache").glob(f"{getattr(self, name)}-*")
        return path


@pytest.fixture
def rig(tmp_path: Path, memory_store, new_executor, packed_of) -> Rig:
    return Rig(tmp_path, memory_store, new_executor(), packed_of)


def _set(target: str, value: object) -> Callable[[Rig], None]:
    """Overwrite an attribute named by a path from the rig; a function gets the old value."""

    def change(rig: Rig) -> None:
        owner: object = rig
        *path, last = target.split(".")
        for name in path:
            owner = owner.entry(name[1:]) if name.startswith("@") else getattr(owner, name)  # type: ignore[attr-defined]
        setattr(owner, last, value(getattr(owner, last)) if callable(value) else value)

    return change


def _plus_one(count: int) -> int:
    return count + 1


def _lead_astray(rig: Rig) -> None:
    place = rig.entry("running").placement
    rig.pool.tensors.row_offset[place.first_row] = rig.entry("idle").placement.pages[0] * PAGE


def _lead_a_site_astray(column: int) -> Callable[[Rig], None]:
    def change(rig: Rig) -> None:
        rig.pool.tensors.sites[rig.entry("running").placement.index, 0, column] = rig.entry("idle").placement.first_row

    return change


def _own_anothers_page(rig: Rig) -> None:
    rig.pool.table._free_pages.append(rig.entry("running").placement.pages[0])


CORRUPTIONS: list[tuple[str, Callable[[Rig], object], str]] = [
    ("a hold too many", _set("@waiting.holds", _plus_one), "adapter {waiting} has 2 holds, 1 were taken"),
    ("a lost hold", _set("@waiting.holds", 0), "adapter {waiting} has 0 holds, 1 were taken"),
    (
        "a device reference too many",
        _set("@running.references", _plus_one),
        "adapter {running} has 2 device references, 1 were taken",
    ),
    ("a stranger's reference", _set("@idle.references", 1), "adapter {idle} has 1 device references, 0 were taken"),
    ("an evictable adapter in use", _set("@idle.references", 1), "adapter {idle} is evictable from the device and should not be"),
    (
        "an idle adapter nobody evicts",
        lambda r: r.residency._room.idle.clear(),
        "adapter {idle} should be evictable from the device and is not",
    ),
    ("a count of evictable pages", _set("residency._room.idle_pages", _plus_one), "evictable pages: 2 booked, 1 counted"),
    (
        "protection left over",
        lambda r: r.residency._room.protected.add(r.idle),
        "adapter {idle} is protected on the device and should not be",
    ),
    (
        "a forgotten place in the line",
        lambda r: r.residency._read_queue.clear(),
        "adapter {coming} should be in the queue for host memory",
    ),
    (
        "a copy nobody wants",
        lambda r: r.residency._copy_queue.update({r.waiting: None}),
        "{waiting} is in the queue for the device and",
    ),
    (
        "a pin of the host cache lost",
        lambda r: r.residency._host.unpin(r.waiting),
        "adapter {waiting} should be pinned on the host and is not",
    ),
    ("a page given away", _own_anothers_page, "page 0 belongs to the free ones and to adapter {running}"),
    ("a page lost", lambda r: r.pool.table._free_pages.remove(7), "page 7 belongs to nobody"),
    ("an index lost", lambda r: r.pool.table._free_indices.remove(4), "adapter index 4 belongs to nobody"),
    ("rows lost", lambda r: r.pool.table._rows._starts.clear(), "rows end at 24, there are 64"),
    ("a row in another's page", _lead_astray, "rows of adapter {running} lie in pages [2], which are not its own"),
    *(
        (
            f"a site record in column {column}",
            _lead_a_site_astray(column),
            "site records of adapter {running} lead outside its own rows",
        )
        for column in (0, 1, 4, 5)
    ),
    ("host bytes", _set("residency._host.used_bytes", _plus_one), "host memory: 2049 bytes booked, 2048 counted"),
    ("unpinned host bytes", _set("residency._host._unpinned_bytes", _plus_one), "unpinned bytes booked, 1536 counted"),
    ("host memory over its bound", _set("residency._host.capacity_bytes", 1), "host memory: 2048 bytes used of 1"),
    (
        "a copy of another size",
        lambda r: r.residency._host._num_bytes.update({r.waiting: 9}),
        "host memory: 9 bytes booked for adapter {waiting}, it has 512",
    ),
    ("a copy that vanished", lambda r: r.residency._host._copies.pop(r.idle), "adapter {idle} may be evicted and is not there"),
    ("a pin of the disk cache left over", lambda r: r.fetcher._disk.pin(r.idle), "disk cache: 1 pins of {idle}, 0 loads in flight"),
    (
        "a pin of the disk cache lost",
        lambda r: r.fetcher._disk.unpin(r.coming),
        "disk cache: 0 pins of {coming}, 1 loads in flight",
    ),
    ("disk bytes", _set("fetcher._disk._num_bytes", lambda count: count - 1), "disk cache: "),
    ("a disk cache over its bound", _set("fetcher._disk._max_bytes", 1), "of them could be deleted"),
    ("a file that vanished", lambda r: r.file_of("idle").unlink(), "the file of {idle} was booked with "),
    ("a file that was cut", lambda r: r.file_of("idle").write_bytes(b"half"), " bytes and has 4"),
    (
        "a file in nobody's books",
        lambda r: (r.folder / "cache" / f"{'f' * 64}-{'0' * 32}.safetensors").write_bytes(b""),
        f"disk cache: {'f' * 64}-{'0' * 32}.safetensors is in nobody's books",
    ),
    (
        "a download left over",
        lambda r: (r.folder / "cache" / "incoming" / "crashed").mkdir(),
        "fetches: crashed was left half written",
    ),
    (
        "no folder any more",
        lambda r: (r.folder / "cache").rename(r.folder / "gone"),
        "disk cache: the folder cannot be read: No such",
    ),
]


@pytest.mark.parametrize(("corrupt", "finding"), [pytest.param(*rest, id=name) for name, *rest in CORRUPTIONS])
def test_each_way_to_be_off_is_found_and_named(rig: Rig, corrupt: Callable[[Rig], object], finding: str) -> None:
    assert rig.discrepancies() == []
    corrupt(rig)
    wanted = finding.format(**{name: getattr(rig, name) for name in ("running", "idle", "waiting", "coming")})
    assert any(wanted in found for found in rig.discrepancies()), rig.discrepancies()


def test_a_load_in_flight_is_no_finding(rig: Rig, memory_store, packed_of, tmp_path: Path) -> None:
    """Its file may be on the way into the cache or out of it; it is counted once it has come to rest."""
    late = memory_store.add(packed_of("late"), tmp_path)
    rig.residency.hold(late)
    rig.fetcher._disk.pin(late)
    (rig.folder / "cache" / f"{late}-{'0' * 32}.safetensors").write_bytes(b"")
    assert rig.residency.discrepancies({rig.waiting: 1, rig.coming: 1, late: 1}, {rig.running: 1}) == []
