"""Which API processes an engine serves, whose each request is, and what is kept of those whose client died. Knows no sockets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from graftwork_engine.messages import Orphan, OutItem

MAX_KEPT_ORPHANS = 100_000
"""Orphans that nobody settles are forgotten from the oldest on, so that a lost journal cannot fill memory."""

MAX_KEPT_ENDED = 10_000
"""Requests of a living client that have ended: should it die before it wrote their counts down, they are its orphans too."""


@dataclass(slots=True)
class Session:
    """One API process. ``identity`` is its socket's routing id."""

    client_id: str
    identity: bytes
    last_heard: float
    process_handle: int | None
    request_ids: set[str] = field(default_factory=set)
    ended: dict[str, int] = field(default_factory=dict)  # final counts, the newest last


class SessionTable:
    """Sessions by client, requests by owner, and the orphans of clients that died."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, Session] = {}
        self._owner: dict[str, Session] = {}
        self._output_count: dict[str, int] = {}
        self._dying: set[str] = set()
        self._forgotten: dict[str, Session] = {}  # until their last item has passed
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

        They become claimable with their final counts as `deliver` sees their last items; those that had ended are at once.
        """
        del self._by_identity[session.identity]
        for request_id, count in session.ended.items():
            self._keep(request_id, count)
        session.ended.clear()
        left = sorted(session.request_ids)
        self._dying.update(left)
        for request_id in left:
            del self._owner[request_id]
        session.request_ids.clear()
        return left

    def own(self, session: Session, request_id: str, output_count: int) -> bool:
        """Note a new request with the output tokens it came with; False if its id is already running here.

        A request that is added again is nobody's orphan.
        """
        if request_id in self._owner:
            return False
        self._orphans.pop(request_id, None)
        session.ended.pop(request_id, None)
        self._owner[request_id] = session
        self._output_count[request_id] = output_count
        session.request_ids.add(request_id)
        return True

    def is_stopping(self, request_id: str) -> bool:
        """True while a request of this id, forgotten or left by a client that died, has not yet stopped."""
        return request_id in self._dying or request_id in self._forgotten

    def owned_by(self, session: Session, request_id: str) -> bool:
        """True if this session may act on the request."""
        return self._owner.get(request_id) is session

    def forget(self, request_id: str, output_index: int) -> None:
        """A request ended on its client's own wish: only its last item is still sent, so that the client knows when another run
        of this id may begin; and no token from ``output_index`` on counts.
        """
        self._forgotten[request_id] = self._owner[request_id]
        self._end_owned(request_id, min(output_index, self._output_count.pop(request_id, 0)))

    def owners(self, request_ids: Iterable[str]) -> dict[bytes, list[str]]:
        """Request ids grouped by the socket they belong to."""
        grouped: dict[bytes, list[str]] = {}
        for request_id in request_ids:
            session = self._owner.get(request_id)
            if session is not None:
                grouped.setdefault(session.identity, []).append(request_id)
        return grouped

    def deliver(self, items: Iterable[OutItem]) -> dict[bytes, list[OutItem]]:
        """Count a step's items, end the requests that have their last one, and group the rest by the socket they go to."""
        grouped: dict[bytes, list[OutItem]] = {}
        forgotten, owner, output_count = self._forgotten, self._owner, self._output_count
        for item in items:
            request_id = item.request_id
            if request_id in forgotten:
                forgetter = forgotten[request_id]
                if item.finish is not None:
                    del forgotten[request_id]
                    if self.find(forgetter.identity) is forgetter:
                        grouped.setdefault(forgetter.identity, []).append(item)
                continue
            if request_id in output_count:
                output_count[request_id] = item.first_output_index + len(item.token_ids)
            session = owner.get(request_id)
            if session is not None:
                part = grouped.get(session.identity)
                if part is None:
                    part = grouped[session.identity] = []
                part.append(item)
            if item.finish is not None:
                self._end(request_id)
        return grouped

    def claim(self, request_ids: Iterable[str]) -> tuple[list[Orphan], list[str]]:
        """The final counts of those requests that are orphans, and the ids of those whose client is not known to be dead yet
        or that have not stopped. Two claims are answered alike.
        """
        items, stopping = [], []
        for request_id in request_ids:
            if (count := self._orphans.get(request_id)) is not None:
                items.append(Orphan(request_id, count))
            elif request_id in self._dying or request_id in self._owner or self._has_ended(request_id):
                stopping.append(request_id)
        return items, stopping

    def settle(self, request_ids: Iterable[str]) -> None:
        """These orphans' counts are durable elsewhere."""
        for request_id in request_ids:
            self._orphans.pop(request_id, None)

    def _has_ended(self, request_id: str) -> bool:
        return any(request_id in session.ended for session in self._by_identity.values())

    def _end(self, request_id: str) -> None:
        count = self._output_count.pop(request_id, 0)
        self._end_owned(request_id, count)
        if request_id in self._dying:
            self._dying.discard(request_id)
            self._keep(request_id, count)

    def _end_owned(self, request_id: str, count: int) -> None:
        session = self._owner.pop(request_id, None)
        if session is None:
            return
        session.request_ids.discard(request_id)
        session.ended.pop(request_id, None)
        session.ended[request_id] = count
        if len(session.ended) > MAX_KEPT_ENDED:
            del session.ended[next(iter(session.ended))]

    def _keep(self, request_id: str, count: int) -> None:
        self._orphans[request_id] = count
        while len(self._orphans) > MAX_KEPT_ORPHANS:
            del self._orphans[next(iter(self._orphans))]
