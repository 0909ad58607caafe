"""Several choices and prompts, stop strings, repeated prompts, tokens: what goes to the engine and what comes back over HTTP."""

from __future__ import annotations

import json
import math

import httpx
import pytest

from graftwork_engine.errors import ErrorCode, RequestFailed
from graftwork_engine.messages import OutItem, TokenLogprob

CHAT = {"model": "tiny-base", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny-base", "prompt": "hi"}
PATHS = {"chat/completions": CHAT, "completions": TEXT}
WORDS = ["hello", "hello world", "hello world you", "you"]


def choices_of(response: httpx.Response) -> list[dict]:
    """The answer's choices by index, put together from the chunks of a stream: each begins and ends once, in that order."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [{"text": c["text"] if "text" in c else c["message"]["content"], **c} for c in choices]
    frames = [frame.removeprefix("data: ") for frame in response.text.split("\n\n")]
    assert frames[-2:] == ["[DONE]", ""]
    choices: dict[int, dict] = {}
    for frame in frames[:-2]:
        for part in json.loads(frame)["choices"]:
            if part["index"] not in choices:
                choices[part["index"]] = {"text": "", "token_ids": [], "finish_reason": None}
                assert "delta" not in part or part["delta"] == {"role": "assistant", "content": ""}
            else:
                assert "role" not in part.get("delta", {})
            choice = choices[part["index"]]
            assert choice["finish_reason"] is None, "nothing comes behind a choice's finish"
            choice["text"] += part["text"] if "text" in part else part["delta"].get("content", "")
            choice["token_ids"] += part.get("token_ids", [])
            choice["finish_reason"] = part["finish_reason"]
    assert sorted(choices) == list(range(len(choices)))
    assert all(choice["finish_reason"] for choice in choices.values())
    return [choices[index] for index in sorted(choices)]


def num_tokens(server, words: str) -> int:
    return len(server.tokenizer.encode(words, add_special_tokens=False))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_all_choices_of_a_prompt(server, path: str, stream: bool, n: int) -> None:
    texts = [WORDS[place % 4] for place in range(n)]
    server.engine.scripts.extend(server.engine.say(words, pause=0.002 * (place % 3), cached=2) for place, words in enumerate(texts))
    response = server.post(path, PATHS[path] | {"n": n, "stream": stream, "seed": 7})
    choices = choices_of(response)
    assert [choice["text"] for choice in choices] == texts
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    requests = server.engine.requests
    ours = response.headers["x-request-id"]
    assert [request.request_id for request in requests] == [ours, *(f"{ours}-{index}" for index in range(1, n))]
    assert [(request.sampling.seed, request.sampling.choice) for request in requests] == [(7, index) for index in range(n)]
    row = server.usage(ours)
    assert (row.status, row.prompt_tokens, row.cached_tokens) == ("completed", len(requests[0].prompt_ids), 2)
    assert row.output_tokens == sum(num_tokens(server, words) + 1 for words in texts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["a", "bb", "a c"], [[1, 5], [70], [5, 6, 7]], ["a"], [[5, 6]]])
@pytest.mark.parametrize("n", [1, 2])
def test_choices_of_several_prompts(server, prompts: list, stream: bool, n: int) -> None:
    def script(request):
        """Says which prompt and which choice it is."""
        return server.engine.say("hello" + " world" * (len(request.prompt_ids) + 10 * request.sampling.choice))(request)

    server.engine.scripts.extend([script] * (n * len(prompts)))
    response = server.post("completions", TEXT | {"prompt": prompts, "n": n, "stream": stream, "max_tokens": 200})
    ids = [server.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    expected = ["hello" + " world" * (len(prompt) + 10 * choice) for prompt in ids for choice in range(n)]
    assert [choice["text"] for choice in choices_of(response)] == expected
    ours = response.headers["x-request-id"]
    by_id = {request.request_id: (request.prompt_ids, request.sampling.choice) for request in server.engine.requests}
    assert by_id == {ours if index == 0 else f"{ours}-{index}": (ids[index // n], index % n) for index in range(n * len(prompts))}
    row = server.usage(ours)
    assert row.prompt_tokens == sum(map(len, ids)), "each prompt once"
    assert row.output_tokens == sum(num_tokens(server, words) + 1 for words in expected)


@pytest.mark.parametrize("path", PATHS)
def test_one_choice_that_fails_ends_them_all(server, path: str) -> None:
    say = server.engine.say
    failing = say("hello world", then=RequestFailed(ErrorCode.POISONED, "crashed twice"))
    server.engine.scripts.extend([say("hello you " * 50, pause=0.005), failing, say("hello you " * 50, pause=0.005)])
    response = server.post(path, PATHS[path] | {"n": 3, "stream": True, "max_tokens": 200})
    *_, error, done, _ = response.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "poisoned"
    assert done == "data: [DONE]"
    ours = response.headers["x-request-id"]
    assert sorted(server.engine.aborted) == [ours, f"{ours}-2"]
    row = server.usage(ours)
    assert row.status == "failed"
    assert 3 <= row.output_tokens < 100


def test_a_client_that_leaves_ends_all_choices(server) -> None:
    say = server.engine.say
    server.engine.scripts.extend(say("hello you " * 50, pause=0.005) for _ in range(3))
    body = json.dumps(CHAT | {"n": 3, "stream": True})
    with server.http.stream("POST", "/v1/chat/completions", content=body, headers=server.headers()) as response:
        lines = response.iter_lines()
        while '"index":2' not in next(lines):
            pass
    ours = response.headers["x-request-id"]
    row = server.usage(ours)
    assert (row.status, row.prompt_tokens) == ("aborted", len(server.engine.requests[0].prompt_ids))
    assert sorted(server.engine.aborted) == [ours, f"{ours}-1", f"{ours}-2"]


# Stop strings


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "billed"),
    [
        (" world", "hello", "hello world"),
        (["zzz", "wor"], "hello ", "hello world"),
        (["h"], "", "hello"),
        ("lo world you a", "hel", "hello world you a"),
        (["world you", "o wor"], "hell", "hello world"),
    ],
)
def test_text_ends_before_a_stop_string(server, path: str, stream: bool, stop, text: str, billed: str) -> None:
    server.engine.scripts.append(server.engine.say("hello world you are"))
    asked = {"stop": stop, "stream": stream, "return_token_ids": True, "logprobs": None}
    response = server.post(path, PATHS[path] | asked)
    [choice] = choices_of(response)
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    [request] = server.engine.requests
    assert server.engine.stopped == [(request.request_id, len(choice["token_ids"]))]
    assert server.tokenizer.decode(choice["token_ids"]).startswith(billed)
    assert not server.tokenizer.decode(choice["token_ids"][:-1]).startswith(billed)
    assert server.usage(request.request_id).output_tokens == len(choice["token_ids"])
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == len(choice["token_ids"])


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_stops_for_itself(server, stream: bool) -> None:
    say = server.engine.say
    server.engine.scripts.extend([say("hello world you", pause=0.002), say("you hello"), say("you world")])
    response = server.post("completions", TEXT | {"n": 3, "stop": [" world"], "stream": stream})
    assert [(choice["text"], choice["finish_reason"]) for choice in choices_of(response)] == [
        ("hello", "stop"),
        ("you hello", "stop"),
        ("you", "stop"),
    ]
    ours = response.headers["x-request-id"]
    assert sorted(request_id for request_id, _ in server.engine.stopped) == [ours, f"{ours}-2"]
    assert not server.engine.aborted


def test_the_stop_string_can_be_kept_and_held_text_comes_at_the_end(server) -> None:
    server.engine.scripts.append(server.engine.say("hello world"))
    kept = server.post("completions", TEXT | {"stop": " wor", "include_stop_str_in_output": True})
    assert kept.json()["choices"][0]["text"] == "hello wor"
    server.engine.scripts.append(server.engine.say("hello world"))
    held = server.post("completions", TEXT | {"stop": "lo worlds", "stream": True, "max_tokens": 2})
    assert [(c["text"], c["finish_reason"]) for c in choices_of(held)] == [("hello world", "length")]
    server.engine.scripts.append(server.engine.say("hello hello hello"))
    late = server.post("completions", TEXT | {"stop": "hello", "min_tokens": 2})
    assert late.json()["choices"][0]["text"] == "hello "
    assert server.engine.requests[-1].sampling.min_tokens == 2


def test_log_probabilities_of_cut_text_are_those_of_its_tokens(server) -> None:
    ids = server.tokenizer.encode("hello world you", add_special_tokens=False)

    async def script(request):
        entries = [TokenLogprob(-math.inf if place else -0.5, (token_id,), (-math.inf,)) for place, token_id in enumerate(ids)]
        yield OutItem(request.request_id, 0, ids, entries, finish="length")

    server.engine.scripts.append(script)
    choice = server.post("completions", TEXT | {"stop": "world", "logprobs": 1}).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("hello ", ["hello", " world"])
    assert choice["logprobs"]["token_logprobs"] == [-0.5, -9999.0]
    assert not server.engine.stopped, "the engine had ended it already"


def test_what_the_engine_draws_by(server) -> None:
    asked = {
        "presence_penalty": -2,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100, "7": 2.5, "9": 0},
        "min_tokens": 2,
    }
    for path, body in PATHS.items():
        assert server.post(path, body | asked).status_code == 200
        sampling = server.engine.requests[-1].sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2.0, 1.5, 1.2)
        assert (sampling.logit_bias, sampling.min_tokens) == ({5: -100.0, 7: 2.5}, 2)


# Repeated prompts


def scoring(server, words: str = ""):
    """Scores the prompt if asked to, then says ``words``."""

    async def script(request):
        sampling = request.sampling
        scores = None
        if sampling.prompt_logprobs is not None:
            scores = [None, *(TokenLogprob(-0.1 * i, (i,), (-0.1 * i,)) for i in request.prompt_ids[1:])]
        ids = server.tokenizer.encode(words, add_special_tokens=False)[: sampling.max_tokens]
        entries = None if sampling.logprobs is None else [TokenLogprob(-1.0, (i,), (-1.0,)) for i in ids]
        yield OutItem(request.request_id, 0, ids, entries, scores, finish="length")

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("words", "max_tokens"), [("", 0), ("hello world", 1)])
@pytest.mark.parametrize("model", ["tiny-base", "scored"])
def test_scoring_prompts(server, stream: bool, words: str, max_tokens: int, model: str) -> None:
    """What evaluation tools send."""
    if model == "scored" and server.post("completions", {"model": model, "prompt": [5], "max_tokens": 1}).status_code == 404:
        server.add_adapter(model)
    server.engine.requests.clear()
    prompts = [server.tokenizer.encode("hello you"), server.tokenizer.encode("a world")]
    server.engine.scripts.extend([scoring(server, words), scoring(server, words)])
    asked = {"prompt": prompts, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    response = server.post("completions", asked | {"model": model, "stream": stream})
    assert [request.sampling.prompt_logprobs for request in server.engine.requests] == [1, 1]
    assert [request.sampling.max_tokens for request in server.engine.requests] == [max_tokens] * 2
    made = "hello" if max_tokens else ""
    choices = choices_of(response)
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("hello you" + made, "length"),
        ("a world" + made, "length"),
    ]
    row = server.usage(response.headers["x-request-id"])
    assert (row.prompt_tokens, row.output_tokens) == (sum(map(len, prompts)), 2 * max_tokens)
    if stream:
        return
    assert response.json()["usage"]["completion_tokens"] == 2 * max_tokens
    for prompt, choice in zip(prompts, choices, strict=True):
        shown = choice["logprobs"]
        end = len(prompt) + max_tokens
        assert [len(shown[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [end] * 4
        assert (shown["token_logprobs"][0], shown["top_logprobs"][0]) == (None, None)
        assert shown["token_logprobs"][1 : len(prompt)] == pytest.approx([-0.1 * i for i in prompt[1:]])
        greedy = [max(top.values()) for top in shown["top_logprobs"][1:]]
        assert greedy == shown["token_logprobs"][1:]
        for token, offset in zip(shown["tokens"][1:], shown["text_offset"][1:], strict=True):
            assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_repeated_prompts_with_choices_of_their_own(server, logprobs: int | None) -> None:
    server.engine.scripts.extend([scoring(server, "hello"), scoring(server, "you")])
    body = TEXT | {"prompt": "a ☃", "n": 2, "echo": True, "logprobs": logprobs}
    first, second = server.post("completions", body).json()["choices"]
    assert (first["text"], second["text"]) == ("a ☃hello", "a ☃you")
    leader, follower = server.engine.requests
    assert (leader.sampling.prompt_logprobs, follower.sampling.prompt_logprobs) == (logprobs, None)
    prompt = len(leader.prompt_ids)
    if logprobs is None:
        assert first["logprobs"] is second["logprobs"] is None
    else:
        assert first["logprobs"]["token_logprobs"][:prompt] == second["logprobs"]["token_logprobs"][:prompt]
        assert len(second["logprobs"]["tokens"]) == prompt + num_tokens(server, "you")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_repeated_text_is_the_one_that_was_sent(server, stream: bool, logprobs: int | None) -> None:
    """Special tokens that it spells included, so that the output is what comes behind its length."""
    prompt = "<|im_start|>user\nhi ☃<|im_end|>\n"
    server.engine.scripts.append(scoring(server, "hello"))
    response = server.post("completions", TEXT | {"prompt": prompt, "echo": True, "logprobs": logprobs, "stream": stream})
    assert choices_of(response)[0]["text"] == prompt + "hello"
    if stream or logprobs is None:
        return
    shown = response.json()["choices"][0]["logprobs"]
    num_prompt = len(server.engine.requests[0].prompt_ids)
    assert shown["text_offset"][:3] == [0, 0, len("<|im_start|>")], "the tokenizer's own BOS has no text"
    assert shown["text_offset"][num_prompt:] == [len(prompt)]
    assert len(shown["tokens"]) == num_prompt + 1
    for token, offset in zip(shown["tokens"][1:], shown["text_offset"][1:], strict=True):
        assert token.startswith("bytes:") or (prompt + "hello")[offset:].startswith(token)


# Tokens


@pytest.mark.parametrize("root", ["", "/v1"])
def test_tokenize_and_detokenize(server, root: str) -> None:
    def post(path: str, body: dict) -> dict:
        response = server.http.post(root + path, json={"model": "tiny-base", **body}, headers=server.headers())
        assert response.status_code == 200, response.text
        return response.json()

    ids = server.tokenizer.encode("hello ☃")
    answer = post("/tokenize", {"prompt": "hello ☃", "return_token_strs": True})
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 256)
    assert answer["token_strs"][:2] == ["<|im_start|>", "hello"]
    assert post("/tokenize", {"prompt": "hello ☃", "add_special_tokens": False})["tokens"] == ids[1:]
    assert post("/tokenize", {"prompt": ""})["tokens"] == [1]
    assert post("/detokenize", {"tokens": ids}) == {"prompt": "<|im_start|>hello ☃"}
    assert post("/detokenize", {"tokens": []}) == {"prompt": ""}

    server.post("chat/completions", CHAT)
    chat = post("/tokenize", {"messages": CHAT["messages"]})
    assert chat["tokens"] == server.engine.requests[-1].prompt_ids
    assert chat["token_strs"] is None
    shorter = post("/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": False})
    assert chat["tokens"][: shorter["count"]] == shorter["tokens"]
    assert shorter["count"] < chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404, "model"),
        ("/detokenize", {"tokens": [5], "model": "nobody"}, 404, "model"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, 400, "prompt"),
        ("/tokenize", {"prompt": 7}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "tools": [1]}, 400, "tools"),
        ("/tokenize", {"prompt": "a", "unheard_of": 1}, 400, "unheard_of"),
        ("/detokenize", {"tokens": [100_000]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
def test_refusals_of_tokenize_and_detokenize(server, path: str, body: dict, status: int, param: str) -> None:
    response = server.http.post(path, json={"model": "tiny-base", **body}, headers=server.headers())
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert server.http.post(path, json=body).status_code == 401


def test_foreign_models_are_unknown_to_tokenize(server) -> None:
    server.add_adapter("mine")
    body = {"model": "mine", "prompt": "a"}
    assert server.http.post("/tokenize", json=body, headers=server.headers()).status_code == 200
    foreign = server.http.post("/tokenize", json=body, headers={"authorization": f"Bearer {server.other_key}"})
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "model_not_found")


def test_text_up_to_eight_times_the_context_can_still_be_counted(server) -> None:
    def post(path: str, body: dict) -> httpx.Response:
        return server.http.post(path, json={"model": "tiny-base", **body}, headers=server.headers())

    assert post("/tokenize", {"prompt": "hello " * 1000}).json()["count"] > 4 * 256
    assert post("/detokenize", {"tokens": [70] * (8 * 256)}).status_code == 200
    for path, body, param in (
        ("/tokenize", {"prompt": "hello " * 2000}, "prompt"),
        ("/tokenize", {"prompt": "hello " * 50_000}, "prompt"),
        ("/detokenize", {"tokens": [70] * (8 * 256 + 1)}, "tokens"),
    ):
        answer = post(path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert answer.json()["error"]["param"] == param
        assert "8 times" in answer.json()["error"]["message"]


@pytest.mark.parametrize("seed", [None, 7])
def test_equal_prompts_of_one_request_have_outputs_of_their_own_unless_a_seed_is_given(server, seed: int | None) -> None:
    server.post("completions", TEXT | {"prompt": ["a", "a"], "seed": seed})
    server.post("completions", TEXT | {"prompt": [[5], [5]], "seed": seed})
    seeds = [request.sampling.seed for request in server.engine.requests]
    assert len(set(seeds)) == (4 if seed is None else 1)
    server.engine.requests.clear()
    server.post("completions", TEXT | {"n": 3, "seed": seed})
    assert len({request.sampling.seed for request in server.engine.requests}) == 1, "choices differ by their number"
