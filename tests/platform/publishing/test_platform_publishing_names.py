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


def test_names_that_would_need_cleaning_are_refused_and_touch_nothing(admin: Any) -> None:
    tenant = admin.tenant()
    for taken in ("support", "a", "x"):
        assert admin.push(tenant, name=taken)["state"] == "ready"
    admin.until(lambda: not any(admin.services.settings.uploads_dir.iterdir()))
    admin.until(lambda: not any(admin.services.store.list_keys("incoming/")))
    before = objects(admin)
    for name in [*ESCAPES, *LOOK_ALIKES, *OTHER_CASES]:
        upload = admin.start_upload(tenant, FILES, name)
        assert (name, upload.status_code, upload.json()["error"]["param"]) == (name, 400, "name")
        made = admin.call("POST", "/tenants", json={"name": name})
        assert (name, made.status_code, made.json()["error"]["param"]) == (name, 400, "name")
        if name not in ("", ".", "..", "../x"):  # which the client itself resolves
            encoded = quote(name, safe="")
            for method, path in (
                ("GET", f"adapters/{encoded}"),
                ("DELETE", f"adapters/{encoded}"),
                ("GET", f"adapters/{encoded}/versions"),
            ):
                assert (name, admin.call(method, f"/tenants/{tenant}/{path}").status_code) in (
                    (name, 404),
                    ("a\n", 400),
                    (name, 405),
                )
            assert admin.call("GET", f"/tenants/{encoded}").status_code in (400, 404)
    assert objects(admin) == before
    adapters = admin.call("GET", f"/tenants/{tenant}/adapters").json()["data"]
    assert [adapter["name"] for adapter in adapters] == ["support", "a", "x"]


def test_paths_that_would_need_cleaning_are_refused_and_touch_nothing(admin: Any) -> None:
    tenant = admin.tenant()
    files = {**FILES, "a": b"x", "x": b"x", "etc/passwd": b"x", "support": b"x"}
    upload = admin.start_upload(tenant, files).json()
    before = objects(admin)
    for path in [*(escape for escape in ESCAPES if escape != "a b"), *LOOK_ALIKES]:
        promised = admin.start_upload(tenant, {**FILES, path: b"x"})
        assert (path, promised.status_code, promised.json()["error"]["code"]) == (path, 400, "invalid_path")
        if path not in ("", ".", "..", "../x"):  # which the client itself resolves
            url = f"/tenants/{tenant}/uploads/{upload['id']}/files/{quote(path, safe='')}"
            sent = admin.call("PUT", url, content=b"x")
            assert (path, sent.status_code, sent.json()["error"]["code"]) == (path, 400, "invalid_path")
    for path in ("A", "Support", "ADAPTER_CONFIG.JSON"):
        sent = admin.call("PUT", f"/tenants/{tenant}/uploads/{upload['id']}/files/{path}", content=b"x")
        assert (sent.status_code, sent.json()["error"]["code"]) == (404, "file_not_found")
    assert objects(admin) == before
    assert len(admin.call("GET", f"/tenants/{tenant}/uploads/{upload['id']}").json()["parts"]) == len(files)


def test_paths_of_one_upload_that_are_one_place_on_some_store_are_refused(admin: Any) -> None:
    tenant = admin.tenant()
    before = objects(admin)
    pairs = [("a", "A"), ("README.md", "readme.MD"), ("a", "a/b"), ("A", "a/b"), ("x/a.b", "X/A.B"), ("a/b", "a/b/c"), ("a", "a")]
    for pair in pairs:
        files = [{"path": path, "size": 1, "sha256": hashlib.sha256(b"x").hexdigest()} for path in pair]
        answer = admin.call("POST", f"/tenants/{tenant}/uploads", json={"name": "support", "files": files})
        assert (pair, answer.status_code, answer.json()["error"]["code"]) == (pair, 400, "duplicate_path")
    assert objects(admin) == before


def test_half_a_surrogate_pair_is_refused_and_not_a_server_error(admin: Any) -> None:
    tenant = admin.tenant()
    for name, path in (("a\\ud800", "b"), ("support", "a\\ud800")):
        body = f'{{"name": "{name}", "files": [{{"path": "{path}", "size": 1, "sha256": "{"0" * 64}"}}]}}'
        assert admin.call("POST", f"/tenants/{tenant}/uploads", content=body).status_code == 400
