"""Frames that are put together from parts are, byte for byte, what the dialect itself writes."""

from __future__ import annotations

import json

import pytest

from graftwork_engine.request import FinishReason
from graftwork_platform.inference.frames import Frames
from graftwork_platform.inference.output import Delta, Token
from graftwork_platform.inference.sse import event
from graftwork_platform.inference.wire import ChatWire, CompletionWire, Heading
from graftwork_platform.text.model_text import ModelText

LINE_BREAKS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
TEXTS = ["a", "b", "", " world", 'a "quoted"\n\\ line', "日本語 🎉", f"\x00\x1f{LINE_BREAKS}", "data: [DONE]\n\n", "ab" * 500]


@pytest.mark.parametrize("kind", [ChatWire, CompletionWire])
@pytest.mark.parametrize("prompt_ids", [None, [[1, 2], [3]]])
@pytest.mark.parametrize("usage", [False, True])
def test_every_frame_is_the_dialects_own(
    model_text: ModelText, kind: type, prompt_ids: list[list[int]] | None, usage: bool
) -> None:
    wire = kind(Heading("id-7", 12, 'a "model"', 1, prompt_ids, usage), model_text.tokenizer)
    frames = Frames(wire)
    deltas = [Delta(text, [70], index=index) for text in TEXTS for index in (0, 1)]
    deltas += [
        Delta("first", [70], index=1, is_first=True),
        Delta("scored", [70], [Token(70, 3, -0.5, ((70, -0.5),))], index=1),
        Delta("last", [70], finish=FinishReason.LENGTH),
        Delta("", [70], finish=FinishReason.STOP, index=1),
    ]
    for delta in deltas:
        found = frames.of(delta)
        assert found == b"".join(event(chunk) for chunk in wire.chunks(delta))
        lines = [line for line in found.decode().splitlines() if line]  # at every line break that Unicode knows
        said = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        assert "".join(choice["delta"].get("content", "") if kind is ChatWire else choice["text"] for choice in said) == delta.text
    [choice] = json.loads(frames.of(Delta("x", [70], index=1)).removeprefix(b"data: "))["choices"]
    assert choice["index"] == 1
    assert ("token_ids" in choice) == (prompt_ids is not None)
