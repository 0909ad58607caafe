"""An output in OpenAI's two dialects, whole or in chunks. Knows no engine and no HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, Raw, Struct, UnsetType, json

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
    """What all parts of one answer carry.

    ``prompt_ids``: those of each prompt, with ``n`` choices each, only if token ids were asked for; ``usage`` if usage was.
    """

    id: str
    created: int
    model: str
    n: int = 1
    prompt_ids: list[list[int]] | None = None
    usage: bool = False

    def prompt_ids_of(self, index: int) -> list[int] | UnsetType:
        """The prompt of choice ``index``, where it is shown."""
        return UNSET if self.prompt_ids is None else self.prompt_ids[index // self.n]


class Wire(Protocol):
    """How an answer is written."""

    @property
    def shows_ids(self) -> bool:
        """True if chunks hold token ids beside text."""
        ...

    def chunks(self, delta: Delta) -> Iterator[Struct]:
        """Chunks of a delta of any choice; none if there is nothing to say."""
        ...

    def closing(self, usage: Usage) -> Iterator[Struct]:
        """Chunks behind the last delta."""
        ...

    def whole(self, outputs: Sequence[Delta], usage: Usage) -> Struct:
        """An answer that is not streamed; the outputs of all choices in order."""
        ...


class ChatWire:
    """Chat completions."""

    def __init__(self, heading: Heading, tokenizer: Tokenizer) -> None:
        self.shows_ids = heading.prompt_ids is not None
        self._heading = heading
        self._tokenizer = tokenizer

    def chunks(self, delta: Delta) -> Iterator[Struct]:
        """One chunk that names the role before a choice's first text, one for the text, one for the finish."""
        index, with_ids = delta.index, self.shows_ids
        if delta.is_first:
            prompt_ids = self._heading.prompt_ids_of(index) if index == 0 else UNSET
            yield self._chunk([ChatChunkChoice(ChatDelta("assistant", ""), index)], prompt_ids=prompt_ids)
        if delta.text or delta.tokens or (with_ids and delta.token_ids):
            ids = delta.token_ids if with_ids else UNSET
            content = ChatDelta(content=delta.text)
            yield self._chunk([ChatChunkChoice(content, index, logprobs=self._logprobs(delta), token_ids=ids)])
        if delta.finish is not None:
            yield self._chunk([ChatChunkChoice(ChatDelta(), index, finish_reason=_finish(delta.finish))])

    def closing(self, usage: Usage) -> Iterator[Struct]:
        """One chunk with the usage, if it was asked for."""
        if self._heading.usage:
            yield self._chunk([], usage)

    def whole(self, outputs: Sequence[Delta], usage: Usage) -> Struct:
        """The whole chat completion."""
        heading = self._heading
        choices = [
            ChatChoice(
                message=ChatMessage(output.text),
                finish_reason=_finish(output.finish),
                index=output.index,
                logprobs=self._logprobs(output),
                token_ids=output.token_ids if self.shows_ids else UNSET,
            )
            for output in outputs
        ]
        prompt_ids = heading.prompt_ids_of(0)
        return ChatCompletion(heading.id, heading.created, heading.model, choices, usage, prompt_token_ids=prompt_ids)

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None, prompt_ids: list[int] | UnsetType = UNSET
    ) -> ChatChunk:
        heading = self._heading
        shown = usage if heading.usage else UNSET
        return ChatChunk(heading.id, heading.created, heading.model, choices, shown, prompt_token_ids=prompt_ids)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return None if delta.tokens is None else ChatLogprobs([_raw(self._token(token)) for token in delta.tokens])

    def _token(self, token: Token) -> TokenLogprob:
        if token.logprob is None:
            raise AssertionError("a chat repeats no prompt")
        drawn = self._entry(token.token_id, token.logprob)
        return TokenLogprob(drawn.token, drawn.logprob, drawn.bytes, [self._entry(*top) for top in token.top])

    def _entry(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(self._tokenizer.token_text(token_id), logprob, list(self._tokenizer.token_bytes(token_id)))


class CompletionWire:
    """Text completions."""

    def __init__(self, heading: Heading, tokenizer: Tokenizer) -> None:
        self.shows_ids = heading.prompt_ids is not None
        self._heading = heading
        self._tokenizer = tokenizer

    def chunks(self, delta: Delta) -> Iterator[Struct]:
        """One chunk; the last one carries the finish."""
        if delta.text or delta.tokens or delta.finish is not None or (self.shows_ids and delta.token_ids):
            yield self._completion([self._choice(delta)])

    def closing(self, usage: Usage) -> Iterator[Struct]:
        """One chunk with the usage, if it was asked for."""
        if self._heading.usage:
            yield self._completion([], usage)

    def whole(self, outputs: Sequence[Delta], usage: Usage) -> Struct:
        """The whole text completion."""
        heading = self._heading
        return Completion(heading.id, heading.created, heading.model, [self._choice(output) for output in outputs], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        heading = self._heading
        return Completion(heading.id, heading.created, heading.model, choices, usage if heading.usage else UNSET)

    def _choice(self, delta: Delta) -> CompletionChoice:
        return CompletionChoice(
            delta.text,
            delta.index,
            None if delta.finish is None else _finish(delta.finish),
            None if delta.tokens is None else self._logprobs(delta.tokens),
            token_ids=delta.token_ids if self.shows_ids else UNSET,
            prompt_token_ids=self._heading.prompt_ids_of(delta.index) if delta.is_first else UNSET,
        )

    def _logprobs(self, tokens: list[Token]) -> CompletionLogprobs:
        text = self._tokenizer.token_text
        return CompletionLogprobs(
            tokens=[text(token.token_id) for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=[self._top(token) for token in tokens],
            text_offset=[token.offset for token in tokens],
        )

    def _top(self, token: Token) -> Raw | None:
        """OpenAI's rule: the drawn token is always among them, so there may be one more than was asked for."""
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, value in (*token.top, (token.token_id, token.logprob)):
            top.setdefault(self._tokenizer.token_text(token_id), value)  # of two tokens of one text the more probable
        return _raw(top)


def _raw(entry: TokenLogprob | dict[str, float]) -> Raw:
    return Raw(json.encode(entry))


def _finish(finish: EngineFinish | None) -> FinishReason:
    if finish is EngineFinish.STOP:
        return "stop"
    if finish is EngineFinish.LENGTH:
        return "length"
    raise AssertionError(f"an output that ended with {finish} has no answer")
