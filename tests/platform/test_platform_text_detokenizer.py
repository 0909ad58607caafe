"""Incremental detokenisation: the pieces are the decoding of all ids, and no piece ends inside a character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from graftwork_platform.text.detokenizer import new_detokenizer
from graftwork_platform.text.tokenizer import Tokenizer


def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(["hello world été 日本語 日本 🎉🎉"] * 5, trainer)
    backend.add_tokens(["été chaud", "Ġé", "<tool>"])
    return Tokenizer(backend, {})


def byte_fallback() -> Tokenizer:
    """SentencePiece's kind: whole words, and a byte token for everything else."""
    words = ["<unk>", "</s>", "▁", "▁hello", "lo", "a", "é", "▁日", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(backend, {})


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = new_detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@settings(max_examples=250, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=40))
def test_pieces_are_the_decoding_of_any_ids(ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@settings(max_examples=120, deadline=None)
@given(st.text(max_size=30))
def test_no_piece_ends_inside_a_character(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    streamed = pieces(BYTE_LEVEL, ids)
    assert "".join(streamed) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(streamed)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from(["<unk>", "</s>", "▁", "▁hello", "lo", "a", "é", "▁日"]), st.text(min_size=1, max_size=3)),
        max_size=12,
    )
)
def test_byte_fallback_pieces_are_the_decoding(parts: list[str]) -> None:
    ids: list[int] = []
    for part in parts:
        known = BYTE_FALLBACK.token_id(part)
        spelled = [BYTE_FALLBACK.token_id(f"<0x{byte:02X}>") or 0 for byte in part.encode()]
        ids += spelled if known is None else [known]
    assert "".join(pieces(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_a_character_appears_when_it_is_complete(tokenizer: Tokenizer) -> None:
    if tokenizer.is_byte_level:
        ids = [tokenizer.encode(char)[0] for char in "ab"]
        snowman = tokenizer.encode("☃")
    else:
        ids = [tokenizer.token_id("a") or 0, tokenizer.token_id("lo") or 0]
        snowman = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "☃".encode()]
    streamed = pieces(tokenizer, [*ids, *snowman])
    assert len(snowman) == 3
    assert streamed[2:] == ["", "", "☃", ""]
    assert pieces(tokenizer, snowman[:2])[:2] == ["", ""]
    assert set(pieces(tokenizer, snowman[:2])[-1]) == {"\ufffd"}


def test_the_alphabet_is_the_one_in_the_file(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.decoder = decoders.ByteLevel()
    raw = json.loads(backend.to_str())
    raw["model"]["vocab"] = {char: i for i, char in enumerate(alphabet)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert sorted(tokenizer.token_bytes(i)[0] for i in range(256)) == list(range(256))
