"""An output in OpenAI's two dialects, whole or in chunks. Knows no engine and no HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from graftwork_engine.request import FinishReason as EngineFinish
from graftwork_platform.inference.output import Delta, Token
from graftwork_platform.inference.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from graftwork_platform.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Heading:
    """What all parts of one answer carry. ``prompt_ids`` only if token ids were asked for; ``usage`` if usage was."""

    id: str
    created: int
    model: str
    prompt_ids: list[int] | None = None
    usage: bool = False


class Wire(Protocol):
    """How an answer is written."""

    def opening(self) -> Iterator[Struct]:
        """Chunks before the first delta."""
        ...

    def chunks(self, delta: Delta) -> Iterator[Struct]:
        """Chunks of a delta; none if there is nothing to say."""
        ...

    def closing(self, usage: Usage) -> Iterator[Struct]:
        """Chunks behind the last delta."""
        ...

    def whole(self, output: Delta, usage: Usage) -> Struct:
        """An answer that is not streamed."""
        ...


class ChatWire:
    """Chat completions."""

    def __init__(self, heading: Heading, tokenizer: Tokenizer) -> None:
        self._heading = heading
        self._tokenizer = tokenizer

    def opening(self) -> Iterator[Struct]:
        """One chunk that names the role."""
        yield self._chunk([ChatChunkChoice(ChatDelta("assistant", ""))], prompt_ids=_or_unset(self._heading.prompt_ids))

    def chunks(self, delta: Delta) -> Iterator[Struct]:
        """One chunk for the text, one for the finish."""
        with_ids = self._heading.prompt_ids is not None
        if delta.text or delta.tokens or (with_ids and delta.token_ids):
            ids = delta.token_ids if with_ids else UNSET
            yield self._chunk([ChatChunkChoice(ChatDelta(content=delta.text), logprobs=self._logprobs(delta), token_ids=ids)])
        if delta.finish is not None:
            yield self._chunk([ChatChunkChoice(ChatDelta(), finish_reason=_finish(delta.finish))])

    def closing(self, usage: Usage) -> Iterator[Struct]:
        """One chunk with the usage, if it was asked for."""
        if self._heading.usage:
            yield self._chunk([], usage)

    def whole(self, output: Delta, usage: Usage) -> Struct:
        """The whole chat completion."""
        heading = self._heading
        choice = ChatChoice(
            message=ChatMessage(output.text),
            finish_reason=_finish(output.finish),
            logprobs=self._logprobs(output),
            token_ids=output.token_ids if heading.prompt_ids is not None else UNSET,
        )
        return ChatCompletion(
            heading.id, heading.created, heading.model, [choice], usage, prompt_token_ids=_or_unset(heading.prompt_ids)
        )

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None, prompt_ids: list[int] | UnsetType = UNSET
    ) -> ChatChunk:
        heading = self._heading
        shown = usage if heading.usage else UNSET
        return ChatChunk(heading.id, heading.created, heading.model, choices, shown, prompt_token_ids=prompt_ids)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return None if delta.tokens is None else ChatLogprobs([self._token(token) for token in delta.tokens])

    def _token(self, token: Token) -> TokenLogprob:
        drawn = self._entry(token.token_id, token.logprob)
        return TokenLogprob(drawn.token, drawn.logprob, drawn.bytes, [self._entry(*top) for top in token.top])

    def _entry(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(self._tokenizer.token_text(token_id), logprob, list(self._tokenizer.token_bytes(token_id)))


class CompletionWire:
    """Text completions."""

    def __init__(self, heading: Heading, tokenizer: Tokenizer) -> None:
        self._heading = heading
        self._tokenizer = tokenizer
        self._is_first = True

    def opening(self) -> Iterator[Struct]:
        """Nothing: the first delta says it all."""
        return iter(())

    def chunks(self, delta: Delta) -> Iterator[Struct]:
        """One chunk; the last one carries the finish."""
        with_ids = self._heading.prompt_ids is not None
        if delta.text or delta.tokens or delta.finish is not None or (with_ids and delta.token_ids):
            yield self._completion([self._choice(delta, with_prompt_ids=self._is_first)])
            self._is_first = False

    def closing(self, usage: Usage) -> Iterator[Struct]:
        """One chunk with the usage, if it was asked for."""
        if self._heading.usage:
            yield self._completion([], usage)

    def whole(self, output: Delta, usage: Usage) -> Struct:
        """The whole text completion."""
        heading = self._heading
        return Completion(heading.id, heading.created, heading.model, [self._choice(output, with_prompt_ids=True)], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        heading = self._heading
        return Completion(heading.id, heading.created, heading.model, choices, usage if heading.usage else UNSET)

    def _choice(self, delta: Delta, *, with_prompt_ids: bool) -> CompletionChoice:
        prompt_ids = self._heading.prompt_ids
        return CompletionChoice(
            delta.text,
            None if delta.finish is None else _finish(delta.finish),
            None if delta.tokens is None else self._logprobs(delta.tokens),
            token_ids=UNSET if prompt_ids is None else delta.token_ids,
            prompt_token_ids=_or_unset(prompt_ids if with_prompt_ids else None),
        )

    def _logprobs(self, tokens: list[Token]) -> CompletionLogprobs:
        text = self._tokenizer.token_text
        tops: list[dict[str, float]] = []
        for token in tokens:
            # OpenAI's rule: the drawn token is always among them, so there may be one more than was asked for.
            top = {text(token_id): value for token_id, value in token.top}
            top.setdefault(text(token.token_id), token.logprob)
            tops.append(top)
        return CompletionLogprobs(
            tokens=[text(token.token_id) for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=tops,
            text_offset=[token.offset for token in tokens],
        )


def _finish(finish: EngineFinish | None) -> FinishReason:
    if finish is EngineFinish.STOP:
        return "stop"
    if finish is EngineFinish.LENGTH:
        return "length"
    raise AssertionError(f"an output that ended with {finish} has no answer")


def _or_unset(ids: list[int] | None) -> list[int] | UnsetType:
    return UNSET if ids is None else ids
