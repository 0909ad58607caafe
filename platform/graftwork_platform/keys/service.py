"""Making, listing and revoking keys, in the database and in the ring of this process. Knows no HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from graftwork_platform.catalog.catalog import live_adapter, newest_ready
from graftwork_platform.db import Database
from graftwork_platform.db_postgresql import Turn, take_turn
from graftwork_platform.errors import BadRequest, Forbidden, NotFound, Unauthorized
from graftwork_platform.ids import show, uuid7
from graftwork_platform.keys.ring import KeyRing
from graftwork_platform.keys.rows import ALL_WITHIN_S, all_entries, entries_of
from graftwork_platform.keys.text import NewKey, generate, key_hmac
from graftwork_platform.models import ApiKey, Tenant
from graftwork_platform.paging import Page, page_of
from graftwork_platform.secrets import Secrets, write_private

_log = logging.getLogger(__name__)


class Keys:
    """The keys of all tenants. The ring passed in is kept equal to what the database says."""

    def __init__(self, database: Database, ring: KeyRing, secrets: Secrets, *, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._ring = ring
        self._secrets = secrets
        self._now = now
        self._rotating = asyncio.Lock()

    async def open(self, admin_file: Path) -> None:
        """Fill the ring. The first server on a database makes the admin key and leaves it in ``admin_file``.

        Raises `DatabaseUnavailable`; may then be called again.
        """
        await self.ensure_admin(lambda text: write_private(admin_file, text + "\n"))
        await self.load()
        self.settle_admin_file(admin_file)

    async def load(self) -> None:
        """Fill the ring from the database."""
        with self._ring.reading() as read:
            read.replace_all(await self._database.run_read(all_entries, within=ALL_WITHIN_S))

    async def create(self, tenant_id: UUID, *, adapter: str | None, expires_at: int | None = None) -> tuple[ApiKey, NewKey]:
        """A new key of a tenant; ``adapter`` names its default, which can be served. Raises `BadRequest`, `NotFound`."""
        if expires_at is not None and expires_at <= self._now() * 1000:
            raise BadRequest("expires_at lies in the past.", param="expires_at")
        new = generate()

        def work(session: Session) -> ApiKey:
            tenant = session.get_one(Tenant, tenant_id, with_for_update={"read": True})  # a deletion waits, and revokes this too
            if tenant.deleted_at is not None:
                raise NotFound(f"No tenant `{tenant.name}`.", code="tenant_not_found")
            default = _adapter_id(session, tenant_id, adapter) if adapter is not None else None
            row = self._row(new, tenant_id=tenant_id, default_adapter_id=default, expires_at=expires_at)
            session.add(row)
            return row

        return await asyncio.shield(self._store(work)), new

    async def ensure_admin(self, keep: Callable[[str], None]) -> bool:
        """Make the admin key unless the database holds one; true if it was made.

        ``keep`` gets its text before the key becomes valid, so that a crash in between never leaves a valid key nobody knows.
        """
        new = generate()

        def work(session: Session) -> bool:
            take_turn(session, Turn.CHANGE_ADMIN_KEY)
            if session.scalar(select(ApiKey.id).where(ApiKey.is_admin, ApiKey.revoked_at.is_(None)).limit(1)) is not None:
                return False
            keep(new.text)
            session.add(self._row(new, tenant_id=None, default_adapter_id=None, expires_at=None))
            return True

        return await self._database.run_write(work)

    async def rotate_admin(self, file: Path) -> tuple[ApiKey, NewKey]:
        """A new admin key in ``file``; every older one is refused from then on.

        Its text waits beside the file until it is valid, so a crash on the way leaves a working key in one of the two
        (`settle_admin_file` then says which).
        """
        new = generate()

        def work(session: Session) -> tuple[ApiKey, Sequence[UUID]]:
            take_turn(session, Turn.CHANGE_ADMIN_KEY)
            valid = ApiKey.is_admin & ApiKey.revoked_at.is_(None)
            older = session.scalars(select(ApiKey.id).where(valid)).all()
            session.execute(update(ApiKey).where(valid).values(revoked_at=int(self._now() * 1000)))
            row = self._row(new, tenant_id=None, default_adapter_id=None, expires_at=None)
            session.add(row)
            return row, older

        async def commit_then_refuse() -> ApiKey:
            async with self._rotating:  # one file waits at a time
                await asyncio.to_thread(write_private, _next_file(file), new.text + "\n")
                row, older = await self._database.run_write(work)
                for key_id in older:
                    self._ring.remove(key_id)
                _next_file(file).replace(file)
                await self._learn(row.id)
            return row

        return await asyncio.shield(commit_then_refuse()), new

    def settle_admin_file(self, file: Path) -> None:
        """Finish a rotation of the admin key that was cut short, or undo it if its key never became valid. After `load`.

        A file whose key another server has replaced since is left there, and said to be stale.
        """
        waiting = _next_file(file)
        if waiting.exists():
            if self._is_admin_key(waiting):
                waiting.replace(file)
            else:
                waiting.unlink()
        if file.exists() and not self._is_admin_key(file):
            _log.warning("%s holds a key that is not valid any more: another server on this database has made a new one", file)

    def _is_admin_key(self, file: Path) -> bool:
        try:
            self._ring.authenticate_admin(f"Bearer {file.read_text(errors='replace').strip()}")
        except (Unauthorized, Forbidden):
            return False
        return True

    async def revoke(self, tenant_id: UUID, key_id: UUID) -> ApiKey:
        """Refuse a key from now on; again is no error. Raises `NotFound`."""

        def work(session: Session) -> ApiKey:
            row = session.scalar(select(ApiKey).where(ApiKey.tenant_id == tenant_id, ApiKey.id == key_id).with_for_update())
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

    async def list(self, tenant_id: UUID, *, after: UUID | None, limit: int) -> Page[ApiKey]:
        """A tenant's keys, revoked ones too, oldest first."""
        query = select(ApiKey).where(ApiKey.tenant_id == tenant_id).order_by(ApiKey.id)
        if after is not None:
            query = query.where(ApiKey.id > after)
        return await self._database.run_read(lambda session: page_of(session, query, limit))

    async def _store(self, work: Callable[[Session], ApiKey]) -> ApiKey:
        row = await self._database.run_write(work)
        await self._learn(row.id)
        return row

    async def _learn(self, key_id: UUID) -> None:
        """Take a key that was just made into the ring, unless it is revoked by now.

        It is read again, after its commit: what the maker knows is as old as that, and reads of every key that began before it
        and after it may both have been heard of meanwhile. The ring could not tell which of them know better.
        """
        with self._ring.reading() as read:
            read.replace([key_id], [], await self._database.run_read(lambda session: entries_of(session, [key_id], [])))

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
