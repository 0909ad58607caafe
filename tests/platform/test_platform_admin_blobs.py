"""What becomes of published blobs: swept after their version, rebuilt when they vanish, and a store that is away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from graftwork_adapters.errors import BlobCorrupt, BlobNotFound, StoreUnavailable
from graftwork_adapters.folder_store import FolderStore
from graftwork_adapters.keys import AdapterDigest, packed_key, packed_path, upload_prefix
from graftwork_platform.publishing import blob_records

StartAdmin = Callable[..., AbstractContextManager[Any]]


def test_blobs_of_deleted_versions_go_after_the_grace_unless_another_tenant_has_them(start_admin: StartAdmin) -> None:
    clock = [1_700_000_000.0]
    with start_admin(now=lambda: clock[0]) as admin:
        one, two = admin.tenant("one"), admin.tenant("two")
        shared = admin.push(one, b"shared")["version"]["digest"]
        alone = admin.push(one, b"alone")["version"]["digest"]
        admin.push(two, b"shared")
        admin.call("DELETE", f"/tenants/{one}/adapters/support")
        store, sweep = admin.services.store, admin.services.publisher.sweep

        def blobs(digest: str) -> int:
            packed = packed_path(packed_key(AdapterDigest(digest), "b" * 64, "bfloat16"))
            return len(list(store.list_keys(upload_prefix(AdapterDigest(digest))))) + store.exists(packed)

        admin.run(sweep)
        assert (blobs(shared), blobs(alone)) == (3, 3)
        clock[0] += 2 * admin.services.settings.request_timeout + 1
        admin.run(sweep)
        assert (blobs(shared), blobs(alone)) == (3, 0)
        admin.call("DELETE", f"/tenants/{two}/adapters/support")
        clock[0] += 2 * admin.services.settings.request_timeout + 1
        admin.run(sweep)
        assert (blobs(shared), blobs(alone)) == (0, 0)


def test_a_vanished_packed_form_is_rebuilt_once_for_all_who_wait(admin: Any) -> None:
    digest = AdapterDigest(admin.push(admin.tenant(), b"one", **{"tokenizer/tokenizer.json": b"{}"})["version"]["digest"])
    packed = packed_path(packed_key(digest, "b" * 64, "bfloat16"))
    admin.services.store.delete(packed)
    before = len(admin.publish.jobs)

    async def many() -> None:
        await asyncio.gather(*(admin.services.publisher.ensure_packed(digest) for _ in range(8)))

    admin.run(many)
    assert admin.services.store.exists(packed)
    assert len(admin.publish.jobs) == before + 1
    assert admin.publish.jobs[-1].expected_digest == digest
    admin.run(many)
    assert len(admin.publish.jobs) == before + 1


def test_rebuilding_fails_clearly_when_the_upload_is_gone_or_another_one(admin: Any) -> None:
    digest = AdapterDigest(admin.push(admin.tenant(), b"one")["version"]["digest"])
    store = admin.services.store
    store.delete(packed_path(packed_key(digest, "b" * 64, "bfloat16")))
    weights = upload_prefix(digest) + "adapter_model.safetensors"
    store.delete(weights)
    other = admin.services.settings.data_dir / "other"
    other.write_bytes(b"not one")
    store.put_if_absent(weights, other)
    with pytest.raises(BlobCorrupt, match="the content is another one"):
        admin.run(admin.services.publisher.ensure_packed, digest)
    for key in list(store.list_keys(upload_prefix(digest))):
        store.delete(key)
    with pytest.raises(BlobNotFound):
        admin.run(admin.services.publisher.ensure_packed, digest)


def corrupt(admin: Any, key: str) -> None:
    """Change a blob's last byte, where the store keeps it."""
    broken, content = admin.services.settings.data_dir / "broken", admin.services.settings.data_dir / "content"
    admin.services.store.fetch(key, content)
    broken.write_bytes(content.read_bytes()[:-1] + b"\xff")
    admin.services.store.delete(key)
    admin.services.store.put_if_absent(key, broken)
    for path in (broken, content):
        path.unlink()


def is_intact(admin: Any, digest: AdapterDigest) -> bool:
    return bool(admin.run(admin.services.publisher._blobs.has_intact_packed, digest))


def test_a_corrupt_packed_form_is_replaced_once_for_all_who_wait_and_an_intact_one_is_left(
    admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = AdapterDigest(admin.push(admin.tenant(), b"one")["version"]["digest"])
    corrupt(admin, packed_path(packed_key(digest, "b" * 64, "bfloat16")))
    before = len(admin.publish.jobs)

    async def many() -> None:
        await asyncio.gather(*(admin.services.publisher.ensure_packed(digest, replace=True) for _ in range(8)))

    admin.run(many)
    assert is_intact(admin, digest)
    assert len(admin.publish.jobs) == before + 1
    deleted: list[str] = []
    monkeypatch.setattr(FolderStore, "delete", lambda _store, key: deleted.append(key))
    admin.run(many)
    assert (len(admin.publish.jobs), deleted) == (before + 1, [])


def test_the_same_bytes_again_heal_a_corrupt_packed_form(admin: Any) -> None:
    tenant = admin.tenant()
    digest = AdapterDigest(admin.push(tenant, b"one")["version"]["digest"])
    corrupt(admin, packed_path(packed_key(digest, "b" * 64, "bfloat16")))
    assert admin.push(tenant, b"one")["version"]["version"] == "v1"
    assert is_intact(admin, digest)


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_what_the_digest_does_not_cover_in_a_stored_upload_is_not_fetched(admin: Any) -> None:
    """Earlier versions stored every file of everyone who sent this digest."""
    digest = AdapterDigest(admin.push(admin.tenant(), b"one", **{"tokenizer.json": b"{}"})["version"]["digest"])
    note = admin.services.settings.data_dir / "note"
    note.write_bytes(b"x")
    for number in range(70):
        admin.services.store.put_if_absent(f"{upload_prefix(digest)}note{number}.txt", note)
    admin.services.store.put_if_absent(f"{upload_prefix(digest)}folder/README.md", note)
    folder = admin.services.settings.data_dir / "fetched"
    admin.run(admin.services.publisher._blobs.fetch_upload, digest, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    ]


def test_packed_forms_of_every_row_type_go_with_their_digest(start_admin: StartAdmin) -> None:
    clock = [1_700_000_000.0]
    with start_admin(now=lambda: clock[0], row_type="float32") as admin:
        digest = AdapterDigest(admin.push(admin.tenant(), b"one")["version"]["digest"])
    with start_admin(now=lambda: clock[0]) as admin:
        admin.run(admin.services.publisher.ensure_packed, digest)
        store = admin.services.store
        assert len(list(store.list_keys("packed/"))) == 2
        admin.call("DELETE", "/tenants/acme/adapters/support")
        clock[0] += 2 * admin.services.settings.request_timeout + 1
        admin.run(admin.services.publisher.sweep)
        assert (list(store.list_keys("packed/")), list(store.list_keys("uploads/"))) == ([], [])


def test_a_waiter_that_gives_up_does_not_stop_the_rebuild(admin: Any) -> None:
    digest = AdapterDigest(admin.push(admin.tenant(), b"one")["version"]["digest"])
    packed = packed_path(packed_key(digest, "b" * 64, "bfloat16"))
    admin.services.store.delete(packed)
    admin.publish.blocked = True

    async def one_gives_up() -> None:
        first = asyncio.create_task(admin.services.publisher.ensure_packed(digest))
        second = asyncio.create_task(admin.services.publisher.ensure_packed(digest))
        await asyncio.sleep(0.05)
        first.cancel()
        admin.publish.blocked = False
        await second

    admin.run(one_gives_up)
    assert admin.services.store.exists(packed)


def test_a_store_that_is_away_does_not_keep_the_server_from_starting(
    start_admin: StartAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_admin() as admin:
        digest = AdapterDigest(admin.push(admin.tenant(), b"one")["version"]["digest"])
        admin.call("DELETE", "/tenants/acme/adapters/support")

    refused: list[str] = []

    def away(_store: FolderStore, key: str) -> None:
        refused.append(key)
        raise StoreUnavailable("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "delete", away)
        with start_admin(request_timeout=0.0) as admin:
            assert admin.call("GET", "/tenants/acme").status_code == 200
            admin.until(lambda: bool(refused) and not admin.run(admin.services.database.run_read, blob_records.sweeps))
            assert len(list(admin.services.store.list_keys(upload_prefix(digest)))) == 2
    with start_admin(request_timeout=0.0) as admin:
        admin.until(lambda: list(admin.services.store.list_keys(upload_prefix(digest))) == [])


def test_a_store_that_hangs_does_not_hold_the_start_up(start_admin: StartAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_admin() as admin:
        admin.push(admin.tenant(), b"one")
        admin.call("DELETE", "/tenants/acme/adapters/support")
    asked, answers = threading.Event(), threading.Event()
    delete = FolderStore.delete

    def hang(store: FolderStore, key: str) -> None:
        asked.set()
        assert answers.wait(60)
        delete(store, key)

    monkeypatch.setattr(FolderStore, "delete", hang)
    with start_admin(request_timeout=0.0) as admin:
        assert admin.call("GET", "/tenants/acme").status_code == 200
        assert asked.wait(60), "the sweep begins with the server"
        assert admin.call("GET", "/tenants/acme").status_code == 200
        answers.set()
