"""Who is calling, from the Authorization header alone: every valid key in memory. Knows no SQL."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable
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


class KeyRing:
    """Every key that is neither revoked nor of a deleted tenant. Reading it takes no lock and no database.

    Whoever changes a key in the database changes the ring right after the commit and before anyone is told, so a revoked key
    is refused from the moment its revocation is confirmed.
    """

    def __init__(self, secrets: Secrets, *, now: Callable[[], float] = time.time) -> None:
        self._secrets = secrets
        self._now = now
        self._by_public_id: dict[str, KeyEntry] = {}

    def replace_all(self, entries: Iterable[KeyEntry]) -> None:
        """Hold exactly ``entries``."""
        self._by_public_id = {entry.public_id: entry for entry in entries}

    def add(self, entry: KeyEntry) -> None:
        """Let this key in."""
        self._by_public_id = {**self._by_public_id, entry.public_id: entry}

    def remove(self, key_id: UUID) -> None:
        """Refuse this key from now on."""
        self._by_public_id = {p: e for p, e in self._by_public_id.items() if e.key_id != key_id}

    def remove_tenant(self, tenant_id: UUID) -> None:
        """Refuse all keys of a tenant from now on."""
        self._by_public_id = {p: e for p, e in self._by_public_id.items() if e.tenant_id != tenant_id}

    def authenticate(self, authorization: str | None) -> Caller:
        """The tenant behind a ``Bearer`` header. Raises `Unauthorized`, or `Forbidden` for an admin key."""
        entry = self._verify(authorization)
        if entry.tenant_id is None:
            raise Forbidden("An admin key cannot run models; use a tenant's key.")
        return Caller(
            tenant_id=entry.tenant_id,
            tenant_name=entry.tenant_name,
            key_id=entry.key_id,
            default_adapter_id=entry.default_adapter_id,
            cache_salt=self._secrets.tenant_salt(entry.tenant_id),
        )

    def authenticate_admin(self, authorization: str | None) -> AdminCaller:
        """The operator behind a ``Bearer`` header. Raises `Unauthorized`, or `Forbidden` for a tenant's key."""
        entry = self._verify(authorization)
        if entry.tenant_id is not None:
            raise Forbidden("This needs the admin key.")
        return AdminCaller(entry.key_id)

    def _verify(self, authorization: str | None) -> KeyEntry:
        if not authorization:
            raise Unauthorized("You did not provide an API key. Send it as: Authorization: Bearer YOUR_KEY")
        scheme, _, text = authorization.partition(" ")
        text = text.strip()
        if scheme.lower() != "bearer" or len(text) > _MAX_KEY_CHARS:
            raise Unauthorized
        entry = self._by_public_id.get(public_id_of(text) or "")
        # The hash is made and compared even for an unknown key, so that time tells nothing of which public ids exist.
        expected = entry.key_hmac if entry else _NO_KEY
        matches = hmac.compare_digest(key_hmac(self._secrets.pepper, text), expected)
        if entry is None or not matches:
            raise Unauthorized
        if entry.expires_at is not None and entry.expires_at <= self._now() * 1000:
            raise Unauthorized("This API key has expired.", code="key_expired")
        return entry
