"""A store or database that is away or hangs: pushes wait for it, the background goes on, and nothing else stands behind it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from graftwork_adapters.errors import StoreUnavailable
from graftwork_adapters.folder_store import FolderStore
from graftwork_platform.db import DatabaseUnavailable
from graftwork_platform.ids import uuid7
from graftwork_platform.publishing.incoming import Incoming
from graftwork_platform.publishing.leases import PublishTiming
from graftwork_platform.publishing.manifest import FileEntry
from graftwork_platform.publishing.store_threads import StoreThreads

Play = Callable[..., None]

PATIENT = PublishTiming(lease=1500.0, poll=0.01, retry_pause=0.01, outage_pause=0.02, sweep=0.02)
ONE_KIND = pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)


@ONE_KIND
@pytest.mark.parametrize("error", [StoreUnavailable("it does not answer"), DatabaseUnavailable()])
def test_an_outage_longer_than_all_attempts_does_not_fail_a_push(
    play: Play, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(tenant: UUID, one: Any) -> None:
        one.publish.errors = [error] * 9
        version = await one.push(tenant)
        assert (version.state, version.number, version.attempts) == ("ready", 1, 1)

    with caplog.at_level(logging.WARNING, "graftwork_platform.publishing"):
        play(scene, servers=1, timing=PATIENT)
    told = [record for record in caplog.records if "attempt 1 to publish" in record.getMessage()]
    assert len(told) == 9
    assert all(record.exc_info is None and str(error) in record.getMessage() for record in told)


@ONE_KIND
def test_an_outage_that_does_not_end_fails_the_push_with_the_reason(play: Play) -> None:
    async def scene(tenant: UUID, one: Any) -> None:
        one.publish.errors = [StoreUnavailable("it does not answer")] * 999
        version = await one.push(tenant)
        (finding,) = version.report
        assert (version.state, version.attempts, one.publish.began > 3) == ("failed", 3, True)
        assert "it does not answer" in (finding["message"] or "")

    play(scene, servers=1, timing=replace(PATIENT, outage=0.3))


@ONE_KIND
def test_a_fault_that_is_no_outage_still_has_few_attempts(play: Play) -> None:
    async def scene(tenant: UUID, one: Any) -> None:
        one.publish.errors = [OSError(28, "No space left on device")] * 9
        assert ((await one.push(tenant)).state, one.publish.began) == ("failed", 3)

    play(scene, servers=1, timing=PATIENT)


@ONE_KIND
def test_an_unforeseen_error_does_not_end_the_background(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swept = [0]

    async def scene(_tenant: UUID, one: Any) -> None:
        def sweep(*_arguments: Any) -> None:
            swept[0] += 1
            raise RuntimeError("dictionary changed size during iteration")

        monkeypatch.setattr(one.services.publisher._incoming, "sweep", sweep)
        while swept[0] < 3:
            await asyncio.sleep(0.01)

    play(scene, servers=1, timing=PATIENT)
    assert any(record.exc_info for record in caplog.records if "unforeseen" in record.getMessage())


def test_local_folders_may_come_and_go_while_they_are_swept(tmp_path: Path) -> None:
    """A sweep looks at each folder while others are assembled; those of the last hour are not its to remove."""
    incoming = Incoming(FolderStore(tmp_path / "objects"), tmp_path / "local", StoreThreads())
    now = 1_700_000_000

    def put(upload_id: UUID) -> None:
        files = [FileEntry("weights", 1, "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881")]
        source = tmp_path / f"source-{upload_id.hex}"
        source.write_bytes(b"x")
        incoming._store_part(upload_id, 0, 1, source)
        incoming.assemble(upload_id, files, 10)

    old, young = uuid7(lambda: now - 7200), uuid7(lambda: now)
    put(old)
    put(young)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            put(uuid7(lambda: now))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(30):
            incoming.sweep((), now * 1000)
    finally:
        stop.set()
        thread.join()
    assert young in incoming._folders
    assert old not in incoming._folders
    incoming.close()


@ONE_KIND
def test_nothing_else_waits_behind_a_store_that_hangs(play: Play) -> None:
    hanging, released = threading.Semaphore(0), threading.Event()

    async def scene(tenant: UUID, one: Any) -> None:
        def hang(operation: str, _key: str) -> None:
            if operation == "list":
                hanging.release()
                assert released.wait(60)

        uploads = [await one.begin(tenant, b"%d" % number) for number in range(40)]
        one.store.before = hang
        asking = [asyncio.create_task(one.services.uploads.get(tenant, upload)) for upload in uploads]
        try:
            for _ in range(16):
                while not hanging.acquire(blocking=False):
                    await asyncio.sleep(0.005)
            async with asyncio.timeout(30):
                assert await asyncio.to_thread(lambda: "tokens") == "tokens"
        finally:
            released.set()
        views = await asyncio.gather(*asking)
        assert [len(view.missing) for view in views] == [2] * 40

    play(scene, servers=1)
