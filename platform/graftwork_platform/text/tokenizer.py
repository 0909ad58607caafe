"""Text to token ids and back, as transformers' AutoTokenizer does it, from the model folder's files. Knows no requests.

``tokenizer.json`` holds the whole pipeline. ``tokenizer_config.json`` (and ``special_tokens_map.json``, where an older folder has
one) names the special tokens, some of which the pipeline may not know yet. Truncation and padding that a folder may carry are
for training and are switched off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NORMALISER_MARGIN = 4
_LONG_TEXT, _LONG_IDS = 4096, 1024
"""Characters and ids from which on the library's calls for batches are used: only those release the interpreter's lock."""


class TokenizerError(Exception):
    """The folder's files do not describe a tokenizer."""


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], num_rows: int | None = None) -> None:
        """``num_rows``: of the model's embedding, where every id is known to be below that. The vocabulary is then never asked for
        as a whole, which would hold the interpreter's lock for a large one.
        """
        self._backend = backend
        self.special_tokens = dict(special_tokens)  # "bos_token" → "<s>", …: what a chat template sees by these names
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.is_byte_level = _is_byte_level(backend)
        self.max_bytes_per_token = _max_bytes_per_token(backend, self.is_byte_level, num_rows)
        self._byte_of_char = _byte_level_alphabet()
        self._anchor = backend.encode("a", add_special_tokens=False).ids
        self._anchor_text = backend.decode(self._anchor)
        self.num_leading, self.num_trailing = self._count_added()
        self._bytes: dict[int, bytes] = {}  # filled as tokens are seen
        self._whole_texts: dict[int, str | None] = {}

    @classmethod
    def from_dir(cls, model_dir: Path, num_rows: int | None = None) -> Tokenizer:
        """Read a Hugging Face folder; ``num_rows`` as for the constructor. Raises `TokenizerError`."""
        path = model_dir / "tokenizer.json"
        if not path.exists():
            raise TokenizerError(f"{path} is missing; only folders with a tokenizer.json are served")
        text = path.read_text(encoding="utf-8")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = read_tokenizer_config(model_dir)
        _add_declared_tokens(backend, config)
        named = dict(_named_tokens(config))
        # Text that spells a special token means that token, also where tokenizer.json has it as an ordinary one.
        backend.add_special_tokens([_as_added_token(value, special=True) for value in named.values()])
        return cls(backend, named_special_tokens(config), num_rows)

    def min_tokens(self, num_bytes: int) -> int:
        """The least number of tokens that a text of ``num_bytes`` (UTF-8) can make, known without looking at it."""
        return -(-num_bytes // self.max_bytes_per_token)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added ones included; the model's matrix may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def max_id(self) -> int:
        """The highest id of any token."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def num_shared_ids(self) -> int:
        """Tokens whose id another token has too."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return len(vocabulary) - len(set(vocabulary.values()))

    def pipeline(self) -> dict[str, object]:
        """All that decides how text becomes ids and ids text, as ``tokenizer.json`` writes it."""
        found: dict[str, object] = json.loads(self._backend.to_str())
        return {name: part for name, part in found.items() if name not in ("version", "truncation", "padding")}

    def token_id(self, token: str) -> int | None:
        """The id of exactly this token."""
        return self._backend.token_to_id(token)

    @property
    def eos_id(self) -> int | None:
        """The id of the tokenizer's own end-of-sequence token."""
        token = self.special_tokens.get("eos_token")
        return None if token is None else self.token_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; with ``add_special_tokens`` as the pipeline wraps it (a leading BOS, for many models)."""
        if len(text) < _LONG_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def find_offsets(self, text: str) -> list[int]:
        """Characters of ``text`` before each of its tokens, those that the pipeline adds left out."""
        [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        return [start for start, _ in encoding.offsets]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Ids without a token are skipped; bytes that are no UTF-8 become U+FFFD."""
        if len(ids) < _LONG_IDS:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token, special or not, adds in the middle of a text; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_token_bytes(token_id)
        return known

    def whole_text(self, token_id: int) -> str | None:
        """`token_bytes` as text, None where they are no whole characters."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            pass
        try:
            text = self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._whole_texts[token_id] = text
        return text

    def token_text(self, token_id: int) -> str:
        """One token as a string of its own: its text, or ``bytes:\\x…`` where its bytes are a part of a character."""
        text = self.whole_text(token_id)
        if text is not None:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token_id))

    def _count_added(self) -> tuple[int, int]:
        """Special tokens that the pipeline sets before and behind every text."""
        wrapped = self._backend.encode("a", add_special_tokens=True).ids
        added = len(wrapped) - len(self._anchor)
        leading = next((place for place in range(added + 1) if wrapped[place:][: len(self._anchor)] == self._anchor), 0)
        return leading, added - leading

    def _find_token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            if all(char in self._byte_of_char for char in token):
                return bytes(self._byte_of_char[char] for char in token)
            return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        # Decoders of the SentencePiece kind treat the first token of a text differently: look at it behind another one.
        text = self._backend.decode([*self._anchor, token_id], skip_special_tokens=False)
        return text.removeprefix(self._anchor_text).encode()


def _max_bytes_per_token(backend: tokenizers.Tokenizer, is_byte_level: bool, num_rows: int | None) -> int:
    """No token stands for more bytes of text than this. A normaliser may make a text shorter before it is cut: it gets a margin."""
    if num_rows is None:
        vocabulary: Iterable[str] = backend.get_vocab(with_added_tokens=True)
    else:
        vocabulary = (token for token in map(backend.id_to_token, range(num_rows)) if token is not None)
    longest = max((len(token) if is_byte_level and token.isascii() else len(token.encode()) for token in vocabulary), default=1)
    return longest * (1 if backend.normalizer is None else _NORMALISER_MARGIN)


def read_tokenizer_config(model_dir: Path) -> dict[str, object]:
    """``tokenizer_config.json`` with an older folder's ``special_tokens_map.json`` laid over it; empty if there is neither."""
    config = read_object(model_dir / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_object(model_dir / "special_tokens_map.json")
    return config


def read_object(path: Path) -> dict[str, object]:
    """A file's JSON object; empty if there is no file. Raises `TokenizerError`."""
    if not path.exists():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise TokenizerError(f"{path} does not hold an object")
    return raw


def named_special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """The special tokens that a `read_tokenizer_config` names, by what it calls them."""
    return {name: _content(value) for name, value in _named_tokens(config)}


def _named_tokens(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in config.items():
        if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value)):
            yield name, value


def _add_declared_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> None:
    """Tokens that tokenizer_config.json declares and tokenizer.json lacks, in the order of their ids."""
    declared = config.get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return
    known = backend.get_added_tokens_decoder()
    missing = [
        _as_added_token(value, special=bool(value.get("special")))
        for token_id, value in sorted(declared.items(), key=lambda entry: int(entry[0]))
        if int(token_id) not in known and isinstance(value, dict)
    ]
    backend.add_tokens(missing)  # at once: each call builds the search for all of them anew


def _content(value: object) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _as_added_token(value: object, *, special: bool) -> tokenizers.AddedToken:
    flags = value if isinstance(value, dict) else {"normalized": False}
    return tokenizers.AddedToken(
        _content(value),
        single_word=bool(flags.get("single_word", False)),
        lstrip=bool(flags.get("lstrip", False)),
        rstrip=bool(flags.get("rstrip", False)),
        normalized=bool(flags.get("normalized", not special)),
        special=special,
    )


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    parts = decoder.get("decoders", [decoder])
    return [part.get("type") for part in parts] == ["ByteLevel"]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: Latin-1's visible characters stand for themselves, the rest follow U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in visible}
    hidden = (byte for byte in range(0x100) if byte not in set(visible))
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(hidden)})
    return alphabet
