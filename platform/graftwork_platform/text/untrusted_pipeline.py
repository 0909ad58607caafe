"""Which parts of a stranger's ``tokenizer.json`` may run in the process that serves everybody. Knows no files and runs nothing.

A tokenizer is code of a kind: a regular expression can take years on a line of text, a rewriting rule can make a gigabyte of it,
and both hold up everyone else's requests. So parts that run patterns or rewrite text must be the base's own, others must be of
types whose cost is bounded by the text's length, and the sizes that bound it are bounded themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

MAX_TOKEN_CHARS = 512
"""Of one token: finding a text's tokens takes its length times this at worst."""
MAX_PARTS = 32
"""Of one stage of the pipeline."""
MAX_WORD_CHARS = 1000
"""That a WordPiece model looks at: it takes the square of this for each word."""
MERGES_PER_ROW = 3
"""Of the embedding, unless the base's model has more; those of Llama 3 and Gemma have about two."""

_STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_HARMLESS = {
    "normalizer": {"BertNormalizer", "StripAccents", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "ByteLevel"},
    "pre_tokenizer": {
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "Metaspace",
        "Punctuation",
        "Whitespace",
        "WhitespaceSplit",
    },
    "post_processor": {"BertProcessing", "RobertaProcessing", "ByteLevel", "TemplateProcessing"},
    "decoder": {"BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Strip", "WordPiece"},
}
_MODELS = {"BPE", "Unigram", "WordLevel", "WordPiece"}

Problem = tuple[str, str]
"""Where in ``tokenizer.json``, and what is wrong with it."""


def find_problems(pipeline: Mapping[str, object], base: Mapping[str, object], num_rows: int) -> list[Problem]:
    """What in ``pipeline`` may not run here; the parts of ``base``, the base's own, may. Both as `Tokenizer.pipeline` says.

    ``num_rows``: of the embedding that goes with it, which bounds how many entries it has.
    """
    problems: list[Problem] = []
    for stage in _STAGES:
        if pipeline.get(stage) != base.get(stage):
            problems += _stage_problems(stage, pipeline.get(stage), list(_parts(base.get(stage))))
    problems += _model_problems(pipeline.get("model"), base.get("model"), num_rows)
    added = pipeline.get("added_tokens") or []
    if not isinstance(added, list):
        return [*problems, ("added_tokens", "is not a list")]
    contents = (str(token.get("content", "")) if isinstance(token, dict) else "" for token in added)
    return problems + [("added_tokens", _too_long(content)) for content in contents if len(content) > MAX_TOKEN_CHARS]


def _stage_problems(stage: str, part: object, trusted: list[object]) -> Iterator[Problem]:
    parts = list(_parts(part))
    if len(parts) > MAX_PARTS:
        yield stage, f"has {len(parts)} parts, more than {MAX_PARTS}"
    for each in parts:
        if each in trusted:
            continue
        kind = each.get("type") if isinstance(each, dict) else None
        if kind not in _HARMLESS[stage]:
            yield stage, f"the part {str(kind)[:64]} is not the base's own, and may run patterns or rewrite text"
        elif kind == "TemplateProcessing" and _num_pieces(each) > MAX_PARTS:
            yield stage, f"wraps a text in more than {MAX_PARTS} pieces"


def _parts(part: object) -> Iterator[object]:
    """The parts of a stage, those of sequences one by one. Nesting is no deeper than the JSON's, which its reader bounds."""
    if part is None:
        return
    if isinstance(part, dict) and part.get("type") == "Sequence":
        lists = [part[name] for name in _LISTS if isinstance(part.get(name), list)]
        for each in (inner for parts in lists for inner in parts):
            yield from _parts(each)
    else:
        yield part


def _num_pieces(part: object) -> int:
    pieces = part.get("single") if isinstance(part, dict) else None
    return len(pieces) if isinstance(pieces, list) else 0


def _model_problems(model: object, base: object, num_rows: int) -> Iterator[Problem]:
    if not isinstance(model, dict) or model.get("type", "BPE") not in _MODELS:
        kind = model.get("type") if isinstance(model, dict) else None
        yield "model", f"is of the type {str(kind)[:64]}; served are {', '.join(sorted(_MODELS))}"
        return
    if model.get("dropout"):
        yield "model.dropout", "is set: the same text would be cut in another way each time"
    longest = model.get("max_input_chars_per_word", 0)
    if isinstance(longest, int) and longest > MAX_WORD_CHARS:
        yield "model.max_input_chars_per_word", f"is {longest}, more than {MAX_WORD_CHARS}"
    if (count := _num_entries(model, "vocab")) > max(num_rows, _num_entries(base, "vocab")):
        yield "model.vocab", f"has {count} entries, and the embedding has {num_rows} rows"
    if (count := _num_entries(model, "merges")) > (most := max(MERGES_PER_ROW * num_rows, _num_entries(base, "merges"))):
        yield "model.merges", f"has {count} entries, more than {most}"
    known = set(_vocabulary(base))
    for token in _vocabulary(model):
        if len(token) > MAX_TOKEN_CHARS and token not in known:
            yield "model.vocab", _too_long(token)
            return


def _num_entries(model: object, name: str) -> int:
    entries = model.get(name) if isinstance(model, dict) else None
    return len(entries) if isinstance(entries, (dict, list)) else 0


def _vocabulary(model: object) -> Iterator[str]:
    """A model's tokens: keys of an object, or the first of each pair."""
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        yield from vocab
    elif isinstance(vocab, list):
        yield from (str(entry[0]) for entry in vocab if isinstance(entry, list) and entry)


def _too_long(token: str) -> str:
    return f"a token of {len(token)} characters, more than {MAX_TOKEN_CHARS}"
