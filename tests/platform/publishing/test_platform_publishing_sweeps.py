"""Blobs between servers: a sweep never takes what a publication counts on, and nothing is kept for ever."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select

from graftwork_adapters.errors import StoreUnavailable
from graftwork_adapters.keys import AdapterDigest, packed_key, packed_path
from graftwork_adapters.packed import read_packed
from graftwork_platform.errors import Conflict, NotFound
from graftwork_platform.models import Adapter, AdapterVersion, BlobSweep
from graftwork_platform.publishing import blob_records, blobs

Play = Callable[..., None]


class Gate:
    """Stops one operation of a `SteeredStore` where it is, until `open`."""

    def __init__(self, operation: str, *, part_of: str = "/") -> None:
        self.reached, self._may_go = threading.Event(), threading.Event()
        self._operation, self._part = operation, part_of

    def __call__(self, operation: str, key: str) -> None:
        if operation == self._operation and self._part in key and not key.startswith("incoming/"):
            self.reached.set()
            assert self._may_go.wait(60)

    def open(self) -> None:
        self._may_go.set()

    async def is_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 60)


async def marks(server: Any) -> list[str]:
    found: list[str] = await server.services.database.run_read(lambda s: list(s.scalars(select(BlobSweep.digest))))
    return found


async def orphan(server: Any, tenant: UUID, clock: list[float], weights: bytes = b"weights") -> str:
    """A digest whose only version was deleted so long ago that a sweep takes it."""
    digest = (await server.push(tenant, weights)).digest
    await server.services.catalog.delete_adapter(tenant, "support")
    clock[0] += 2 * server.services.settings.request_timeout + 1
    assert digest is not None
    return str(digest)


@pytest.fixture
def clock() -> list[float]:
    return [1_700_000_000.0]


def test_a_sweep_leaves_what_another_server_has_just_found_in_place(play: Play, clock: list[float]) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        digest = await orphan(one, tenant, clock)
        for server in (one, two):
            server.store.before = Gate("put", part_of="packed/")  # the files were found in place, the packed form is not yet
        upload = await two.submit(tenant)
        publishing = asyncio.create_task(two.ended(tenant, upload))
        at_gate = next(iter(await first_of(one.store.before, two.store.before)))
        await one.services.publisher.sweep()
        await two.services.publisher.sweep()
        assert (one.blobs(digest), await marks(one)) == (3, [])
        for gate in (one.store.before, two.store.before):
            gate.open()
        version = await publishing
        assert at_gate.reached.is_set()
        assert (version.state, version.digest, version.number, one.blobs(digest)) == ("ready", digest, 2, 3)
        await one.services.publisher.sweep()
        assert one.blobs(digest) == 3

    async def first_of(*gates: Gate) -> set[Gate]:
        while not (reached := {gate for gate in gates if gate.reached.is_set()}):
            await asyncio.sleep(0.005)
        return reached

    play(scene, now=lambda: clock[0])


def test_a_publication_waits_for_the_sweep_that_deletes_its_blobs(play: Play, clock: list[float]) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        digest = await orphan(one, tenant, clock)
        gate = one.store.before = Gate("delete")
        sweeping = asyncio.create_task(one.services.publisher.sweep())
        await gate.is_reached()
        upload = await two.submit(tenant)
        while two.publish.began + one.publish.began < 2:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        assert (await two.row(upload)).state == "validating"
        gate.open()
        await sweeping
        version = await two.ended(tenant, upload)
        assert (version.state, version.digest, one.blobs(digest), await marks(one)) == ("ready", digest, 3, [])

    play(scene, now=lambda: clock[0])


def test_the_mark_of_a_killed_sweep_is_void_after_a_while_for_publications_and_for_sweeps(
    play: Play, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        digest = await orphan(one, tenant, clock)
        dead = UUID(int=1)
        await one.services.database.run_write(lambda s: blob_records.begin_sweep(s, AdapterDigest(digest), dead, None))
        await two.services.publisher.sweep()
        assert (one.blobs(digest), await marks(one)) == (3, [digest])
        monkeypatch.setattr(blobs, "_DEAD_SECONDS", 0.1)
        assert (await two.push(tenant)).digest == digest
        assert (one.blobs(digest), await marks(one)) == (3, [])

        await one.services.catalog.delete_adapter(tenant, "support")
        clock[0] += 2 * one.services.settings.request_timeout + 1
        await one.services.database.run_write(lambda s: blob_records.begin_sweep(s, AdapterDigest(digest), UUID(int=2), None))
        await two.services.publisher.sweep()
        assert one.blobs(digest) == 3
        await asyncio.sleep(0.15)
        await two.services.publisher.sweep()
        assert (one.blobs(digest), await marks(one)) == (0, [])

    play(scene, now=lambda: clock[0])


def test_a_sweep_that_takes_too_long_begins_no_more_deletions(
    play: Play, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(tenant: UUID, one: Any) -> None:
        digest = await orphan(one, tenant, clock)
        with monkeypatch.context() as patched:
            patched.setattr(blobs, "_SWEEP_SECONDS", -1.0)
            await one.services.publisher.sweep()
            assert (one.blobs(digest), await marks(one)) == (3, [])
        await one.services.publisher.sweep()
        assert one.blobs(digest) == 0

    play(scene, servers=1, now=lambda: clock[0])


def test_a_sweep_that_fails_half_way_is_made_good_by_the_next(play: Play, clock: list[float]) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        digest = await orphan(one, tenant, clock)

        def away(operation: str, key: str) -> None:
            if operation == "delete" and key.endswith(".json"):
                raise StoreUnavailable("away")

        one.store.before = away
        await one.services.publisher.sweep()
        assert (one.blobs(digest), await marks(one)) == (2, [])
        await asyncio.gather(two.services.publisher.sweep(), two.services.publisher.sweep())
        assert (one.blobs(digest), await marks(one)) == (0, [])

    play(scene, now=lambda: clock[0])


def test_blobs_of_a_version_that_failed_behind_its_digest_go_too(play: Play, clock: list[float]) -> None:
    async def scene(tenant: UUID, one: Any) -> None:
        gate = one.store.before = Gate("put", part_of="packed/")
        upload = await one.submit(tenant)
        await gate.is_reached()
        await one.services.catalog.delete_adapter(tenant, "support")
        gate.open()
        version = await one.ended(tenant, upload)
        assert (version.state, one.blobs(version.digest)) == ("failed", 3)
        await one.services.publisher.sweep()
        assert one.blobs(version.digest) == 3
        clock[0] += 2 * one.services.settings.request_timeout + 1
        await one.services.publisher.sweep()
        assert one.blobs(version.digest) == 0

    play(scene, servers=1, now=lambda: clock[0])


def test_a_packed_form_rebuilt_for_a_version_that_was_swept_meanwhile_does_not_stay(play: Play, clock: list[float]) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        digest = await orphan(one, tenant, clock)
        packed = packed_path(packed_key(AdapterDigest(digest), "b" * 64, "bfloat16"))
        one.store.delete(packed)
        gate = one.store.before = Gate("put", part_of="packed/")
        rebuilding = asyncio.create_task(one.services.publisher.ensure_packed(AdapterDigest(digest)))
        await gate.is_reached()
        await two.services.publisher.sweep()
        assert two.blobs(digest) == 0
        gate.open()
        await rebuilding
        assert two.blobs(digest) == 0

    play(scene, now=lambda: clock[0])


def test_two_servers_that_rebuild_a_packed_form_at_once_leave_one_that_is_whole(play: Play, tmp_path: Any) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        digest = AdapterDigest((await one.push(tenant)).digest or "")
        packed = packed_path(packed_key(digest, "b" * 64, "bfloat16"))
        one.store.delete(packed)
        began = one.publish.began + two.publish.began
        one.publish.go.clear()
        two.publish.go.clear()
        both = [asyncio.create_task(server.services.publisher.ensure_packed(digest)) for server in (one, two)]
        while one.publish.began + two.publish.began < began + 2:
            await asyncio.sleep(0.005)
        one.publish.go.set()
        two.publish.go.set()
        await asyncio.gather(*both)
        one.store.fetch(packed, tmp_path / "packed")
        index, _ = read_packed(tmp_path / "packed", packed_key(digest, "b" * 64, "bfloat16"))
        assert index.digest == digest

    play(scene)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_servers_do_at_once_ready_versions_have_their_blobs_and_nothing_stays_behind(
    play: Play, seed: int, clock: list[float]
) -> None:
    chance = random.Random(seed)
    names, contents = ["a", "b"], [b"one", b"two", b"three"]

    async def push(tenant: UUID, server: Any, name: str, weights: bytes) -> None:
        upload = await server.begin(tenant, weights, name)
        await server.send(tenant, upload, weights)
        try:
            await server.services.uploads.complete(tenant, upload)
        except Conflict as error:  # the clock was moved on while it was sent
            assert error.code in ("upload_expired", "upload_closed")  # noqa: PT017 — what is expected is that there may be none
            return
        await server.ended(tenant, upload)

    async def delete(tenant: UUID, server: Any, name: str) -> None:
        try:
            await server.services.catalog.delete_adapter(tenant, name)
        except NotFound:
            return

    async def check(server: Any) -> None:
        def ready(session: Any) -> list[tuple[UUID, str]]:
            query = select(AdapterVersion.id, AdapterVersion.digest).where(AdapterVersion.state == "ready")
            return [(version_id, digest) for version_id, digest in session.execute(query)]

        before = await server.services.database.run_read(ready)
        counted = {digest: await asyncio.to_thread(server.blobs, digest) for _, digest in before}
        after = await server.services.database.run_read(ready)
        for version in set(before) & set(after):
            assert counted[version[1]] == 3

    async def scene(tenant: UUID, *servers: Any) -> None:
        for server in servers:
            server.publish.delay = lambda: chance.choice([0.0, 0.0, 0.01])
            server.store.before = lambda _operation, _key: time.sleep(chance.choice([0.0, 0.0, 0.002]))
        for _ in range(5):
            acts: list[Any] = []
            for _ in range(4):
                server, name = chance.choice(servers), chance.choice(names)
                acts += [push(tenant, server, name, chance.choice(contents)), chance.choice(servers).services.publisher.sweep()]
                acts += [delete(tenant, server, name)] if chance.random() < 0.5 else []
            chance.shuffle(acts)
            clock[0] += chance.choice([0.0, 700.0])
            await asyncio.gather(*acts)
            await check(servers[0])
        versions: Any = await servers[0].services.database.run_read(
            lambda s: s.execute(
                select(Adapter.name, AdapterVersion.number, AdapterVersion.id, Adapter.next_version)
                .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
                .where(AdapterVersion.number.is_not(None))
                .order_by(Adapter.name, AdapterVersion.number)
            ).all()
        )
        for name in names:
            numbers = [number for owner, number, _, _ in versions if owner == name]
            assert numbers == list(range(1, len(numbers) + 1))
            assert all(following == len(numbers) + 1 for owner, _, _, following in versions if owner == name)
        for name in names:
            await delete(tenant, servers[0], name)
        clock[0] += 26 * 3600
        await servers[1].services.publisher.sweep()
        await servers[0].services.publisher.sweep()
        left = [key for prefix in ("incoming/", "packed/", "uploads/") for key in servers[0].store.list_keys(prefix)]
        assert (left, await marks(servers[0])) == ([], [])

    play(scene, now=lambda: clock[0], request_timeout=300.0)
