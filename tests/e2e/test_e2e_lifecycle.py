"""What happens to streams, data and processes when parts of the server are killed, stopped and started again."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

pytestmark = pytest.mark.e2e

PROMPT = [40, 41, 42, 43, 44, 45]


SLOW = ("--kernel", "all=reference")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    """On one backend: the kill tests have both. In plain torch, so that a stream lasts as long as a kill takes."""
    return start_server("--dtype", "float32", *SLOW)


def test_stream_survives_a_kill_of_the_engine(server: Any, key: str, adapters: dict[str, Path], reference: Any) -> None:
    client = server.lenient(server.client(key))
    expected = reference(adapters["stable"], PROMPT, 150)
    [engine] = server.process_ids("graftwork_engine.process")
    tokens: list[int] = []
    stream = client.completions.create(
        model="stable",
        prompt=PROMPT,
        max_tokens=150,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    killed = False
    for chunk in stream:
        tokens += (chunk.choices[0].model_extra or {}).get("token_ids") or []
        if len(tokens) >= 20 and not killed:
            os.kill(engine, signal.SIGKILL)
            killed = True
    assert killed
    assert tokens == expected
    server.wait_ready()


def test_a_request_that_is_running_in_two_crashes_ends_with_an_error_event(server: Any, key: str) -> None:
    stream = server.client(key).chat.completions.create(
        model="plain",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    kills = 0
    with pytest.raises(openai.APIError, match="crashed") as raised:  # noqa: PT012 - the stream raises it, on its way
        for number, _ in enumerate(stream):
            if number >= 10 * (kills + 1) and kills < 2:
                [engine] = server.process_ids("graftwork_engine.process")
                os.kill(engine, signal.SIGKILL)
                kills += 1
    assert kills == 2
    assert not isinstance(raised.value, openai.APIConnectionError)
    server.wait_ready()
    assert len(server.complete(server.client(key), "plain", PROMPT, 2)) == 2


def test_killed_api_process_comes_back_and_its_streams_stop(server: Any, key: str) -> None:
    [api] = server.process_ids("graftwork_platform.serve.api_process")
    [engine] = server.process_ids("graftwork_engine.process")
    body = {"model": "plain", "prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    with (
        httpx2.Client(timeout=60) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        os.kill(api, signal.SIGKILL)
        with pytest.raises(httpx2.HTTPError):
            list(lines)
    server.wait_ready()
    assert server.process_ids("graftwork_engine.process") == [engine], "the engine outlives it"
    server.wait_until_idle()
    assert len(server.complete(server.client(key), "plain", PROMPT, 2)) == 2


def test_stop_and_second_start_keep_all_data(start_server: Callable[..., Any], make_adapter: Callable[..., Path]) -> None:
    server = start_server("--dtype", "float32")
    key = server.tenant_with("keeper", {"kept": make_adapter("kept", 40)})
    tokens = server.complete(server.client(key), "kept", PROMPT, 8)
    mode = stat.S_IMODE((server.data_dir / "admin.key").stat().st_mode)
    assert mode == 0o600
    assert server.stop() == 0
    server.start()
    assert server.complete(server.client(key), "kept", PROMPT, 8) == tokens
    assert key not in server.log.read_text()
    assert server.admin_key not in server.log.read_text()


def test_stopping_ends_a_running_stream_with_an_error_event(start_server: Callable[..., Any]) -> None:
    server = start_server("--dtype", "float32", "--shutdown-grace", "0.5", *SLOW)
    key = server.tenant_with("streaming", {})
    stream = server.client(key).chat.completions.create(
        model=server.model.name,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    codes: list[int] = []
    stopper = threading.Thread(target=lambda: codes.append(server.stop()))
    with pytest.raises(openai.APIError) as raised:  # noqa: PT012 - the stream raises it, on its way
        for number, _ in enumerate(stream):
            if number == 5:
                stopper.start()
    assert not isinstance(raised.value, openai.APIConnectionError), "the connection was cut without a word"
    stopper.join()
    assert codes == [0]
    assert "Traceback" not in server.log.read_text()
    server.start()
    [row] = server.wait_usage("streaming", 1)
    assert row["status"] == "failed"
    assert row["output_tokens"] > 5


def test_second_server_on_the_same_data_is_refused(server: Any, tiny_base: Path) -> None:
    import subprocess
    import sys

    command = [
        sys.executable,
        "-m",
        "graftwork_platform.cli",
        "serve",
        "--model",
        str(tiny_base),
        "--data-dir",
        str(server.data_dir),
    ]
    done = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "in use" in done.stderr + done.stdout


def test_children_die_with_the_supervisor(start_server: Callable[..., Any]) -> None:
    server = start_server("--dtype", "float32")
    children = server.process_ids("graftwork_engine.process") + server.process_ids("graftwork_platform.serve.api_process")
    assert len(children) == 2
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    server.process = None
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
