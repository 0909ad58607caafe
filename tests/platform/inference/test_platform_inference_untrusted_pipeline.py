"""Which parts of an upload's tokenizer may run in the process that serves everybody."""

from __future__ import annotations

from typing import Any

import pytest

from graftwork_platform.text.model_text import ModelText
from graftwork_platform.text.untrusted_pipeline import MAX_TOKEN_CHARS, MERGES_PER_ROW, find_problems


def replace_rule(old: str, new: str, kind: str = "Regex") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


@pytest.mark.parametrize(
    ("stage", "part"),
    [
        ("normalizer", replace_rule("(a+)+$", "b")),
        ("normalizer", replace_rule("a", "a" * 1000, "String")),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 10**6}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 40}),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}),
        (
            "pre_tokenizer",
            {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "Split", "pattern": {"Regex": "."}}]},
        ),
        ("decoder", replace_rule("a", "b")),
        ("post_processor", {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 40}),
        ("decoder", 7),
        ("decoder", {}),
    ],
)
def test_parts_that_may_cost_anything_must_be_the_base_s(model_text: ModelText, stage: str, part: Any) -> None:
    base = model_text.tokenizer.pipeline()
    [(where, _), *_] = find_problems({**base, stage: part}, base, 320)
    assert where == stage
    assert find_problems({**base, stage: part}, {**base, stage: part}, 320) == [], "what is the base's own is trusted"


@pytest.mark.parametrize(
    ("model", "where"),
    [
        ({"type": "BPE", "dropout": 0.1, "vocab": {}}, "model.dropout"),
        ({"type": "WordPiece", "max_input_chars_per_word": 10**9, "vocab": {}}, "model.max_input_chars_per_word"),
        ({"type": "Unigram", "vocab": [["a" * (MAX_TOKEN_CHARS + 1), -1.0]]}, "model.vocab"),
        ({"type": "BPE", "vocab": {"a" * (MAX_TOKEN_CHARS + 1): 0}}, "model.vocab"),
        ({"type": "BPE", "vocab": {f"t{i}": i for i in range(321)}}, "model.vocab"),
        ({"type": "Unigram", "vocab": [["a", -1.0]] * 321}, "model.vocab"),
        ({"type": "BPE", "vocab": {}, "merges": [["a", "b"]] * (MERGES_PER_ROW * 320 + 1)}, "model.merges"),
        ({"type": "Custom"}, "model"),
        (None, "model"),
    ],
)
def test_models_whose_cost_is_not_bounded_are_named(model_text: ModelText, model: Any, where: str) -> None:
    base = model_text.tokenizer.pipeline()
    assert [place for place, _ in find_problems({**base, "model": model}, base, 320)] == [where]


def test_harmless_parts_may_differ(model_text: ModelText) -> None:
    base = model_text.tokenizer.pipeline()
    other = {
        **base,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}],
        },
        "post_processor": None,
        "added_tokens": [{"id": 9, "content": "<|x|>"}],
    }
    assert find_problems(other, base, 320) == []
    long = {**base, "added_tokens": [{"id": 9, "content": "x" * (MAX_TOKEN_CHARS + 1)}]}
    assert [where for where, _ in find_problems(long, base, 320)] == ["added_tokens"]
