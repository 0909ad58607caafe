"""The whole product on a tiny base, in fp32, through the official OpenAI client and the command line."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from graftwork_adapters.base_spec import load_base_spec
from graftwork_adapters.keys import AdapterDigest, packed_key, packed_path, upload_prefix

pytestmark = pytest.mark.e2e

PROMPT = [40, 41, 42, 43, 44, 45]


def packed_of(server: Any, digest: str) -> str:
    """Key of an adapter's packed form in the store of a server that serves in fp32."""
    base_id = load_base_spec(server.model, None).base_id
    return packed_path(packed_key(AdapterDigest(digest), base_id, "float32"))


@pytest.fixture(scope="module")
def foreign_key(server: Any, make_adapter: Callable[..., Path]) -> str:
    return str(server.tenant_with("globex", {"secret-sauce": make_adapter("secret", 9)}))


def test_every_model_answers_as_peft_does(
    server: Any, key: str, tiny_base: Path, adapters: dict[str, Path], reference: Any
) -> None:
    client = server.client(key)
    base = server.complete(client, tiny_base.name, PROMPT, 24)
    assert base == reference(None, PROMPT, 24)
    for name, folder in adapters.items():
        tokens = server.complete(client, name, PROMPT, 24)
        assert tokens == reference(folder, PROMPT, 24), name
        assert tokens != base, f"{name} changes nothing"
        assert server.complete(client, f"{name}@v1", PROMPT, 24) == tokens
    assert server.complete(client, "default", PROMPT, 24) == reference(adapters["plain"], PROMPT, 24)


def test_models_are_listed_base_first(server: Any, key: str, tiny_base: Path) -> None:
    client = server.client(key)
    names = [model.id for model in client.models.list()]
    assert names[0] == tiny_base.name
    assert set(names[1:]) == {"plain", "stable", "keys-only"}
    assert client.models.retrieve("plain").id == "plain"


def test_chat_streams_with_usage(server: Any, key: str) -> None:
    client = server.client(key)
    chunks = list(
        client.chat.completions.create(
            model="stable",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=12,
            temperature=0.7,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = client.chat.completions.create(
        model="stable",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=12,
        temperature=0.7,
        seed=7,
        extra_body={"ignore_eos": True},
    )
    assert whole.choices[0].message.content == text, "the same seed draws the same text, streamed or not"


def test_unknown_foreign_and_deleted_models_are_the_same_404(
    server: Any, key: str, foreign_key: str, make_adapter: Callable[..., Path]
) -> None:
    client = server.client(key)
    server.cli("adapters", "push", str(make_adapter("gone", 20)), "--tenant", "acme", "--name", "gone")
    assert len(server.complete(client, "gone", PROMPT, 2)) == 2
    server.cli("adapters", "delete", "gone", "--tenant", "acme")
    texts = []
    for model in ("never-was", "secret-sauce", "gone"):
        with pytest.raises(openai.NotFoundError) as raised:
            server.complete(client, model, PROMPT, 2)
        assert raised.value.code == "model_not_found"
        texts.append(str(raised.value.message).replace(model, "MODEL"))
    assert len(set(texts)) == 1
    assert len(server.complete(server.client(foreign_key), "secret-sauce", PROMPT, 2)) == 2


def test_keys_wrong_missing_and_revoked(server: Any, key: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.complete(server.client("gw-wrong"), "plain", PROMPT, 2)
    bare = httpx2.post(f"{server.url}/v1/completions", content=b"{not json", timeout=60)
    assert bare.status_code == 401
    assert bare.json()["error"]["code"] == "invalid_api_key"
    made = server.cli("keys", "create", "--tenant", "acme", "--adapter", "stable")
    client = server.client(made["key"])
    assert len(server.complete(client, "default", PROMPT, 2)) == 2
    server.cli("keys", "revoke", made["id"], "--tenant", "acme")
    with pytest.raises(openai.AuthenticationError):
        server.complete(client, "default", PROMPT, 2)


def test_prompt_beyond_the_limit_names_both_numbers(server: Any, key: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        server.complete(server.client(key), "plain", [50] * 2000, 4)
    assert raised.value.code == "context_length_exceeded"
    assert "2000" in raised.value.message
    assert "1024" in raised.value.message


def test_vanished_blob_is_503_and_the_rest_goes_on(server: Any, key: str, make_adapter: Callable[..., Path]) -> None:
    digest = server.push(make_adapter("vanishing", 30), tenant="acme", name="vanishing").digest
    for gone in [*server.store.list_keys(upload_prefix(digest)), packed_of(server, digest)]:
        server.store.delete(gone)
    client = server.client(key)
    with pytest.raises(openai.InternalServerError) as raised:
        server.complete(client, "vanishing", PROMPT, 2)
    assert raised.value.status_code == 503
    assert "vanishing" in str(raised.value.message)
    assert len(server.complete(client, "plain", PROMPT, 2)) == 2


def test_missing_packed_form_is_rebuilt(server: Any, key: str, make_adapter: Callable[..., Path], reference: Any) -> None:
    folder = make_adapter("rebuilt", 31)
    digest = server.push(folder, tenant="acme", name="rebuilt").digest
    server.store.delete(packed_of(server, digest))
    assert server.complete(server.client(key), "rebuilt", PROMPT, 8) == reference(folder, PROMPT, 8)


def test_broken_upload_is_refused_with_every_finding(
    server: Any, key: str, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    good = make_adapter("good-for-breaking", 32)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "adapter_config.json").write_text(
        (good / "adapter_config.json").read_text().replace('"use_qalora": false', '"use_qalora": true')
    )
    data = (good / "adapter_model.safetensors").read_bytes()
    (bad / "adapter_model.safetensors").write_bytes(data[:-64])
    answer = server.cli("adapters", "push", str(bad), "--tenant", "acme", "--name", "bad", check=False)
    assert answer["state"] == "failed"
    failed = [finding for finding in answer["report"] if finding["result"] == "fail"]
    assert any("use_qalora" in str(finding["field"]) for finding in failed)
    assert len(failed) >= 2
    assert len(server.complete(server.client(key), "plain", PROMPT, 2)) == 2


def test_disconnect_frees_the_engine(server: Any, key: str) -> None:
    body = {"model": "plain", "prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}"}
    with (
        httpx2.Client(timeout=60) as client,
        client.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, headers=headers) as response,
    ):
        next(response.iter_lines())
    with pytest.raises(httpx2.TimeoutException):  # many prompts, so that it takes longer than this on any machine
        httpx2.post(f"{server.url}/v1/completions", json={**body, "prompt": [PROMPT] * 32}, headers=headers, timeout=0.3)
    server.wait_until_idle()
    deadline = time.monotonic() + 60
    while sum(row["status"] == "aborted" for row in server.usage_rows("acme")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_usage_is_what_the_client_received(server: Any, foreign_key: str, tiny_base: Path) -> None:
    client = server.client(foreign_key)
    before = len(server.usage_rows("globex"))
    answers = [
        client.completions.create(model=model, prompt=PROMPT, max_tokens=count, temperature=0, extra_body={"ignore_eos": True})
        for model, count in ((tiny_base.name, 3), ("secret-sauce", 5))
    ]
    rows = server.wait_usage("globex", before + 2)[before:]
    assert sorted(row["output_tokens"] for row in rows) == sorted(a.usage.completion_tokens for a in answers if a.usage)
    assert {row["prompt_tokens"] for row in rows} == {len(PROMPT)}


def test_32_streams_over_32_adapters_with_memory_for_8(
    start_server: Callable[..., Any], make_adapter: Callable[..., Path], reference: Any
) -> None:
    folders = {f"a{i}": make_adapter(f"many-{i}", 100 + i, r=(4, 8, 16, 5)[i % 4]) for i in range(32)}
    # Ranks 4, 8, 16 and 5 of this base take 1, 2, 3 and 1 pages: 14 pages hold eight of them.
    server = start_server("--dtype", "float32", "--adapter-memory", str(14 * 64 * 1024))
    key = server.tenant_with("many", folders)
    client = server.client(key)
    names = list(folders)
    server.complete(client, server.model.name, PROMPT, 2)
    alone = {name: server.complete(client, name, [60 + i, *PROMPT], 20) for i, name in enumerate(names)}
    for i, name in enumerate(names[:4]):
        assert alone[name] == reference(folders[name], [60 + i, *PROMPT], 20)
    assert len({tuple(tokens) for tokens in alone.values()}) > 16, "the adapters differ"
    [engine] = server.process_ids("graftwork_engine.process")
    [api] = server.process_ids("graftwork_platform.serve.api_process")

    def all_together() -> dict[str, list[int]]:
        barrier = threading.Barrier(len(names))

        def stream(i: int, name: str) -> list[int]:
            barrier.wait()
            return server.stream_tokens(client, name, [60 + i, *PROMPT], 20)

        with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
            return dict(zip(names, pool.map(stream, range(len(names)), names), strict=True))

    def open_files() -> dict[int, int]:
        client.close()
        time.sleep(1.2)  # the server notices closed connections, and the engine's next reading arrives
        return {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (engine, api)}

    assert all_together() == alone
    # Connections to the database are opened when first needed and kept, so the second round is the one that must leave nothing.
    files_before, before = open_files(), server.wait_until_idle()
    client = server.client(key)
    assert all_together() == alone
    # A reader of the database may have been needed for the first time; what streams leave behind would be one file for each.
    deadline = time.monotonic() + 60
    while any(count - files_before[pid] >= len(names) // 2 for pid, count in open_files().items()):
        assert time.monotonic() < deadline, (files_before, open_files())
    after = server.wait_until_idle()
    for metrics in (before, after):
        assert metrics["graftwork_engine_adapter_device_references"] == 0
        assert metrics["graftwork_engine_adapter_holds"] == 0
        unused = metrics["graftwork_engine_kv_blocks_free"] + metrics["graftwork_engine_kv_blocks_cached"]
        assert unused == metrics["graftwork_engine_kv_blocks_total"]
    evictions = "graftwork_engine_adapter_device_evictions_total"
    assert after[evictions] > before[evictions]
