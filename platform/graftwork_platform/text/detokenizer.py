"""Token ids to text, one at a time, as they are generated: what is returned never ends inside a character. Knows no requests.

The pieces, laid end to end with the last `flush`, are the decoding of all ids without special tokens. Byte-level tokenizers
(GPT-2's kind: Llama 3, Qwen, SmolLM) decode token by token, so their bytes go through an incremental UTF-8 decoder: exact, and
constant work per token. Others (SentencePiece's kind) decode a token by its neighbours, so a window of tokens is decoded twice;
there the pieces are exact wherever the tokens spell valid UTF-8.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from graftwork_platform.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one growing sequence."""

    def push(self, token_id: int) -> str:
        """Take the next token; the text that has become certain, often empty in the middle of a character."""
        ...

    def flush(self) -> str:
        """The sequence has ended: what was held back, an unfinished character as U+FFFD."""
        ...


def new_detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Detokenizer:
    """A detokenizer for one sequence. Special tokens have no text unless they are not to be skipped."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    return _ByteLevelDetokenizer(tokenizer, skipped) if tokenizer.is_byte_level else _WindowDetokenizer(tokenizer, skipped)


class _ByteLevelDetokenizer:
    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_between_characters = True

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if self._is_between_characters and (whole := self._tokenizer.whole_text(token_id)) is not None:
            return whole
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._is_between_characters = not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        self._is_between_characters = True
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """``_context`` is what was returned last and gives the tokens in ``_pending`` their left neighbours."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        return self._take(final=False)

    def flush(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        if not final and (len(text) <= len(before) or text.endswith(_REPLACEMENT)):
            return ""
        self._context, self._pending = self._pending, []
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)  # those to be skipped are not there
