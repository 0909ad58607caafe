"""What is known of one adapter on its way to the host and the device. State alone: moves nothing and starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from graftwork_adapters.direct_copy import DirectCopy
from graftwork_adapters.load_failure import LoadFailure
from graftwork_adapters.packed import PackedIndex
from graftwork_adapters.page_table import PageLayout, Placement


class HostState(Enum):
    """How far an adapter's way to host memory has come."""

    UNCLAIMED = auto()  # not on its way, and what the host cache may have of it can be evicted
    FETCHING = auto()  # to the local disk
    FETCHED = auto()  # its size is known; it waits for host memory
    READING = auto()  # into memory that is reserved for it
    PINNED = auto()  # in memory, for its holders or for the copy to the device


@dataclass(slots=True, eq=False)
class Entry:
    """One adapter that is held, referenced, on the device or on its way."""

    key: str
    holds: int = 0
    references: int = 0
    host: HostState = HostState.UNCLAIMED
    arrival: int = 0
    fetched: tuple[PackedIndex, PageLayout] | None = None  # while it waits for host memory
    wanted: bool = False  # a holder has asked for it on the device
    direct: DirectCopy | None = None  # while it is read, if that may go on to the device
    placement: Placement | None = None
    copying: bool = False  # into `placement`, now or as soon as it is read
    fresh: bool = False  # copied because a holder asked, and not acquired since
    failure: LoadFailure | None = None
    is_failure_told: bool = False  # somebody has asked for it

    @property
    def is_resident(self) -> bool:
        """True if its copy on the device is complete."""
        return self.placement is not None and not self.copying

    @property
    def is_protected(self) -> bool:
        """True while it may not be evicted though nothing references it: else two waiters could evict each other for ever."""
        return self.placement is not None and (self.copying or (self.fresh and self.holds > 0))

    def forget_failure(self) -> None:
        """Let it be loaded again."""
        self.failure = None
        self.is_failure_told = False

    def require_placement(self) -> Placement:
        """Its place on the device, where there must be one."""
        if self.placement is None:
            raise AssertionError(f"adapter {self.key} has no place on the device")
        return self.placement

    def take_fetched(self) -> tuple[PackedIndex, PageLayout]:
        """What was fetched, for whoever reads or abandons it now."""
        fetched, self.fetched = self.fetched, None
        if fetched is None:
            raise AssertionError(f"adapter {self.key} has not been fetched")
        return fetched
