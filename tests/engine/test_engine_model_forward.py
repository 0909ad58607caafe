"""Logits of a whole prompt against transformers, for the biases and norms that a family may have and few checkpoints show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from graftwork_engine.kv_memory import allocate_kv_cache
from graftwork_engine.model.config import ModelConfig
from graftwork_engine.model.layers import ForwardBatch, Placement
from graftwork_engine.model.llama import Llama
from graftwork_engine.model.loader import load_weights
from graftwork_engine.model.registry import build_model
from graftwork_kernels import reference
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import AttentionBatch, empty_adapter_memory
from graftwork_kernels.ops import Operators

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
PROMPT = torch.arange(3, 120, 7)


def logits(model: Llama) -> torch.Tensor:
    """Of every row of the prompt, run as one step."""
    ops, count = Operators(reference), len(PROMPT)
    attention = AttentionBatch(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_len=torch.tensor([count], dtype=torch.int32),
        block_table=torch.tensor([[1, 0]], dtype=torch.int32),
        kv_slot=torch.tensor([(1 - i // 16) * 16 + i % 16 for i in range(count)]),
        max_query_len=count,
        max_context_len=count,
    )
    batch = ForwardBatch(
        ops, torch.arange(count), attention, build_adapter_batch([-1] * count), empty_adapter_memory(model.config.num_sites)
    )
    kv = allocate_kv_cache(model.config, 2, 16, model.place.dtype)
    return model.logits(ops, model.hidden_states(PROMPT, batch, kv))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
        LlamaConfig(**SHAPE, head_dim=16, rms_norm_eps=1e-2, tie_word_embeddings=True),
        LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}),
        LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}),
        Qwen3Config(**SHAPE, head_dim=16, attention_bias=True),
    ],
    ids=["llama-biases", "llama-wide-heads", "llama-mha", "llama-mqa", "qwen3-biases"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    theirs.save_pretrained(tmp_path)
    model = build_model(ModelConfig.from_dir(tmp_path), 32, Placement(dtype, CPU))
    load_weights(model, tmp_path)
    with torch.inference_mode():
        expected = theirs(input_ids=PROMPT[None]).logits[0]
        got = logits(model)
    assert got.dtype == torch.float32
    error = (got - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 3e-2)
