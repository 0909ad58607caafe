"""However a request ends, there is one usage row, durable before its client is told, and nothing is left running."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import time

import httpx
import pytest

from graftwork_engine.errors import ErrorCode, RequestFailed
from graftwork_engine.messages import OutItem

WORDS = "hello world, how are you"
PATHS = {"chat/completions": {"messages": [{"role": "user", "content": "hi"}]}, "completions": {"prompt": "hi", "max_tokens": 100}}


def hang_after(server, num_tokens: int, words: str = WORDS, pause: float = 0.0):
    """Says so many tokens and then nothing more."""
    ids = server.tokenizer.encode(words, add_special_tokens=False)[:num_tokens]

    async def script(request):
        for place, token_id in enumerate(ids):
            yield OutItem(request.request_id, place, [token_id], cached_tokens=1)
            if pause:
                await asyncio.sleep(pause)
        await asyncio.Event().wait()

    server.engine.scripts.append(script)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def tokens_counted(server) -> int:
    """Of the requests that run, as a checkpoint would write them."""
    return sum(count.output_tokens for entry in list(server.services.usage._running) for count in entry.counts.values())


def send_raw(server, path: str, **fields: object) -> socket.socket:
    """A request on a socket of its own, so that the test decides when its client dies."""
    body = json.dumps({"model": "tiny-base", **PATHS[path], **fields}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_tokens", range(7))
def test_client_leaves_a_stream_at_any_token(server, path: str, num_tokens: int) -> None:
    hang_after(server, num_tokens)
    with send_raw(server, path, stream=True, return_token_ids=True) as connection:
        wait_until(lambda: server.engine.requests)
        seen = b""
        while seen.count(b'"token_ids":[') < num_tokens:
            seen += connection.recv(65536)
    [request] = server.engine.requests
    row = server.usage(request.request_id)
    prompt_tokens = len(request.prompt_ids) if num_tokens else 0
    assert (row.status, row.output_tokens, row.prompt_tokens) == ("aborted", num_tokens, prompt_tokens)
    assert row.cached_tokens == min(1, num_tokens)
    assert server.engine.aborted == [request.request_id]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_client_leaves_while_it_waits_for_the_whole_answer(server, path: str, num_tokens: int) -> None:
    hang_after(server, num_tokens)
    with send_raw(server, path):
        wait_until(lambda: server.engine.requests and tokens_counted(server) == num_tokens)
    [request] = server.engine.requests
    row = server.usage(request.request_id)
    assert (row.status, row.output_tokens) == ("aborted", num_tokens)
    assert server.engine.aborted == [request.request_id]


def test_client_leaves_in_the_middle_of_writing(server) -> None:
    hang_after(server, 90, "hello world " * 45, pause=0.001)  # it has no end that could come before the client leaves
    with send_raw(server, "chat/completions", stream=True) as connection:
        connection.recv(1000)
    [request] = server.engine.requests
    row = server.usage(request.request_id)
    assert row.status == "aborted"
    assert 1 <= row.output_tokens <= 90
    wait_until(lambda: server.engine.aborted == [request.request_id])


@pytest.mark.parametrize("path", PATHS)
def test_usage_is_durable_before_the_stream_ends(server, path: str) -> None:
    body = {"model": "tiny-base", "stream": True, "stream_options": {"include_usage": True}, **PATHS[path]}
    with server.http.stream("POST", f"/v1/{path}", json=body, headers=server.headers()) as response:
        rows_at_finish = rows_at_done = None
        for line in response.iter_lines():
            if rows_at_finish is None and '"finish_reason":"stop"' in line:
                rows_at_finish = server.durable(response.headers["x-request-id"])
            if line == "data: [DONE]":
                rows_at_done = server.durable(response.headers["x-request-id"])
    for rows in (rows_at_finish, rows_at_done):
        [row] = rows
        assert (row.status, row.output_tokens) == ("completed", 3)


def test_a_database_that_does_not_answer_holds_nothing_up(server) -> None:
    """While somebody else holds the database's write lock, requests run and end; their rows come when it is free."""
    lock = sqlite3.connect(server.database.removeprefix("sqlite:///"), isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    answers = [server.post(path, {"model": "tiny-base", "stream": True, **body}) for path, body in PATHS.items()]
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
    lock.execute("ROLLBACK")
    lock.close()
    assert [server.usage(answer.headers["x-request-id"]).status for answer in answers] == ["completed"] * 2


def test_usage_is_durable_before_a_whole_answer(server) -> None:
    response = server.http.post("/v1/completions", json={"model": "tiny-base", "prompt": "x"}, headers=server.headers())
    [row] = server.durable(response.headers["x-request-id"])
    assert (row.status, row.output_tokens, row.model) == ("completed", 3, "tiny-base")


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_durable_before_a_failure_is_told(server, stream: bool) -> None:
    server.engine.scripts.append(server.engine.say("hello world", then=RequestFailed(ErrorCode.TIMEOUT, "")))
    body = {"model": "tiny-base", "prompt": "x", "stream": stream}
    with server.http.stream("POST", "/v1/completions", json=body, headers=server.headers()) as response:
        text = ""
        for piece in response.iter_text():
            text += piece
            if '"error"' in text:
                [row] = server.durable(response.headers["x-request-id"])
    assert (row.status, row.output_tokens) == ("failed", 2)
    assert text.endswith("data: [DONE]\n\n") == stream


def test_a_vanished_blob_is_503_for_its_adapter_alone(server) -> None:
    [version] = server.add_adapter("vanished")
    server.engine.scripts.append(server.engine.say("", then=RequestFailed(ErrorCode.ADAPTER_MISSING, "no packed form")))
    body = {"model": "vanished", "prompt": "x"}
    response = server.http.post("/v1/completions", json=body, headers=server.headers())
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "adapter_missing")
    assert "`vanished`" in error["message"]
    assert version.digest in error["message"]
    assert int(response.headers["retry-after"]) > 0
    row = server.usage(response.headers["x-request-id"])
    assert (row.status, row.prompt_tokens, row.version_id) == ("failed", 0, version.id)
    assert server.http.post("/v1/completions", json=body | {"model": "tiny-base"}, headers=server.headers()).status_code == 200


def test_64_streams_hold_no_database_connection(server) -> None:
    """The database has two readers; a connection held by a stream would stop the third request."""

    async def main() -> None:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.url, headers=server.headers(), limits=limits, timeout=60) as client:
            body = {"model": "tiny-base", "stream": True, **PATHS["chat/completions"]}
            for _ in range(64):
                hang_after(server, 1)
            streams = [client.stream("POST", "/v1/chat/completions", json=body) for _ in range(64)]
            responses = await asyncio.gather(*(stream.__aenter__() for stream in streams))
            assert [response.status_code for response in responses] == [200] * 64
            assert (await client.get("/v1/models")).status_code == 200
            assert (await client.post("/v1/completions", json={"model": "tiny-base", "prompt": "x"})).status_code == 200
            await asyncio.gather(*(stream.__aexit__(None, None, None) for stream in streams))

    asyncio.run(main())
    hanging = [request.request_id for request in server.engine.requests[:64]]
    assert {server.usage(request_id).status for request_id in hanging} == {"aborted"}
    assert sorted(server.engine.aborted) == sorted(hanging)
