"""The tokenizer equals transformers' own, on a small byte-level BPE and on a SentencePiece-like one, both trained here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from graftwork_platform.text.tokenizer import Tokenizer, TokenizerError

CORPUS = [
    "Hello world, how are you today? I am well, thank you.",
    "Été à Zürich: 25 °C; l'hiver − 3 °C. 日本語のテキスト。 Привет, мир! 👩‍👩‍👧 🎉",
    'def f(x):\n    return {"a": [1, 2, 3]}\n',
] * 3
TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "  leading",
    "trailing  ",
    "a<|im_end|>b",
    "<s>x</s>",
    "\n\n\t",
    "👩‍👩‍👧",
    "x\u0000y",
    "<|late|> and <pad>",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_dir(path: Path, *, bos: bool = False, config: dict[str, object] | None = None) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, show_progress=False, initial_alphabet=alphabet, special_tokens=SPECIALS)
    )
    tokenizer.add_tokens([tokenizers.AddedToken("été chaud"), tokenizers.AddedToken("<tool>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", pair="$A $B", special_tokens=[("<|im_start|>", 1)]
        )
    tokenizer.enable_truncation(8)  # a training left-over that serving must not obey
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(base | (config or {})))
    return path


def sentencepiece_dir(path: Path) -> Path:
    """Llama 2's pipeline: spaces become U+2581, unknown characters fall back to byte tokens."""
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"])
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(["hello world how are you today thank you"] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    )
    return path


def assert_same_as_transformers(path: Path) -> None:
    ours, theirs = Tokenizer.from_dir(path), AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert ours.eos_id == theirs.eos_token_id
    assert ours.special_ids == set(theirs.all_special_ids) | {i for i, t in theirs.added_tokens_decoder.items() if t.special}
    assert ours.special_tokens == theirs.special_tokens_map


def test_byte_level_equals_transformers(tmp_path: Path) -> None:
    assert_same_as_transformers(byte_level_dir(tmp_path / "plain"))


def test_leading_bos_equals_transformers(tmp_path: Path) -> None:
    path = byte_level_dir(tmp_path / "bos", bos=True)
    assert_same_as_transformers(path)
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer.encode("a")[0] == tokenizer.token_id("<|im_start|>")
    assert len(tokenizer.encode("one two three four five six seven eight nine ten")) > 8


def test_padding_left_over_from_training_is_off(tmp_path: Path) -> None:
    path = byte_level_dir(tmp_path / "padded")
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.enable_padding(length=32)
    backend.save(str(path / "tokenizer.json"))
    assert len(Tokenizer.from_dir(path).encode("a")) == 1


def test_sentencepiece_equals_transformers(tmp_path: Path) -> None:
    assert_same_as_transformers(sentencepiece_dir(tmp_path / "sp"))


def test_tokens_declared_beside_the_pipeline_are_known(tmp_path: Path) -> None:
    first_free = Tokenizer.from_dir(byte_level_dir(tmp_path / "without")).vocab_size
    late = {"content": "<|late|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    config = {"added_tokens_decoder": {str(first_free): late}, "pad_token": "<pad>"}
    path = byte_level_dir(tmp_path / "with", config=config)
    assert_same_as_transformers(path)
    assert Tokenizer.from_dir(path).token_id("<|late|>") == first_free


def test_special_tokens_as_objects_and_in_their_own_file(tmp_path: Path) -> None:
    path = byte_level_dir(tmp_path / "map")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>", **flags}}))
    assert_same_as_transformers(path)
    assert Tokenizer.from_dir(path).special_tokens == {"eos_token": "<|im_end|>"}


def test_bytes_and_text_of_single_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(byte_level_dir(tmp_path / "bytes"))
    for text in (*CORPUS, "ünïcode ☃ 🎉"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()
    [first, *_] = tokenizer.encode("☃", add_special_tokens=False)
    assert tokenizer.token_text(first) == "bytes:\\xe2"
    assert tokenizer.token_text(tokenizer.encode("a")[0]) == "a"
    assert tokenizer.token_bytes(tokenizer.token_id("été chaud") or 0) == "été chaud".encode()
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_text(tokenizer.token_id("<|im_end|>") or 0) == "<|im_end|>"


def test_bytes_of_sentencepiece_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(sentencepiece_dir(tmp_path / "sp"))
    ids = tokenizer.encode("hello world ☃", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == " hello world ☃".encode()


class _WithoutWholes:
    """A library's tokenizer that is never asked for all it has at once."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> object:
        assert name not in ("get_vocab", "to_str"), "these hold the interpreter's lock for as long as the vocabulary is large"
        return getattr(self._backend, name)


def test_with_known_rows_the_vocabulary_is_never_asked_for_as_a_whole(tmp_path: Path) -> None:
    folder = byte_level_dir(tmp_path / "m")
    wanted = Tokenizer.from_dir(folder)
    tokenizer = Tokenizer(_WithoutWholes(wanted._backend), wanted.special_tokens, wanted.max_id + 1)  # type: ignore[arg-type]
    assert tokenizer.max_bytes_per_token == wanted.max_bytes_per_token
    assert tokenizer.is_byte_level
    assert tokenizer.encode(CORPUS[1]) == wanted.encode(CORPUS[1])


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{"), ("tokenizer_config.json", "[]"), ("tokenizer_config.json", "{")]
)
def test_broken_files_are_refused_by_name(tmp_path: Path, name: str, content: str) -> None:
    path = byte_level_dir(tmp_path / "broken")
    (path / name).write_text(content)
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.from_dir(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_dir(path)
