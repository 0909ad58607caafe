"""Tenants: made, found by name or id, and marked deleted. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from graftwork_platform.catalog.names import check_tenant_name
from graftwork_platform.db import Database
from graftwork_platform.errors import Conflict, NotFound
from graftwork_platform.ids import parse, uuid7
from graftwork_platform.models import Tenant
from graftwork_platform.paging import Page, page_of


class Tenants:
    """All tenants."""

    def __init__(self, database: Database, *, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now

    async def create(self, name: str) -> Tenant:
        """A new tenant. Raises `BadRequest` for a bad name, `Conflict` for a taken one (deleted tenants keep theirs)."""
        check_tenant_name(name)

        def work(session: Session) -> Tenant:
            if session.scalar(select(Tenant.id).where(Tenant.name == name)) is not None:
                raise Conflict(f"A tenant named `{name}` exists or existed.", param="name", code="tenant_exists")
            tenant = Tenant(id=uuid7(self._now), name=name, created_at=int(self._now() * 1000), deleted_at=None)
            session.add(tenant)
            return tenant

        return await self._database.run_write(work)

    async def get(self, name_or_id: str) -> Tenant:
        """Raises `NotFound`."""
        tenant_id = parse("tn", name_or_id)  # no name begins with `tn_`, so the two never meet
        tenant = None
        if tenant_id is not None or (name_or_id.isascii() and name_or_id.isprintable()):  # databases refuse NUL
            matches = Tenant.name == name_or_id if tenant_id is None else Tenant.id == tenant_id
            query = select(Tenant).where(matches, Tenant.deleted_at.is_(None))
            tenant = await self._database.run_read(lambda session: session.scalar(query))
        if tenant is None:
            raise NotFound(f"No tenant `{name_or_id}`.", code="tenant_not_found")
        return tenant

    async def delete(self, tenant_id: UUID) -> None:
        """Mark a tenant deleted; its usage stays. The caller revokes its keys next."""

        def work(session: Session) -> None:
            tenant = session.get_one(Tenant, tenant_id, with_for_update=True)
            tenant.deleted_at = tenant.deleted_at or int(self._now() * 1000)

        await self._database.run_write(work)

    async def list(self, *, after: UUID | None, limit: int) -> Page[Tenant]:
        """Tenants that are not deleted, oldest first."""
        query = select(Tenant).where(Tenant.deleted_at.is_(None)).order_by(Tenant.id)
        if after is not None:
            query = query.where(Tenant.id > after)
        return await self._database.run_read(lambda session: page_of(session, query, limit))
