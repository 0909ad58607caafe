"""Adapters with their own tokenizer, chat template, ends and vocabulary: what requests for them become, and how it is read."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from sqlalchemy import update

from graftwork_adapters.errors import BlobNotFound, StoreUnavailable
from graftwork_adapters.keys import AdapterDigest, upload_prefix
from graftwork_adapters.publish_job import AdapterTraits
from graftwork_engine.messages import OutItem, TokenLogprob
from graftwork_platform.catalog.catalog import ResolvedModel
from graftwork_platform.catalog.facts import OwnText, VersionFacts
from graftwork_platform.errors import BadRequest, ServiceUnavailable
from graftwork_platform.inference import adapter_texts
from graftwork_platform.inference.adapter_texts import BYTES_PER_FILE_BYTE, PAUSE_FACTOR, AdapterTexts
from graftwork_platform.models import AdapterVersion
from graftwork_platform.text.model_text import ModelText
from graftwork_platform.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<|tool|>{{ m.content }}{{ eos_token }}{% endfor %}"
CHAT = [{"role": "user", "content": "hello"}]


def write_own(model_dir: Path, folder: Path, template: str = TEMPLATE) -> int:
    """The base's tokenizer with one more token, and another template; the token's id."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("<|tool|>", special=False, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (folder / "chat_template.jinja").write_text(template)
    return int(backend.token_to_id("<|tool|>"))


def digest_of(name: str) -> AdapterDigest:
    """That of `Server.add_adapter`'s first version."""
    return AdapterDigest(f"{name}1".encode().hex().rjust(64, "0"))


@pytest.fixture
def own(server: Any, model_dir: Path, tmp_path: Path) -> int:
    """The adapter ``tool`` with a tokenizer, a template and ends of its own; the id of its own token."""
    token = write_own(model_dir, tmp_path / "own")
    if "tool" not in {line.id for line in server.client().models.list()}:
        facts = VersionFacts(AdapterTraits(vocab_size=token + 1), OwnText(True, True, (0, 7)))
        server.add_adapter("tool", facts=facts)
        for path in (tmp_path / "own").iterdir():
            server.services.store.put_if_absent(upload_prefix(digest_of("tool")) + path.name, path)
    return token


def post(server: Any, path: str, body: dict[str, Any]) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_chat_is_written_by_its_template_and_cut_by_its_tokenizer(server: Any, own: int) -> None:
    post(server, "chat/completions", {"model": "tool", "messages": CHAT})
    [request] = server.engine.requests
    hello = server.tokenizer.encode("hello", add_special_tokens=False)
    assert request.prompt_ids == [own, *hello, 0], "its own token, and the end that its own files name"
    assert request.sampling.stop_token_ids == (0, 7)
    assert request.vocab_size == own + 1
    post(server, "chat/completions", {"model": "tiny-base", "messages": CHAT})
    assert own not in server.engine.requests[-1].prompt_ids
    assert server.engine.requests[-1].sampling.stop_token_ids == (2,)
    assert server.engine.requests[-1].vocab_size is None


def test_its_tokens_have_their_text_in_answers_and_end_at_stop_strings(server: Any, own: int) -> None:
    async def script(request: Any) -> Any:
        scores = [TokenLogprob(-0.5, (own,), (-0.5,))]
        yield OutItem(request.request_id, 0, [own], logprobs=scores)
        yield OutItem(request.request_id, 1, [7], finish="stop", logprobs=scores)

    server.engine.scripts.append(script)
    answer = post(server, "completions", {"model": "tool", "prompt": "<|tool|>a", "logprobs": 1, "echo": False})
    assert answer["choices"][0]["text"] == "<|tool|>"
    assert answer["choices"][0]["logprobs"]["tokens"][0] == "<|tool|>"
    assert server.engine.requests[-1].prompt_ids[1] == own
    server.engine.scripts.append(server.engine.say("hello"))
    server.engine.scripts.append(script)
    stopped = post(server, "completions", {"model": "tool", "prompt": ["a", "b"], "stop": "<|to"})
    assert stopped["choices"][1]["text"] == ""
    assert stopped["choices"][1]["finish_reason"] == "stop"


def test_tokens_are_counted_and_spelled_by_its_tokenizer(server: Any, own: int) -> None:
    found = post(
        server, "tokenize", {"model": "tool", "prompt": "<|tool|>", "return_token_strs": True, "add_special_tokens": False}
    )
    assert (found["tokens"], found["token_strs"]) == ([own], ["<|tool|>"])
    assert post(server, "tokenize", {"model": "tiny-base", "prompt": "<|tool|>"})["count"] > 1
    assert post(server, "detokenize", {"model": "tool", "tokens": [own]})["prompt"] == "<|tool|>"
    assert server.post("detokenize", {"model": "tiny-base", "tokens": [own]}).status_code == 400


def test_ids_are_bounded_by_its_own_vocabulary(server: Any, own: int) -> None:
    post(server, "completions", {"model": "tool", "prompt": [own]})
    for body in (
        {"prompt": [own + 1]},
        {"prompt": [1], "stop_token_ids": [own + 1]},
        {"prompt": [1], "logit_bias": {str(own + 1): 1}},
    ):
        assert server.post("completions", {"model": "tool", **body}).status_code == 400
    assert server.post("completions", {"model": "tiny-base", "prompt": [own]}).status_code == 400


def test_the_model_list_says_whose_tokenizer_it_is(server: Any, own: int) -> None:
    server.add_adapter("as-the-base")
    listed = {line["id"]: line.get("tokenizer") for line in server.http.get("/v1/models", headers=server.headers()).json()["data"]}
    assert (listed["tool"], listed["as-the-base"], listed["tiny-base"]) == ("own", "base", None)
    assert server.http.get("/v1/models/tool@v1", headers=server.headers()).json()["tokenizer"] == "own"


def test_a_version_nobody_knows_any_more_is_503_and_never_a_plain_lora(server: Any) -> None:
    server.add_adapter("unknown")
    with server.services.database.write() as session:
        session.execute(update(AdapterVersion).where(AdapterVersion.digest == digest_of("unknown")).values(facts=None))
    response = server.post("completions", {"model": "unknown", "prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "adapter_unknown")
    assert "`unknown`" in response.json()["error"]["message"]
    listed = {line["id"]: line.get("tokenizer") for line in server.http.get("/v1/models", headers=server.headers()).json()["data"]}
    assert listed["unknown"] is None


def test_files_that_are_away_are_503_and_when_they_are_back_it_is_served(server: Any, model_dir: Path, tmp_path: Path) -> None:
    write_own(model_dir, tmp_path / "own")
    server.add_adapter("lost", facts=VersionFacts(text=OwnText(chat_template=True)))
    response = server.post("chat/completions", {"model": "lost", "messages": CHAT})
    assert response.status_code == 503
    assert "`lost`" in response.json()["error"]["message"]
    assert response.headers["retry-after"]
    for path in (tmp_path / "own").iterdir():
        server.services.store.put_if_absent(upload_prefix(digest_of("lost")) + path.name, path)
    post(server, "chat/completions", {"model": "lost", "messages": CHAT})


def test_a_call_that_a_prompt_lacks_leaves_the_base_s_vocabulary(server: Any, model_text: ModelText) -> None:
    size = model_text.vocab_size
    traits = AdapterTraits(invocation_token_ids=(size,), vocab_size=size + 2)
    server.add_adapter("called", facts=VersionFacts(traits, OwnText(eos_token_ids=(2, size + 1))))
    post(
        server, "completions", {"model": "called", "prompt": [5, size], "stop_token_ids": [9], "top_k": size + 2, "temperature": 1}
    )
    active = server.engine.requests[-1]
    assert (active.vocab_size, active.sampling.stop_token_ids, active.sampling.top_k) == (size + 2, (2, 9, size + 1), size + 2)
    post(server, "completions", {"model": "called", "prompt": [5], "stop_token_ids": [9], "top_k": size + 2, "temperature": 1})
    base = server.engine.requests[-1]
    assert (base.vocab_size, base.sampling.stop_token_ids, base.sampling.top_k) == (None, (2, 9), size)
    for body in ({"prompt": [5, size + 1]}, {"prompt": [5], "logit_bias": {str(size): 1}}):
        assert server.post("completions", {"model": "called", **body}).status_code == 400


# By itself


class Source:
    """Upload files by digest, each with a token of its own; counts what is fetched, and waits or fails as a test says."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.fetched: list[AdapterDigest] = []
        self.go = asyncio.Event()
        self.failure: Exception | None = None

    async def __call__(self, digest: AdapterDigest, folder: Path) -> None:
        self.fetched.append(digest)
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        write_own(self.model_dir, folder, f"{digest[:1]}: {{{{ messages[0].content }}}}")


def model_of(letter: str, text: OwnText = OwnText(True, True)) -> ResolvedModel:
    return ResolvedModel(f"model-{letter}", 1, AdapterDigest(letter * 64), facts=VersionFacts(text=text))


Play = Callable[..., None]


@pytest.fixture
def play(model_dir: Path, model_text: ModelText, tmp_path: Path) -> Play:
    """``play(scene, **options)``: await ``scene(texts, source)``."""

    def play(scene: Any, **options: Any) -> None:
        async def all_of_it() -> None:
            source = Source(model_dir)
            texts = AdapterTexts(model_text, source, tmp_path / "scratch", **options)
            try:
                async with asyncio.timeout(60):
                    await scene(texts, source)
            finally:
                await asyncio.to_thread(texts.close)
            assert list((tmp_path / "scratch").glob("*")) == [], "no file is left"

        asyncio.run(all_of_it())

    return play


def test_what_brings_no_text_is_the_base_s_and_reads_nothing(play: Play, model_text: ModelText) -> None:
    async def scene(texts: AdapterTexts, source: Source) -> None:
        assert await texts.of(ResolvedModel("base")) is model_text
        assert await texts.of(model_of("a", OwnText())) is model_text
        ends = await texts.of(model_of("a", OwnText(eos_token_ids=(5,))))
        assert (ends.eos_token_ids, ends.tokenizer) == ((5,), model_text.tokenizer)
        smaller = ResolvedModel("m", 1, AdapterDigest("b" * 64), facts=VersionFacts(AdapterTraits(vocab_size=2)))
        assert (await texts.of(smaller)).eos_token_ids == (), "an end that the vocabulary does not have"
        assert source.fetched == []

    play(scene)


def test_all_who_ask_at_once_wait_for_one_reading_and_the_loop_goes_on(play: Play) -> None:
    async def scene(texts: AdapterTexts, source: Source) -> None:
        waiting = [asyncio.create_task(texts.of(model_of("a"))) for _ in range(20)]
        await asyncio.sleep(0.01)
        waiting[0].cancel()  # a client that left takes nobody with it
        source.go.set()
        found = [await task for task in waiting[1:]]
        assert source.fetched == ["a" * 64]
        assert {id(text.tokenizer) for text in found} == {id(found[0].tokenizer)}
        assert await found[0].chat_template.render([{"role": "user", "content": "hi"}]) == "a: hi"  # type: ignore[union-attr]
        await texts.of(model_of("a"))
        assert len(source.fetched) == 1

    play(scene)


@pytest.mark.parametrize("failure", [StoreUnavailable("away"), BlobNotFound("gone"), OSError("no disk")])
def test_failures_name_the_model_and_are_forgotten(play: Play, failure: Exception) -> None:
    async def scene(texts: AdapterTexts, source: Source) -> None:
        source.failure = failure
        source.go.set()
        for _ in range(2):
            with pytest.raises(ServiceUnavailable, match="model-a"):
                await texts.of(model_of("a"))
        source.failure = None
        await texts.of(model_of("a"))
        assert len(source.fetched) == 3

    play(scene)


def test_what_was_not_asked_for_longest_makes_room(play: Play, model_dir: Path) -> None:
    async def scene(texts: AdapterTexts, source: Source) -> None:
        source.go.set()
        held = await texts.of(model_of("a"))
        await texts.of(model_of("b"))
        await texts.of(model_of("a"))
        await texts.of(model_of("c"))
        assert len(source.fetched) == 3
        await texts.of(model_of("a"))
        assert len(source.fetched) == 3, "it was asked for after b"
        await texts.of(model_of("b"))
        assert source.fetched[-1] == "b" * 64
        await texts.of(model_of("c"))
        assert held.chat_template is not None
        assert await held.chat_template.render(CHAT) == "a: hello", "whoever still has it can go on"

    play(scene, max_bytes=int(2.5 * BYTES_PER_FILE_BYTE * _size_of(model_dir)))


def test_however_small_they_are_only_so_many_are_kept(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_texts, "MAX_KEPT", 2)

    async def scene(texts: AdapterTexts, source: Source) -> None:
        source.go.set()
        for letter in "abca":
            await texts.of(model_of(letter))
        assert [digest[0] for digest in source.fetched] == list("abca")

    play(scene)


def test_tokenizers_are_read_one_by_one_and_with_pauses(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[tuple[float, float]] = []
    from_dir = Tokenizer.from_dir

    def slow(folder: Path, num_rows: int | None = None) -> Tokenizer:
        started = time.monotonic()
        time.sleep(0.05)
        times.append((started, time.monotonic()))
        return from_dir(folder, num_rows)

    async def scene(texts: AdapterTexts, source: Source) -> None:
        monkeypatch.setattr(Tokenizer, "from_dir", slow)
        source.go.set()
        await asyncio.gather(*(texts.of(model_of(letter)) for letter in "abc"))
        pauses = [later[0] - earlier[1] for earlier, later in pairwise(times)]
        assert len(pauses) == 2
        assert min(pauses) >= PAUSE_FACTOR * 0.05

    play(scene)


def _size_of(model_dir: Path) -> int:
    return (model_dir / "tokenizer.json").stat().st_size


def test_templates_that_nobody_has_any_more_are_forgotten(play: Play) -> None:
    async def scene(texts: AdapterTexts, source: Source) -> None:
        source.go.set()
        for letter in "abcd":
            text = await texts.of(model_of(letter))
            assert text.chat_template is not None
            await text.chat_template.render(CHAT)
        del text
        gc.collect()
        await texts.of(model_of("e"))
        assert len(texts._sandbox._sources) <= 2, "d's, which was kept until then, and e's"

    play(scene, max_bytes=1)


def test_a_template_of_one_s_own_that_takes_too_long_is_the_request_s_error(play: Play, model_dir: Path) -> None:
    slow = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"

    async def scene(texts: AdapterTexts, source: Source) -> None:
        async def fetch(_digest: AdapterDigest, folder: Path) -> None:
            write_own(model_dir, folder, slow)

        texts._fetch = fetch
        text = await texts.of(model_of("a"))
        assert text.chat_template is not None
        with pytest.raises(BadRequest, match=r"0\.5 s"):
            await text.chat_template.render(CHAT)
        base = texts.base.chat_template
        assert base is not None
        assert "hello" in await base.render(CHAT)

    play(scene)


def test_its_tokenizer_is_read_as_the_base_s_is(play: Play, model_dir: Path, tmp_path: Path) -> None:
    async def scene(texts: AdapterTexts, source: Source) -> None:
        source.go.set()
        text = await texts.of(model_of("a"))
        write_own(model_dir, tmp_path / "same")
        assert text.tokenizer.pipeline() == Tokenizer.from_dir(tmp_path / "same").pipeline()
        assert text.tokenizer.eos_id == 0

    play(scene)
