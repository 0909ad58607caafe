"""Two `graftwork serve`, each with its own data directory, on one PostgreSQL and one S3 store, with secrets shared by file."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

pytestmark = pytest.mark.e2e

PROMPT = [40, 41, 42, 43, 44, 45]
SOON_S = 1.0
"""Within this time a change made through one server holds at the other, by a clock that stands still while the machine does."""


@pytest.fixture(scope="module")
def shared(new_shared_backend: Callable[[], Any]) -> Any:
    return new_shared_backend()


@pytest.fixture(scope="module")
def pair(start_server: Callable[..., Any], shared: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    secrets = tmp_path_factory.mktemp("secrets")
    first = start_server("--dtype", "float32", "--secrets-dir", str(secrets), on=shared)
    second = start_server("--dtype", "float32", "--secrets-dir", str(secrets), on=shared)
    second.admin_server = first
    yield first, second
    second.stop()
    first.stop()


@pytest.fixture(scope="module")
def key(pair: tuple[Any, Any], adapters: dict[str, Path]) -> str:
    return str(pair[0].tenant_with("acme", adapters, default="plain"))


def test_adapter_ready_in_one_is_served_by_the_other_within_a_second(
    pair: tuple[Any, Any], key: str, make_adapter: Callable[..., Path], reference: Any, steady_clock: Callable[[], float]
) -> None:
    first, second = pair
    """The name resolves at once; how soon the first token is there is the machine's affair."""
    folder = make_adapter("fresh", 50)
    client = second.client(key)
    with pytest.raises(openai.NotFoundError):
        second.complete(client, "fresh", PROMPT, 1)
    version = f"{first.url}/admin/v1/tenants/acme/adapters/fresh/versions/v1"
    headers = {"Authorization": f"Bearer {first.admin_key}"}
    with concurrent.futures.ThreadPoolExecutor(1) as pool, httpx2.Client(headers=headers, timeout=60) as admin:
        pushed = pool.submit(first.push, folder, tenant="acme", name="fresh")
        give_up = time.monotonic() + 120
        while (answer := admin.get(version)).status_code == 404:  # it has its number when it is ready
            assert time.monotonic() < give_up
            time.sleep(0.01)
        ready_at = steady_clock()
        assert answer.json()["state"] == "ready"
        tokens: list[int] = []
        while not tokens:
            asked = steady_clock()
            try:
                tokens = second.complete(client, "fresh", PROMPT, 1)
            except openai.NotFoundError:
                assert asked - ready_at < SOON_S, "the name does not resolve at the other server"
                time.sleep(0.01)
        assert pushed.result().state == "ready"
    assert [*tokens, *second.complete(client, "fresh", [*PROMPT, *tokens], 7)] == reference(folder, PROMPT, 8)


def test_both_answer_alike_and_each_request_is_billed_once(pair: tuple[Any, Any], key: str, adapters: dict[str, Path]) -> None:
    first, second = pair
    before = len(first.usage_rows("acme"))
    for name in adapters:
        assert first.complete(first.client(key), name, PROMPT, 12) == second.complete(second.client(key), name, PROMPT, 12)
    rows = first.wait_usage("acme", before + 2 * len(adapters))
    assert rows == second.usage_rows("acme"), "both servers show the same rows"


def test_a_key_made_at_one_works_at_the_other_and_its_revocation_too(
    pair: tuple[Any, Any], key: str, steady_clock: Callable[[], float]
) -> None:
    first, second = pair
    made = first.cli("keys", "create", "--tenant", "acme", "--adapter", "stable")
    began = steady_clock()
    while True:
        try:
            assert len(second.complete(second.client(made["key"]), "default", PROMPT, 2)) == 2
            break
        except openai.AuthenticationError:
            assert steady_clock() - began < SOON_S, "the new key is not known after a second"
    refused_at: list[float] = []

    def use() -> None:  # under load, with requests on the way that could bring the old key back
        client = second.client(made["key"])
        while not refused_at:
            try:
                second.complete(client, "default", PROMPT, 2)
            except openai.AuthenticationError:
                refused_at.append(steady_clock())

    users = [threading.Thread(target=use) for _ in range(4)]
    for user in users:
        user.start()
    time.sleep(0.3)
    revoke = f"{first.url}/admin/v1/tenants/acme/keys/{made['id']}"
    answer = httpx2.delete(revoke, headers={"Authorization": f"Bearer {first.admin_key}"}, timeout=60)
    revoked_at = steady_clock()
    assert answer.status_code == 200
    for user in users:
        user.join(60)
    assert refused_at[0] - revoked_at < SOON_S
    for _ in range(20):
        with pytest.raises(openai.AuthenticationError):
            second.complete(second.client(made["key"]), "default", PROMPT, 2)
    assert len(second.complete(second.client(key), "plain", PROMPT, 2)) == 2


def test_deleted_at_one_is_404_at_the_other(pair: tuple[Any, Any], key: str, make_adapter: Callable[..., Path]) -> None:
    first, second = pair
    first.push(make_adapter("short-lived", 51), tenant="acme", name="short-lived")
    assert len(second.complete(second.client(key), "short-lived", PROMPT, 2)) == 2
    second.cli("adapters", "delete", "short-lived", "--tenant", "acme")
    with pytest.raises(openai.NotFoundError):
        first.complete(first.client(key), "short-lived", PROMPT, 2)


def test_an_upload_may_be_sent_through_both(pair: tuple[Any, Any], key: str, make_adapter: Callable[..., Path]) -> None:
    import hashlib

    folder = make_adapter("split-upload", 52)
    files = {name: (folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    headers = {"Authorization": f"Bearer {pair[0].admin_key}"}
    promised = [{"path": n, "size": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in files.items()]
    root = [f"{server.url}/admin/v1/tenants/acme/uploads" for server in pair]
    upload = httpx2.post(root[0], headers=headers, json={"name": "split", "files": promised}, timeout=60).json()
    for number, part in enumerate(upload["parts"]):
        body = files[part["path"]][part["offset"] : part["offset"] + part["size"]]
        url = f"{root[number % 2]}/{upload['id']}/files/{part['path']}"
        assert httpx2.put(url, params={"part": part["part"]}, headers=headers, content=body, timeout=60).status_code == 204
    assert httpx2.post(f"{root[1]}/{upload['id']}/complete", headers=headers, timeout=60).status_code in (200, 202)
    deadline = time.monotonic() + 120
    while (state := httpx2.get(f"{root[0]}/{upload['id']}", headers=headers, timeout=60).json()["state"]) == "validating":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert state == "ready"
    assert len(pair[0].complete(pair[0].client(key), "split", PROMPT, 2)) == 2


def test_doctor_finds_both_healthy(pair: tuple[Any, Any], shared: Any) -> None:
    for server in pair:
        (secrets,) = (value for flag, value in pairwise(server.arguments) if flag == "--secrets-dir")
        found = server.cli("doctor", "--data-dir", str(server.data_dir), "--secrets-dir", secrets, *shared.arguments)
        assert {check["result"] for check in found["checks"]} == {"pass"}


def test_a_server_with_other_secrets_is_refused(shared: Any, pair: tuple[Any, Any], tiny_base: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "graftwork_platform.cli", "serve", "--model", str(tiny_base), "--port", "0"),
        *("--data-dir", str(tmp_path / "other"), *shared.arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "--secrets-dir" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
