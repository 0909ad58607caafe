"""A waiting line that is fair between flows, by counting the tokens each was served. Refuses to know what a token costs.

After the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Two rules:

    pick    the next item is the oldest one of the flow whose counter is smallest
    lift    a flow that begins to wait is lifted to the smallest counter of those already waiting

so a flow that is always busy gets its share to within one item's tokens, and a flow that was away has saved up nothing.

Items that cannot be served at the moment for a reason of their own (their adapter is still on its way) are *parked*: they do not
stand in the line, others pass, and when they return their flow is lifted like one that was away.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What can stand in the line. ``order`` is unique and tells who came first."""

    @property
    def flow(self) -> str: ...

    @property
    def order(self) -> int: ...


Item = TypeVar("Item", bound=Queued)

_MAX_IDLE_COUNTERS = 4096
"""Counters of flows that do not wait are kept up to this number; then those that lag behind, which a lift would undo, go."""


class FairQueue(Generic[Item]):
    """Every item is in the line, parked, or outside. All operations but `unpark` cost O(log flows) and a short memmove."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._items: dict[int, Item] = {}  # in the line, by order
        self._orders: dict[str, list[int]] = {}  # of each flow in the line, ascending
        self._heap: list[tuple[float, int, str]] = []  # (counter, order of the oldest item, flow)
        self._newest_entry: dict[str, tuple[float, int, str]] = {}  # older ones of the same flow in the heap are void
        self._parked: dict[int, Item] = {}
        self._last_popped = ""  # flow
        self._level = 0.0  # the largest counter that a flow had when it was picked

    def __len__(self) -> int:
        return len(self._items) + len(self._parked)

    def __iter__(self) -> Iterator[Item]:
        """All items, in order of arrival."""
        both = self._items | self._parked
        return (both[order] for order in sorted(both))

    def counter(self, flow: str) -> float:
        """Tokens the flow was served, lifts included."""
        return self._counters.get(flow, 0.0)

    def push(self, item: Item) -> None:
        """Join the line, at the place in its flow that the item's order gives it.

        With nobody in the line the flow is lifted to the one picked last, which may still be at work.
        """
        entry = self._first()
        self._join(item, entry[0] if entry else max(self._level, self.counter(self._last_popped)))

    def pop(self) -> Item | None:
        """Take out whoever is next; None if nobody stands in the line."""
        entry = self._first()
        if entry is None:
            return None
        counter, order, self._last_popped = entry
        self._level = max(self._level, counter)
        item = self._items[order]
        self._leave(item)
        return item

    def put_back(self, item: Item) -> None:
        """Undo a `pop`: back to the same place, without a lift."""
        self._join(item, 0.0)

    def park(self, item: Item) -> None:
        """Set a popped item aside until the next `unpark`."""
        self._parked[item.order] = item

    def unpark(self) -> None:
        """Let all parked items join the line again. Their flows are lifted to those that stood there, not to each other."""
        parked, self._parked = self._parked, {}
        entry = self._first()
        level = entry[0] if entry else 0.0
        for item in parked.values():
            self._join(item, level)

    def remove(self, item: Item) -> None:
        """Take an item out, in the line or parked; it must be one of the two."""
        if self._parked.pop(item.order, None) is None:
            self._leave(item)

    def charge(self, flow: str, tokens: float) -> None:
        """Count tokens served to a flow, whether it waits for more or not."""
        self._counters[flow] = self._counters.get(flow, 0.0) + tokens

    def _join(self, item: Item, level: float) -> None:
        orders = self._orders.get(item.flow)
        if orders is None:
            orders = self._orders[item.flow] = []
            self._counters[item.flow] = max(self._counters.get(item.flow, 0.0), level)
            self._drop_idle_counters()
        insort(orders, item.order)
        self._items[item.order] = item
        if orders[0] == item.order:
            self._enter(item.flow)

    def _leave(self, item: Item) -> None:
        del self._items[item.order]
        orders = self._orders[item.flow]
        del orders[bisect_left(orders, item.order)]
        if not orders:
            del self._orders[item.flow]
            del self._newest_entry[item.flow]

    def _enter(self, flow: str) -> None:
        entry = (self._counters[flow], self._orders[flow][0], flow)
        self._newest_entry[flow] = entry
        heapq.heappush(self._heap, entry)

    def _first(self) -> tuple[float, int, str] | None:
        """The heap's first entry that tells the truth. Counters only grow, so an outdated entry surfaces before its time."""
        while self._heap:
            entry = self._heap[0]
            flow = entry[2]
            if self._newest_entry.get(flow) != entry:
                heapq.heappop(self._heap)
            elif entry[:2] != (self._counters[flow], self._orders[flow][0]):
                heapq.heappop(self._heap)
                self._enter(flow)
            else:
                return entry
        return None

    def _drop_idle_counters(self) -> None:
        if len(self._counters) - len(self._orders) > _MAX_IDLE_COUNTERS:
            self._counters = {f: c for f, c in self._counters.items() if c > self._level or f in self._orders}
