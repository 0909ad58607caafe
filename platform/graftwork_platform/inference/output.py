"""What an engine's items say: text, and per token its words and probabilities. Knows no wire format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graftwork_engine.messages import OutItem, TokenLogprob
from graftwork_engine.request import FinishReason
from graftwork_platform.text.detokenizer import new_detokenizer
from graftwork_platform.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


@dataclass(frozen=True, slots=True)
class Token:
    """A drawn token. ``offset``: characters of the output before it. ``top``: (id, log-probability), best first."""

    token_id: int
    offset: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one item adds to the output. ``tokens`` only if log-probabilities were asked for."""

    text: str
    token_ids: list[int]
    tokens: list[Token] | None = None
    finish: FinishReason | None = None


class OutputText:
    """The text of one growing output. The token that stopped it is counted and reported, but is no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = new_detokenizer(tokenizer)
        self._length = 0  # characters so far

    def take(self, item: OutItem) -> Delta:
        """The next item, in order."""
        finish = None if item.finish is None else FinishReason(item.finish)
        num_words = len(item.token_ids) - (finish is FinishReason.STOP)
        pieces: list[str] = []
        offsets: list[int] = []
        for place, token_id in enumerate(item.token_ids):
            offsets.append(self._length)
            if place < num_words:
                self._add(pieces, self._detokenizer.push(token_id))
        if finish is not None:
            self._add(pieces, self._detokenizer.flush())
        tokens = None if item.logprobs is None else _tokens(item.token_ids, offsets, item.logprobs)
        return Delta("".join(pieces), item.token_ids, tokens, finish)

    def _add(self, pieces: list[str], piece: str) -> None:
        pieces.append(piece)
        self._length += len(piece)


def join(deltas: Sequence[Delta]) -> Delta:
    """All deltas of an output, in order, as one."""
    tokens = [token for delta in deltas for token in delta.tokens or ()]
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        tokens=tokens if any(delta.tokens is not None for delta in deltas) else None,
        finish=deltas[-1].finish if deltas else None,
    )


def _tokens(ids: list[int], offsets: list[int], logprobs: list[TokenLogprob]) -> list[Token]:
    return [
        Token(
            token_id,
            offset,
            max(entry.logprob, LOWEST_LOGPROB),
            tuple((top, max(value, LOWEST_LOGPROB)) for top, value in zip(entry.top_ids, entry.top_logprobs, strict=True)),
        )
        for token_id, offset, entry in zip(ids, offsets, logprobs, strict=True)
    ]
