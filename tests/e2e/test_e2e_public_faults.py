"""Faults that users of other servers reported, tried on the whole product. Each test names the public thread it is about."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from graftwork_platform.admin.client import CallFailed

pytestmark = pytest.mark.e2e

PROMPT = [40, 41, 42, 43, 44, 45]
LONG_PROMPT = [50 + i % 150 for i in range(400)]


def push(server: Any, folder: Path, name: str) -> str:
    """The number of the version that came of it."""
    version = server.push(folder, tenant="acme", name=name)
    assert version.state == "ready", version.report
    return str(version.version)


def assert_alive(server: Any, key: str, reference: Any, adapters: dict[str, Path]) -> None:
    """The base and an adapter still answer, and rightly."""
    client = server.client(key)
    assert server.complete(client, server.model.name, PROMPT, 6) == reference(None, PROMPT, 6)
    assert server.complete(client, "plain", PROMPT, 6) == reference(adapters["plain"], PROMPT, 6)
    assert httpx2.get(f"{server.url}/readyz", timeout=60).status_code == 200


def test_long_prompts_in_every_order_of_base_and_adapters(server: Any, key: str, adapters: dict[str, Path], reference: Any) -> None:
    """vllm#3264: an adapter answered from the prefix cache of another one."""
    client = server.client(key)
    folders: dict[str, Path | None] = {server.model.name: None, "plain": adapters["plain"], "stable": adapters["stable"]}
    expected = {name: reference(folder, LONG_PROMPT, 8) for name, folder in folders.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    names = list(folders)
    for shift in range(3):
        for order in ([names[shift], names[shift - 1], names[shift - 2]], [names[shift], names[shift - 2], names[shift - 1]]):
            for name in order:
                assert server.complete(client, name, LONG_PROMPT, 8) == expected[name], order
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        mixed = names * 3
        answers = list(pool.map(lambda name: server.complete(client, name, LONG_PROMPT, 8), mixed))
    assert answers == [expected[name] for name in mixed]


def test_new_version_under_one_name_reads_no_old_cache(
    server: Any, key: str, make_adapter: Callable[..., Path], reference: Any
) -> None:
    """vllm#42125, sglang#8263: after an upload under the same name, long prompts still used the old weights' cache."""
    client = server.client(key)
    first, second = make_adapter("version-one", 60), make_adapter("version-two", 61)
    push(server, first, "replaced")
    assert server.complete(client, "replaced", LONG_PROMPT, 8) == reference(first, LONG_PROMPT, 8)
    assert push(server, second, "replaced") == "v2"
    assert server.complete(client, "replaced", LONG_PROMPT, 8) == reference(second, LONG_PROMPT, 8)
    assert server.complete(client, "replaced@v1", LONG_PROMPT, 8) == reference(first, LONG_PROMPT, 8)
    server.cli("adapters", "delete", "replaced", "--tenant", "acme")
    with pytest.raises(openai.NotFoundError):
        server.complete(client, "replaced", LONG_PROMPT, 8)
    assert push(server, first, "replaced") == "v3", "numbers are never dealt out again"
    assert server.complete(client, "replaced", LONG_PROMPT, 8) == reference(first, LONG_PROMPT, 8)


def test_adapters_loaded_one_by_one_are_never_mixed_up(
    server: Any, key: str, make_adapter: Callable[..., Path], reference: Any
) -> None:
    """vllm#12199, vllm#4234: the second adapter loaded at run time answered like the first; adapters needed a restart."""
    client = server.client(key)
    folders = {f"one-by-one-{i}": make_adapter(f"one-by-one-{i}", 70 + i, r=(2, 8, 16, 3, 12)[i]) for i in range(5)}
    for name, folder in folders.items():
        push(server, folder, name)
        assert server.complete(client, name, PROMPT, 8) == reference(folder, PROMPT, 8)
    for name in reversed(folders):
        assert server.complete(client, name, PROMPT, 8) == reference(folders[name], PROMPT, 8)


def test_bad_uploads_while_another_adapter_streams(
    server: Any, key: str, adapters: dict[str, Path], make_adapter: Callable[..., Path], reference: Any, tmp_path: Path
) -> None:
    """vllm#3310, vllm#11702: one bad adapter killed the engine for everybody."""
    good = make_adapter("good-for-breaking-2", 80)
    config = json.loads((good / "adapter_config.json").read_text())
    weights = (good / "adapter_model.safetensors").read_bytes()
    broken: dict[str, tuple[str, bytes]] = {
        "cut": (json.dumps(config), weights[: len(weights) // 2]),
        "rank": (json.dumps(config | {"r": 3}), weights),
        "no-json": ("{", weights),
        "no-weights": (json.dumps(config), b""),
        "huge-header": (json.dumps(config), (1 << 40).to_bytes(8, "little") + weights[8:]),
        "other-type": (json.dumps(config | {"peft_type": "PREFIX_TUNING"}), weights),
    }
    client = server.client(key)
    expected = reference(adapters["stable"], PROMPT, 120)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = pool.submit(server.stream_tokens, client, "stable", PROMPT, 120)
        for name, (text, data) in broken.items():
            folder = tmp_path / name
            folder.mkdir()
            (folder / "adapter_config.json").write_text(text)
            (folder / "adapter_model.safetensors").write_bytes(data)
            with contextlib.suppress(CallFailed):  # some are refused before they are a version
                assert server.push(folder, tenant="acme", name=f"bad-{name}").state == "failed"
            with pytest.raises(openai.NotFoundError):
                server.complete(client, f"bad-{name}", PROMPT, 2)
        assert stream.result(120) == expected
    assert_alive(server, key, reference, adapters)


def test_adapter_deleted_in_mid_stream_serves_its_stream_to_the_end(
    server: Any, key: str, make_adapter: Callable[..., Path], reference: Any
) -> None:
    """sglang PR 9084, dynamo PR 11520: an unload during a request aborted it, or continued it with something else."""
    folder = make_adapter("in-flight", 81)
    push(server, folder, "in-flight")
    expected = reference(folder, PROMPT, 200)
    client = server.lenient(server.client(key))
    extra = {"ignore_eos": True, "return_token_ids": True}
    tokens: list[int] = []
    deleted = False
    for chunk in client.completions.create(
        model="in-flight", prompt=PROMPT, max_tokens=200, temperature=0, stream=True, extra_body=extra
    ):
        tokens += (chunk.choices[0].model_extra or {}).get("token_ids") or []
        if len(tokens) >= 20 and not deleted:
            server.cli("adapters", "delete", "in-flight", "--tenant", "acme")
            deleted = True
            with pytest.raises(openai.NotFoundError):
                server.complete(server.client(key), "in-flight", PROMPT, 2)
    assert deleted
    assert tokens == expected


def test_every_kind_of_ending_gives_back_what_it_held(server: Any, key: str, adapters: dict[str, Path], reference: Any) -> None:
    """sglang#36894, vllm#46283: references that were never given back after n > 1, aborts, refusals and stop strings."""
    rng = random.Random(5)
    headers = {"Authorization": f"Bearer {key}"}
    models = [server.model.name, *adapters]

    def ask(number: int) -> None:
        kind, model = number % 6, rng.choice(models)
        body: dict[str, Any] = {"model": model, "prompt": [60 + number, *PROMPT], "max_tokens": 60, "ignore_eos": True}
        if kind == 0:
            body |= {"n": 3, "seed": number}
        elif kind == 1:
            body |= {"stop": ["a", "e"], "temperature": 2.0}
        elif kind == 2:
            body |= {"max_tokens": 5000}  # refused
        elif kind == 3:
            body |= {"prompt": [9999]}  # refused: outside the vocabulary
        elif kind == 4:
            body |= {"echo": True, "logprobs": 2, "max_tokens": 0}
        timeout = 0.02 + rng.random() * 0.1 if kind == 5 else 60
        try:
            answer = httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=timeout)
            assert answer.status_code == (400 if kind in (2, 3) else 200), answer.text
        except httpx2.TimeoutException:
            assert kind == 5

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(120)))
    metrics = server.wait_until_idle()
    assert metrics["graftwork_engine_adapter_device_references"] == 0
    assert metrics["graftwork_engine_adapter_holds"] == 0
    unused = metrics["graftwork_engine_kv_blocks_free"] + metrics["graftwork_engine_kv_blocks_cached"]
    assert unused == metrics["graftwork_engine_kv_blocks_total"]
    assert_alive(server, key, reference, adapters)
    deadline = time.monotonic() + 60
    while (checked := server.wait_until_idle())["graftwork_engine_integrity_checks_total"] == 0:  # done when the engine is idle
        assert time.monotonic() < deadline
    assert checked["graftwork_engine_integrity_faults_total"] == 0


NASTY_BODIES: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": None},
    {"prompt": [-1]},
    {"prompt": [1 << 70]},
    {"prompt": PROMPT, "max_tokens": 0},
    {"prompt": PROMPT, "max_tokens": -1},
    {"prompt": PROMPT, "max_tokens": 1 << 62},
    {"prompt": PROMPT, "n": 0},
    {"prompt": PROMPT, "n": 10_000},
    {"prompt": PROMPT, "logit_bias": {"999999": 5}},
    {"prompt": PROMPT, "logit_bias": {"x": 5}},
    {"prompt": PROMPT, "logit_bias": {"5": 1e9}},
    {"prompt": PROMPT, "temperature": 1e300},
    {"prompt": PROMPT, "repetition_penalty": 0},
    {"prompt": PROMPT, "presence_penalty": 99},
    {"prompt": PROMPT, "min_tokens": 900, "max_tokens": 4},
    {"prompt": PROMPT, "stop": [""]},
    {"prompt": PROMPT, "stop": ["a"] * 100},
    {"prompt": PROMPT, "logprobs": 5000},
    {"prompt": PROMPT, "model": ["plain", "stable"]},
    {"prompt": PROMPT, "model": "../../etc/passwd"},
    {"prompt": PROMPT, "model": "plain\u0000"},
    {"prompt": "\ud800"},
    {"prompt": "x" * 200_000},
]


@pytest.mark.parametrize("body", NASTY_BODIES, ids=lambda body: json.dumps(body)[:50])
def test_no_single_request_hurts_the_server(server: Any, key: str, body: dict[str, Any]) -> None:
    """vllm#7283, vllm#6521, vllm#51940: empty prompts, scoring calls and odd fields that ended the engine."""
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx2.post(
        f"{server.url}/v1/completions", content=json.dumps({"model": "plain", **body}), headers=headers, timeout=60
    )
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in answer.text


def test_the_server_is_alive_after_all_that(server: Any, key: str, adapters: dict[str, Path], reference: Any) -> None:
    assert_alive(server, key, reference, adapters)
    assert server.metrics()["graftwork_engine_restarts_total"] == 0


def test_models_show_no_paths_and_nobody_elses_names(server: Any, key: str, make_adapter: Callable[..., Path]) -> None:
    """vllm#11761, sglang#12745: model lists that showed the server's files, and errors that listed everybody's adapters."""
    other = server.tenant_with("initech", {"hidden": make_adapter("hidden", 82)})
    headers = {"Authorization": f"Bearer {key}"}
    listed = httpx2.get(f"{server.url}/v1/models", headers=headers, timeout=60).text
    assert "hidden" not in listed
    assert str(server.data_dir) not in listed
    assert all("/" not in model["id"] and model["parent"] in (None, server.model.name) for model in json.loads(listed)["data"])
    for model in ("a:b", "org/name", "plain ", "PLAIN", "pläin", "hidden", "plain@v99"):
        answer = httpx2.post(f"{server.url}/v1/completions", json={"model": model, "prompt": PROMPT}, headers=headers, timeout=60)
        assert answer.status_code == 404, model
        assert "stable" not in answer.text
    shown = httpx2.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {other}"}, timeout=60).json()
    assert [model["id"] for model in shown["data"]] == [server.model.name, "hidden"]


def test_sigterm_lets_streams_end_and_takes_no_new_ones(
    start_server: Callable[..., Any], make_adapter: Callable[..., Path]
) -> None:
    """litellm PR 28714, sglang PR 38744: a rolling restart dropped the streams that were running."""
    server = start_server("--dtype", "float32", "--shutdown-grace", "30", "--kernel", "all=reference")  # streams of seconds
    key = server.tenant_with("rolling", {"kept": make_adapter("rolling", 83)})
    client = server.client(key)
    expected = server.complete(client, "kept", PROMPT, 700)
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        begun = [threading.Event() for _ in range(5)]

        def stream(event: threading.Event) -> list[int]:
            tokens = []
            for some in server.streamed(client, "kept", PROMPT, 700):
                tokens += some
                event.set()
            return tokens

        streams = [pool.submit(stream, event) for event in begun]
        assert all(event.wait(120) for event in begun)
        stopper = threading.Thread(target=server.stop, args=(signal.SIGTERM,))
        stopper.start()
        assert [stream.result(120) for stream in streams] == [expected] * 5
        stopper.join(120)
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(f"{server.url}/readyz", timeout=2)
