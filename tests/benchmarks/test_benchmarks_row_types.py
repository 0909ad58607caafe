"""What is measured of 8-bit rows: distributions that are PEFT's own for bf16 rows, and farther off the fewer bits there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmark_scripts import script
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

row_types = script("row_types")

TOKENS = list(range(3, 43))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny base in bf16, and an adapter of it that says something."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=row_types.LONGEST,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter"


@torch.inference_mode()
def test_rows_of_fewer_bits_are_farther_from_peft(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = folders
    scorer = row_types.Scorer(base, pool_bytes=16 << 20)
    found = {
        row_type: scorer.logprobs(TOKENS, scorer.load(adapter, row_type, base, tmp_path))
        for row_type in ("bfloat16", "int8", "e4m3")
    }
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
    golden = model(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    assert (found["bfloat16"] - golden).abs().max() < 0.3  # bf16 activations
    divergence = {
        row_type: float((found["bfloat16"].exp() * (found["bfloat16"] - found[row_type])).sum(-1).mean()) for row_type in found
    }
    assert divergence["bfloat16"] == 0
    assert 0 < divergence["int8"] < divergence["e4m3"] < 0.1


def test_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        row_types.parse(["--base", str(tmp_path), "--prompts", "0"])
    assert "1 or more" in capsys.readouterr().err
