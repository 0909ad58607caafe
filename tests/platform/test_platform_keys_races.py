"""Keys that are made, revoked and rotated while every key is being read, and tenants that are deleted: all or nothing, at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from graftwork_platform.db import Database
from graftwork_platform.errors import NotFound, Unauthorized
from graftwork_platform.ids import uuid7
from graftwork_platform.keys.ring import KeyRing
from graftwork_platform.keys.rows import all_entries
from graftwork_platform.keys.service import Keys
from graftwork_platform.models import Adapter, AdapterVersion, ApiKey, Tenant, Upload, Usage, UsageStatus, VersionState
from graftwork_platform.secrets import Secrets
from graftwork_platform.tenants import Tenants
from graftwork_platform.usage import UsageRow, insert_usage

SECRETS = Secrets(pepper=b"p" * 32, cache_salt=b"s" * 32)


class Paced(Database):
    """A database whose next write can have something happen right before its commit, and right after it."""

    before: Callable[[], Awaitable[None]] | None = None
    after: Callable[[], Awaitable[None]] | None = None

    async def run_write(self, work: Callable[[Session], Any], **options: Any) -> Any:
        before, self.before, after, self.after = self.before, None, self.after, None
        if before is not None:
            await before()
        done = await super().run_write(work, **options)
        if after is not None:
            await after()
        return done


class World:
    """Keys and tenants on one database, and a read of every key under way."""

    def __init__(self, database: Paced) -> None:
        self.database = database
        self.ring = KeyRing(SECRETS)
        self.keys = Keys(database, self.ring, SECRETS)
        self.tenants = Tenants(database, self.ring)

    def admits(self, key: str) -> bool:
        try:
            self.ring.authenticate(f"Bearer {key}")
        except Unauthorized:
            return False
        return True

    @asynccontextmanager
    async def reading_all(self) -> AsyncIterator[None]:
        """Around the next write: reads every key before its commit, after it has begun, and takes that in after it."""
        reading = self.ring.reading()
        looked: list[Any] = []

        async def look() -> None:
            looked.append(reading.__enter__())
            looked.append(await self.database.run_read(all_entries))

        async def arrive() -> None:
            looked[0].replace_all(looked[1])
            reading.__exit__(None, None, None)

        self.database.before, self.database.after = look, arrive
        yield
        assert len(looked) == 2


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with closing(Paced(database_url)) as database:
        yield World(database)


def test_a_key_made_while_every_key_is_read_works_from_the_answer_on(world: World) -> None:
    async def main() -> None:
        tenant = await world.tenants.create("acme")
        async with world.reading_all():
            _, new = await world.keys.create(tenant.id, adapter=None)
        assert world.admits(new.text)

    asyncio.run(main())


def test_keys_made_while_the_admin_key_is_rotated_work(world: World, tmp_path: Path) -> None:
    async def main() -> None:
        await world.keys.open(tmp_path / "admin.key")
        tenant = await world.tenants.create("acme")
        for pause in range(12):
            rotating = asyncio.create_task(world.keys.rotate_admin(tmp_path / "admin.key"))
            await asyncio.sleep(0.001 * pause)
            _, new = await world.keys.create(tenant.id, adapter=None)
            _, admin = await rotating
            assert world.admits(new.text)
            assert (tmp_path / "admin.key").read_text().strip() == admin.text
            world.ring.authenticate_admin(f"Bearer {admin.text}")

    asyncio.run(main())


def test_a_rotated_admin_key_is_refused_whatever_was_being_read(world: World, tmp_path: Path) -> None:
    async def main() -> None:
        await world.keys.open(tmp_path / "admin.key")
        old = (tmp_path / "admin.key").read_text().strip()
        async with world.reading_all():
            _, new = await world.keys.rotate_admin(tmp_path / "admin.key")
        world.ring.authenticate_admin(f"Bearer {new.text}")
        with pytest.raises(Unauthorized):
            world.ring.authenticate_admin(f"Bearer {old}")

    asyncio.run(main())


@pytest.mark.parametrize("end", ["key", "tenant"])
def test_a_key_that_is_revoked_before_its_maker_hears_of_its_commit_stays_out(world: World, end: str) -> None:
    async def main() -> None:
        tenant = await world.tenants.create("acme")

        async def revoke() -> None:
            if end == "tenant":
                await world.tenants.delete(tenant.id)
                return
            with world.database.read() as session:
                (key_id,) = session.scalars(select(ApiKey.id).where(ApiKey.tenant_id == tenant.id))
            await world.keys.revoke(tenant.id, key_id)

        world.database.after = revoke
        _, new = await world.keys.create(tenant.id, adapter=None)
        assert not world.admits(new.text)

    asyncio.run(main())


@pytest.mark.parametrize("end", ["key", "tenant"])
def test_a_revoked_key_stays_out_whatever_was_being_read(world: World, end: str) -> None:
    async def main() -> None:
        tenant = await world.tenants.create("acme")
        row, new = await world.keys.create(tenant.id, adapter=None)
        async with world.reading_all():
            await (world.keys.revoke(tenant.id, row.id) if end == "key" else world.tenants.delete(tenant.id))
        assert not world.admits(new.text)

    asyncio.run(main())


def fill(session: Session, tenant: UUID, key: UUID) -> None:
    """An adapter with a version, one deleted before, an upload under way, and usage."""
    adapter, older = (
        Adapter(id=uuid7(), tenant_id=tenant, name="x", created_at=1),
        Adapter(id=uuid7(), tenant_id=tenant, name="y", created_at=1, deleted_at=7),
    )
    session.add_all([adapter, older])
    session.flush()
    for place, state, deleted in ((adapter, "ready", None), (older, "deleting", 7)):
        session.add(
            AdapterVersion(
                id=uuid7(),
                tenant_id=tenant,
                adapter_id=place.id,
                number=1,
                digest="d" * 64,
                manifest_sha256="m" * 64,
                state=state,
                report=[],
                created_at=1,
                ready_at=1,
                deleted_at=deleted,
            )
        )
    session.add(
        Upload(
            id=uuid7(),
            tenant_id=tenant,
            adapter_name="z",
            files=[],
            part_bytes=1,
            state="uploading",
            created_at=1,
            expires_at=2**50,
        )
    )
    insert_usage(session, [UsageRow(uuid7(), None, tenant, key, "x", None, 1, 0, 1, UsageStatus.COMPLETED, 0)])


async def execute(database: Database, statement: str) -> None:
    def work(session: Session) -> None:
        session.execute(text(statement))

    await database.run_write(work)


def states(session: Session, tenant: UUID) -> dict[str, Any]:
    versions = select(AdapterVersion).where(AdapterVersion.tenant_id == tenant)
    return {
        "tenant": session.get_one(Tenant, tenant).deleted_at,
        "keys": session.scalars(select(ApiKey.revoked_at).where(ApiKey.tenant_id == tenant)).all(),
        "adapters": session.scalars(select(Adapter.deleted_at).where(Adapter.tenant_id == tenant).order_by(Adapter.name)).all(),
        "versions": sorted((version.state, version.deleted_at or 0) for version in session.scalars(versions)),
        "uploads": session.scalars(select(Upload.state).where(Upload.tenant_id == tenant)).all(),
        "usage": session.scalar(select(func.count()).select_from(Usage).where(Usage.tenant_id == tenant)),
    }


def test_a_deleted_tenant_leaves_its_usage_and_nothing_that_is_served(world: World) -> None:
    async def main() -> None:
        tenant, other = await world.tenants.create("acme"), await world.tenants.create("globex")
        kept: dict[UUID, str] = {}
        for each in (tenant, other):
            row, new = await world.keys.create(each.id, adapter=None)
            kept[each.id] = new.text
            await world.database.run_write(lambda session, each=each, row=row: fill(session, each.id, row.id))
        untouched = await world.database.run_read(lambda session: states(session, other.id))
        await world.tenants.delete(tenant.id)
        left = await world.database.run_read(lambda session: states(session, tenant.id))
        now = left["tenant"]
        assert now > 7
        assert left == {
            "tenant": now,
            "keys": [now],
            "adapters": [now, 7],
            "versions": [(VersionState.DELETING, 7), (VersionState.DELETING, now)],
            "uploads": ["expired"],
            "usage": 1,
        }
        assert not world.admits(kept[tenant.id])
        assert world.admits(kept[other.id])
        assert await world.database.run_read(lambda session: states(session, other.id)) == untouched
        with pytest.raises(NotFound):
            await world.tenants.delete(tenant.id)
        assert await world.database.run_read(lambda session: states(session, tenant.id)) == left

    asyncio.run(main())


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
@pytest.mark.parametrize("table", ["tenants", "api_keys", "uploads", "adapters", "adapter_versions"])
def test_a_deletion_that_fails_half_way_has_done_nothing_and_can_be_done_again(world: World, table: str) -> None:
    async def main() -> None:
        tenant = await world.tenants.create("acme")
        row, new = await world.keys.create(tenant.id, adapter=None)
        await world.database.run_write(lambda session: fill(session, tenant.id, row.id))
        before = await world.database.run_read(lambda session: states(session, tenant.id))
        full = f"CREATE TRIGGER full BEFORE UPDATE ON {table} BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        await execute(world.database, full)
        with pytest.raises(SQLAlchemyError, match="disk full"):
            await world.tenants.delete(tenant.id)
        assert await world.database.run_read(lambda session: states(session, tenant.id)) == before
        assert world.admits(new.text)
        await execute(world.database, "DROP TRIGGER full")
        await world.tenants.delete(tenant.id)
        assert not world.admits(new.text)

    asyncio.run(main())


def test_the_blobs_of_a_deleted_tenant_are_swept_and_it_is_not_there_a_second_time(
    start_admin: Callable[..., AbstractContextManager[Any]],
) -> None:
    clock = [1_700_000_000.0]
    with start_admin(now=lambda: clock[0]) as admin:
        tenant = admin.tenant()
        assert admin.push(tenant)["state"] == "ready"
        assert list(admin.services.store.list_keys("uploads/"))
        key = admin.call("POST", f"/tenants/{tenant}/keys", json={}).json()
        assert admin.call("DELETE", f"/tenants/{tenant}").status_code == 200
        assert admin.call("DELETE", f"/tenants/{tenant}").status_code == 404
        with pytest.raises(Unauthorized):
            admin.services.keyring.authenticate(f"Bearer {key['key']}")
        clock[0] += 1e6
        admin.run(admin.services.publisher.sweep)
        assert not list(admin.services.store.list_keys("uploads/"))
