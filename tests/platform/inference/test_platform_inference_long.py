"""What is long holds nobody else up: the event loop goes on while a text is cut, tokens are read, and an answer is written."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import TypeVar

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from graftwork_engine.request import FinishReason
from graftwork_platform.inference import routes
from graftwork_platform.inference.output import Delta, Token
from graftwork_platform.inference.wire import ChatWire, CompletionWire, Heading
from graftwork_platform.text.tokenizer import Tokenizer

T = TypeVar("T")
WORDS = "The quick brown fox jumps over the lazy dog; été à Zürich, 25 °C, and 日本語. "


async def paused(work: Awaitable[T]) -> tuple[T, float]:
    """The result, and the longest time for which nothing else ran, as a part of the time that it took."""
    task = asyncio.ensure_future(work)
    started = last = time.perf_counter()
    longest = 0.0
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return task.result(), longest / (last - started)


def result_in_pieces(begin: Callable[[], Awaitable[T]], largest: float) -> T:
    """The result, if at one of a few times nothing else had to wait for more than this part of it: a pause may be the machine's."""
    pauses = []
    while len(pauses) < 6:
        result, pause = asyncio.run(paused(begin()))
        if pause < largest:
            return result
        pauses.append(pause)
    raise AssertionError(f"parts of the time in which nothing else ran: {pauses}")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False)
    backend.train_from_iterator([WORDS] * 3, trainer)
    return Tokenizer(backend, {"eos_token": "</s>"})


def test_the_loop_goes_on_while_a_long_text_becomes_tokens_and_text_again(tokenizer: Tokenizer) -> None:
    text = WORDS * 25_000
    ids = result_in_pieces(lambda: asyncio.to_thread(tokenizer.encode, text), 1 / 4)
    assert ids[:200] == tokenizer.encode(text[:1000])[:200]
    assert result_in_pieces(lambda: asyncio.to_thread(tokenizer.decode, ids), 1 / 2) == text


@pytest.mark.parametrize("kind", [ChatWire, CompletionWire])
def test_the_loop_goes_on_while_a_large_answer_is_written(tokenizer: Tokenizer, kind: type) -> None:
    num_choices, num_tokens = 8, 600
    top = tuple((100 + place, -0.1 * place) for place in range(20))
    tokens = [Token(100, place, -0.5, top) for place in range(num_tokens)]
    deltas = [Delta("x", [100] * num_tokens, tokens, FinishReason.LENGTH, index, True) for index in range(num_choices)]

    async def run(_admitted: object, tally: routes.Tally):
        for delta in deltas:
            tally.output_tokens += len(delta.token_ids)
            yield delta

    inference = SimpleNamespace(generator=SimpleNamespace(run=run), tokenizer=tokenizer)
    admitted = SimpleNamespace(num_choices=num_choices, echo=False, tokenizer=tokenizer, adapter_active=None)

    def whole() -> Awaitable[bytes]:
        return routes._whole(inference, admitted, kind(Heading("id", 1, "model", num_choices), tokenizer))

    body = result_in_pieces(whole, 1 / 3)
    choices = json.loads(body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(num_choices))
    shown = choices[-1]["logprobs"]
    assert len(shown["content"] if kind is ChatWire else shown["top_logprobs"]) == num_tokens
