"""Tenants: made, found by name or id, and marked deleted. Knows no HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from uuid import UUID

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from graftwork_adapters.keys import RowTypeName
from graftwork_platform.catalog.names import check_tenant_name
from graftwork_platform.db import Database
from graftwork_platform.errors import Conflict, NotFound
from graftwork_platform.ids import parse, uuid7
from graftwork_platform.keys.ring import KeyRing
from graftwork_platform.models import Adapter, AdapterVersion, ApiKey, Tenant, Upload, UploadState, VersionState
from graftwork_platform.paging import Page, page_of


class Tenants:
    """All tenants. The ring passed in is the one that knows their keys."""

    def __init__(self, database: Database, ring: KeyRing, *, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._ring = ring
        self._now = now

    async def create(self, name: str, *, row_type: RowTypeName | None = None) -> Tenant:
        """A new tenant; ``row_type`` is that of its adapters' rows, None the server's.

        Raises `BadRequest` for a bad name, `Conflict` for a taken one (deleted tenants keep theirs).
        """
        check_tenant_name(name)

        def work(session: Session) -> Tenant:
            if session.scalar(select(Tenant.id).where(Tenant.name == name)) is not None:
                raise Conflict(f"A tenant named `{name}` exists or existed.", param="name", code="tenant_exists")
            now = int(self._now() * 1000)
            tenant = Tenant(id=uuid7(self._now), name=name, row_type=row_type, created_at=now, deleted_at=None)
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

    async def set_row_type(self, tenant_id: UUID, row_type: RowTypeName | None) -> Tenant:
        """Of which type the rows of what it uploads from now on are, unless an upload says so. Raises `NotFound`."""

        def work(session: Session) -> Tenant:
            tenant = session.get_one(Tenant, tenant_id, with_for_update=True)
            if tenant.deleted_at is not None:
                raise NotFound(f"No tenant `{tenant.name}`.", code="tenant_not_found")
            tenant.row_type = row_type
            return tenant

        return await self._database.run_write(work)

    async def delete(self, tenant_id: UUID) -> None:
        """Refuse a tenant's keys from now on, and stop serving what it has; its usage stays. All or nothing. Raises `NotFound`."""

        def work(session: Session) -> None:
            tenant = session.get_one(Tenant, tenant_id, with_for_update=True)  # no key is made behind this
            if tenant.deleted_at is not None:
                raise NotFound(f"No tenant `{tenant.name}`.", code="tenant_not_found")
            tenant.deleted_at = int(self._now() * 1000)
            _close_all_of(session, tenant_id, tenant.deleted_at)

        async def commit_then_refuse() -> None:
            await self._database.run_write(work)
            self._ring.remove_tenant(tenant_id)

        # A client that hangs up between the commit and the ring must not leave the keys working.
        await asyncio.shield(commit_then_refuse())

    async def list(self, *, after: UUID | None, limit: int) -> Page[Tenant]:
        """Tenants that are not deleted, oldest first."""
        query = select(Tenant).where(Tenant.deleted_at.is_(None)).order_by(Tenant.id)
        if after is not None:
            query = query.where(Tenant.id > after)
        return await self._database.run_read(lambda session: page_of(session, query, limit))


def _close_all_of(session: Session, tenant_id: UUID, now: int) -> None:
    """Revoke keys, expire uploads, and delete adapters with their versions, whose blobs a sweep then frees.

    An upload that is being validated finds its adapter deleted. Rows are locked in the order of `publishing.records`.
    """
    keys = (ApiKey.tenant_id == tenant_id, ApiKey.revoked_at.is_(None))
    session.execute(update(ApiKey).where(*keys).values(revoked_at=now))
    uploads = (Upload.tenant_id == tenant_id, Upload.state == UploadState.UPLOADING)
    session.execute(update(Upload).where(*uploads).values(state=UploadState.EXPIRED))
    adapters = (Adapter.tenant_id == tenant_id, Adapter.deleted_at.is_(None))
    session.execute(update(Adapter).where(*adapters).values(deleted_at=now))
    versions = (AdapterVersion.tenant_id == tenant_id, AdapterVersion.state == VersionState.READY)
    session.execute(update(AdapterVersion).where(*versions).values(state=VersionState.DELETING, deleted_at=now))
