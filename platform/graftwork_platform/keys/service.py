"""Making, listing and revoking keys, in the database and in the ring of this process. Knows no HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from graftwork_platform.catalog.catalog import live_adapter, newest_ready
from graftwork_platform.db import Database
from graftwork_platform.errors import BadRequest, Forbidden, NotFound, Unauthorized
from graftwork_platform.ids import show, uuid7
from graftwork_platform.keys.ring import KeyEntry, KeyRing
from graftwork_platform.keys.text import NewKey, generate, key_hmac
from graftwork_platform.models import ApiKey, Tenant
from graftwork_platform.paging import Page, page_of
from graftwork_platform.secrets import Secrets, write_private


class Keys:
    """The keys of all tenants. The ring passed in is kept equal to what the database says."""

    def __init__(self, database: Database, ring: KeyRing, secrets: Secrets, *, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._ring = ring
        self._secrets = secrets
        self._now = now

    async def load(self) -> None:
        """Fill the ring from the database."""
        self._ring.replace_all(await self._database.run_read(_valid_entries))

    async def create(self, tenant_id: UUID, *, adapter: str | None, expires_at: int | None = None) -> tuple[ApiKey, NewKey]:
        """A new key of a tenant; ``adapter`` names its default, which can be served. Raises `BadRequest`, `NotFound`."""
        if expires_at is not None and expires_at <= self._now() * 1000:
            raise BadRequest("expires_at lies in the past.", param="expires_at")
        new = generate()

        def work(session: Session) -> tuple[ApiKey, KeyEntry]:
            tenant = session.get_one(Tenant, tenant_id)
            if tenant.deleted_at is not None:
                raise NotFound(f"No tenant `{tenant.name}`.", code="tenant_not_found")
            default = _adapter_id(session, tenant_id, adapter) if adapter is not None else None
            row = self._row(new, tenant_id=tenant_id, default_adapter_id=default, expires_at=expires_at)
            session.add(row)
            return row, _entry(row, tenant.name)

        return await asyncio.shield(self._store(work)), new

    async def ensure_admin(self, keep: Callable[[str], None]) -> bool:
        """Make the admin key unless there is one; true if it was made.

        ``keep`` gets its text before the key becomes valid, so that a crash in between never leaves a valid key nobody knows.
        """
        new = generate()

        def work(session: Session) -> KeyEntry | None:
            if session.scalar(select(ApiKey.id).where(ApiKey.is_admin, ApiKey.revoked_at.is_(None)).limit(1)) is not None:
                return None
            keep(new.text)
            row = self._row(new, tenant_id=None, default_adapter_id=None, expires_at=None)
            session.add(row)
            return _entry(row, "")

        entry = await self._database.run_write(work)
        if entry is not None:
            self._ring.add(entry)
        return entry is not None

    async def rotate_admin(self, file: Path) -> tuple[ApiKey, NewKey]:
        """A new admin key in ``file``; every older one is refused from then on.

        Its text waits beside the file until it is valid, so a crash on the way leaves a working key in one of the two
        (`settle_admin_file` then says which).
        """
        new = generate()
        await asyncio.to_thread(write_private, _next_file(file), new.text + "\n")

        def work(session: Session) -> ApiKey:
            valid = ApiKey.is_admin & ApiKey.revoked_at.is_(None)
            session.execute(update(ApiKey).where(valid).values(revoked_at=int(self._now() * 1000)))
            row = self._row(new, tenant_id=None, default_adapter_id=None, expires_at=None)
            session.add(row)
            return row

        async def commit_then_refuse() -> ApiKey:
            row = await self._database.run_write(work)
            await self.load()
            _next_file(file).replace(file)
            return row

        return await asyncio.shield(commit_then_refuse()), new

    def settle_admin_file(self, file: Path) -> None:
        """Finish a rotation of the admin key that was cut short, or undo it if its key never became valid. After `load`."""
        waiting = _next_file(file)
        if not waiting.exists():
            return
        try:
            self._ring.authenticate_admin(f"Bearer {waiting.read_text().strip()}")
        except (Unauthorized, Forbidden):
            waiting.unlink()
        else:
            waiting.replace(file)

    async def revoke(self, tenant_id: UUID, key_id: UUID) -> ApiKey:
        """Refuse a key from now on; again is no error. Raises `NotFound`."""

        def work(session: Session) -> ApiKey:
            row = session.scalar(select(ApiKey).where(ApiKey.tenant_id == tenant_id, ApiKey.id == key_id))
            if row is None:
                raise NotFound(f"No key {show('key', key_id)} in this tenant.", code="key_not_found")
            row.revoked_at = row.revoked_at or int(self._now() * 1000)
            return row

        async def commit_then_refuse() -> ApiKey:
            row = await self._database.run_write(work)
            self._ring.remove(key_id)
            return row

        # A client that hangs up between the commit and the ring must not leave the key working.
        return await asyncio.shield(commit_then_refuse())

    async def revoke_all(self, tenant_id: UUID) -> None:
        """Refuse every key of a tenant from now on."""

        def work(session: Session) -> None:
            session.execute(
                update(ApiKey)
                .where(ApiKey.tenant_id == tenant_id, ApiKey.revoked_at.is_(None))
                .values(revoked_at=int(self._now() * 1000))
            )

        await self._database.run_write(work)
        self._ring.remove_tenant(tenant_id)

    async def list(self, tenant_id: UUID, *, after: UUID | None, limit: int) -> Page[ApiKey]:
        """A tenant's keys, revoked ones too, oldest first."""
        query = select(ApiKey).where(ApiKey.tenant_id == tenant_id).order_by(ApiKey.id)
        if after is not None:
            query = query.where(ApiKey.id > after)
        return await self._database.run_read(lambda session: page_of(session, query, limit))

    async def _store(self, work: Callable[[Session], tuple[ApiKey, KeyEntry]]) -> ApiKey:
        row, entry = await self._database.run_write(work)
        self._ring.add(entry)
        return row

    def _row(self, new: NewKey, *, tenant_id: UUID | None, default_adapter_id: UUID | None, expires_at: int | None) -> ApiKey:
        return ApiKey(
            id=uuid7(self._now),
            tenant_id=tenant_id,
            is_admin=tenant_id is None,
            public_id=new.public_id,
            key_hmac=key_hmac(self._secrets.pepper, new.text),
            default_adapter_id=default_adapter_id,
            created_at=int(self._now() * 1000),
            expires_at=expires_at,
            revoked_at=None,
        )


def _next_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.next")


def _adapter_id(session: Session, tenant_id: UUID, name: str) -> UUID:
    try:
        adapter = live_adapter(session, tenant_id, name)
    except NotFound as missing:
        raise NotFound(f"{missing} Publish it first.", param="adapter", code=missing.code) from None
    if newest_ready(session, adapter.id) is None:
        raise NotFound(f"Adapter `{name}` has no ready version; publish one first.", param="adapter", code="version_not_found")
    return adapter.id


def _valid_entries(session: Session) -> list[KeyEntry]:
    rows = session.execute(
        select(ApiKey, Tenant.name)
        .outerjoin(Tenant, Tenant.id == ApiKey.tenant_id)
        .where(ApiKey.revoked_at.is_(None), Tenant.deleted_at.is_(None))
    )
    return [_entry(row, name or "") for row, name in rows]


def _entry(row: ApiKey, tenant_name: str) -> KeyEntry:
    return KeyEntry(
        key_id=row.id,
        public_id=row.public_id,
        key_hmac=row.key_hmac,
        tenant_id=row.tenant_id,
        tenant_name=tenant_name,
        default_adapter_id=row.default_adapter_id,
        expires_at=row.expires_at,
    )
