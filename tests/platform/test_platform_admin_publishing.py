"""Uploads become versions: faults on the way, names, versions, verdicts and crashes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from graftwork_adapters.keys import AdapterDigest, packed_key, packed_path, upload_prefix
from graftwork_platform import cli
from graftwork_platform.admin.schemas import VersionOut
from graftwork_platform.ids import parse
from graftwork_platform.settings import PublishLimits, UploadLimits

StartAdmin = Callable[..., AbstractContextManager[Any]]

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 10}


def incoming(admin: Any) -> list[str]:
    """Keys of parts in the store."""
    return list(admin.services.store.list_keys("incoming/"))


def versions(admin: Any, tenant: str, name: str = "support") -> Any:
    return admin.call("GET", f"/tenants/{tenant}/adapters/{name}/versions").json()["data"]


def test_a_pushed_folder_becomes_a_ready_version_with_its_blobs(admin: Any) -> None:
    tenant = admin.tenant()
    upload = admin.push(tenant, b"w" * 3000)
    version = upload["version"]
    assert (upload["state"], version["state"], version["version"]) == ("ready", "ready", "v1")
    assert version["report"] == [
        {"check": "tensors", "result": "pass", "field": None, "message": "applied 2 of 2 tensors", "fix": None}
    ]
    digest = AdapterDigest(version["digest"])
    stored = set(admin.services.store.list_keys(upload_prefix(digest)))
    assert stored == {upload_prefix(digest) + path for path in ("adapter_config.json", "adapter_model.safetensors")}
    assert admin.services.store.exists(packed_path(packed_key(digest, "b" * 64, "bfloat16")))
    settings = admin.services.settings
    admin.until(lambda: [*settings.uploads_dir.iterdir(), *settings.scratch_dir.iterdir(), *incoming(admin)] == [])


def test_parts_are_listed_and_may_come_in_any_order_and_twice(admin: Any) -> None:
    tenant = admin.tenant()
    upload = admin.start_upload(tenant, FILES).json()
    sizes = [(p["path"], p["part"], p["offset"], p["size"]) for p in upload["parts"]]
    weights = "adapter_model.safetensors"
    assert sizes == [("adapter_config.json", 1, 0, 2), (weights, 1, 0, 1024), (weights, 2, 1024, 1024), (weights, 3, 2048, 512)]
    admin.send_parts(tenant, {**upload, "parts": upload["parts"][::-1]}, FILES)
    admin.send_parts(tenant, upload, FILES)
    assert admin.call("GET", f"/tenants/{tenant}/uploads/{upload['id']}").json()["parts"] == []
    completed = admin.call("POST", f"/tenants/{tenant}/uploads/{upload['id']}/complete")
    assert completed.status_code == 202
    assert completed.json()["state"] == "validating"
    assert completed.json()["upload"] == upload["id"]
    assert admin.wait(tenant, upload["id"])["state"] == "ready"
    again = admin.call("POST", f"/tenants/{tenant}/uploads/{upload['id']}/complete")
    assert (again.status_code, again.json()["version"]) == (200, "v1")


def test_the_latest_bytes_again_are_that_version_and_older_ones_a_new_version(admin: Any) -> None:
    tenant = admin.tenant()
    first, second = admin.push(tenant, b"one"), admin.push(tenant, b"two")
    same = admin.push(tenant, b"two")
    assert same["version"] == second["version"]
    older = admin.push(tenant, b"one")
    assert older["version"]["version"] == "v3"
    assert older["version"]["digest"] == first["version"]["digest"]
    assert [v["version"] for v in versions(admin, tenant)] == ["v1", "v2", "v3"]


def test_equal_files_are_answered_at_once_and_an_equal_digest_after_validation(admin: Any) -> None:
    tenant = admin.tenant()
    first = admin.push(tenant, b"one")
    assert len(admin.publish.jobs) == 1
    assert admin.push(tenant, b"one")["version"] == first["version"]
    assert len(admin.publish.jobs) == 1
    other_readme = admin.push(tenant, b"one", **{"README.md": b"text"})
    assert other_readme["version"]["id"] == first["version"]["id"]
    assert len(admin.publish.jobs) == 2
    assert len(versions(admin, tenant)) == 1


def test_equal_files_whose_blob_vanished_are_published_again(admin: Any) -> None:
    tenant = admin.tenant()
    digest = AdapterDigest(admin.push(tenant, b"one")["version"]["digest"])
    packed = packed_path(packed_key(digest, "b" * 64, "bfloat16"))
    admin.services.store.delete(packed)
    assert admin.push(tenant, b"one")["version"]["version"] == "v1"
    assert admin.services.store.exists(packed)


def test_a_refused_version_keeps_its_report_and_costs_no_number(admin: Any) -> None:
    tenant = admin.tenant()
    admin.publish.fail = "rank 512 is over 256"
    refused = admin.push(tenant, b"bad")
    assert refused["state"] == "failed"
    assert refused["version"]["state"] == "failed"
    assert refused["version"]["version"] is None
    assert refused["version"]["report"][0]["message"] == "rank 512 is over 256"
    admin.publish.fail = None
    assert admin.push(tenant, b"good")["version"]["version"] == "v1"
    assert [v["state"] for v in versions(admin, tenant)] == ["failed", "ready"]


def test_deleted_names_keep_counting_and_old_versions_stay_gone(admin: Any) -> None:
    tenant = admin.tenant()
    admin.push(tenant, b"one")
    assert admin.call("DELETE", f"/tenants/{tenant}/adapters/support").json()["deleted"] is True
    assert admin.call("GET", f"/tenants/{tenant}/adapters/support").status_code == 404
    assert admin.call("DELETE", f"/tenants/{tenant}/adapters/support").status_code == 404
    assert admin.push(tenant, b"one")["version"]["version"] == "v2"
    assert [v["version"] for v in versions(admin, tenant)] == ["v2"]
    assert admin.call("GET", f"/tenants/{tenant}/adapters/support/versions/v1").status_code == 404


def test_an_adapter_deleted_during_validation_is_not_revived(admin: Any) -> None:
    tenant = admin.tenant()
    admin.publish.blocked = True
    upload = admin.start_upload(tenant, FILES).json()
    admin.send_parts(tenant, upload, FILES)
    assert admin.call("POST", f"/tenants/{tenant}/uploads/{upload['id']}/complete").status_code == 202
    assert admin.call("DELETE", f"/tenants/{tenant}/adapters/support").status_code == 200
    admin.publish.blocked = False
    ended = admin.wait(tenant, upload["id"])
    assert ended["state"] == "failed"
    assert "deleted" in ended["version"]["report"][-1]["message"]
    assert admin.call("GET", f"/tenants/{tenant}/adapters").json()["data"] == []


def test_path_tricks_are_refused(admin: Any) -> None:
    tenant = admin.tenant()
    tricks = ["../x", "/etc/passwd", "a/../b", "a//b", "a\\b", ".hidden", "a/.git/x", "", "a\x00b", "a\nb", "a\n", "x" * 201]
    for path in [*tricks, "a/", "./a", "~", "é", " a"]:
        answer = admin.start_upload(tenant, {path: b"x"})
        assert (path, answer.status_code, answer.json()["error"]["param"]) == (path, 400, "files.0.path")


def test_paths_that_share_a_place_are_refused(admin: Any) -> None:
    tenant = admin.tenant()
    for paths in [("a", "A"), ("a", "a/b"), ("d/x", "a.b", "D/X")]:
        answer = admin.start_upload(tenant, dict.fromkeys(paths, b"x"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "duplicate_path")
    assert admin.start_upload(tenant, dict.fromkeys(("a", "a.b", "a-b/c", "ab"), b"x")).status_code == 201


def test_too_many_files_and_bytes_are_refused(start_admin: StartAdmin) -> None:
    with start_admin(upload=UploadLimits(max_files=2, max_bytes=10)) as admin:
        tenant = admin.tenant()
        assert admin.start_upload(tenant, {}).status_code == 400
        assert admin.start_upload(tenant, dict.fromkeys("abc", b"x")).status_code == 400
        large = admin.start_upload(tenant, {"a": b"x" * 11})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "payload_too_large")


def test_promises_that_cannot_be_kept_are_refused(admin: Any) -> None:
    tenant = admin.tenant()
    wrong = {"size": [-1, "1", None], "sha256": ["0" * 63, "A" * 64, 7], "mode": [1]}
    for field, value in [(field, value) for field, values in wrong.items() for value in values]:
        file = {"path": "a", "size": 1, "sha256": "0" * 64, field: value}
        answer = admin.call("POST", f"/tenants/{tenant}/uploads", json={"name": "support", "files": [file]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"files.0.{field}")


def test_parts_of_the_wrong_length_are_refused(admin: Any) -> None:
    tenant = admin.tenant()
    upload = admin.start_upload(tenant, FILES).json()
    path = f"/tenants/{tenant}/uploads/{upload['id']}/files/adapter_model.safetensors"
    for body in (b"x" * 1023, b"x" * 1025, b""):
        answer = admin.call("PUT", path, params={"part": 1}, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "part_size")
    for part in (0, 4, -1):
        answer = admin.call("PUT", path, params={"part": part}, content=b"")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "part")
    assert admin.call("PUT", path, params={"part": "x"}, content=b"").json()["error"]["param"] == "part"
    missing = admin.call("PUT", f"/tenants/{tenant}/uploads/{upload['id']}/files/other", content=b"")
    assert missing.status_code == 404
    assert len(admin.call("GET", f"/tenants/{tenant}/uploads/{upload['id']}").json()["parts"]) == 4


def test_completing_too_early_names_what_is_missing(admin: Any) -> None:
    tenant = admin.tenant()
    upload = admin.start_upload(tenant, FILES).json()
    admin.send_parts(tenant, {**upload, "parts": upload["parts"][:2]}, FILES)
    answer = admin.call("POST", f"/tenants/{tenant}/uploads/{upload['id']}/complete")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "parts_missing")
    assert "adapter_model.safetensors part 2" in answer.json()["error"]["message"]


def test_wrong_bytes_are_found_in_one_part_at_once_and_in_many_at_completion(admin: Any) -> None:
    tenant = admin.tenant()
    upload = admin.start_upload(tenant, FILES).json()
    path = f"/tenants/{tenant}/uploads/{upload['id']}"
    at_once = admin.call("PUT", f"{path}/files/adapter_config.json", content=b"[]")
    assert (at_once.status_code, at_once.json()["error"]["code"]) == (400, "checksum_mismatch")
    admin.send_parts(tenant, upload, {**FILES, "adapter_model.safetensors": b"?" * 2560})
    late = admin.call("POST", f"{path}/complete")
    assert (late.status_code, late.json()["error"]["code"]) == (400, "checksum_mismatch")
    assert [p["path"] for p in admin.call("GET", path).json()["parts"]] == ["adapter_model.safetensors"] * 3
    admin.send_parts(tenant, {"id": upload["id"], "parts": admin.call("GET", path).json()["parts"]}, FILES)
    assert admin.call("POST", f"{path}/complete").status_code == 202


def test_a_completed_upload_takes_no_more_parts(admin: Any) -> None:
    tenant = admin.tenant()
    upload = admin.push(tenant)
    answer = admin.call("PUT", f"/tenants/{tenant}/uploads/{upload['id']}/files/adapter_config.json", content=b"{}")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")


def test_only_well_formed_adapter_names_that_are_not_reserved_are_taken(admin: Any) -> None:
    tenant = admin.tenant()
    for name in ["default", "tiny-base", "Support", "-a", ".a", "a@b", "a/b", "", "x" * 65, "a b", "a\n"]:
        answer = admin.start_upload(tenant, FILES, name)
        assert (name, answer.status_code, answer.json()["error"]["param"]) == (name, 400, "name")
    for name in ["a", "0", "v2", "a.b_c-d", "x" * 64]:
        assert admin.start_upload(tenant, FILES, name).status_code == 201


def test_unfinished_publications_are_taken_up_again_after_a_restart(start_admin: StartAdmin) -> None:
    with start_admin() as admin:
        tenant = admin.tenant()
        admin.publish.blocked = True
        upload = admin.start_upload(tenant, FILES).json()
        admin.send_parts(tenant, upload, FILES)
        admin.call("POST", f"/tenants/{tenant}/uploads/{upload['id']}/complete")
        admin.run(asyncio.sleep, 0.05)
        leftover = admin.services.settings.uploads_dir / ("0" * 32)
        leftover.mkdir()
    with start_admin() as admin:
        assert not leftover.exists()
        assert admin.wait(tenant, upload["id"])["version"]["version"] == "v1"


def test_a_publication_that_outlived_too_many_servers_fails_with_a_clear_error(start_admin: StartAdmin) -> None:
    for attempt in range(2):
        with start_admin() as admin:
            admin.publish.blocked = True
            if attempt == 0:
                tenant = admin.tenant()
                upload = admin.start_upload(tenant, FILES).json()
                admin.send_parts(tenant, upload, FILES)
                admin.call("POST", f"/tenants/{tenant}/uploads/{upload['id']}/complete")
            admin.until(lambda started=admin.publish.jobs: bool(started))
    with start_admin(publish=PublishLimits(max_attempts=2)) as admin:
        ended = admin.wait(tenant, upload["id"])
        assert ended["state"] == "failed"
        assert "stopped" in ended["version"]["report"][0]["message"]
        assert admin.publish.jobs == []


def test_uploads_that_are_never_completed_expire(start_admin: StartAdmin) -> None:
    clock = [1_700_000_000.0]
    with start_admin(now=lambda: clock[0]) as admin:
        tenant = admin.tenant()
        upload = admin.start_upload(tenant, FILES).json()
        admin.send_parts(tenant, upload, FILES)
        clock[0] += 3600
        admin.run(admin.services.publisher.sweep)
        assert len(incoming(admin)) == 4
        clock[0] += 24 * 3600
        admin.run(admin.services.publisher.sweep)
        assert incoming(admin) == []
        path = f"/tenants/{tenant}/uploads/{upload['id']}"
        assert admin.call("GET", path).json()["state"] == "expired"
        assert admin.call("POST", f"{path}/complete").status_code == 409
        assert admin.call("PUT", f"{path}/files/adapter_config.json", content=b"{}").status_code == 409


def test_an_empty_file_is_one_empty_part(admin: Any) -> None:
    tenant = admin.tenant()
    upload = admin.push(tenant, b"one", **{"empty.txt": b""})
    assert upload["state"] == "ready"
    key = upload_prefix(AdapterDigest(hashlib.sha256(b"one").hexdigest())) + "empty.txt"
    assert admin.services.store.exists(key)


def test_a_full_disk_is_told_as_such_and_the_upload_can_go_on(admin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = admin.tenant()
    upload = admin.start_upload(tenant, FILES).json()
    admin.send_parts(tenant, {**upload, "parts": upload["parts"][1:]}, FILES)

    def full(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device", "/secret/place")

    path = f"/tenants/{tenant}/uploads/{upload['id']}"
    answers = []
    for place in ("graftwork_platform.publishing.incoming.scratch_folder", "graftwork_adapters.folder_store.os.fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(place, full)
            answers.append(admin.call("PUT", f"{path}/files/adapter_config.json", content=b"{}"))
    admin.send_parts(tenant, upload, FILES)
    for place in ("graftwork_platform.publishing.incoming.scratch_folder", "graftwork_adapters.folder_store.os.scandir"):
        with monkeypatch.context() as patched:
            patched.setattr(place, full)
            answers.append(admin.call("POST", f"{path}/complete"))
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
        assert "secret" not in answer.text
        assert answer.headers["retry-after"] == "30"
    assert admin.call("POST", f"{path}/complete").status_code == 202


def test_a_client_that_hangs_up_in_a_part_leaves_nothing_behind(admin: Any) -> None:
    tenant = admin.tenant()
    upload = admin.start_upload(tenant, FILES).json()
    upload_id, tenant_id = parse("up", upload["id"]), parse("tn", tenant)

    async def body() -> Any:
        yield b"x" * 100
        raise ClientDisconnect

    put = admin.services.uploads.put_part
    with pytest.raises(ClientDisconnect):
        admin.run(put, tenant_id, upload_id, "adapter_model.safetensors", 1, body())
    assert [*admin.services.settings.uploads_dir.iterdir(), *incoming(admin)] == []
    assert len(admin.call("GET", f"/tenants/{tenant}/uploads/{upload['id']}").json()["parts"]) == 4


@pytest.mark.parametrize(
    ("number", "state", "says"),
    [
        ("v3", "ready", "n0@v3 is ready."),
        ("v3", "deleting", "n0@v3 was published, and is deleting: its adapter was deleted."),
        (None, "failed", "n0 was refused"),
    ],
)
def test_the_verdict_that_people_read_is_the_versions_state(
    number: str | None, state: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli._show_verdict("n0", VersionOut(id="av_1", created=1, version=number, digest=None, state=state, report=[]), False)
    printed = capsys.readouterr().out
    assert says in printed
    assert ("is ready" in printed) == (state == "ready")
