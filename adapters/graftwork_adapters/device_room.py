"""Which adapters on the device may be evicted, and in what order. Keeps books for one thread and moves no bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.page_table import Extent, Placement
from graftwork_adapters.residency_entry import Entry


class DeviceRoom:
    """Places in a device pool, and the adapters that must give theirs up when others need room: least recently used first."""

    def __init__(self, pool: DevicePool) -> None:
        self.idle: OrderedDict[str, Placement] = OrderedDict()  # what may be evicted, least recently used first
        self.idle_pages = 0
        self.idle_whole_bytes = 0
        self.protected: set[str] = set()
        self._pool = pool
        self._stale_indices: list[int] = []  # freed since the last copy; their site records are reset by the next

    def touch(self, key: str) -> None:
        """Count as a use of the adapter, if it may be evicted."""
        if key in self.idle:
            self.idle.move_to_end(key)

    def settle(self, entry: Entry) -> None:
        """Bring what is derived from an entry up to date after a change."""
        self._set_idle(entry, entry.is_resident and not entry.references and not entry.is_protected)
        if entry.is_protected:
            self.protected.add(entry.key)
        else:
            self.protected.discard(entry.key)

    def make(self, extent: Extent, evict: Callable[[str], None], *, is_early: bool = False) -> Placement | None:
        """Room for an adapter, others evicted as needed; None, with nothing evicted, if too few pages or too few bytes for wholes
        could be made free.

        Evicted are, least recently used first, those alone that have some of what is missing. ``is_early``: nobody is evicted once
        there are pages and bytes enough, for the sake of row numbers that may not be needed.
        """
        table = self._pool.table
        if table.num_free_pages + self.idle_pages < extent.num_pages:
            return None
        if table.num_free_whole_bytes + self.idle_whole_bytes < extent.num_whole_bytes:
            return None
        placement = self._pool.place(extent)
        while placement is None and not (is_early and self._has_bytes(extent)):
            victim = next((key for key, place in self.idle.items() if table.helps(place, extent)), None)
            if victim is None:
                break
            evict(victim)
            placement = self._pool.place(extent)
        return placement

    def give_back(self, entry: Entry) -> None:
        """Take the adapter's place from it. Nothing reads or writes there any more."""
        placement = entry.require_placement()
        self._pool.free(placement)
        self._stale_indices.append(placement.index)
        self._set_idle(entry, False)
        entry.placement = None
        entry.fresh = False

    def take_stale(self) -> list[int]:
        """The indices whose site records are to be reset, for the copy that does so."""
        stale, self._stale_indices = self._stale_indices, []
        return stale

    def _has_bytes(self, extent: Extent) -> bool:
        table = self._pool.table
        return table.num_free_pages >= extent.num_pages and table.num_free_whole_bytes >= extent.num_whole_bytes

    def _set_idle(self, entry: Entry, idle: bool) -> None:
        if idle != (entry.key in self.idle):
            placement, sign = entry.require_placement(), 1 if idle else -1
            self.idle_pages += sign * len(placement.pages)
            self.idle_whole_bytes += sign * placement.num_whole_bytes
            if idle:
                self.idle[entry.key] = placement
            else:
                del self.idle[entry.key]
