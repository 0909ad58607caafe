"""Adapters that are served exactly: every format, by the names of PEFT's own config.

This file is long because it is one table.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from adapter_edits import (
    cast,
    fuse,
    in_order,
    keep_config,
    on_tensors,
    rename,
    set_config,
    shard,
    share_a,
    split,
    to_megatron,
    to_mlx,
    to_torchtune,
)
from peft import EvaConfig, LoHaConfig, PeftModel, get_peft_model, initialize_lora_eva_weights, save_as_lora
from peft_zoo import SHAPE, VOCAB_SIZE, Recipe, randomise
from transformers import AutoModelForCausalLM

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
INVOCATION = [5, 77, 9]
PATTERNS = {
    "r": 3,
    "rank_pattern": {"q_proj": 9, r"layers\.1\.mlp\..*": 2},
    "alpha_pattern": {"q_proj": 20, "down_proj": 3},
}
ADDED = VOCAB_SIZE + 3
RANKS = dict(
    zip(
        (f"layers.{layer}.*{name}" for layer in range(3) for name in ATTENTION),
        [1, 2, 3, 4, 8, 12, 16, 24, 48, 64, 100, 5],
        strict=True,
    )
)


def save_converted(model: PeftModel, folder: Path) -> None:
    """As PEFT's guide has it: the start is saved, the adapter trained, then saved as the difference between the two."""
    start = folder.parent / "start"
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(start)
    randomise(model)
    model.save_pretrained(folder, path_initial_model_for_weight_conversion=start)


def save_eva(model: PeftModel, folder: Path) -> None:
    """With A and ranks from the base's own activations, as EVA has it; ranks differ from module to module."""
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, VOCAB_SIZE, (4, 24), generator=generator) for _ in range(12)]
    initialize_lora_eva_weights(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens])
    assert len(set(model.peft_config["default"].rank_pattern.values())) > 1
    randomise(model)
    model.save_pretrained(folder)


def save_loha_as_lora(base_dir: Path, folder: Path) -> None:
    """PEFT's own conversion of another kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
        model = get_peft_model(
            base, LoHaConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_weights=False)
        )
        randomise(model)
        save_as_lora(folder, model, rank=8, progressbar=False)


SELECTION = [
    Recipe("list", "target_modules: list", {"target_modules": ["q_proj", "v_proj"]}),
    Recipe("paths", "target_modules: list", {"target_modules": ["self_attn.q_proj", "mlp.down_proj"]}, "qwen3-tied"),
    Recipe("regex", "target_modules: regular expression", {"target_modules": r".*layers\.[02]\.self_attn\.(q|v)_proj"}),
    Recipe("all-linear", "target_modules: all-linear", {"target_modules": "all-linear"}, "qwen2"),
    Recipe("layers", "layers_to_transform, layers_pattern", {"target_modules": ALL, "layers_to_transform": [0, 2]}),
    Recipe(
        "layers-pattern",
        "layers_to_transform, layers_pattern",
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1], "layers_pattern": ["layers"]},
        "qwen2-tied",
    ),
    Recipe("excluded", "exclude_modules", {"target_modules": "all-linear", "exclude_modules": ["q_proj", "layers.1.mlp.up_proj"]}),
    Recipe("excluded-regex", "exclude_modules", {"target_modules": ALL, "exclude_modules": r".*layers\.1\..*"}, "qwen3-tied"),
    Recipe("rank1", "any rank up to the server's limit", {"r": 1, "target_modules": ALL}),
    Recipe("rank13", "any rank up to the server's limit", {"r": 13, "target_modules": ALL}),
    Recipe("rank64", "any rank up to the server's limit", {"r": 64, "lora_alpha": 16, "target_modules": ALL}, "qwen2"),
    Recipe("rank64-rslora", "rsLoRA", {"r": 64, "lora_alpha": 16, "use_rslora": True, "target_modules": ALL}, "qwen2"),
    Recipe("ranks", "any rank up to the server's limit", {"rank_pattern": RANKS, "lora_alpha": 6, "target_modules": ATTENTION}),
    Recipe("patterns", "rank_pattern, alpha_pattern", {**PATTERNS, "target_modules": ALL}),
    Recipe("rslora", "rsLoRA", {"r": 16, "use_rslora": True, "target_modules": ALL}),
    Recipe("rslora-patterns", "rsLoRA", {**PATTERNS, "use_rslora": True, "target_modules": ALL}, "qwen2"),
]

BIASES = [
    Recipe("bias-lora-only", "bias: lora_only", {"bias": "lora_only", "target_modules": ["q_proj", "v_proj", "o_proj"]}, "qwen2"),
    Recipe("bias-all", "bias: all", {"bias": "all", "target_modules": ["q_proj", "down_proj"]}, "qwen2"),
    Recipe("lora-bias", "lora_bias", {"lora_bias": True, "target_modules": ALL}, "qwen2"),
    Recipe("lora-bias-rslora", "lora_bias", {**PATTERNS, "lora_bias": True, "use_rslora": True, "target_modules": ALL}),
    Recipe(
        "lora-bias-and-all", "lora_bias", {"lora_bias": True, "bias": "all", "target_modules": ["k_proj", "o_proj"]}, "qwen2-tied"
    ),
    Recipe("lora-bias-head", "lora_bias on lm_head", {"lora_bias": True, "target_modules": ["q_proj", "lm_head"]}),
    Recipe(
        "lora-bias-head-tied",
        "lora_bias on lm_head",
        {"lora_bias": True, "lora_alpha": 5, "target_modules": ["lm_head"]},
        "qwen2-tied",
    ),
]

DORA = [
    Recipe("dora", "DoRA", {"use_dora": True, "target_modules": ["q_proj", "v_proj"]}),
    Recipe("dora-all", "DoRA", {"use_dora": True, "target_modules": "all-linear"}, "qwen2-tied"),
    Recipe("dora-bias", "DoRA with bias", {"use_dora": True, "bias": "all", "target_modules": ALL}, "qwen2"),
    Recipe("dora-rslora", "DoRA with rsLoRA and patterns", {"use_dora": True, "use_rslora": True, "r": 9, "target_modules": ALL}),
    Recipe("dora-patterns", "DoRA with rsLoRA and patterns", {**PATTERNS, "use_dora": True, "target_modules": ALL}, "qwen3-tied"),
]

INITS = [
    Recipe("gaussian", "init gaussian, orthogonal", {"init_lora_weights": "gaussian", "target_modules": ALL}),
    Recipe("orthogonal", "init gaussian, orthogonal", {"init_lora_weights": "orthogonal", "target_modules": ALL}, "qwen3-tied"),
    Recipe(
        "eva",
        "init EVA",
        {"target_modules": ALL, "init_lora_weights": "eva", "eva_config": EvaConfig(rho=2.0)},
        "qwen2",
        save=save_eva,
    ),
    Recipe("mica", "init MiCA", {"init_lora_weights": "mica", "target_modules": ["q_proj", "up_proj"]}),
    Recipe("velora", "VeLoRA", {"velora_config": {"num_groups": 4}, "target_modules": ["q_proj", "down_proj"]}),
    Recipe(
        "pissa-converted",
        "PiSSA, OLoRA, CorDA, LoRA-GA: converted by PEFT",
        {"init_lora_weights": "pissa", "target_modules": ALL},
        save=save_converted,
    ),
    Recipe(
        "olora-converted",
        "PiSSA, OLoRA, CorDA, LoRA-GA: converted by PEFT",
        {"init_lora_weights": "olora", "target_modules": ["q_proj"]},
        save=save_converted,
    ),
    Recipe("loha-as-lora", "other kinds: converted to LoRA by PEFT", {}, make=save_loha_as_lora),
]

HEAD_AND_EMBEDDING = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}
WHOLES = [
    Recipe("head", "modules_to_save: lm_head", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    Recipe("head-tied", "modules_to_save: lm_head", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "qwen2-tied"),
    Recipe("embedding", "modules_to_save: embed_tokens", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    Recipe(
        "embedding-tied",
        "modules_to_save: embed_tokens",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        "qwen3-tied",
    ),
    Recipe("head-embedding", "modules_to_save: lm_head and embed_tokens", HEAD_AND_EMBEDDING),
    Recipe("head-embedding-tied", "modules_to_save: lm_head and embed_tokens", HEAD_AND_EMBEDDING, "qwen2-tied"),
    Recipe(
        "norms",
        "modules_to_save: norms",
        {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "post_attention_layernorm", "norm"]},
    ),
    Recipe(
        "qk-norms", "modules_to_save: norms", {"target_modules": ["v_proj"], "modules_to_save": ["q_norm", "k_norm"]}, "qwen3-tied"
    ),
    Recipe("linear", "modules_to_save: a linear", {"target_modules": ["q_proj"], "modules_to_save": ["down_proj"]}),
    Recipe("linear-bias", "modules_to_save: a linear", {"target_modules": ["o_proj"], "modules_to_save": ["v_proj"]}, "qwen2"),
    Recipe(
        "fused-linear",
        "modules_to_save: fused projections",
        {"target_modules": ["o_proj"], "modules_to_save": ["qkv_proj"]},
        "phi3",
    ),
    Recipe(
        "fused-attention",
        "modules_to_save: fused projections",
        {"target_modules": ["gate_up_proj", "down_proj"], "modules_to_save": ["self_attn"]},
        "phi3",
    ),
    Recipe(
        "fused-mlp",
        "modules_to_save: fused projections",
        {"use_dora": True, "target_modules": ["qkv_proj"], "modules_to_save": ["mlp", "norm"]},
        "phi3",
    ),
    Recipe(
        "all-wholes",
        "modules_to_save: a linear",
        {**HEAD_AND_EMBEDDING, "use_dora": True, "modules_to_save": ["lm_head", "embed_tokens", "norm", "k_proj"]},
        "qwen2",
    ),
]

EMBEDDINGS = [
    Recipe("lora-embedding", "LoRA on embed_tokens", {"target_modules": ["q_proj", "embed_tokens"]}),
    Recipe("lora-embedding-tied", "LoRA on embed_tokens", {"target_modules": ["embed_tokens"]}, "qwen2-tied"),
    Recipe("lora-head", "LoRA on lm_head", {"target_modules": ["v_proj", "lm_head"]}),
    Recipe("lora-head-tied", "LoRA on lm_head", {"target_modules": ["lm_head"]}, "qwen3-tied"),
    Recipe(
        "lora-both", "LoRA on embed_tokens and lm_head", {"use_rslora": True, "target_modules": ["embed_tokens", "lm_head", *ALL]}
    ),
    Recipe(
        "lora-both-tied",
        "LoRA on embed_tokens and lm_head",
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        "qwen2-tied",
    ),
    Recipe(
        "dora-both", "DoRA on embed_tokens and lm_head", {"use_dora": True, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}
    ),
    Recipe(
        "dora-both-tied",
        "DoRA on embed_tokens and lm_head",
        {"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]},
        "qwen3-tied",
    ),
]

TIED = [
    Recipe(
        "tied-whole",
        "ensure_weight_tying",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        "qwen2-tied",
    ),
    Recipe(
        "tied-lora",
        "ensure_weight_tying",
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        "qwen3-tied",
    ),
    Recipe(
        "tied-dora",
        "ensure_weight_tying",
        {"target_modules": ["v_proj", "embed_tokens"], "use_dora": True, "ensure_weight_tying": True},
        "qwen2-tied",
    ),
    Recipe(
        "tied-rows",
        "ensure_weight_tying",
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9, 77], "ensure_weight_tying": True},
        "qwen3-tied",
    ),
]

ROWS = [
    Recipe("rows", "trainable_token_indices", {"target_modules": ["q_proj", "v_proj"], "trainable_token_indices": [5, 9, 77]}),
    Recipe("rows-tied", "trainable_token_indices", {"target_modules": ALL, "trainable_token_indices": [5, 9, 77]}, "qwen2-tied"),
    Recipe(
        "rows-dict",
        "trainable_token_indices",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 150]}},
        "qwen3-tied",
    ),
    Recipe(
        "rows-head",
        "trainable_token_indices",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3], "lm_head": [11, 12]}},
    ),
]

ADDED_TOKENS = [
    Recipe("added", "added tokens", {"target_modules": ["q_proj", "v_proj"]}, vocab_size=ADDED),
    Recipe("added-tied", "added tokens", {"target_modules": ALL}, "qwen2-tied", vocab_size=ADDED),
    Recipe("added-trained", "added tokens", HEAD_AND_EMBEDDING, "qwen2", vocab_size=ADDED),
    Recipe("added-trained-tied", "added tokens", HEAD_AND_EMBEDDING, "qwen3-tied", vocab_size=ADDED),
]

ALORA = [
    Recipe("alora", "aLoRA", {"target_modules": ALL, "alora_invocation_tokens": INVOCATION}),
    Recipe(
        "alora-bias",
        "aLoRA",
        {"target_modules": ["q_proj", "k_proj", "v_proj"], "r": 7, "alora_invocation_tokens": INVOCATION},
        "qwen2",
    ),
]

SPLIT_AS_ONE = on_tensors(share_a)
FUSED = in_order(on_tensors(fuse), set_config(target_modules=["qkv_proj", "gate_up_proj", "o_proj"]))
ON_FUSED = {"target_modules": ["qkv_proj", "gate_up_proj"]}
SIZES = {"self_attn.qkv_proj": (32, 16, 16), "mlp.gate_up_proj": (48, 48)}
ONE_WITHOUT = r"^base_model\.model\."
FORMS = [
    Recipe("fused", "fused qkv_proj and gate_up_proj", {"target_modules": ALL[:-1]}, change=SPLIT_AS_ONE, convert=FUSED),
    Recipe(
        "fused-dora",
        "fused qkv_proj and gate_up_proj",
        {"use_dora": True, "target_modules": ALL[:-1]},
        "qwen2",
        change=SPLIT_AS_ONE,
        convert=FUSED,
    ),
    Recipe("fused-base", "a base that fuses its projections", {"target_modules": "all-linear"}, "phi3"),
    Recipe("fused-base-dora", "a base that fuses its projections", {**ON_FUSED, "use_dora": True, "use_rslora": True}, "phi3"),
    Recipe("fused-base-patterns", "a base that fuses its projections", {**ON_FUSED, "rank_pattern": {"qkv_proj": 7}}, "phi3"),
    Recipe("split", "split adapters on a base that fuses its projections", ON_FUSED, "phi3", convert=split(SIZES)),
    Recipe("no-prefix", "names without PEFT's prefix", {"target_modules": ALL}, convert=rename(ONE_WITHOUT, "")),
    Recipe(
        "one-prefix",
        "names without PEFT's prefix",
        {"target_modules": ALL},
        convert=rename(r"^base_model\.model\.model\.", "base_model.model."),
    ),
    Recipe(
        "adapter-name",
        "names with the adapter's name",
        {"target_modules": ALL},
        "qwen2",
        convert=rename(r"\.weight$", ".default.weight"),
    ),
    Recipe(
        "compiled",
        "names of a compiled or sharded model",
        {"target_modules": ALL},
        convert=rename(ONE_WITHOUT, "base_model.model._orig_mod."),
    ),
    Recipe(
        "ddp-compiled",
        "names of a compiled or sharded model",
        {"target_modules": ALL},
        "qwen2",
        convert=rename("^", "_orig_mod.module."),
    ),
    Recipe(
        "multimodal",
        "names of a multimodal wrapper",
        {"target_modules": ALL},
        "qwen2",
        convert=rename(r"\.model\.layers", ".model.language_model.layers"),
    ),
    Recipe(
        "magnitude-weight",
        "DoRA magnitudes as older PEFT named them",
        {"use_dora": True, "target_modules": ALL},
        convert=rename(r"(lora_magnitude_vector)$", r"\1.weight"),
    ),
    Recipe(
        "torchtune-peft",
        "torchtune",
        {"target_modules": ALL},
        convert=keep_config("r", "lora_alpha", "target_modules", "peft_type"),
    ),
    Recipe(
        "torchtune",
        "torchtune",
        {"target_modules": ALL},
        convert=to_torchtune(SHAPE["hidden_size"] // SHAPE["num_attention_heads"]),
    ),
    Recipe(
        "megatron",
        "NeMo, Megatron",
        {"target_modules": ALL},
        "qwen2",
        change=SPLIT_AS_ONE,
        convert=to_megatron(SHAPE["num_key_value_heads"]),
    ),
    Recipe("mlx", "MLX", {"target_modules": ["q_proj", "v_proj"]}, convert=to_mlx),
    Recipe("mlx-dora", "MLX", {"use_dora": True, "target_modules": ALL}, "qwen2", convert=to_mlx),
    Recipe("fp16", "tensors of fp32, fp16, bf16, fp8", {"target_modules": ALL}, change=cast(torch.float16)),
    Recipe("bf16", "tensors of fp32, fp16, bf16, fp8", {"use_dora": True, "target_modules": ALL}, change=cast(torch.bfloat16)),
    Recipe("e4m3", "tensors of fp32, fp16, bf16, fp8", {"target_modules": ALL}, "qwen3-tied", change=cast(torch.float8_e4m3fn)),
    Recipe(
        "e4m3-ends",
        "tensors of fp32, fp16, bf16, fp8",
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        "qwen2",
        change=cast(torch.float8_e4m3fn, "lora_"),
        convert=cast(torch.float8_e4m3fn, "base_layer"),
    ),
    Recipe(
        "e5m2-dora-head",
        "tensors of fp32, fp16, bf16, fp8",
        {"use_dora": True, "target_modules": ["lm_head"]},
        "qwen2-tied",
        change=cast(torch.float8_e5m2, "lora_"),
        convert=cast(torch.float8_e5m2, "base_layer"),
    ),
    Recipe("e5m2", "tensors of fp32, fp16, bf16, fp8", {"target_modules": ALL}, change=cast(torch.float8_e5m2)),
    Recipe(
        "mixed-types", "tensors of fp32, fp16, bf16, fp8", {"target_modules": ALL}, "qwen2", change=cast(torch.float16, "lora_B")
    ),
    Recipe("sharded", "sharded files", {"target_modules": ALL}, convert=shard),
]

TOGETHER = "several of these together"
LORA_AND_SAVED = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["q_proj"]}
ON_ALL_THREE = {
    "target_modules": ["q_proj", "embed_tokens", "lm_head"],
    "rank_pattern": {"embed_tokens": 7, "lm_head": 3},
    "alpha_pattern": {"lm_head": 2},
}
COMBINATIONS = [
    Recipe("alora-lora-bias", TOGETHER, {"target_modules": ALL, "lora_bias": True, "alora_invocation_tokens": INVOCATION}, "qwen2"),
    Recipe(
        "alora-lora-head", TOGETHER, {"target_modules": ["q_proj", "lm_head"], "alora_invocation_tokens": INVOCATION}, "qwen2-tied"
    ),
    Recipe("rows-lora-head", TOGETHER, {"target_modules": ["lm_head"], "trainable_token_indices": [5, 9]}, "qwen2"),
    Recipe(
        "rows-lora-head-tied", TOGETHER, {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [9, 5]}, "qwen2-tied"
    ),
    Recipe(
        "rows-lora-bias-head-tied",
        TOGETHER,
        {"target_modules": ["lm_head"], "lora_bias": True, "use_rslora": True, "trainable_token_indices": {"embed_tokens": [150]}},
        "qwen3-tied",
    ),
    Recipe("rows-saved-head", TOGETHER, {**HEAD_AND_EMBEDDING, "modules_to_save": ["lm_head"], "trainable_token_indices": [5, 9]}),
    Recipe(
        "dora-bias-head", TOGETHER, {"target_modules": ["q_proj", "lm_head"], "use_dora": True, "bias": "lora_only"}, "qwen2-tied"
    ),
    Recipe("lora-in-saved", TOGETHER, LORA_AND_SAVED, "qwen2"),
    Recipe("saved-attention", TOGETHER, {"target_modules": ["down_proj"], "modules_to_save": ["self_attn"]}, "qwen2"),
    Recipe("saved-linear-biases", TOGETHER, {"target_modules": ["q_proj"], "bias": "all", "modules_to_save": ["v_proj"]}, "qwen2"),
    Recipe(
        "saved-attention-biases",
        TOGETHER,
        {"target_modules": ["down_proj"], "bias": "all", "modules_to_save": ["self_attn"]},
        "qwen2",
    ),
    Recipe(
        "saved-all-biases",
        TOGETHER,
        {
            **HEAD_AND_EMBEDDING,
            "bias": "all",
            "modules_to_save": ["self_attn", "norm", "embed_tokens"],
            "target_modules": ["up_proj"],
        },
        "qwen2-tied",
    ),
    Recipe("saved-mlp", TOGETHER, {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}, "qwen3-tied"),
    Recipe("patterns-on-all", TOGETHER, ON_ALL_THREE, "qwen2-tied"),
    Recipe("mica-embedding", TOGETHER, {"target_modules": ["q_proj", "embed_tokens"], "init_lora_weights": "mica"}),
    Recipe(
        "orthogonal-embedding", TOGETHER, {"target_modules": ["q_proj", "embed_tokens"], "init_lora_weights": "orthogonal"}, "qwen2"
    ),
    Recipe(
        "head-one-layer",
        TOGETHER,
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "layers_to_transform": [1]},
        "qwen2",
    ),
]

EXACT = [*SELECTION, *BIASES, *DORA, *INITS, *WHOLES, *EMBEDDINGS, *TIED, *ROWS, *ADDED_TOKENS, *ALORA, *FORMS, *COMBINATIONS]
