"""What an engine's items say: text up to a stop string, and per token its words and probabilities. Knows no wire format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from graftwork_engine.messages import OutItem, TokenLogprob
from graftwork_engine.request import FinishReason
from graftwork_platform.inference.echo import text_offsets
from graftwork_platform.text.detokenizer import new_detokenizer
from graftwork_platform.text.stop import StopMatcher
from graftwork_platform.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """The strings that end an output once it has ``min_tokens`` tokens; ``include``: the one that does is a part of the text."""

    strings: tuple[str, ...] = ()
    include: bool = False
    min_tokens: int = 0


class Token(msgspec.Struct, frozen=True):
    """A token of the output, or of the prompt that it repeats.

    ``offset``: characters before it in the text as it would be without stop strings. ``logprob`` is None for a prompt's first
    token. ``top``: (id, log-probability), best first.
    """

    token_id: int
    offset: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Delta(msgspec.Struct, frozen=True):
    """What one item adds to the output of choice ``index``. ``tokens`` only if log-probabilities were asked for.

    ``token_ids`` are the output's own; ``tokens`` begin with the prompt's where it is repeated.
    """

    text: str
    token_ids: list[int]
    tokens: list[Token] | None = None
    finish: FinishReason | None = None
    index: int = 0
    is_first: bool = False


class OutputText:
    """The text of one growing output.

    The token that stopped it is counted and reported, but is no text, as no special token is. Of a stop string only what comes
    before it is (unless it is to be included), and tokens behind the one that completes it are no output at all; the tokens that
    spell it are, and are reported as soon as they come, while text that may yet be a part of a stop string is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: StopRule | None = None,
        *,
        echo: Sequence[int] | None = None,
        echo_text: str | None = None,
        index: int = 0,
    ) -> None:
        """``echo``: the prompt's tokens, if the output is to begin with them; ``echo_text``: what they were made of, if a text.

        The prompt is repeated as its client sent it: as that text, special tokens that it spells included, or else as its tokens
        read.
        """
        self._tokenizer = tokenizer
        self._detokenizer = new_detokenizer(tokenizer)
        self._rule = stop or StopRule()
        self._matcher = StopMatcher(self._rule.strings, include=self._rule.include)
        self._echo = echo
        self._echo_text = echo_text
        self._index = index
        self._is_first = True
        self._length = 0  # characters so far, those that are held back or cut among them
        self.num_tokens = 0
        self.is_finished = False

    def take(self, item: OutItem) -> Delta:
        """The next item, in order. Its ``finish`` is set if the item's is, or if a stop string is complete."""
        if self.is_finished:
            raise AssertionError(f"an item for choice {self._index}, which has ended")
        if self._adds_text_alone(item):
            return self._take_text(item)
        finish = None if item.finish is None else FinishReason(item.finish)
        text, tokens = self._take_echo(item)
        used = 0
        offsets: list[int] = []
        for token_id in item.token_ids:
            offsets.append(self._length)
            used += 1
            self.num_tokens += 1
            if used < len(item.token_ids) or finish is not FinishReason.STOP:
                text += self._push(self._detokenizer.push(token_id))
            if self._matcher.matched:
                break
        if finish is not None and not self._matcher.matched:
            text += self._push(self._detokenizer.flush())
            text += self._matcher.flush()
        if self._matcher.matched:
            finish = FinishReason.STOP
        if item.logprobs is not None:
            tokens = (tokens or []) + _tokens(item.token_ids[:used], offsets, item.logprobs[:used])
        delta = Delta(text, item.token_ids[:used], tokens, finish, self._index, self._is_first)
        self._is_first, self.is_finished = False, finish is not None
        return delta

    def _adds_text_alone(self, item: OutItem) -> bool:
        """True for nearly all items, of which no more is done than must be."""
        return item.finish is None and item.logprobs is None and not self._rule.strings and not self._is_first

    def _take_text(self, item: OutItem) -> Delta:
        ids, push = item.token_ids, self._detokenizer.push
        text = push(ids[0]) if len(ids) == 1 else "".join([push(token_id) for token_id in ids])
        self.num_tokens += len(ids)
        self._length += len(text)
        return Delta(text, ids, None, None, self._index, False)

    def _push(self, piece: str) -> str:
        self._length += len(piece)
        return self._matcher.push(piece, counts=self.num_tokens >= self._rule.min_tokens)

    def _take_echo(self, item: OutItem) -> tuple[str, list[Token] | None]:
        """The prompt's part, if it is wanted and this is the first item. Stop strings are not looked for in it."""
        if self._echo is None or not self._is_first:
            return "", None
        pieces: list[str] = []
        offsets: list[int] = []
        for token_id in self._echo:
            offsets.append(self._length)
            pieces.append(self._detokenizer.push(token_id))  # the output's first token may read by its neighbours
            self._length += len(pieces[-1])
        text, scores = "".join(pieces), item.prompt_logprobs
        if self._echo_text is not None:
            self._detokenizer.flush()  # a whole text ends with a whole character
            text = self._echo_text
            self._length = len(text)
            if scores is not None:
                offsets = text_offsets(self._tokenizer, self._echo, text)
        return text, None if scores is None else _tokens(self._echo, offsets, scores)


def join(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one choice, in order, as one."""
    tokens = [token for delta in deltas for token in delta.tokens or ()]
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        tokens=tokens if any(delta.tokens is not None for delta in deltas) else None,
        finish=deltas[-1].finish,
        index=deltas[0].index,
        is_first=True,
    )


def _tokens(ids: Sequence[int], offsets: list[int], logprobs: Sequence[TokenLogprob | None]) -> list[Token]:
    return [
        Token(token_id, offset, None, ())
        if entry is None
        else Token(
            token_id,
            offset,
            _finite(entry.logprob),
            tuple((top, _finite(value)) for top, value in zip(entry.top_ids, entry.top_logprobs, strict=True)),
        )
        for token_id, offset, entry in zip(ids, offsets, logprobs, strict=True)
    ]


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
