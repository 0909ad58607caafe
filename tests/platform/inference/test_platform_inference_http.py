"""What raw HTTP sees of requests that are served: sampling, token ids, log-probabilities; probes, metrics and unknown routes."""

from __future__ import annotations

import json
import math

import httpx

from graftwork_engine.messages import OutItem, TokenLogprob
from graftwork_platform.inference import routes
from graftwork_platform.inference.sse import EventStream

CHAT = {"model": "tiny-base", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny-base", "prompt": "hi"}


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def test_sampling_reaches_the_engine(server) -> None:
    asked = {"temperature": 0, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": -1, "stop_token_ids": [9, 5], "max_tokens": 3}
    assert server.post("completions", TEXT | asked | {"ignore_eos": True}).status_code == 200
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 7, 0.5, 0.1)
    assert (sampling.seed, sampling.stop_token_ids, sampling.max_tokens) == (2**64 - 1, (5, 9), 3)
    assert (sampling.logprobs, sampling.choice) == (None, 0)

    extremes = {"top_k": 10**30, "top_p": 1e-300, "stream": True, "stream_options": {"include_usage": None}}
    assert server.post("completions", TEXT | extremes).status_code == 200
    assert server.engine.requests[-1].sampling.top_k == server.tokenizer.vocab_size

    seeds = set()
    for _ in range(4):
        server.post("completions", TEXT | {"top_k": -1, "stop_token_ids": [5]})
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
    assert server.post("chat/completions", CHAT | {"messages": messages}).status_code == 200
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
    answer = server.post("completions", TEXT | {"stop_token_ids": ids[1:], "return_token_ids": True}).json()
    assert answer["choices"][0]["text"] == "hello"
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["usage"]["completion_tokens"] == len(ids)


def test_return_token_ids(server) -> None:
    ids = [*server.tokenizer.encode("hello world", add_special_tokens=False), 2]
    chat = server.post("chat/completions", CHAT | {"return_token_ids": True}).json()
    assert chat["prompt_token_ids"] == server.engine.requests[-1].prompt_ids
    assert chat["choices"][0]["token_ids"] == ids
    text = server.post("completions", TEXT | {"return_token_ids": True}).json()
    assert text["choices"][0]["prompt_token_ids"] == server.engine.requests[-1].prompt_ids
    assert text["choices"][0]["token_ids"] == ids
    plain = server.post("chat/completions", CHAT)
    assert "token_ids" not in plain.text

    chunks = events(server.post("chat/completions", CHAT | {"return_token_ids": True, "stream": True}))
    assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == ids
    chunks = events(server.post("completions", TEXT | {"return_token_ids": True, "stream": True}))
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
    assert server.post("chat/completions", CHAT).json()["choices"][0]["logprobs"] is None


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
    chunks = events(server.post("completions", TEXT | {"logprobs": 1, "stream": True}))
    assert [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]] == shown.text_offset


def test_a_silent_stream_is_kept_alive(server, monkeypatch) -> None:
    """By default after 15 s; here a hundred times as soon."""

    def sooner(frames, *, keep_alive: float, time_left: float) -> EventStream:
        return EventStream(frames, keep_alive=keep_alive / 100, time_left=time_left)

    monkeypatch.setattr(routes, "EventStream", sooner)
    server.engine.scripts.append(server.engine.say("hello world", pause=0.4))
    text = server.post("chat/completions", CHAT | {"stream": True}).text
    assert 2 <= text.count(": keep-alive\n\n") <= 10
    server.engine.scripts.append(server.engine.say("hello world", pause=0.4))
    stream = server.client().chat.completions.create(**CHAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello world", "clients pass over it"


def test_client_request_id_is_kept_beside_ours(server) -> None:
    for sent, kept in (("job-7", "job-7"), ("x" * 300, "x" * 128), ("é", None)):
        response = server.post("completions", TEXT, **{"x-request-id": sent.encode()})
        ours = response.headers["x-request-id"]
        assert response.json()["id"] == "cmpl-" + ours.removeprefix("req_")
        row = server.usage(ours)
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
    server.post("completions", TEXT)
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


def test_no_document_of_the_routes_is_public(server) -> None:
    for path in ("/openapi.json", "/docs", "/redoc"):
        response = server.http.get(server.url + path, headers=server.headers())
        assert (response.status_code, error_of(response)["code"]) == (404, "unknown_url")
    paths = server.app.openapi()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/readyz"} <= set(paths)


def test_admin_routes_are_mounted(server) -> None:
    key = server.services.settings.admin_key_file.read_text().strip()
    response = server.http.get(f"{server.url}/admin/v1/tenants", headers={"authorization": f"Bearer {key}"})
    assert [tenant["name"] for tenant in response.json()["data"]] == ["acme", "globex"]
