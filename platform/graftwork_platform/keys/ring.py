"""Who is calling, from the Authorization header alone: every valid key in memory. Knows no SQL."""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

from graftwork_platform.errors import Forbidden, Unauthorized
from graftwork_platform.keys.text import key_hmac, public_id_of
from graftwork_platform.secrets import Secrets

_NO_KEY = bytes(32)
_MAX_KEY_CHARS = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, speaking through one of its keys. ``default_adapter_id``: what ``model: "default"`` means to it."""

    tenant_id: UUID
    tenant_name: str
    key_id: UUID
    default_adapter_id: UUID | None
    cache_salt: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AdminCaller:
    """The operator."""

    key_id: UUID


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A valid key. Without a tenant it is an admin key."""

    key_id: UUID
    public_id: str
    key_hmac: bytes = field(repr=False)
    tenant_id: UUID | None
    tenant_name: str
    default_adapter_id: UUID | None
    expires_at: int | None  # Unix milliseconds


Reread = Callable[[str], Awaitable[KeyEntry | None]]
"""Asks the database for the valid key with a public half; raises `ServiceUnavailable` if that does not answer."""

SILENCE_S = 1.0
"""A ring that has not been told for so long that it is up to date is not believed."""


class Reading:
    """One read of the database on its way into the ring. What the ring was told by a read that began later is newer, and stays.

    That holds if every change is followed by a read that begins after its commit, or by word of a revocation, which stays true.
    """

    def __init__(self, ring: KeyRing, began: int) -> None:
        self._ring, self._began = ring, began

    def replace_all(self, entries: Collection[KeyEntry]) -> None:
        """The read found exactly these keys valid."""
        self._ring._take(self._began, self._ring.entries, entries)
        self._ring._told_all = max(self._ring._told_all, self._began)

    def replace(self, key_ids: Collection[UUID], tenant_ids: Collection[UUID], entries: Collection[KeyEntry]) -> None:
        """Of ``key_ids``, and of the keys of ``tenant_ids``, the read found exactly these valid."""
        ring = self._ring
        known = [ring._by_id[key_id] for key_id in key_ids if key_id in ring._by_id]
        if tenant_ids:
            known += [entry for entry in ring.entries if entry.tenant_id in tenant_ids and entry.key_id not in key_ids]
        ring._take(self._began, known, entries)
        for each in (*key_ids, *tenant_ids):
            ring._told[each] = max(ring._told.get(each, 0), self._began)


class KeyRing:
    """Every key that is neither revoked nor of a deleted tenant. Belongs to one thread; reading it takes no lock and no database.

    Whoever changes a key in the database changes the ring right after the commit and before anyone is told, so a revoked key
    is refused from the moment its revocation is confirmed. Where other servers change keys too (``reread`` is given), someone
    keeps the ring equal to the database and says up to when it is so (`hear`).
    """

    def __init__(
        self,
        secrets: Secrets,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        reread: Reread | None = None,
    ) -> None:
        self._secrets = secrets
        self._now = now
        self._clock = clock
        self._reread = reread
        self._heard_until = -math.inf
        self._by_public_id: dict[str, KeyEntry] = {}
        self._by_id: dict[UUID, KeyEntry] = {}
        self._reads = 0  # numbers reads in the order in which they began
        self._open: set[int] = set()  # reads that have not been taken in yet
        self._told: dict[UUID, int] = {}  # key or tenant: the latest read that spoke of it, while older ones are open
        self._told_all = 0  # the latest read that spoke of every key

    @property
    def entries(self) -> list[KeyEntry]:
        """All keys."""
        return list(self._by_id.values())

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """A read of the database begins with the block, and is taken in before its end."""
        self._reads += 1
        began = self._reads
        self._open.add(began)
        try:
            yield Reading(self, began)
        finally:
            self._open.discard(began)
            if not self._open:  # nothing older can still arrive
                self._told.clear()

    def remove(self, key_id: UUID) -> None:
        """Refuse this key from now on."""
        with self.reading() as revoked:
            revoked.replace([key_id], [], [])

    def remove_tenant(self, tenant_id: UUID) -> None:
        """Refuse all keys of a tenant from now on."""
        with self.reading() as deleted:
            deleted.replace([], [tenant_id], [])

    def hear(self, until: float) -> None:
        """Every change that was committed before the clock showed ``until`` is in the ring."""
        self._heard_until = max(self._heard_until, until)

    @property
    def is_current(self) -> bool:
        """True if the ring can be believed."""
        return self.silent_for < SILENCE_S

    @property
    def silent_for(self) -> float:
        """Seconds since the ring was known to be equal to the database; 0 where nobody else changes keys."""
        return 0.0 if self._reread is None else self._clock() - self._heard_until

    async def admit(self, authorization: str | None) -> Caller:
        """The tenant behind a ``Bearer`` header, by the database if the ring does not know the key or is not current.

        Raises `Unauthorized`, `Forbidden` for an admin key, or `ServiceUnavailable` if the key cannot be checked.
        """
        return self._caller(await self._current_entry(authorization))

    async def admit_admin(self, authorization: str | None) -> AdminCaller:
        """The operator behind a ``Bearer`` header. Raises as `admit` does, `Forbidden` for a tenant's key."""
        return _operator(await self._current_entry(authorization))

    def authenticate(self, authorization: str | None) -> Caller:
        """The tenant behind a ``Bearer`` header, by the ring alone. Raises `Unauthorized`, or `Forbidden` for an admin key."""
        return self._caller(self._known_entry(authorization))

    def authenticate_admin(self, authorization: str | None) -> AdminCaller:
        """The operator behind a ``Bearer`` header, by the ring alone. Raises `Unauthorized`, or `Forbidden` for a tenant's key."""
        return _operator(self._known_entry(authorization))

    def _take(self, began: int, known: Collection[KeyEntry], found: Collection[KeyEntry]) -> None:
        """Hold ``found`` in place of ``known``, but for those that a later read spoke of."""
        for entry in known:
            if not self._knows_better(entry, began):
                del self._by_id[entry.key_id], self._by_public_id[entry.public_id]
        for entry in found:
            if not self._knows_better(entry, began):
                self._by_id[entry.key_id] = self._by_public_id[entry.public_id] = entry

    def _knows_better(self, entry: KeyEntry, began: int) -> bool:
        of_tenant = 0 if entry.tenant_id is None else self._told.get(entry.tenant_id, 0)
        return max(self._told_all, self._told.get(entry.key_id, 0), of_tenant) > began

    async def _current_entry(self, authorization: str | None) -> KeyEntry:
        text = _bearer(authorization)
        public_id = public_id_of(text)
        known = self._by_public_id.get(public_id or "")
        if self._reread is None or public_id is None or (known is not None and self.is_current):
            return self._verify(text, known)
        if known is None:
            return self._verify(text, await self._reread(public_id))  # another server may have made it a moment ago
        with self.reading() as read:
            found = await self._reread(public_id)
            if found is None:  # word of how things stood before may yet come and make the ring current: it must not let the key in
                read.replace([known.key_id], [], [])
        return self._verify(text, found)

    def _known_entry(self, authorization: str | None) -> KeyEntry:
        text = _bearer(authorization)
        return self._verify(text, self._by_public_id.get(public_id_of(text) or ""))

    def _verify(self, text: str, entry: KeyEntry | None) -> KeyEntry:
        # The hash is made and compared even for an unknown key, so that time tells nothing of which public ids exist.
        expected = entry.key_hmac if entry else _NO_KEY
        matches = hmac.compare_digest(key_hmac(self._secrets.pepper, text), expected)
        if entry is None or not matches:
            raise Unauthorized
        if entry.expires_at is not None and entry.expires_at <= self._now() * 1000:
            raise Unauthorized("This API key has expired.", code="key_expired")
        return entry

    def _caller(self, entry: KeyEntry) -> Caller:
        if entry.tenant_id is None:
            raise Forbidden("An admin key cannot run models; use a tenant's key.")
        return Caller(
            tenant_id=entry.tenant_id,
            tenant_name=entry.tenant_name,
            key_id=entry.key_id,
            default_adapter_id=entry.default_adapter_id,
            cache_salt=self._secrets.tenant_salt(entry.tenant_id),
        )


def _operator(entry: KeyEntry) -> AdminCaller:
    if entry.tenant_id is not None:
        raise Forbidden("This needs the admin key.")
    return AdminCaller(entry.key_id)


def _bearer(authorization: str | None) -> str:
    if not authorization:
        raise Unauthorized("You did not provide an API key. Send it as: Authorization: Bearer YOUR_KEY")
    scheme, _, text = authorization.partition(" ")
    text = text.strip()
    if scheme.lower() != "bearer" or len(text) > _MAX_KEY_CHARS:
        raise Unauthorized
    return text
