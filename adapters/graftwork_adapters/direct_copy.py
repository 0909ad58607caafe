"""An adapter's way straight on to the device while its load is still running. Knows no queues and no holders."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial

from graftwork_adapters.host_cache import HostCopy
from graftwork_adapters.page_table import Extent, Placement


class DirectCopy:
    """Hands a place on the device from the engine's thread to the thread of a load, which starts the copy there.

    Without it a load would end, wait for the engine's thread to come by between two steps, and only then be copied: a step longer
    for whoever waits. Each attribute is written by one thread: ``placement`` by the engine's, ``copied`` by the load's until that
    has ended. ``extent`` is the room to give it, which may be more than it turns out to need.
    """

    def __init__(self, extent: Extent, executor: Executor, write: Callable[[Placement, HostCopy], None]) -> None:
        self.extent = extent
        self.placement: Placement | None = None
        self.copied: Future[None] | None = None
        self._executor = executor
        self._write = write

    def offer(self, copy: HostCopy) -> None:
        """Start the copy if there is a place for it and it has not been started: for the load's thread, as often as it likes."""
        placement = self.placement
        if placement is not None and self.copied is None and placement.holds(copy.layout.extent):
            self.copied = self._executor.submit(partial(self._write, placement.trimmed(copy.layout.extent), copy))
