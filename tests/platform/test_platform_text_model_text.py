"""What a model folder says of its text: where generation ends, and how many ids there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from graftwork_engine.errors import UnsupportedModel
from graftwork_platform.text.model_text import ModelText
from graftwork_platform.text.tokenizer import TokenizerError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "eos_token_id": 1,
}


def model_dir(path: Path, **files: dict[str, object]) -> Path:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "</s>": 1, "<end>": 2, "<turn>": 3}, []))
    backend.save(str(path / "tokenizer.json"))
    for name, content in ({"config": CONFIG, "tokenizer_config": {}} | files).items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (1,)),
        ({"generation_config": {"eos_token_id": 2}}, (2,)),
        ({"generation_config": {"eos_token_id": [2, 1]}}, (1, 2)),
        ({"tokenizer_config": {"eos_token": "<turn>"}}, (1, 3)),
        ({"generation_config": {"eos_token_id": [2, 1]}, "tokenizer_config": {"eos_token": "<turn>"}}, (1, 2, 3)),
        ({"config": {**CONFIG, "eos_token_id": None}}, ()),
    ],
)
def test_where_generation_ends(tmp_path: Path, files: dict[str, dict[str, object]], expected: tuple[int, ...]) -> None:
    text = ModelText.from_dir(model_dir(tmp_path, **files))
    assert text.eos_token_ids == expected
    assert text.vocab_size == 16
    assert text.chat_template is None


def test_folders_that_are_not_served(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        ModelText.from_dir(tmp_path)
    with pytest.raises(UnsupportedModel, match="Mamba"):
        ModelText.from_dir(model_dir(tmp_path, config={**CONFIG, "architectures": ["MambaForCausalLM"]}))
