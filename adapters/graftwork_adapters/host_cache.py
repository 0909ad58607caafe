"""Adapters in host memory within a byte budget. Bookkeeping for one thread: knows no device and starts no loads."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from graftwork_adapters.fetcher import HostAdapter
from graftwork_adapters.page_table import PageLayout


@dataclass(frozen=True, slots=True)
class HostCopy:
    """An adapter in host memory, and how its rows will be cut into device pages."""

    adapter: HostAdapter
    layout: PageLayout


class HostCache:
    """Host copies by key. Room is reserved before a copy is read; unpinned copies are evicted, least recently used first.

    A reservation is pinned from the start. Each key is pinned once or not at all: its owner counts the references behind the pin.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.num_evictions = 0
        self._num_bytes: dict[str, int] = {}
        self._copies: dict[str, HostCopy] = {}
        self._unpinned: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._unpinned_bytes = 0

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, key: str) -> bool:
        return key in self._copies

    def get(self, key: str) -> HostCopy:
        """The copy of a key that is here."""
        return self._copies[key]

    def reserve(self, key: str, num_bytes: int) -> bool:
        """Set ``num_bytes`` aside for ``key``, evicting what must go; false, evicting nothing, if pinned copies leave no room."""
        if self.used_bytes - self._unpinned_bytes + num_bytes > self.capacity_bytes:
            return False
        while self.used_bytes + num_bytes > self.capacity_bytes:
            victim, _ = self._unpinned.popitem(last=False)
            self._unpinned_bytes -= self._num_bytes[victim]
            self._forget(victim)
            self.num_evictions += 1
        self._num_bytes[key] = num_bytes
        self.used_bytes += num_bytes
        return True

    def fill(self, key: str, copy: HostCopy) -> None:
        """Put the copy into its reservation, which stays pinned; what it does not need of that is given back."""
        num_bytes = copy.adapter.rows.nbytes
        if num_bytes > self._num_bytes[key]:
            raise AssertionError(f"adapter {key} has {num_bytes} bytes, {self._num_bytes[key]} were reserved")
        self.used_bytes -= self._num_bytes[key] - num_bytes
        self._num_bytes[key] = num_bytes
        self._copies[key] = copy

    def cancel(self, key: str) -> None:
        """Give a reservation back that was not filled."""
        self._forget(key)

    def pin(self, key: str) -> None:
        """Keep the copy of ``key`` until `unpin`."""
        del self._unpinned[key]
        self._unpinned_bytes -= self._num_bytes[key]

    def unpin(self, key: str) -> None:
        """Let the copy of ``key`` be evicted; it is now the most recently used."""
        self._unpinned[key] = None
        self._unpinned_bytes += self._num_bytes[key]

    def discrepancies(self) -> list[str]:
        """Recount the bytes from the copies themselves; what is wrong with the books, empty when all is well."""
        found = []
        if self.used_bytes != (counted := sum(self._num_bytes.values())):
            found.append(f"host memory: {self.used_bytes} bytes booked, {counted} counted")
        if self.used_bytes > self.capacity_bytes:
            found.append(f"host memory: {self.used_bytes} bytes used of {self.capacity_bytes}")
        if self._unpinned_bytes != (counted := sum(self._num_bytes.get(key, 0) for key in self._unpinned)):
            found.append(f"host memory: {self._unpinned_bytes} unpinned bytes booked, {counted} counted")
        for key, copy in self._copies.items():
            if copy.adapter.rows.nbytes != (booked := self._num_bytes.get(key, 0)):
                found.append(f"host memory: {booked} bytes booked for adapter {key}, it has {copy.adapter.rows.nbytes}")
        found += [
            f"host memory: adapter {key} may be evicted and is not there" for key in self._unpinned.keys() - self._copies.keys()
        ]
        return found

    def pinned_keys(self) -> set[str]:
        """Keys that are pinned, filled or not."""
        return set(self._num_bytes) - set(self._unpinned)

    def _forget(self, key: str) -> None:
        self._copies.pop(key, None)
        self.used_bytes -= self._num_bytes.pop(key)
