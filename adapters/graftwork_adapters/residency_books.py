"""The books of a residency, to be read and recounted: what is kept beside the entries must follow from them. Changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.device_room import DeviceRoom
from graftwork_adapters.host_cache import HostCache
from graftwork_adapters.residency_entry import Entry, HostState


@dataclass(frozen=True, slots=True)
class ResidencyBooks:
    """A view of the state of `graftwork_adapters.residency.AdapterResidency`, whose thread alone may use it."""

    entries: Mapping[str, Entry]
    host: HostCache
    pool: DevicePool
    read_queue: Sequence[str]
    copy_queue: Collection[str]
    room: DeviceRoom

    def levels(self) -> dict[str, float]:
        """How much is where, by names for metrics."""
        entries = self.entries.values()
        return {
            "adapter_host_bytes": self.host.used_bytes,
            "adapter_host_capacity_bytes": self.host.capacity_bytes,
            "adapter_device_bytes": self.pool.used_bytes,
            "adapter_device_capacity_bytes": self.pool.capacity_bytes,
            "adapter_whole_bytes": self.pool.used_whole_bytes,
            "adapter_whole_capacity_bytes": self.pool.whole_capacity_bytes,
            "adapters_on_host": len(self.host),
            "adapters_on_device": sum(e.is_resident for e in entries),
            "adapters_loading": sum(e.host in (HostState.FETCHING, HostState.FETCHED, HostState.READING) for e in entries),
            "adapters_waiting_for_device": len(self.copy_queue),
            "adapter_holds": sum(e.holds for e in entries),
            "adapter_device_references": sum(e.references for e in entries),
        }

    def discrepancies(self, holds: Mapping[str, int], references: Mapping[str, int]) -> list[str]:
        """Recount host and device, given the holds and references by key of those who took them; empty when all is well."""
        entries = self.entries
        found = []
        for what, kept, due in (
            ("holds", {key: e.holds for key, e in entries.items() if e.holds}, holds),
            ("device references", {key: e.references for key, e in entries.items() if e.references}, references),
        ):
            found += [
                f"adapter {key} has {kept.get(key, 0)} {what}, {due.get(key, 0)} were taken"
                for key in sorted(kept.keys() | due.keys())
                if kept.get(key, 0) != due.get(key, 0)
            ]
        for what, kept_keys, due_keys in self._derived():
            found += [f"adapter {key} is {what} and should not be" for key in sorted(kept_keys - due_keys)]
            found += [f"adapter {key} should be {what} and is not" for key in sorted(due_keys - kept_keys)]
        found += self.host.discrepancies()
        placements = {key: e.placement for key, e in entries.items() if e.placement}
        found += self.pool.discrepancies(placements, [key for key in placements if entries[key].is_resident])
        idle = [placements[key] for key in self.room.idle if key in placements]
        for what, booked, counted in (
            ("evictable pages", self.room.idle_pages, sum(len(place.pages) for place in idle)),
            ("evictable bytes of wholes", self.room.idle_whole_bytes, sum(place.num_whole_bytes for place in idle)),
        ):
            if booked != counted:
                found.append(f"{what}: {booked} booked, {counted} counted")
        return found

    def _derived(self) -> Iterator[tuple[str, set[str], set[str]]]:
        """What is kept beside the entries to be found quickly: (what it says of an adapter, kept, recounted) keys."""
        entries = self.entries.values()
        claimed = {e.key for e in entries if e.host in (HostState.READING, HostState.PINNED)}
        yield "pinned on the host", self.host.pinned_keys(), claimed
        evictable = {e.key for e in entries if e.is_resident and not e.references and not e.is_protected}
        yield "evictable from the device", set(self.room.idle), evictable
        yield "protected on the device", self.room.protected, {e.key for e in entries if e.is_protected}
        fetched = {e.key for e in entries if e.host is HostState.FETCHED}
        yield "in the queue for host memory", set(self.read_queue), fetched
        wanted = {e.key for e in entries if e.wanted and e.host is HostState.PINNED and e.placement is None}
        yield "in the queue for the device", set(self.copy_queue), wanted
