"""Valid keys as the database holds them. Knows no memory of them."""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from graftwork_platform.keys.ring import KeyEntry
from graftwork_platform.models import ApiKey, Tenant

ALL_WITHIN_S = 30.0
"""How long the database may take over every key there is."""


def all_entries(session: Session) -> list[KeyEntry]:
    """Every key that is neither revoked nor of a deleted tenant."""
    return _entries(session, _valid())


def entries_of(session: Session, key_ids: Collection[UUID], tenant_ids: Collection[UUID]) -> list[KeyEntry]:
    """Those of them that are among ``key_ids`` or of ``tenant_ids``."""
    return _entries(session, _valid().where(ApiKey.id.in_(key_ids) | ApiKey.tenant_id.in_(tenant_ids)))


def entry_called(session: Session, public_id: str) -> KeyEntry | None:
    """The one of them with that public half."""
    return next(iter(_entries(session, _valid().where(ApiKey.public_id == public_id))), None)


def _entry(row: ApiKey, tenant_name: str) -> KeyEntry:
    """A row in the words of the ring."""
    return KeyEntry(
        key_id=row.id,
        public_id=row.public_id,
        key_hmac=row.key_hmac,
        tenant_id=row.tenant_id,
        tenant_name=tenant_name,
        default_adapter_id=row.default_adapter_id,
        expires_at=row.expires_at,
    )


def _valid() -> Select[ApiKey, str | None]:
    return (
        select(ApiKey, Tenant.name)
        .outerjoin(Tenant, Tenant.id == ApiKey.tenant_id)
        .where(ApiKey.revoked_at.is_(None), Tenant.deleted_at.is_(None))
    )


def _entries(session: Session, query: Select[ApiKey, str | None]) -> list[KeyEntry]:
    return [_entry(row, name or "") for row, name in session.execute(query)]
