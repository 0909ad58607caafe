"""Names between servers: seen at once everywhere, dealt once, and never cleaned into another one."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any
from urllib.parse import quote
from uuid import UUID

import pytest

from graftwork_platform.errors import Conflict, ModelNotFound

Play = Callable[..., None]

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}

ESCAPES = ["../x", "..", ".", "%2e%2e%2fx", "..%2fx", "/etc/passwd", "a/../b", "a\\..\\b", "a\x00b", "a\n", " a", "a b", ""]
LOOK_ALIKES = ["suppоrt", "ｓupport", "support\u200b", "suppo\u0301rt", "\u202esupport", "ſupport"]
OTHER_CASES = ["Support", "SUPPORT", "supporT"]


def objects(admin: Any) -> set[str]:
    """Every file in the data directory but the database's and the logs of usage."""
    root = admin.services.settings.data_dir
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if not p.name.startswith("graftwork.db")}


def test_a_version_that_is_ready_in_one_server_is_served_by_the_other_at_once(play: Play) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        for number in range(1, 6):
            if number == 1:
                for server in (one, two):
                    for _ in range(3):  # a name that is asked for too early must not be remembered as unknown
                        with pytest.raises(ModelNotFound):
                            await server.services.catalog.resolve(tenant, "support")
            version = await one.push(tenant, b"%d" % number)
            seen = await two.services.catalog.resolve(tenant, "support")
            assert (seen.version, seen.digest) == (number, version.digest)
        await two.services.catalog.delete_adapter(tenant, "support")
        with pytest.raises(ModelNotFound):
            await one.services.catalog.resolve(tenant, "support")

    play(scene)


def test_a_hundred_requests_over_a_name_whose_version_changes_get_one_or_the_other_whole(play: Play) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        digests = {1: (await one.push(tenant, b"first")).digest}
        pushing = asyncio.create_task(one.push(tenant, b"second"))
        seen: list[tuple[int, str]] = []

        async def ask() -> None:
            resolved = await two.services.catalog.resolve(tenant, "support")
            seen.append((resolved.version, resolved.digest))

        while len(seen) < 100 or not pushing.done():
            await asyncio.gather(*(ask() for _ in range(10)))
        digests[2] = (await pushing).digest
        await ask()
        assert {version for version, _ in seen} == {1, 2}
        assert all(digest == digests[version] for version, digest in seen)

    play(scene)


def test_names_made_in_two_servers_at_once_are_one_row_or_a_clear_error(play: Play) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        for turn in range(5):
            made = await asyncio.gather(
                *(server.services.tenants.create(f"t{turn}") for server in (one, two, one, two)), return_exceptions=True
            )
            refused = [result for result in made if isinstance(result, BaseException)]
            assert [type(error) for error in refused] == [Conflict] * 3
            uploads = []
            for server, weights in ((one, b"left"), (two, b"right")):
                uploads.append(await server.begin(tenant, weights, f"a{turn}"))
                await server.send(tenant, uploads[-1], weights)
            completing = (
                server.services.uploads.complete(tenant, upload) for server, upload in zip((one, two), uploads, strict=True)
            )
            views = await asyncio.gather(*completing)
            assert len({view.version.adapter_id for view in views}) == 1
            versions = [await one.ended(tenant, upload) for upload in uploads]
            assert sorted(version.number or 0 for version in versions) == [1, 2]

    play(scene)


def test_numbers_of_one_adapter_are_dealt_once_by_many_publications_at_once(play: Play) -> None:
    async def scene(tenant: UUID, one: Any, two: Any) -> None:
        pushes = (server.push(tenant, b"%d" % turn) for turn, server in enumerate([one, two] * 5))
        numbers = [version.number for version in await asyncio.gather(*pushes)]
        assert sorted(numbers) == list(range(1, 11))

    play(scene)


@pytest.mark.parametrize("name", [*ESCAPES, *LOOK_ALIKES, *OTHER_CASES])
def test_a_name_that_would_need_cleaning_is_refused_and_touches_nothing(admin: Any, name: str) -> None:
    tenant = admin.tenant()
    assert admin.start_upload(tenant, FILES, "support").status_code == 201
    before = objects(admin)
    upload = admin.start_upload(tenant, FILES, name)
    assert (upload.status_code, upload.json()["error"]["param"]) == (400, "name")
    made = admin.call("POST", "/tenants", json={"name": name})
    assert (made.status_code, made.json()["error"]["param"]) == (400, "name")
    for path in (f"/tenants/{tenant}/adapters/{quote(name, safe='')}", f"/tenants/{quote(name, safe='')}/adapters/support"):
        assert admin.call("GET", path).status_code in ((200, 404) if name in ("", ".", "..") else (404,))
    assert objects(admin) == before


@pytest.mark.parametrize("path", [*(e for e in ESCAPES if e != "a b"), *LOOK_ALIKES])
def test_a_path_that_would_need_cleaning_is_refused_and_touches_nothing(admin: Any, path: str) -> None:
    tenant = admin.tenant()
    upload = admin.start_upload(tenant, FILES).json()
    before = objects(admin)
    promised = admin.start_upload(tenant, {**FILES, path: b"x"})
    assert (promised.status_code, promised.json()["error"]["code"]) == (400, "invalid_path")
    if path not in ("", ".", "..", "../x"):  # which the client itself resolves
        url = f"/tenants/{tenant}/uploads/{upload['id']}/files/{quote(path, safe='')}"
        sent = admin.call("PUT", url, content=b"{}")
        assert (sent.status_code, sent.json()["error"]["code"]) == (400, "invalid_path")
    assert objects(admin) == before


@pytest.mark.parametrize(
    "paths", [("a", "A"), ("README.md", "readme.MD"), ("a", "a/b"), ("A", "a/b"), ("x/a.b", "X/A.B"), ("a/b", "a/b/c"), ("a", "a")]
)
def test_paths_of_one_upload_that_are_one_place_on_some_store_are_refused(admin: Any, paths: tuple[str, str]) -> None:
    tenant = admin.tenant()
    before = objects(admin)
    files = [{"path": path, "size": 1, "sha256": hashlib.sha256(b"x").hexdigest()} for path in paths]
    answer = admin.call("POST", f"/tenants/{tenant}/uploads", json={"name": "support", "files": files})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "duplicate_path")
    assert objects(admin) == before


@pytest.mark.parametrize("field", ["name", "path"])
def test_half_a_surrogate_pair_is_refused_and_not_a_server_error(admin: Any, field: str) -> None:
    tenant = admin.tenant()
    name, path = ('"a\\ud800"', '"b"') if field == "name" else ('"support"', '"a\\ud800"')
    body = f'{{"name": {name}, "files": [{{"path": {path}, "size": 1, "sha256": "{"0" * 64}"}}]}}'
    answer = admin.call("POST", f"/tenants/{tenant}/uploads", content=body)
    assert answer.status_code == 400
