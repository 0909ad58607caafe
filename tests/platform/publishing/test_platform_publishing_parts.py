"""Parts through any server: what one has taken another counts, assembles, replaces and forgets."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from graftwork_adapters.errors import StoreUnavailable
from graftwork_adapters.folder_store import FolderStore
from graftwork_platform.errors import BadRequest, Conflict, PlatformError, ServiceUnavailable
from graftwork_platform.ids import uuid7
from graftwork_platform.publishing.incoming import Incoming
from graftwork_platform.publishing.manifest import FileEntry, parts_of
from graftwork_platform.publishing.store_threads import StoreThreads

Play = Callable[..., None]

WEIGHTS = bytes(range(256)) * 10  # three parts
PART = 1024


async def body_of(content: bytes) -> Any:
    for start in range(0, len(content), 100):
        yield content[start : start + 100]


def keys(server: Any) -> list[str]:
    return list(server.store.list_keys("incoming/"))


def test_create_parts_and_complete_may_each_go_to_another_server(play: Play) -> None:
    async def scene(tenant: UUID, *servers: Any) -> None:
        upload = await servers[0].begin(tenant, WEIGHTS)
        missing = (await servers[1].services.uploads.get(tenant, upload)).missing
        assert len(missing) == 4
        content = {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}
        for index, part in enumerate(missing):
            here, there = servers[index % 3], servers[(index + 1) % 3]
            body = body_of(content[part.path][part.offset : part.offset + part.size])
            await here.services.uploads.put_part(tenant, upload, part.path, part.number, body)
            assert len((await there.services.uploads.get(tenant, upload)).missing) == 3 - index
        await servers[2].services.uploads.complete(tenant, upload)
        version = await servers[0].ended(tenant, upload)
        assert (version.state, version.digest) == ("ready", hashlib.sha256(WEIGHTS).hexdigest())
        assert servers[1].blobs(version.digest) == 3
        while keys(servers[0]) or any(any(s.services.settings.uploads_dir.iterdir()) for s in servers):
            await asyncio.sleep(0.005)

    play(scene, servers=3)


def test_completed_at_two_servers_at_once_it_is_one_version(play: Play) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        for turn in range(5):
            weights, name = b"%d" % turn, f"n{turn}"
            upload = await one.begin(tenant, weights, name)
            await two.send(tenant, upload, weights)
            views = await asyncio.gather(*(server.services.uploads.complete(tenant, upload) for server in (one, two)))
            assert len({view.version.id for view in views}) == 1
            assert (await one.ended(tenant, upload)).number == 1

    play(scene)


def test_a_part_that_arrives_behind_the_verdict_is_refused_and_leaves_nothing(play: Play) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        upload = await one.begin(tenant)
        await two.send(tenant, upload)
        arrived = asyncio.Event()

        async def slow() -> Any:
            yield b"wei"
            await arrived.wait()
            yield b"ghts"

        late = asyncio.create_task(two.services.uploads.put_part(tenant, upload, "adapter_model.safetensors", 1, slow()))
        await asyncio.sleep(0.01)
        await one.services.uploads.complete(tenant, upload)
        assert (await one.ended(tenant, upload)).state == "ready"
        while keys(one):
            await asyncio.sleep(0.005)
        arrived.set()
        with pytest.raises(Conflict, match="takes no more parts"):
            await late
        assert keys(one) == []

    play(scene)


def test_a_store_that_is_away_is_told_as_such_at_every_step(play: Play) -> None:
    async def scene(tenant: UUID, one: Any) -> None:
        upload = await one.begin(tenant)
        await one.send(tenant, upload)

        def away(_operation: str, _key: str) -> None:
            raise StoreUnavailable("the store is away")

        uploads = one.services.uploads
        one.store.before = away
        steps = [
            lambda: uploads.get(tenant, upload),
            lambda: uploads.put_part(tenant, upload, "adapter_config.json", 1, body_of(b"{}")),
            lambda: uploads.complete(tenant, upload),
        ]
        for step in steps:
            with pytest.raises(ServiceUnavailable) as raised:
                await step()
            assert raised.value.code == "storage_unavailable"
        one.store.before = lambda _operation, _key: None
        await uploads.complete(tenant, upload)
        assert (await one.ended(tenant, upload)).state == "ready"

    play(scene, servers=1)


def test_a_part_that_is_sent_again_while_its_upload_is_completed_makes_it_busy_and_not_wrong(play: Play) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        upload = await one.begin(tenant, WEIGHTS)
        await one.send(tenant, upload, WEIGHTS)
        loop = asyncio.get_running_loop()

        def replace_first(operation: str, key: str) -> None:
            if operation == "fetch" and "/1.2." in key:
                one.store.before = lambda _operation, _key: None
                again = two.services.uploads.put_part(
                    tenant, upload, "adapter_model.safetensors", 2, body_of(WEIGHTS[PART : 2 * PART])
                )
                asyncio.run_coroutine_threadsafe(again, loop).result()

        one.store.before = replace_first
        with pytest.raises(Conflict) as raised:
            await one.services.uploads.complete(tenant, upload)
        assert raised.value.code == "upload_busy"
        await one.services.uploads.complete(tenant, upload)
        assert (await two.ended(tenant, upload)).state == "ready"

    play(scene)


def test_uploads_expire_whichever_server_took_their_parts_and_young_ones_are_left_alone(play: Play) -> None:
    clock = [1_700_000_000.0]

    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        old = await one.begin(tenant)
        await one.send(tenant, old)
        clock[0] += 25 * 3600
        young = await two.begin(tenant)
        await two.send(tenant, young)
        # A server that is an hour behind: its new uploads may be missing from a list that was made a moment before.
        behind = uuid7(lambda: clock[0] - 1800)
        path = one.services.settings.data_dir / "part"
        path.write_bytes(b"x")
        one.store.put_if_absent(f"incoming/{behind.hex}/0.1.1.{uuid4().hex}", path)
        await two.services.publisher.sweep()
        assert {key.split("/")[1] for key in keys(one)} == {young.hex, behind.hex}
        with pytest.raises(Conflict, match="expired"):
            await one.services.uploads.complete(tenant, old)
        clock[0] += 3600
        await one.services.publisher.sweep()
        assert {key.split("/")[1] for key in keys(one)} == {young.hex}

    play(scene, now=lambda: clock[0])


@pytest.fixture
def incoming(tmp_path: Path) -> tuple[Incoming, Incoming]:
    """Of two servers."""
    return of_server(tmp_path, "one"), of_server(tmp_path, "two")


def of_server(folder: Path, name: str) -> Incoming:
    return Incoming(FolderStore(folder / "objects"), folder / name, StoreThreads())


def entry(content: bytes, path: str = "weights") -> FileEntry:
    return FileEntry(path, len(content), hashlib.sha256(content).hexdigest())


def assembled(incoming: Incoming, upload: UUID, file: FileEntry) -> bytes | str | None:
    """The file, or the code of the error that it cannot be had for."""
    try:
        return (incoming.folder(upload, [file], PART) / file.path).read_bytes()
    except BadRequest as error:
        return error.code


def test_a_part_sent_at_once_to_two_servers_is_there_once_and_whole(incoming: tuple[Incoming, Incoming]) -> None:
    good, bad = b"g" * 1500, b"b" * 1500
    file = entry(good)
    first, second = parts_of(file, PART)

    async def scene() -> None:
        for _ in range(10):
            upload = uuid4()
            await incoming[0].receive(upload, [file], second, body_of(good[PART:]))
            sent = (
                incoming[0].receive(upload, [file], first, body_of(good[:PART])),
                incoming[1].receive(upload, [file], first, body_of(bad[:PART])),
            )
            await asyncio.gather(*sent, incoming[1].receive(upload, [file], first, body_of(good[:PART])))
            views = [one.received(upload, [file], PART) for one in incoming]
            assert views == [{("weights", 1), ("weights", 2)}] * 2
            verdict = assembled(incoming[0], upload, file)
            if verdict == good:
                assert assembled(incoming[1], upload, file) == good
            else:
                assert verdict == "checksum_mismatch"
                assert incoming[1].received(upload, [file], PART) == set()

    asyncio.run(scene())


def test_the_part_that_was_sent_last_counts_whichever_server_took_it(incoming: tuple[Incoming, Incoming], tmp_path: Path) -> None:
    good, bad = b"g" * 1500, b"b" * 1500
    file = entry(good)
    first, second = parts_of(file, PART)

    async def scene() -> None:
        for turn in range(20):
            upload = uuid4()
            await incoming[turn % 2].receive(upload, [file], second, body_of(good[PART:]))
            await incoming[turn % 2].receive(upload, [file], first, body_of(bad[:PART]))
            await incoming[1 - turn % 2].receive(upload, [file], first, body_of(good[:PART]))
            assert len(list(FolderStore(tmp_path / "objects").list_keys(f"incoming/{upload.hex}/"))) == 2
            assert (incoming[0].folder(upload, [file], PART) / "weights").read_bytes() == good

    asyncio.run(scene())


def test_listing_an_upload_does_not_count_another_ones_parts(incoming: tuple[Incoming, Incoming]) -> None:
    file = entry(b"x")
    part = parts_of(file, PART)[0]

    async def scene() -> None:
        upload = uuid4()
        near = UUID(int=upload.int ^ 1)
        await incoming[0].receive(near, [file], part, body_of(b"x"))
        assert incoming[0].received(upload, [file], PART) == set()
        with pytest.raises(PlatformError, match="have not arrived"):
            incoming[0].assemble(upload, [file], PART)

    asyncio.run(scene())


def test_what_a_dead_process_left_on_the_local_disk_goes_and_what_lives_stays(
    incoming: tuple[Incoming, Incoming], tmp_path: Path
) -> None:
    file = entry(b"x")

    async def scene() -> None:
        upload = uuid4()
        await incoming[0].receive(upload, [file], parts_of(file, PART)[0], body_of(b"x"))
        folder = incoming[0].folder(upload, [file], PART)
        (tmp_path / "one" / "left-by-a-crash").mkdir()
        of_server(tmp_path, "one").sweep_local()  # another process on the same folder
        assert not (tmp_path / "one" / "left-by-a-crash").exists()
        assert (folder / "weights").read_bytes() == b"x"
        incoming[0].close()
        assert list((tmp_path / "one").iterdir()) == []
        assert incoming[0].received(upload, [file], PART) == {("weights", 1)}

    asyncio.run(scene())
