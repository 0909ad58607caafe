"""What servers on one database have in common or are refused for, and keys that cannot be checked make a server not ready."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from graftwork_platform.app import _add_probes
from graftwork_platform.db import Database
from graftwork_platform.errors import ServiceUnavailable
from graftwork_platform.keys.claim import claim
from graftwork_platform.keys.ring import KeyRing
from graftwork_platform.secrets import BadSecret, Secrets
from graftwork_platform.serve.command import CannotServe, _claim_serving
from graftwork_platform.settings import Settings

SECRETS = Secrets(pepper=b"p" * 32, cache_salt=b"s" * 32)


def test_a_database_takes_servers_with_its_own_pepper_only(database_url: str) -> None:
    database, other = Database(database_url), Secrets(pepper=b"q" * 32, cache_salt=SECRETS.cache_salt)
    for _ in range(2):
        database.write_now(lambda session: claim(session, SECRETS))
    with pytest.raises(BadSecret, match="--secrets-dir"):
        database.write_now(lambda session: claim(session, other))
    database.write_now(lambda session: claim(session, replace(SECRETS, cache_salt=b"t" * 32)))
    database.close()


def test_servers_on_one_database_serve_the_same(postgres_url: str, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, model_dir=tmp_path, database_url=postgres_url)
    for _ in range(2):
        _claim_serving(settings, "b" * 64)
    with pytest.raises(CannotServe, match=r"another base: .*--model"):
        _claim_serving(settings, "c" * 64)
    with pytest.raises(CannotServe, match=r"another row type: .*--dtype"):
        _claim_serving(replace(settings, row_type="float32"), "b" * 64)
    _claim_serving(settings, "b" * 64)


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_the_one_server_on_a_file_may_change_what_it_serves(database_url: str, tmp_path: Path) -> None:
    for base, row_type in (("b" * 64, "bfloat16"), ("c" * 64, "float32")):
        _claim_serving(Settings(tmp_path, tmp_path, database_url=database_url, row_type=row_type), base)  # type: ignore[arg-type]


def test_a_server_whose_keys_cannot_be_checked_is_not_ready() -> None:
    """Its balancer would send it requests, and each of them would be refused."""
    clock, app = [100.0], FastAPI()

    async def away(_public_id: str) -> None:
        raise ServiceUnavailable("away", code="keys_unavailable")

    ring = KeyRing(SECRETS, clock=lambda: clock[0], reread=away)
    services = SimpleNamespace(usage=SimpleNamespace(failure=None), keyring=ring)
    _add_probes(app, cast("Any", services), cast("Any", SimpleNamespace(healthy=True)), cast("Any", None))
    with TestClient(app) as client:
        assert client.get("/readyz").status_code == 503, "nothing was heard yet"
        ring.hear(100.0)
        for now, status in ((102.9, 200), (103.0, 503), (500.0, 503)):
            clock[0] = now
            answer = client.get("/readyz")
            assert answer.status_code == status, now
        assert "keys cannot be checked" in answer.json()["status"]
        ring.hear(500.0)
        assert client.get("/readyz").status_code == 200
