"""An activated LoRA: where it begins in each prompt, what the engine is told of that, and what answers say where it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork_adapters.keys import AdapterDigest, packed_key
from graftwork_adapters.publish_job import AdapterTraits
from graftwork_engine.messages import Sampling
from graftwork_engine.streams import GenerationRequest, Stream
from graftwork_platform.catalog.facts import VersionFacts
from graftwork_platform.inference.invocation import last_occurrence

CALL = (40, 41, 42)
TRAITS = AdapterTraits(invocation_token_ids=CALL)
BEFORE, BEHIND = [10, 11, 40, 41], [50, 51]

tokens = st.integers(0, 3)


@given(st.lists(tokens, max_size=30), st.lists(tokens, min_size=1, max_size=4))
def test_the_last_occurrence_is_found(ids: list[int], wanted: list[int]) -> None:
    places = [place for place in range(len(ids)) if ids[place : place + len(wanted)] == wanted]
    assert last_occurrence(ids, wanted) == (places[-1] if places else None)


def test_ids_of_large_vocabularies_are_found_and_a_hostile_prompt_costs_little() -> None:
    assert last_occurrence([262_143, 0x10FFFF, 0xD800, 262_143], [0xD800]) == 2
    ids = [1] * 200_000
    assert last_occurrence(ids, [2] + [1] * 20_000) is None, "a search that is quadratic would take minutes"
    assert last_occurrence(ids, [1] * 20_000) == 180_000


@pytest.mark.parametrize("wanted", [[2**40], [-1], [0x110000, 5], []])
def test_calls_that_are_no_tokens_are_nowhere(wanted: list[int]) -> None:
    assert last_occurrence([1, 5, 7], wanted) is None


def test_a_call_that_is_no_token_leaves_the_base(server: Any) -> None:
    server.add_adapter("never-called", facts=VersionFacts(AdapterTraits(invocation_token_ids=(2**40, -1))))
    response = server.post("completions", {"model": "never-called", "prompt": [5]})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["adapter_active"] is False


@pytest.fixture
def key(server: Any) -> str:
    """The packed key of the activated adapter ``caller``, which is made unless it is there."""
    if "caller" not in {line.id for line in server.client().models.list()}:
        server.add_adapter("caller", facts=VersionFacts(TRAITS), row_type="int8")
    return str(packed_key(AdapterDigest(b"caller1".hex().rjust(64, "0")), "base-id", "int8"))


def complete(server: Any, prompt: Any, **more: Any) -> Any:
    response = server.post("completions", {"model": "caller", "prompt": prompt, **more})
    assert response.status_code == 200, response.text
    return response


def told(server: Any) -> list[tuple[str | None, int]]:
    """Adapter and start of all requests the engine was given, in order."""
    return [(request.adapter_key, request.adapter_start) for request in server.engine.requests]


def test_it_begins_with_the_first_token_of_the_last_call(server: Any, key: str) -> None:
    answer = complete(server, [*BEFORE, *CALL, 60, *CALL, *BEHIND]).json()
    assert told(server) == [(key, 8)]
    assert answer["usage"]["adapter_active"] is True
    assert answer["model"] == "caller"


@pytest.mark.parametrize("prompt", [[*BEFORE, *BEHIND], list(CALL[:2]), [42, 41, 40]])
def test_without_a_call_the_base_answers_and_usage_says_so(server: Any, key: str, prompt: list[int]) -> None:
    response = complete(server, prompt)
    assert told(server) == [(None, 0)]
    assert response.json()["usage"]["adapter_active"] is False
    assert response.json()["model"] == "caller", "it is the adapter that was asked"
    row = server.usage(response.headers["x-request-id"])
    assert row.model == "caller"
    assert row.version_id is not None


def test_each_prompt_has_its_own_start_and_all_its_choices_that(server: Any, key: str) -> None:
    prompts = [[*CALL, 50], [50, 51], [50, *CALL]]
    answer = complete(server, prompts, n=2).json()
    by_prompt = {tuple(request.prompt_ids): (request.adapter_key, request.adapter_start) for request in server.engine.requests}
    assert by_prompt == {(*CALL, 50): (key, 0), (50, 51): (None, 0), (50, *CALL): (key, 1)}
    assert len(server.engine.requests) == 6
    assert answer["usage"]["adapter_active"] is False, "one prompt lacks the call"


def test_a_call_in_text_and_in_a_chat_is_found_in_the_tokens(server: Any, key: str) -> None:
    text = "hello" + server.tokenizer.decode(list(CALL))
    ids = server.tokenizer.encode(text)
    assert ids[-3:] == list(CALL), "the tokenizer of this test spells it so"
    complete(server, text)
    assert told(server) == [(key, len(ids) - 3)]
    messages = [{"role": "user", "content": text}]
    answer = server.post("chat/completions", {"model": "caller", "messages": messages}).json()
    assert answer["usage"]["adapter_active"] is True
    request = server.engine.requests[-1]
    assert request.prompt_ids[request.adapter_start :][:3] == list(CALL)


def test_a_call_that_is_generated_changes_nothing(server: Any, key: str) -> None:
    server.engine.scripts.append(server.engine.say(server.tokenizer.decode(list(CALL))))
    answer = complete(server, BEHIND).json()
    assert answer["usage"]["adapter_active"] is False
    assert told(server) == [(None, 0)]


def test_a_stream_says_it_in_its_usage(server: Any, key: str) -> None:
    response = complete(server, [1, *CALL], stream=True, stream_options={"include_usage": True})
    frames = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert frames[-1]["usage"]["adapter_active"] is True


def test_others_say_nothing_of_it(server: Any) -> None:
    server.add_adapter("steady")
    for model in ("steady", "tiny-base"):
        answer = server.post("completions", {"model": model, "prompt": [*CALL]}).json()
        assert "adapter_active" not in answer["usage"]
    assert [start for _, start in told(server)] == [0, 0]


def test_an_engine_that_starts_again_is_told_the_same() -> None:
    request = GenerationRequest("r", [1, 2], Sampling(max_tokens=4, seed=1), b"", "flow", "key", adapter_start=1, vocab_size=9)
    stream = Stream(request, None)
    stream.output_ids += [7, 8]
    first, second = stream.as_add("e1"), stream.as_add("e2")
    assert (first.adapter_start, first.vocab_size, second.adapter_start, second.vocab_size) == (1, 9, 1, 9)
    assert second.output_ids == [7, 8]


def test_a_version_s_own_row_type_makes_its_key(server: Any) -> None:
    server.add_adapter("wide")
    server.add_adapter("narrow", row_type="e4m3")
    for name in ("wide", "narrow"):
        server.post("completions", {"model": name, "prompt": [5]})
    digests = [AdapterDigest(f"{name}1".encode().hex().rjust(64, "0")) for name in ("wide", "narrow")]
    keys = [packed_key(digests[0], "base-id", "bfloat16"), packed_key(digests[1], "base-id", "e4m3")]
    assert [adapter_key for adapter_key, _ in told(server)] == keys
