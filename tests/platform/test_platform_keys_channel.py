"""Several servers on one PostgreSQL: a revoked key is refused everywhere within a second, and nobody believes a silent channel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import func, select, text
from sqlalchemy.engine import make_url

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.stores import open_store
from graftwork_platform import context
from graftwork_platform.context import build_services, running
from graftwork_platform.db import Database
from graftwork_platform.errors import ServiceUnavailable, Unauthorized
from graftwork_platform.keys.channel import KeyChannel, reread_from
from graftwork_platform.keys.ring import SILENCE_S, KeyRing
from graftwork_platform.keys.service import Keys
from graftwork_platform.keys.text import generate
from graftwork_platform.models import ApiKey
from graftwork_platform.secrets import Secrets
from graftwork_platform.settings import Settings
from graftwork_platform.tenants import Tenants

SECRETS = Secrets(pepper=b"p" * 32, cache_salt=b"s" * 32)
KILL_LISTENERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'graftwork key changes'
"""


@dataclass
class Peer:
    """One server's view of the keys."""

    database: Database
    ring: KeyRing
    keys: Keys
    tenants: Tenants

    async def admits(self, key: str) -> bool:
        try:
            await self.ring.admit(f"Bearer {key}")
        except Unauthorized:
            return False
        return True

    async def make_key(self, tenant: str) -> str:
        owner = await self.tenants.create(tenant)
        return (await self.keys.create(owner.id, adapter=None))[1].text

    async def revoke(self, key: str) -> None:
        caller = await self.ring.admit(f"Bearer {key}")
        await self.keys.revoke(caller.tenant_id, caller.key_id)


@asynccontextmanager
async def peer(
    url: str, *, listens_by: str = "", within: float = 60.0, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Peer]:
    """``listens_by``: the URL of its channel, if that is another way to the same database."""
    database, way = Database(url), Database(listens_by or url)
    ring = KeyRing(SECRETS, clock=clock, reread=reread_from(database, within=within))
    channel = asyncio.create_task(KeyChannel(way, ring, clock=clock).run())
    try:
        yield Peer(database, ring, Keys(database, ring, SECRETS), Tenants(database, ring))
    finally:
        channel.cancel()
        with suppress(asyncio.CancelledError):
            await channel
        for each in (database, way):
            each.close()


async def until(holds: Callable[[], Any], within: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
    """Waits for it."""
    began = clock()
    while True:
        found = holds()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert clock() - began < within, "it never held"
        await asyncio.sleep(0.005)


@contextmanager
def during(fault: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    fault()
    try:
        yield
    finally:
        end()


def through(line: Any, url: str) -> str:
    return make_url(url).set(port=line.port).render_as_string(hide_password=False)


def execute(url: str, statement: str) -> list[Any]:
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        cursor = connection.execute(statement)  # type: ignore[call-overload]
        return cursor.fetchall() if cursor.description else []


def test_what_changes_at_one_server_holds_at_the_other_within_a_second(
    postgres_url: str, steady_clock: Callable[[], float]
) -> None:
    async def soon(holds: Callable[[], Any]) -> None:
        await until(holds, SILENCE_S, steady_clock)

    async def main() -> None:
        async with peer(postgres_url) as one, peer(postgres_url) as two:
            await until(lambda: one.ring.is_current and two.ring.is_current)
            key, doomed = await one.make_key("acme"), await one.make_key("globex")
            for each in (key, doomed):
                await soon(lambda each=each: known(two, each))
            await one.revoke(key)
            await soon(lambda: unknown(two, key))
            caller = two.ring.authenticate(f"Bearer {doomed}")
            deletion = f"UPDATE tenants SET deleted_at = 1 WHERE id = '{caller.tenant_id}'"  # its keys' own rows are not touched
            await asyncio.to_thread(execute, postgres_url, deletion)
            await soon(lambda: unknown(two, doomed))
            by_hand = await two.make_key("initech")
            await soon(lambda: known(one, by_hand))
            await asyncio.to_thread(execute, postgres_url, "UPDATE api_keys SET revoked_at = 1 WHERE revoked_at IS NULL")
            await soon(lambda: unknown(one, by_hand) and unknown(two, by_hand))

    def known(where: Peer, key: str) -> bool:
        return not unknown(where, key)

    def unknown(where: Peer, key: str) -> bool:
        """By the ring alone, so that the channel is what is looked at."""
        try:
            where.ring.authenticate(f"Bearer {key}")
        except Unauthorized:
            return True
        return False

    asyncio.run(main())


def test_a_new_key_works_at_once_at_every_server(postgres_url: str) -> None:
    async def main() -> None:
        async with peer(postgres_url) as one, peer(postgres_url) as two:
            await until(lambda: two.ring.is_current)
            for n in range(20):
                assert await two.admits(await one.make_key(f"t{n}"))
            assert not await two.admits("gw-" + "a" * 16 + "-" + "b" * 43)

    asyncio.run(main())


def test_under_load_with_listeners_killed_a_revoked_key_is_out_in_a_second_and_stays_out(postgres_url: str) -> None:
    late: list[float] = []
    back: list[str] = []
    killed: list[Any] = []
    ended = asyncio.Event()

    async def use(where: Peer, key: str, revoked: list[float]) -> None:
        refused = False
        while not ended.is_set():
            asked = time.monotonic()
            admitted = await where.admits(key)
            if revoked and admitted and asked > revoked[0] + SILENCE_S:
                late.append(asked - revoked[0])
            if refused and admitted:
                back.append(key)
            refused = refused or not admitted
            await asyncio.sleep(0.002)

    async def kill_listeners() -> None:
        while not ended.is_set():
            killed.extend(await asyncio.to_thread(execute, postgres_url, KILL_LISTENERS))
            await asyncio.sleep(0.15)

    async def main() -> None:
        async with peer(postgres_url) as one, peer(postgres_url) as two:
            keys = [await one.make_key(f"t{i}") for i in range(6)]
            kept = await one.make_key("kept")
            marks: list[list[float]] = [[] for _ in keys]
            users = [asyncio.create_task(use(w, k, m)) for k, m in zip(keys, marks, strict=True) for w in (one, two)]
            killer = asyncio.create_task(kill_listeners())
            for place, (key, mark) in enumerate(zip(keys, marks, strict=True)):
                await (one, two)[place % 2].revoke(key)
                mark.append(time.monotonic())
                await asyncio.sleep(0.1)
                assert await one.admits(kept)
                assert await two.admits(kept)
            await asyncio.sleep(SILENCE_S + 0.1)
            for key in keys:
                assert not await one.admits(key)
                assert not await two.admits(key)
            await until(lambda: len(killed) >= 4)
            ended.set()
            await asyncio.gather(*users, killer)
            await until(lambda: one.ring.is_current and two.ring.is_current)

    asyncio.run(main())
    assert late == []
    assert back == []


def test_a_silent_channel_is_not_believed_for_longer_than_a_second(postgres_url: str, line: Any) -> None:
    async def main() -> None:
        async with peer(postgres_url) as one, peer(postgres_url, listens_by=through(line, postgres_url)) as two:
            gone, kept = await one.make_key("acme"), await one.make_key("globex")
            await until(lambda: two.ring.is_current)
            with during(line.hold, line.mend):
                await one.revoke(gone)
                await asyncio.sleep(SILENCE_S)
                assert not two.ring.is_current
                assert not await two.admits(gone)
                assert await two.admits(kept)
                with pytest.raises(Unauthorized):
                    await two.ring.admit("Bearer no-key")
            await until(lambda: two.ring.is_current)
            with pytest.raises(Unauthorized):
                two.ring.authenticate(f"Bearer {gone}")
            two.ring.authenticate(f"Bearer {kept}")

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["hold", "cut"])
def test_without_the_database_keys_are_neither_let_in_nor_refused(postgres_url: str, line: Any, fault: str) -> None:
    now = [0.0]

    async def main() -> None:
        async with peer(postgres_url) as one, peer(through(line, postgres_url), within=0.2, clock=lambda: now[0]) as two:
            key = await one.make_key("acme")
            await until(lambda: two.ring.is_current and two.ring.entries)
            with during(getattr(line, fault), line.mend):
                assert await two.admits(key), "it is known to have been valid a moment ago"
                with pytest.raises(ServiceUnavailable):
                    await two.ring.admit(f"Bearer {generate().text}")  # who knows
                now[0] += SILENCE_S
                assert not two.ring.is_current
                for text_of_key in (key, key[:-1] + "x"):
                    with pytest.raises(ServiceUnavailable) as refused:
                        await two.ring.admit(f"Bearer {text_of_key}")
                    assert (refused.value.status, refused.value.code) == (503, "keys_unavailable")
                    assert "retry-after" in refused.value.headers
                await one.revoke(key)
            await until(lambda: two.ring.is_current)
            assert not await two.admits(key)

    asyncio.run(main())


@pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)
def test_a_server_that_starts_without_its_database_answers_503_and_recovers_by_itself(
    data_settings: Settings, bare_spec: BaseSpec, line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_OPEN_WITHIN_S", 0.1)

    async def main() -> None:
        async with peer(data_settings.database) as one:
            key = await one.make_key("acme")
        settings = replace(data_settings, database_url=through(line, data_settings.database))
        settings.secrets_dir.mkdir()
        for name, secret in (("pepper", SECRETS.pepper), ("cache-salt", SECRETS.cache_salt)):
            (settings.secrets_dir / name).write_text(secret.hex())
        line.cut()
        async with running(build_services(settings, bare_spec, open_store(settings.store))) as services:
            with pytest.raises(ServiceUnavailable):
                await services.keyring.admit(f"Bearer {key}")
            assert not settings.admin_key_file.exists()
            line.mend()
            await until(lambda: services.keyring.is_current and settings.admin_key_file.exists())
            assert (await services.keyring.admit(f"Bearer {key}")).tenant_name == "acme"

            async def operator_is_admitted() -> bool:  # whose key is in the file before it is valid
                with suppress(Unauthorized):
                    await services.keyring.admit_admin(f"Bearer {settings.admin_key_file.read_text().strip()}")
                    return True
                return False

            await until(operator_is_admitted)

    asyncio.run(main())


def test_servers_that_start_together_make_one_admin_key(postgres_url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with peer(postgres_url) as one, peer(postgres_url) as two, peer(postgres_url) as three:
            files = [tmp_path / name for name in "abc"]
            await asyncio.gather(*(each.keys.open(file) for each, file in zip((one, two, three), files, strict=True)))
            (file,) = [file for file in files if file.exists()]
            for each in (one, two, three):
                each.ring.authenticate_admin(f"Bearer {file.read_text().strip()}")

    asyncio.run(main())


def test_admin_keys_rotated_at_both_servers_at_once_leave_one_that_is_valid(
    postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with peer(postgres_url) as one, peer(postgres_url) as two:
            files = {name: tmp_path / name for name in ("one", "two")}
            await one.keys.open(files["one"])
            for _ in range(3):
                rotations = [one.keys.rotate_admin(files["one"]), two.keys.rotate_admin(files["two"])]
                made = await asyncio.gather(*rotations, one.keys.rotate_admin(files["one"]))
                with one.database.read() as session:
                    valid = session.scalars(select(ApiKey).where(ApiKey.is_admin, ApiKey.revoked_at.is_(None))).all()
                assert len(valid) == 1
                (key,) = [new.text for row, new in made if row.id == valid[0].id]
                holders = [file for file in files.values() if file.exists() and file.read_text().strip() == key]
                assert len(holders) == 1
            await one.keys.load()
            await two.keys.load()
            one.keys.settle_admin_file(files["one"])
            two.keys.settle_admin_file(files["two"])
            assert all(file.exists() for file in files.values())
            (stale,) = [file for file in files.values() if file not in holders]
            assert [
                str(stale) in record.getMessage() for record in caplog.records if "not valid any more" in record.getMessage()
            ] == [True]

    asyncio.run(main())


def test_a_key_made_while_its_tenant_is_deleted_is_refused(postgres_url: str) -> None:
    """The deletion's revocation meets the key, or the key's making meets the deletion."""

    async def main() -> None:
        async with peer(postgres_url) as one, peer(postgres_url) as two:
            for attempt in range(6):
                tenant = await one.tenants.create(f"t{attempt}")
                deleting = one.tenants.delete(tenant.id)
                await asyncio.gather(deleting, two.keys.create(tenant.id, adapter=None), return_exceptions=True)
            with one.database.read() as session:
                valid = select(func.count()).select_from(ApiKey).where(ApiKey.revoked_at.is_(None))
                assert session.scalar(valid) == 0

    asyncio.run(main())


def test_every_way_to_change_keys_is_announced_in_its_own_transaction(postgres_url: str) -> None:
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as listener:
        listener.execute("LISTEN graftwork_keys")
        database = Database(postgres_url)
        with database.write() as session:
            session.execute(text("INSERT INTO tenants (id, name, created_at) VALUES (gen_random_uuid(), 'acme', 0)"))
            session.flush()
            assert list(listener.notifies(timeout=0.1)) == [], "nothing is said before the commit"
        for statement, kind in (
            ("UPDATE tenants SET deleted_at = 1", "tenant:"),
            ("DELETE FROM tenants", "tenant:"),
            ("TRUNCATE tenants CASCADE", "all"),
        ):
            with database.write() as session:
                session.execute(text(statement))
            listener.execute("NOTIFY graftwork_keys, 'no more of this'")  # notices come in the order of commits
            heard: list[str] = []
            while "no more of this" not in heard:
                heard += [notice.payload for notice in listener.notifies(timeout=60, stop_after=1)]
            assert heard[0].startswith(kind)
        database.close()


def test_sqlite_needs_no_channel(start_admin: Callable[..., AbstractContextManager[Any]], database_kind: str) -> None:
    with start_admin() as admin:
        admin.until(lambda: admin.services.keyring.is_current)
        assert admin.services.database.is_shared == (database_kind == "postgresql")
