"""Requests that are refused before the engine sees them: authentication before the body, limits, and fields, each by its name."""

from __future__ import annotations

import socket
import threading

import httpx
import msgspec
import pytest

from graftwork_platform.inference import routes, schemas
from graftwork_platform.text.chat_template import ChatTemplate
from graftwork_platform.text.tokenizer import Tokenizer

CHAT = {"model": "tiny-base", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny-base", "prompt": "hi"}


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("key", ["", "Bearer", "Bearer wrong", "Basic abc", "Bearer " + "x" * 5000])
def test_key_is_checked_before_the_body(server, path: str, key: str) -> None:
    response = server.http.post(f"{server.url}/v1/{path}", content=b"{garbage", headers={"authorization": key} if key else {})
    assert response.status_code == 401
    assert error_of(response)["type"] == "authentication_error"
    assert response.headers["x-request-id"].startswith("req_")


def test_a_wrong_key_is_refused_while_its_body_is_still_coming(server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\nContent-Length: 99999999999\r\n\r\n{"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_admin_key_cannot_run_models(server) -> None:
    key = server.services.settings.admin_key_file.read_text().strip()
    response = server.http.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"})
    assert (response.status_code, error_of(response)["type"]) == (403, "permission_error")


def test_body_over_the_limit(server) -> None:
    announced = server.post("completions", b"x" * ((16 << 20) + 1))
    assert (announced.status_code, error_of(announced)["code"]) == (413, "payload_too_large")

    def chunks():
        for _ in range(17):
            yield b" " * (1 << 20)

    streamed = server.http.post(f"{server.url}/v1/completions", content=chunks(), headers=server.headers())
    assert streamed.status_code == 413


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"model": NaN}',
        b'{"temperature": 1e999, "model": "x"}',
        b"[" * 100_000,
        b"\xff",
        b'{"a":"\xff"}',
    ],
)
def test_bodies_that_are_no_json_object(server, body: bytes) -> None:
    response = server.post("chat/completions", body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


UNSUPPORTED = {
    "response_format": {"type": "json_object"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "structured_outputs": {"regex": "a"},
    "prompt_logprobs": 1,
    "bad_words": ["x"],
    "skip_special_tokens": False,
    "priority": 1,
    "cache_salt": "x",
}
CHAT_ONLY = {
    "echo": True,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "modalities": ["text", "audio"],
    "audio": {"voice": "x", "format": "mp3"},
    "reasoning_effort": "low",
    "store": True,
    "metadata": {"a": "b"},
    "chat_template": "x",
    "continue_final_message": True,
    "add_generation_prompt": False,
    "service_tier": "flex",
}
COMPLETION_ONLY = {"best_of": 2, "suffix": "x", "prompt_embeds": "x"}


@pytest.mark.parametrize(
    ("path", "base", "name", "value"),
    [
        *(("chat/completions", CHAT, name, value) for name, value in (UNSUPPORTED | CHAT_ONLY).items()),
        *(("completions", TEXT, name, value) for name, value in (UNSUPPORTED | COMPLETION_ONLY).items()),
        ("chat/completions", CHAT | {"stream": True}, "stream_options.continuous_usage_stats", True),
    ],
)
def test_unserved_fields_are_named(server, path: str, base: dict, name: str, value: object) -> None:
    outer, _, inner = name.partition(".")
    response = server.post(path, base | {outer: {inner: value} if inner else value})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert name in error["message"]
    assert not server.engine.requests


def test_fields_at_their_defaults_are_let_through(server) -> None:
    shared = {"stop": None, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "echo": False, "user": "u"}
    chat = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "store": False, "service_tier": "auto"}
    assert server.post("chat/completions", CHAT | shared | chat | {"unheard_of": None}).status_code == 200
    assert server.post("completions", TEXT | shared | {"best_of": 1, "suffix": None, "min_tokens": 0}).status_code == 200
    true_for_one = server.post("completions", TEXT | {"n": True})
    assert error_of(true_for_one)["param"] == "n"


@pytest.mark.parametrize(
    ("path", "change", "param", "code"),
    [
        ("completions", {"unheard_of": 1}, "unheard_of", "unknown_parameter"),
        ("completions", {"model": None}, "model", None),
        ("completions", {"model": ""}, "model", None),
        ("completions", {"model": 7}, "model", None),
        ("completions", {"model": "no/such"}, "model", "model_not_found"),
        ("completions", {"prompt": None}, "prompt", None),
        ("completions", {"prompt": []}, "prompt", None),
        ("completions", {"prompt": [[]]}, "prompt", None),
        ("completions", {"prompt": [[5], []]}, "prompt", None),
        ("completions", {"prompt": [[5], 5]}, "prompt[1]", None),
        ("completions", {"prompt": [[5], [5, -1]]}, "prompt[1][1]", None),
        ("completions", {"prompt": ["a", 1]}, "prompt[1]", None),
        ("completions", {"prompt": [1, "b"]}, "prompt[1]", None),
        ("completions", {"prompt": [None]}, "prompt[0]", None),
        ("completions", {"prompt": ["a"] * 1025}, "prompt", None),
        ("completions", {"prompt": ["a"] * 9, "n": 128}, "prompt", None),
        ("completions", {"prompts": ["a"]}, "prompts", "unknown_parameter"),
        ("completions", {"best_of": 2, "n": 3}, "best_of", "unsupported_parameter"),
        ("completions", {"echo": 1}, "echo", None),
        ("completions", {"stop": ["ok", ""]}, "stop", None),
        ("completions", {"stop": ""}, "stop", None),
        ("completions", {"stop": ["a", "b", "c", "d", "e"]}, "stop", None),
        ("completions", {"stop": "x" * 1025}, "stop", None),
        ("completions", {"stop": ["a", 1]}, "stop", None),
        ("completions", {"stop": {"a": 1}}, "stop", None),
        ("completions", {"n": 0}, "n", None),
        ("completions", {"n": 129}, "n", None),
        ("completions", {"n": 10_000}, "n", None),
        ("completions", {"n": 1.5}, "n", None),
        ("completions", {"presence_penalty": 2.01}, "presence_penalty", None),
        ("completions", {"frequency_penalty": -2.01}, "frequency_penalty", None),
        ("completions", {"frequency_penalty": "1"}, "frequency_penalty", None),
        ("completions", {"repetition_penalty": 0}, "repetition_penalty", None),
        ("completions", {"repetition_penalty": -1}, "repetition_penalty", None),
        ("completions", {"repetition_penalty": 101}, "repetition_penalty", None),
        ("completions", {"logit_bias": {"5": 100.5}}, "logit_bias", None),
        ("completions", {"logit_bias": {"5": None}}, "logit_bias", None),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias", None),
        ("completions", {"logit_bias": {"-1": 1}}, "logit_bias", None),
        ("completions", {"logit_bias": {"\u0665": 1}}, "logit_bias", None),
        ("completions", {"logit_bias": {"100000": 1}}, "logit_bias", None),
        ("completions", {"logit_bias": {"9" * 5000: 1}}, "logit_bias", None),
        ("completions", {"logit_bias": [1]}, "logit_bias", None),
        ("completions", {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", None),
        ("completions", {"min_tokens": -1}, "min_tokens", None),
        ("completions", {"min_tokens": 17}, "min_tokens", None),
        ("completions", {"min_tokens": 4, "max_tokens": 3}, "min_tokens", None),
        ("chat/completions", {"n": 0}, "n", None),
        ("chat/completions", {"max_tokens": 0}, "max_tokens", None),
        ("completions", {"prompt": [1, -2]}, "prompt[1]", None),
        ("completions", {"prompt": [1.5]}, "prompt[0]", None),
        ("completions", {"prompt": [1, 100000]}, "prompt", None),
        ("completions", {"prompt": [10**30]}, "prompt", None),
        ("completions", {"prompt": {"a": 1}}, "prompt", None),
        ("completions", {"max_tokens": 0}, "max_tokens", None),
        ("completions", {"max_tokens": 1.5}, "max_tokens", None),
        ("completions", {"max_tokens": True}, "max_tokens", None),
        ("completions", {"max_tokens": 10**30}, "prompt", "context_length_exceeded"),
        ("completions", {"max_tokens": 300}, "prompt", "context_length_exceeded"),
        ("completions", {"prompt": [5] * 256}, "prompt", "context_length_exceeded"),
        ("completions", {"prompt": "word " * 5000}, "prompt", "context_length_exceeded"),
        ("completions", {"temperature": -0.1}, "temperature", None),
        ("completions", {"temperature": 2.1}, "temperature", None),
        ("completions", {"temperature": "1"}, "temperature", None),
        ("completions", {"top_p": 0}, "top_p", None),
        ("completions", {"top_p": 1.01}, "top_p", None),
        ("completions", {"min_p": 1.01}, "min_p", None),
        ("completions", {"top_k": -2}, "top_k", None),
        ("completions", {"seed": 2**64}, "seed", None),
        ("completions", {"seed": -(2**63) - 1}, "seed", None),
        ("completions", {"logprobs": 21}, "logprobs", None),
        ("completions", {"logprobs": True}, "logprobs", None),
        ("completions", {"stop_token_ids": [100000]}, "stop_token_ids", None),
        ("completions", {"stop_token_ids": [-1]}, "stop_token_ids[0]", None),
        ("completions", {"stop_token_ids": list(range(129))}, "stop_token_ids", None),
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options", None),
        ("completions", {"stream": True, "stream_options": []}, "stream_options", None),
        ("completions", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ("completions", {"stream": 1}, "stream", None),
        ("completions", {"user": 3}, "user", None),
        ("completions", {"messages": [{}]}, "messages", "unknown_parameter"),
        ("chat/completions", {"messages": None}, "messages", None),
        ("chat/completions", {"messages": []}, "messages", None),
        ("chat/completions", {"messages": ["hi"]}, "messages[0]", None),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", None),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role", None),
        ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", None),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "unsupported_parameter"),
        ("chat/completions", {"messages": [{"role": "user", "content": 7}]}, "messages[0].content", None),
        ("chat/completions", {"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]", None),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", None),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name", None),
        ("chat/completions", {"messages": [{"role": "user", "content": "x", "mood": 3}]}, "messages[0].mood", "unknown_parameter"),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "unsupported_parameter",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "forbidden"}]}, "messages", None),
        ("chat/completions", {"messages": [{"role": "user", "content": "word " * 300}]}, "messages", "context_length_exceeded"),
        ("chat/completions", {"logprobs": False, "top_logprobs": 2}, "top_logprobs", None),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
        ("chat/completions", {"logprobs": 2}, "logprobs", None),
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens", None),
        ("chat/completions", {"max_completion_tokens": 255}, "messages", "context_length_exceeded"),
        ("chat/completions", {"prompt": "x"}, "prompt", "unknown_parameter"),
    ],
)
def test_wrong_fields_are_named(server, path: str, change: dict, param: str, code: str | None) -> None:
    response = server.post(path, (CHAT if path.startswith("chat") else TEXT) | change)
    assert response.status_code == (404 if code == "model_not_found" else 400)
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)
    assert not server.engine.requests


@pytest.mark.parametrize("escaped", ['"\\ud800"', '"\\udc00x"', '"\\ud800\\ud800"'])
def test_half_a_surrogate_pair_is_no_text(server, escaped: str) -> None:
    body = f'{{"model": "tiny-base", "prompt": {escaped}}}'.encode()
    assert server.post("completions", body).status_code == 400


def test_context_message_has_both_numbers(server) -> None:
    response = server.post("completions", TEXT | {"prompt": [5] * 200, "max_tokens": 100})
    message = error_of(response)["message"]
    assert all(number in message for number in ("256", "300", "200", "100"))
    assert server.post("completions", TEXT | {"prompt": [5] * 200, "max_tokens": 56}).status_code == 200
    assert server.post("completions", TEXT | {"prompt": [5] * 250}).status_code == 200
    assert server.engine.requests[-1].sampling.max_tokens == 6


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("completions", {"prompt": "hello " * 400_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hello " * 400_000}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}] * 60_000}),
    ],
)
def test_text_that_cannot_fit_is_refused_before_it_is_cut_into_tokens(server, monkeypatch, path: str, change: dict) -> None:
    def never(*_arguments: object, **_options: object) -> None:
        raise AssertionError("the text was looked at")

    monkeypatch.setattr(Tokenizer, "encode", never)
    monkeypatch.setattr(ChatTemplate, "render", never)
    response = server.post(path, (CHAT if path.startswith("chat") else TEXT) | change)
    assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
    assert "256" in error_of(response)["message"]


@pytest.mark.parametrize(("entries", "in_a_thread"), [(10, False), (500_000, True)])
def test_large_bodies_are_parsed_beside_the_event_loop(server, monkeypatch, entries: int, in_a_thread: bool) -> None:
    threads = []

    def parse(body: bytes) -> schemas.CompletionRequest:
        threads.append(threading.current_thread())
        return schemas.parse_completion(body)

    monkeypatch.setattr(routes, "parse_completion", parse)
    server.post("completions", TEXT | {"prompt": [5] * entries})
    assert (threads[0].name.startswith(("asyncio", "uvloop"))) is in_a_thread


@pytest.mark.parametrize("body", [{"prompt": "hello " * 400_000}, {"messages": [{"role": "user", "content": "x"}] * 300}])
def test_so_is_what_is_only_to_be_counted(server, monkeypatch, body: dict) -> None:
    def never(*_arguments: object, **_options: object) -> None:
        raise AssertionError("the text was looked at")

    monkeypatch.setattr(Tokenizer, "encode", never)
    monkeypatch.setattr(ChatTemplate, "render", never)
    response = server.post("tokenize", {"model": "tiny-base", **body})
    assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("completions", {"prompt": ["a"] * 8, "n": 128, "max_tokens": 200, "logprobs": 20}, "logprobs"),
        ("completions", {"prompt": [[5] * 3000] * 700, "max_tokens": 1, "echo": True, "logprobs": 1}, "logprobs"),
        ("chat/completions", {"n": 128, "max_tokens": 3000, "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        ("chat/completions", {"n": 128, "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
    ],
)
def test_an_answer_of_gigabytes_is_refused(server, path: str, change: dict, param: str) -> None:
    info = server.engine.info
    server.engine.info = msgspec.structs.replace(info, max_model_len=4096)
    body = (CHAT if path.startswith("chat") else TEXT) | change
    response = server.post(path, body)
    server.engine.info = info
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert all(name in error_of(response)["message"] for name in ("`n`", f"`{param}`", "`max_tokens`"))
    assert not server.engine.requests


def test_memory_can_be_the_tighter_limit(server) -> None:
    info = server.engine.info
    server.engine.info = msgspec.structs.replace(info, max_prompt_and_output=100)
    response = server.post("completions", TEXT | {"prompt": [5] * 60, "max_tokens": 41})
    server.engine.info = info
    assert error_of(response)["code"] == "context_length_exceeded"
    assert "100" in error_of(response)["message"]


def test_before_the_engines_first_start(server) -> None:
    info, server.engine.info = server.engine.info, None
    response = server.post("chat/completions", CHAT)
    server.engine.info = info
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_unavailable")
    assert "retry-after" in response.headers
