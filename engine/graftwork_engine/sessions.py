"""Which API processes an engine serves, whose each request is, and what is kept of those whose client died. Knows no sockets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from graftwork_engine.messages import Orphan, OutItem

MAX_KEPT_ORPHANS = 100_000
"""Orphans that nobody claims are forgotten from the oldest on, so that a lost journal cannot fill memory."""


@dataclass(slots=True)
class Session:
    """One API process. ``identity`` is its socket's routing id."""

    client_id: str
    identity: bytes
    last_heard: float
    process_handle: int | None
    request_ids: set[str] = field(default_factory=set)


class SessionTable:
    """Sessions by client, requests by owner, and the orphans of clients that died."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, Session] = {}
        self._owner: dict[str, Session] = {}
        self._output_count: dict[str, int] = {}
        self._dying: set[str] = set()
        self._orphans: dict[str, int] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_identity.values()))

    def find(self, identity: bytes) -> Session | None:
        """The session of a socket, if it has said Hello."""
        return self._by_identity.get(identity)

    def open(self, session: Session) -> None:
        """Take in a new session. The caller has closed an older one of the same identity."""
        if session.identity in self._by_identity:
            raise AssertionError("a session of this identity is open")
        self._by_identity[session.identity] = session

    def close(self, session: Session) -> list[str]:
        """End a session whose client died; returns the requests it leaves, which the caller aborts.

        They become claimable with their final counts as `deliver` sees their last items.
        """
        del self._by_identity[session.identity]
        left = sorted(session.request_ids)
        self._dying.update(left)
        for request_id in left:
            del self._owner[request_id]
        session.request_ids.clear()
        return left

    def own(self, session: Session, request_id: str, output_count: int) -> bool:
        """Note a new request with the output tokens it came with; False if its id is already running here."""
        if request_id in self._owner:
            return False
        self._owner[request_id] = session
        self._output_count[request_id] = output_count
        session.request_ids.add(request_id)
        return True

    def is_dying(self, request_id: str) -> bool:
        """True while a request of this id, left by a client that died, has not yet stopped."""
        return request_id in self._dying

    def owned_by(self, session: Session, request_id: str) -> bool:
        """True if this session may act on the request."""
        return self._owner.get(request_id) is session

    def forget(self, request_id: str) -> None:
        """A request ended on its client's own wish: nothing more is sent or kept."""
        session = self._owner.pop(request_id, None)
        if session is not None:
            session.request_ids.discard(request_id)
        self._output_count.pop(request_id, None)

    def owners(self, request_ids: Iterable[str]) -> dict[bytes, list[str]]:
        """Request ids grouped by the socket they belong to."""
        grouped: dict[bytes, list[str]] = {}
        for request_id in request_ids:
            session = self._owner.get(request_id)
            if session is not None:
                grouped.setdefault(session.identity, []).append(request_id)
        return grouped

    def deliver(self, items: Iterable[OutItem]) -> dict[bytes, list[OutItem]]:
        """Count a step's items, settle the requests that ended, and group the rest by the socket they go to."""
        grouped: dict[bytes, list[OutItem]] = {}
        for item in items:
            request_id = item.request_id
            if request_id in self._output_count:
                self._output_count[request_id] = item.first_output_index + len(item.token_ids)
            session = self._owner.get(request_id)
            if session is not None:
                grouped.setdefault(session.identity, []).append(item)
            if item.finish is not None:
                self._settle(request_id)
        return grouped

    def claim(self) -> list[Orphan]:
        """Hand over the final counts of orphaned requests, each once."""
        claimed = [Orphan(request_id, count) for request_id, count in self._orphans.items()]
        self._orphans.clear()
        return claimed

    def _settle(self, request_id: str) -> None:
        count = self._output_count.pop(request_id, 0)
        session = self._owner.pop(request_id, None)
        if session is not None:
            session.request_ids.discard(request_id)
        if request_id in self._dying:
            self._dying.discard(request_id)
            self._orphans[request_id] = count
            while len(self._orphans) > MAX_KEPT_ORPHANS:
                del self._orphans[next(iter(self._orphans))]
