"""What raw HTTP sees: authentication before the body, limits, fields that are refused, token ids, log-probabilities, probes."""

from __future__ import annotations

import json
import math
import socket

import httpx
import msgspec
import pytest

from graftwork_engine.messages import OutItem, TokenLogprob

CHAT = {"model": "tiny-base", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny-base", "prompt": "hi"}


def post(server, path: str, body: dict | bytes, **headers: str | bytes) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return server.http.post(f"{server.url}/v1/{path}", content=content, headers=server.headers(**headers))


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("key", ["", "Bearer", "Bearer wrong", "Basic abc", "Bearer " + "x" * 5000])
def test_key_is_checked_before_the_body(server, path: str, key: str) -> None:
    response = server.http.post(f"{server.url}/v1/{path}", content=b"{garbage", headers={"authorization": key} if key else {})
    assert response.status_code == 401
    assert error_of(response)["type"] == "authentication_error"
    assert response.headers["x-request-id"].startswith("req_")


def test_a_wrong_key_is_refused_while_its_body_is_still_coming(server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\nContent-Length: 99999999999\r\n\r\n{"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_admin_key_cannot_run_models(server) -> None:
    key = server.services.settings.admin_key_file.read_text().strip()
    response = server.http.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"})
    assert (response.status_code, error_of(response)["type"]) == (403, "permission_error")


def test_body_over_the_limit(server) -> None:
    announced = post(server, "completions", b"x" * ((16 << 20) + 1))
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
    response = post(server, "chat/completions", body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


UNSUPPORTED = {
    "stop": ["x"],
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "logit_bias": {"1": 5},
    "response_format": {"type": "json_object"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "structured_outputs": {"regex": "a"},
    "prompt_logprobs": 1,
    "min_tokens": 3,
    "bad_words": ["x"],
    "skip_special_tokens": False,
    "priority": 1,
    "cache_salt": "x",
    "echo": True,
}
CHAT_ONLY = {
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
    response = post(server, path, base | {outer: {inner: value} if inner else value})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert name in error["message"]
    assert not server.engine.requests


def test_fields_at_their_defaults_are_let_through(server) -> None:
    shared = {"stop": None, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "echo": False, "user": "u"}
    chat = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "store": False, "service_tier": "auto"}
    assert post(server, "chat/completions", CHAT | shared | chat | {"unheard_of": None}).status_code == 200
    assert post(server, "completions", TEXT | shared | {"best_of": 1, "suffix": None, "min_tokens": 0}).status_code == 200
    true_for_one = post(server, "completions", TEXT | {"n": True})
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
        ("completions", {"prompt": ["a", "b"]}, "prompt", "unsupported_parameter"),
        ("completions", {"prompt": [1, "b"]}, "prompt", "unsupported_parameter"),
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
    response = post(server, path, (CHAT if path.startswith("chat") else TEXT) | change)
    assert response.status_code == (404 if code == "model_not_found" else 400)
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)
    assert not server.engine.requests


@pytest.mark.parametrize("escaped", ['"\\ud800"', '"\\udc00x"', '"\\ud800\\ud800"'])
def test_half_a_surrogate_pair_is_no_text(server, escaped: str) -> None:
    body = f'{{"model": "tiny-base", "prompt": {escaped}}}'.encode()
    assert post(server, "completions", body).status_code == 400


def test_context_message_has_both_numbers(server) -> None:
    response = post(server, "completions", TEXT | {"prompt": [5] * 200, "max_tokens": 100})
    message = error_of(response)["message"]
    assert all(number in message for number in ("256", "300", "200", "100"))
    assert post(server, "completions", TEXT | {"prompt": [5] * 200, "max_tokens": 56}).status_code == 200
    assert post(server, "completions", TEXT | {"prompt": [5] * 250}).status_code == 200
    assert server.engine.requests[-1].sampling.max_tokens == 6


def test_memory_can_be_the_tighter_limit(server) -> None:
    info = server.engine.info
    server.engine.info = msgspec.structs.replace(info, max_prompt_and_output=100)
    response = post(server, "completions", TEXT | {"prompt": [5] * 60, "max_tokens": 41})
    server.engine.info = info
    assert error_of(response)["code"] == "context_length_exceeded"
    assert "100" in error_of(response)["message"]


def test_before_the_engines_first_start(server) -> None:
    info, server.engine.info = server.engine.info, None
    response = post(server, "chat/completions", CHAT)
    server.engine.info = info
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_unavailable")
    assert "retry-after" in response.headers


def test_sampling_reaches_the_engine(server) -> None:
    asked = {"temperature": 0, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": -1, "stop_token_ids": [9, 5], "max_tokens": 3}
    assert post(server, "completions", TEXT | asked | {"ignore_eos": True}).status_code == 200
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 7, 0.5, 0.1)
    assert (sampling.seed, sampling.stop_token_ids, sampling.max_tokens) == (2**64 - 1, (5, 9), 3)
    assert (sampling.logprobs, sampling.choice) == (None, 0)

    extremes = {"top_k": 10**30, "top_p": 1e-300, "stream": True, "stream_options": {"include_usage": None}}
    assert post(server, "completions", TEXT | extremes).status_code == 200
    assert server.engine.requests[-1].sampling.top_k == server.tokenizer.vocab_size

    seeds = set()
    for _ in range(4):
        post(server, "completions", TEXT | {"top_k": -1, "stop_token_ids": [5]})
        sampling = server.engine.requests[-1].sampling
        seeds.add(sampling.seed)
        assert (sampling.temperature, sampling.top_k, sampling.stop_token_ids) == (1.0, 0, (2, 5))
    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert 0 < server.engine.requests[-1].timeout_s <= 30


def test_content_parts_roles_and_what_answers_carry(server) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "audio": None, "tool_calls": []},
        {"role": "user", "content": ""},
    ]
    assert post(server, "chat/completions", CHAT | {"messages": messages}).status_code == 200
    prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_ids, skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_stop_token_is_counted_and_is_no_text(server) -> None:
    ids = server.tokenizer.encode("hello world", add_special_tokens=False)

    async def script(request):
        yield OutItem(request.request_id, 0, ids[:1])
        yield OutItem(request.request_id, 1, ids[1:], finish="stop")

    server.engine.scripts.append(script)
    answer = post(server, "completions", TEXT | {"stop_token_ids": ids[1:], "return_token_ids": True}).json()
    assert answer["choices"][0]["text"] == "hello"
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["usage"]["completion_tokens"] == len(ids)


def test_return_token_ids(server) -> None:
    ids = [*server.tokenizer.encode("hello world", add_special_tokens=False), 2]
    chat = post(server, "chat/completions", CHAT | {"return_token_ids": True}).json()
    assert chat["prompt_token_ids"] == server.engine.requests[-1].prompt_ids
    assert chat["choices"][0]["token_ids"] == ids
    text = post(server, "completions", TEXT | {"return_token_ids": True}).json()
    assert text["choices"][0]["prompt_token_ids"] == server.engine.requests[-1].prompt_ids
    assert text["choices"][0]["token_ids"] == ids
    plain = post(server, "chat/completions", CHAT)
    assert "token_ids" not in plain.text

    chunks = events(post(server, "chat/completions", CHAT | {"return_token_ids": True, "stream": True}))
    assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == ids
    chunks = events(post(server, "completions", TEXT | {"return_token_ids": True, "stream": True}))
    assert chunks[0]["choices"][0]["prompt_token_ids"] == text["choices"][0]["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in chunks[1:])
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == ids


def with_logprobs(server, words: str):
    """One token an item, each with itself and the next id as the best two; the last is impossible."""
    ids = server.tokenizer.encode(words, add_special_tokens=False)

    async def script(request):
        for place, token_id in enumerate(ids):
            last = place + 1 == len(ids)
            entry = TokenLogprob(
                -math.inf if last else -0.5 * place,
                (token_id + 1, token_id)[: request.sampling.logprobs],
                (-0.1, -0.2)[: request.sampling.logprobs],
            )
            yield OutItem(request.request_id, place, [token_id], [entry], finish="length" if last else None)

    server.engine.scripts.append(script)
    return ids


def test_chat_logprobs(server) -> None:
    ids = with_logprobs(server, "hello ☃")
    client = server.client()
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == [server.tokenizer.token_text(i) for i in ids]
    assert bytes(byte for entry in content for byte in entry.bytes) == "hello ☃".encode()
    assert [top.logprob for top in content[0].top_logprobs] == [-0.1, -0.2]
    assert content[1].logprob == -0.5
    assert content[-1].logprob == -9999.0
    assert server.engine.requests[-1].sampling.logprobs == 2

    with_logprobs(server, "hello ☃")
    stream = client.chat.completions.create(**CHAT, logprobs=True, stream=True)
    chunks = [chunk for chunk in stream if chunk.choices[0].logprobs]
    assert [entry.token for chunk in chunks for entry in chunk.choices[0].logprobs.content] == [entry.token for entry in content]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "hello ☃"
    assert server.engine.requests[-1].sampling.logprobs == 0
    assert post(server, "chat/completions", CHAT).json()["choices"][0]["logprobs"] is None


def test_completion_logprobs(server) -> None:
    ids = with_logprobs(server, "hello ☃ you")
    answer = server.client().completions.create(**TEXT, logprobs=1)
    shown = answer.choices[0].logprobs
    assert answer.choices[0].text == "hello ☃ you"
    assert shown.tokens == [server.tokenizer.token_text(i) for i in ids]
    assert len(shown.text_offset) == len(shown.token_logprobs) == len(shown.top_logprobs) == len(ids)
    assert shown.text_offset[:2] == [0, 5]
    assert shown.text_offset == sorted(shown.text_offset)
    for token, offset in zip(shown.tokens, shown.text_offset, strict=True):
        assert token.startswith("bytes:") or answer.choices[0].text[offset:].startswith(token)
    assert all(token in top and 1 <= len(top) <= 2 for token, top in zip(shown.tokens, shown.top_logprobs, strict=True))
    with_logprobs(server, "hello ☃ you")
    chunks = events(post(server, "completions", TEXT | {"logprobs": 1, "stream": True}))
    assert [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]] == shown.text_offset


def test_client_request_id_is_kept_beside_ours(server) -> None:
    for sent, kept in (("job-7", "job-7"), ("x" * 300, "x" * 128), ("é", None)):
        response = post(server, "completions", TEXT, **{"x-request-id": sent.encode()})
        ours = response.headers["x-request-id"]
        assert response.json()["id"] == "cmpl-" + ours.removeprefix("req_")
        [row] = server.usage(ours)
        assert row.client_request_id == kept
        assert row.key_id == server.key_id
        assert row.tenant_id == server.tenant_id


def test_unknown_urls_and_methods(server) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/", 404), ("GET", "/v1/completions", 405)):
        response = server.http.request(method, server.url + path, headers=server.headers())
        assert response.status_code == status
        assert error_of(response)["type"] == "invalid_request_error"


def test_probes_and_metrics(server) -> None:
    assert server.http.get(f"{server.url}/livez").status_code == 200
    assert server.http.get(f"{server.url}/readyz").status_code == 200
    server.engine.healthy = False
    response = server.http.get(f"{server.url}/readyz")
    assert (response.status_code, server.http.get(f"{server.url}/livez").status_code) == (503, 200)

    server.engine.stats = {"blocks_free": 12.0, "tokens_total": 7.0, "Bad-Name": 1.0, **{f"x{i}": 1.0 for i in range(400)}}
    post(server, "completions", TEXT)
    server.http.get(f"{server.url}/v1/models/some-name", headers=server.headers())
    server.http.get(f"{server.url}/secret/path/4711")
    text = server.http.get(f"{server.url}/metrics").text
    server.engine.stats = {}
    assert "graftwork_engine_blocks_free 12.0" in text
    assert "graftwork_engine_tokens_total 7.0" in text
    assert "Bad-Name" not in text
    assert text.count("\ngraftwork_engine_x") <= 256
    assert 'graftwork_http_requests_total{route="/v1/completions",status="200"}' in text
    assert 'graftwork_http_requests_total{route="/v1/models/{model:path}",status="404"}' in text
    assert 'graftwork_http_requests_total{route="unknown",status="404"}' in text
    assert "4711" not in text
    assert 'graftwork_generations_total{status="completed"}' in text
    assert 'graftwork_tokens_total{kind="output"}' in text
    assert str(server.tenant_id) not in text


def test_the_openapi_document_lists_the_routes(server) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/readyz"} <= set(paths)


def test_admin_routes_are_mounted(server) -> None:
    key = server.services.settings.admin_key_file.read_text().strip()
    response = server.http.get(f"{server.url}/admin/v1/tenants", headers={"authorization": f"Bearer {key}"})
    assert [tenant["name"] for tenant in response.json()["data"]] == ["acme", "globex"]
