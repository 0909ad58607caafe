"""Who publishes: a server that dies or stalls delays a verdict, never loses it, never gives two, and never for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.exc import OperationalError

from graftwork_adapters.errors import StoreUnavailable
from graftwork_platform.models import AdapterVersion
from graftwork_platform.publishing import records
from graftwork_platform.publishing.leases import PublishTiming
from graftwork_platform.settings import PublishLimits

Play = Callable[..., None]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # the scene's own end is long enough for any machine
        await asyncio.sleep(0.005)


async def version_of(server: Any, upload: UUID) -> AdapterVersion:
    row = await server.row(upload)
    found: AdapterVersion = await server.services.database.run_read(lambda s: s.get_one(AdapterVersion, row.version_id))
    return found


def test_a_killed_servers_publication_is_finished_by_another_once_its_lease_has_run_out(play: Play) -> None:
    clock = [1_700_000_000.0]

    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        one.publish.go.clear()
        two.publish.go.clear()
        upload = await one.submit(tenant)
        await until(lambda: one.publish.began + two.publish.began == 1)
        holder, other = (one, two) if one.publish.began else (two, one)
        holder.kill()
        other.publish.go.set()
        clock[0] += 1499.9
        await asyncio.sleep(0.1)
        assert (other.publish.began, (await one.row(upload)).state) == (0, "validating")
        clock[0] += 0.2
        version = await other.ended(tenant, upload)
        assert (version.state, version.number, version.attempts) == ("ready", 1, 2)
        assert other.blobs(version.digest) == 3

    play(scene, now=lambda: clock[0])


def test_a_live_lease_is_renewed_and_nobody_else_begins(play: Play) -> None:
    clock = [1_700_000_000.0]

    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        one.publish.go.clear()
        two.publish.go.clear()
        upload = await one.submit(tenant)
        await until(lambda: one.publish.began + two.publish.began == 1)
        for _ in range(6):  # four leases long; no machine is too slow, since the time waits for the renewal
            clock[0] += 0.2
            while (await one.row(upload)).lease_until < (clock[0] + 0.25) * 1000:
                await asyncio.sleep(0.005)
        assert one.publish.began + two.publish.began == 1
        one.publish.go.set()
        two.publish.go.set()
        assert (await one.ended(tenant, upload)).attempts == 1

    play(scene, now=lambda: clock[0], timing=PublishTiming(lease=0.3, poll=0.01))


def test_a_server_that_stalled_past_its_lease_gives_no_verdict_and_stops(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    clock = [1_700_000_000.0]

    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        one.publish.go.clear()
        two.publish.go.clear()
        upload = await one.submit(tenant)
        await until(lambda: one.publish.began + two.publish.began == 1)
        staller, other = (one, two) if one.publish.began else (two, one)
        clock[0] += 1500.1  # the staller has not renewed: to it only moments have passed
        other.publish.go.set()
        version = await other.ended(tenant, upload)
        staller.publish.refuse = True  # whatever it finds counts no more
        staller.publish.go.set()
        await until(lambda: "taken the publication over" in caplog.text)
        after = await version_of(one, upload)
        assert (after.id, after.state, after.number, after.attempts) == (version.id, "ready", 1, 2)

    play(scene, now=lambda: clock[0])


def test_a_renewal_that_finds_the_lease_taken_stops_the_work(play: Play) -> None:
    async def scene(tenant: UUID, one: Any) -> None:
        one.publish.go.clear()
        upload = await one.submit(tenant)
        await until(lambda: one.publish.began == 1)
        other = await one.services.database.run_write(
            lambda s: records.take_lease(s, upload, tenant, now=1 << 52, until=1 << 53)  # as a server whose clock is far ahead
        )
        assert other is not None
        await until(lambda: not any(task.get_name().startswith("work on") for task in asyncio.all_tasks()))
        assert (await one.row(upload)).lease_holder == tenant

    play(scene, servers=1, timing=PublishTiming(lease=0.1, poll=1000.0))


def test_a_server_that_closes_gives_its_publications_back_at_once(play: Play) -> None:
    clock = [1_700_000_000.0]

    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        one.publish.go.clear()
        two.publish.go.clear()
        upload = await one.submit(tenant)
        await until(lambda: one.publish.began + two.publish.began == 1)
        holder, other = (one, two) if one.publish.began else (two, one)
        other.publish.go.set()
        await holder.services.publisher.close()
        version = await other.ended(tenant, upload)
        assert (version.state, version.attempts) == ("ready", 2)
        assert [*holder.services.settings.uploads_dir.iterdir(), *holder.services.settings.scratch_dir.iterdir()] == []

    play(scene, now=lambda: clock[0])


@pytest.mark.parametrize("error", [StoreUnavailable("the disk is full"), OSError(11, "no process left", "/secret")])
def test_a_fault_of_the_server_is_tried_again(play: Play, error: Exception) -> None:
    async def scene(tenant: UUID, one: Any) -> None:
        one.publish.errors = [error, error]
        version = await one.push(tenant)
        assert (version.state, version.number, version.attempts) == ("ready", 1, 3)

    play(scene, servers=1)


@pytest.mark.parametrize("error", [StoreUnavailable("the disk is full"), OSError(11, "no process left", "/secret")])
def test_a_lasting_fault_of_the_server_fails_the_version_with_the_reason_and_without_paths(play: Play, error: Exception) -> None:
    async def scene(tenant: UUID, one: Any) -> None:
        one.publish.errors = [error] * 9
        version = await one.push(tenant)
        (finding,) = version.report
        assert (version.state, version.attempts, finding["fix"]) == ("failed", 3, "push it again")
        assert str(error).split("] ")[-1].split(":")[0] in finding["message"]
        assert "secret" not in finding["message"]
        await until(lambda: list(one.store.list_keys("incoming/")) == [])

    play(scene, servers=1)


def test_a_database_fault_behind_the_validation_leaves_nothing_validating_for_ever(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(tenant: UUID, one: Any) -> None:
        finish, tries = records.finish, []

        def away_twice(*arguments: Any) -> None:
            tries.append(1)
            if len(tries) < 3:
                raise OperationalError("UPDATE secret", {}, Exception("disk I/O error"))
            finish(*arguments)

        monkeypatch.setattr(records, "finish", away_twice)
        version = await one.push(tenant)
        assert (version.state, len(tries)) == ("ready", 3)
        assert one.blobs(version.digest) == 3

    play(scene, servers=1)


def test_a_lasting_database_fault_is_told_without_its_statement(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_arguments: Any) -> None:
        raise OperationalError("UPDATE secret", {}, Exception("disk I/O error"))

    async def scene(tenant: UUID, one: Any) -> None:
        monkeypatch.setattr(records, "finish", away)
        (finding,) = (await one.push(tenant)).report
        assert "database" in finding["message"]
        assert "secret" not in finding["message"]

    play(scene, servers=1)


def test_when_not_even_the_fault_can_be_written_down_the_lease_runs_out(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(tenant: UUID, one: Any) -> None:
        tries = []

        def away(*_arguments: Any, **_options: Any) -> None:
            tries.append(1)
            raise OperationalError("UPDATE", {}, Exception("disk I/O error"))

        one.publish.errors = [StoreUnavailable("away")]
        with monkeypatch.context() as patched:
            patched.setattr(records, "put_off", away)
            upload = await one.submit(tenant)
            await until(lambda: tries != [])
        assert (await one.ended(tenant, upload)).state == "ready"

    play(scene, servers=1, timing=PublishTiming(lease=0.3, poll=0.02))


def test_a_programming_error_is_bounded_too(play: Play) -> None:
    async def scene(tenant: UUID, one: Any) -> None:
        one.publish.errors = [KeyError("a bug")] * 9
        version = await one.push(tenant)
        assert version.state == "failed"
        assert "stopped or failed 3 times" in version.report[0]["message"]

    play(scene, servers=1, timing=PublishTiming(lease=0.1, poll=0.01))


def test_an_upload_that_stops_every_server_is_given_up_with_what_is_known(play: Play) -> None:
    clock = [1_700_000_000.0]

    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        one.publish.errors = two.publish.errors = [StoreUnavailable("the disk is full")]
        upload = await one.submit(tenant)
        while not (await version_of(one, upload)).report:
            await asyncio.sleep(0.005)
        one.publish.go.clear()
        two.publish.go.clear()
        clock[0] += 1.0
        await until(lambda: one.publish.began + two.publish.began == 2)
        clock[0] += 1501.0
        version = await one.ended(tenant, upload)
        assert (version.state, one.publish.began + two.publish.began) == ("failed", 2)
        assert "stopped or failed 2 times" in version.report[0]["message"]
        assert "the disk is full" in version.report[0]["message"]

    play(scene, now=lambda: clock[0], publish=PublishLimits(max_attempts=2))


def test_a_server_whose_upload_another_one_took_keeps_no_copy_of_it(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        two.publish.go.clear()
        with monkeypatch.context() as late:
            late.setattr(one.services.publisher, "submit", lambda _upload: None)
            upload = await one.submit(tenant)
            assert any(one.services.settings.uploads_dir.iterdir())
            await until(lambda: two.publish.began == 1)
        one.services.publisher.submit(upload)
        await until(lambda: not any(one.services.settings.uploads_dir.iterdir()))
        two.publish.go.set()
        assert (await one.ended(tenant, upload)).state == "ready"
        assert one.publish.began == 0

    play(scene)
