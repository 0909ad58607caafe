"""One store has one database: another's server is refused, and sweeps nothing even if it could not be refused at its start."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from graftwork_adapters.errors import StoreUnavailable
from graftwork_adapters.folder_store import FolderStore
from graftwork_adapters.stores import open_store
from graftwork_migrations.runner import upgrade
from graftwork_platform.publishing.owner import OWNER_KEY, ForeignStore, claim_store
from graftwork_platform.serve.api_process import _confirm_store
from graftwork_platform.serve.command import CannotServe, _claim_store
from graftwork_platform.settings import Settings

ONE_KIND = pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)


def test_a_store_is_claimed_by_the_first_database_and_refused_to_another(data_settings: Settings, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(b"x")
    open_store(data_settings.store).put_if_absent("uploads/of-an-older-version/file", blob)
    _claim_store(data_settings)
    _claim_store(data_settings)
    upgrade(f"sqlite:///{tmp_path / 'other.db'}")
    other = replace(data_settings, database_url=f"sqlite:///{tmp_path / 'other.db'}", object_store=data_settings.store)
    with pytest.raises(CannotServe, match="another prefix or folder, or the database that this store belongs to"):
        _claim_store(other)
    _claim_store(replace(other, object_store=replace(data_settings.store, url=str(tmp_path / "its-own"))))
    _claim_store(data_settings)


def test_of_many_that_claim_at_once_all_of_one_database_get_it(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "objects")

    def claim(deployment: str) -> str | None:
        try:
            claim_store(store, deployment)
        except ForeignStore:
            return None
        return deployment

    one, two = secrets.token_hex(16), secrets.token_hex(16)
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(claim, [one, two] * 8))
    (winner,) = set(claimed) - {None}
    assert claimed.count(winner) == 8


@ONE_KIND
def test_a_server_on_another_databases_store_is_refused_and_sweeps_and_stores_nothing(play: Callable[..., None]) -> None:
    clock = [1_700_000_000.0]

    async def scene(tenant: UUID, one: Any) -> None:
        digest = (await one.push(tenant)).digest
        await one.services.catalog.delete_adapter(tenant, "support")
        sent = await one.begin(tenant, b"other")
        await one.send(tenant, sent, b"other")
        clock[0] += 30 * 3600
        mine = one.services.settings.data_dir / "owner"
        one.store.fetch(OWNER_KEY, mine)
        one.store.delete(OWNER_KEY)
        claim_store(one.store, "another")
        owner = one.services.store_owner
        owner._confirmed = False  # as at a start while the store was away
        with pytest.raises(ForeignStore):
            await _confirm_store(owner)
        with pytest.raises(ForeignStore):
            await one.services.publisher.sweep()
        parts = [key for key in one.store.list_keys("incoming/") if sent.hex in key]
        assert (one.blobs(digest), len(parts)) == (3, 2)
        refused = await one.push(tenant, b"third")
        assert (refused.state, refused.digest) == ("failed", None)
        one.store.delete(OWNER_KEY)
        one.store.put_if_absent(OWNER_KEY, mine)
        await one.services.publisher.sweep()
        assert (one.blobs(digest), list(one.store.list_keys("incoming/"))) == (0, [])

    play(scene, servers=1, now=lambda: clock[0] + time.monotonic())


@ONE_KIND
def test_a_store_that_is_away_is_asked_again_later(play: Callable[..., None]) -> None:
    async def scene(_tenant: UUID, one: Any) -> None:
        owner = one.services.store_owner
        owner._confirmed = False

        def away(operation: str, _key: str) -> None:
            raise StoreUnavailable(f"no {operation}")

        one.store.before = away
        await _confirm_store(owner)
        with pytest.raises(StoreUnavailable):
            await one.services.publisher.sweep()
        one.store.before = lambda _operation, _key: None
        await one.services.publisher.sweep()

    play(scene, servers=1)
