"""The official client, strict about every shape: models, chat, completions, streams, and errors as its own exceptions."""

from __future__ import annotations

import openai
import pytest

from graftwork_engine.errors import EngineUnavailable, ErrorCode, RequestFailed, RequestRejected
from graftwork_engine.messages import OutItem, TokenLogprob


def test_models(server) -> None:
    server.add_adapter("triage", versions=2)
    client = server.client()
    assert [model.id for model in client.models.list().data] == ["tiny-base", "triage"]
    assert client.models.retrieve("tiny-base").owned_by == "graftwork"
    assert client.models.retrieve("triage@v1").created == 1
    assert client.models.retrieve("default").id == "default"
    for foreign in (client.models.retrieve, server.client(server.other_key).models.retrieve):
        with pytest.raises(openai.NotFoundError) as caught:
            foreign("nobody" if foreign.__self__._client is client else "triage")
        assert caught.value.code == "model_not_found"


def test_chat(server) -> None:
    client = server.client()
    answer = client.chat.completions.create(model="tiny-base", messages=[{"role": "user", "content": "hi"}])
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello world", "stop")
    [request] = server.engine.requests
    assert server.tokenizer.decode(request.prompt_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer.usage.prompt_tokens == len(request.prompt_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id == "chatcmpl-" + request.request_id.removeprefix("req_")
    assert answer.model == "tiny-base"
    assert request.sampling.max_tokens == 256 - len(request.prompt_ids)
    assert request.sampling.stop_token_ids == (2,)


def test_chat_stream_with_usage(server) -> None:
    client = server.client()
    server.engine.scripts.append(server.engine.say("hello ☃ world", cached=3))
    stream = client.chat.completions.create(
        model="tiny-base",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "hello ☃ world"
    assert not any("\ufffd" in piece for piece in texts)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_stream_without_usage_has_no_such_key(server) -> None:
    stream = server.client().chat.completions.create(model="tiny-base", messages=[{"role": "user", "content": "hi"}], stream=True)
    assert all("usage" not in chunk.model_fields_set for chunk in stream)


def test_completion_from_text_and_ids(server) -> None:
    client = server.client()
    for prompt in ("hello", ["hello"], [1, 70, 71], [[1, 70, 71]]):
        answer = client.completions.create(model="tiny-base", prompt=prompt, max_tokens=1)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello", "length")
        assert answer.usage.completion_tokens == 1
    expected = server.tokenizer.encode("hello")
    assert expected[0] == 1
    assert [request.prompt_ids for request in server.engine.requests] == [expected, expected, [1, 70, 71], [1, 70, 71]]
    client.completions.create(model="tiny-base", prompt="hello")
    assert server.engine.requests[-1].sampling.max_tokens == 16


def test_completion_stream(server) -> None:
    # The client's own type demands a finish reason in every chunk, which no server (OpenAI's neither) sends: not strict here.
    client = server.client()
    client._strict_response_validation = False
    stream = client.completions.create(
        model="tiny-base", prompt="x", stream=True, stream_options={"include_usage": True}, max_tokens=5
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "hello world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 3
    assert chunks[0].object == "text_completion"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_with_choices_stops_and_biases(server, stream: bool) -> None:
    say = server.engine.say
    server.engine.scripts.extend([say("hello world"), say("you hello"), say("hello")])
    asked = {
        "n": 3,
        "stop": [" world", "\n"],
        "logit_bias": {"5": -100},
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 3,
    }
    answer = server.client().chat.completions.create(
        model="tiny-base", messages=[{"role": "user", "content": "hi"}], stream=stream, **asked
    )
    texts, finishes = ["", "", ""], [None] * 3
    if stream:
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                finishes[choice.index] = finishes[choice.index] or choice.finish_reason
    else:
        texts = [choice.message.content for choice in answer.choices]
        finishes = [choice.finish_reason for choice in answer.choices]
        counts = [len(server.tokenizer.encode(words, add_special_tokens=False)) for words in ("hello world", "you hello", "hello")]
        assert answer.usage.completion_tokens == counts[0] + counts[1] + 1 + counts[2] + 1
    assert texts == ["hello", "you hello", "hello"]
    assert finishes == ["stop"] * 3
    assert {request.sampling.seed for request in server.engine.requests} == {3}
    assert server.engine.requests[2].sampling.logit_bias == {5: -100.0}


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts_with_echo(server, stream: bool) -> None:
    client = server.client()
    client._strict_response_validation = False  # the client's type knows no null among the log-probabilities, which OpenAI sends
    scores = [None, TokenLogprob(-0.5, (70,), (-0.5,))]

    async def script(request):
        yield OutItem(request.request_id, 0, [71], [TokenLogprob(-1.0)], scores, finish="length")

    server.engine.scripts.extend([script, script])
    prompts = [[70, 70], [71, 71]]
    answer = client.completions.create(model="tiny-base", prompt=prompts, max_tokens=1, echo=True, logprobs=1, stream=stream)
    parts = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    decode = server.tokenizer.decode
    assert [(part.index, part.text) for part in parts] == [(0, decode([70, 70, 71])), (1, decode([71, 71, 71]))]
    assert [part.logprobs.token_logprobs for part in parts] == [[None, -0.5, -1.0]] * 2
    assert parts[0].logprobs.top_logprobs[0] is None


def test_refused_fields_are_the_clients_own_exception(server) -> None:
    for asked, param in (({"n": 0}, "n"), ({"stop": ["a"] * 5}, "stop"), ({"logit_bias": {"5": 101}}, "logit_bias")):
        with pytest.raises(openai.BadRequestError) as caught:
            server.client().completions.create(model="tiny-base", prompt="x", **asked)
        assert caught.value.param == param


def test_adapters_by_every_name(server) -> None:
    first, second = server.add_adapter("writer", versions=2)
    client = server.client()
    seen = []
    for name in ("writer", "writer@v1", "writer@v2"):
        answer = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}])
        assert answer.model == name
        row = server.usage("req_" + answer.id.removeprefix("chatcmpl-"))
        seen.append((server.engine.requests[-1].adapter_key, row.version_id))
    assert seen[0] == seen[2] == (seen[0][0], second.id)
    assert seen[1][0] != seen[0][0]
    assert seen[1][1] == first.id
    client.chat.completions.create(model="default", messages=[{"role": "user", "content": "hi"}])
    assert server.engine.requests[-1].adapter_key is None


def test_tenants_have_their_own_salt_and_flow(server) -> None:
    for key in (server.key, server.other_key):
        server.client(key).completions.create(model="tiny-base", prompt="x", max_tokens=1)
    mine, other = server.engine.requests
    assert mine.cache_salt != other.cache_salt
    assert mine.flow != other.flow


def test_unauthorized(server) -> None:
    for key in ("wrong", "gw-0000000000000000-" + "0" * 43):
        with pytest.raises(openai.AuthenticationError) as caught:
            server.client(key).models.list()
        assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("failure", "exception", "code", "text"),
    [
        (
            RequestRejected(ErrorCode.CONTEXT_LENGTH, "300 and 256"),
            openai.BadRequestError,
            "context_length_exceeded",
            "300 and 256",
        ),
        (RequestFailed(ErrorCode.STORE_UNAVAILABLE, "disk gone"), openai.InternalServerError, "store_unavailable", "disk gone"),
        (RequestFailed(ErrorCode.ADAPTER_CORRUPT, "bad sum"), openai.InternalServerError, "adapter_corrupt", "bad sum"),
        (RequestFailed(ErrorCode.ADAPTER_TOO_LARGE, "9 > 8"), openai.InternalServerError, "adapter_too_large", "9 > 8"),
        (RequestFailed(ErrorCode.TIMEOUT, ""), openai.InternalServerError, "timeout", "longer"),
        (RequestFailed(ErrorCode.POISONED, "crashed twice"), openai.InternalServerError, "poisoned", "crashed twice"),
        (RequestFailed(ErrorCode.INTERNAL, "secret path"), openai.InternalServerError, "internal_error", "had an error"),
        (EngineUnavailable("still starting"), openai.InternalServerError, "engine_unavailable", "still starting"),
        (RuntimeError("a bug"), openai.InternalServerError, None, "had an error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_failures_before_the_first_token(server, failure, exception, code, text, stream) -> None:
    statuses = {"timeout": 504, "poisoned": 500, "internal_error": 500, None: 500, "context_length_exceeded": 400}
    server.engine.scripts.append(server.engine.say("", then=failure))
    with pytest.raises(exception) as caught:
        server.client().chat.completions.create(model="tiny-base", messages=[{"role": "user", "content": "hi"}], stream=stream)
    error = caught.value
    assert error.status_code == statuses.get(code, 503)
    assert error.code == code
    assert text in error.body["message"]
    assert "secret" not in error.body["message"]
    assert ("retry-after" in error.response.headers) == (error.status_code == 503)
    assert error.response.headers.get("x-should-retry") == ("false" if code in ("timeout", "poisoned") else None)
    row = server.usage(error.response.headers["x-request-id"])
    assert (row.status, row.output_tokens) == ("failed", 0)


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RequestFailed(ErrorCode.TIMEOUT, ""), "timeout"),
        (EngineUnavailable("gone"), "engine_unavailable"),
        (RuntimeError("bug"), None),
    ],
)
def test_failure_in_mid_stream(server, failure, code) -> None:
    server.engine.scripts.append(server.engine.say("hello world", then=failure))
    stream = server.client().chat.completions.create(model="tiny-base", messages=[{"role": "user", "content": "x"}], stream=True)
    texts: list[str] = []
    with pytest.raises(openai.APIError) as caught:
        texts.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(texts) == "hello world"
    assert caught.value.code == code
    assert type(caught.value) is openai.APIError
    row = server.usage(stream.response.headers["x-request-id"])
    assert (row.status, row.output_tokens) == ("failed", 2)


def test_failure_in_mid_answer(server) -> None:
    server.engine.scripts.append(server.engine.say("hello world", then=RequestFailed(ErrorCode.TIMEOUT, "30 s")))
    with pytest.raises(openai.InternalServerError) as caught:
        server.client().completions.create(model="tiny-base", prompt="x", max_tokens=9)
    assert caught.value.status_code == 504
    assert server.usage(caught.value.response.headers["x-request-id"]).output_tokens == 2
