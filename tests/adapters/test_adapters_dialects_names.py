"""One adapter of PEFT's, named as its versions and wrappers name it, is read as the same tensors bit for bit, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dialect_reading import LAYER, P, assert_same, dialect_findings, edit, edit_config, failures, golden, read, read_well, values
from safetensors.torch import load_file, save_file

from graftwork_adapters.base_spec import BaseSpec


def test_peft_itself(dora: Path, tiny_spec: BaseSpec) -> None:
    upload, report = read_well(dora, tiny_spec)
    assert_same(values(upload), golden(dora))
    assert upload.num_sent == len(upload.tensors) == 42
    assert upload.dialect == "peft"
    assert upload.shards == ("adapter_model.safetensors",)
    assert upload.config == json.loads((dora / "adapter_config.json").read_text())
    assert all(tensor.trained_module == tensor.module for tensor in upload.tensors)
    assert dialect_findings(report) == ["pass"]


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name.removeprefix(P),
        lambda name: P + name,
        lambda name: name.replace(P, P + "model."),
        lambda name: name.replace(P + "model.", P),
        lambda name: name.replace(".weight", ".default.weight").replace("_vector", "_vector.default"),
        lambda name: name.replace(".weight", ".mine.weight"),
        lambda name: name.replace("_vector", "_vector.weight").replace("weight.weight", "weight"),
        lambda name: name.replace("_vector", "_vector.default.weight"),
        lambda name: "module." + name,
        lambda name: "_orig_mod." + name,
        lambda name: "module._orig_mod." + name,
        lambda name: "_orig_mod.module." + name,
        lambda name: "_orig_mod._fsdp_wrapped_module.module." + name.replace("layers.0.", "layers.0._orig_mod."),
        lambda name: name.replace(P, P + "module."),
        lambda name: name.replace(P, P + "_orig_mod.module."),
        lambda name: name.replace(P, "base_model.module.model."),
        lambda name: name.replace(P, P + "_orig_mod."),
        lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module."),
        lambda name: name.replace("self_attn.", "self_attn._checkpoint_wrapped_module."),
        lambda name: name.replace(P + "model.", P + "model.language_model."),
        lambda name: name.replace(P + "model.", P + "language_model.model."),
    ],
    ids=[
        "no-prefix", "doubled-prefix", "one-more-model", "one-less-model", "default", "own-name", "new-magnitude", "old-magnitude",
        "ddp", "compiled", "compiled-ddp", "ddp-compiled", "all", "ddp-inside", "ddp-compiled-inside", "ddp-between",
        "compiled-inside", "fsdp", "checkpointing", "language-model", "language-model-outside",
    ],
)  # fmt: skip
def test_variants_of_peft(dora: Path, tiny_spec: BaseSpec, change: Callable[[str], str]) -> None:
    expected = golden(dora)
    names = load_file(dora / "adapter_model.safetensors").keys()
    edit(dora, change)
    upload, report = read_well(dora, tiny_spec)
    assert_same(values(upload), expected)
    is_renamed = any(change(name) != name for name in names) and change("_vector") != "_vector.weight"
    assert dialect_findings(report) == (["warn"] if is_renamed else ["pass"])


def test_the_path_that_the_trainer_knew_is_kept(dora: Path, tiny_spec: BaseSpec) -> None:
    edit(dora, lambda name: name.replace(P + "model.", P + "model.language_model."))
    upload, _ = read_well(dora, tiny_spec)
    trained = {tensor.module: tensor.trained_module for tensor in upload.tensors}
    assert trained[f"{LAYER}mlp.up_proj"] == "model.language_model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda name: name.replace("0.mlp.up_proj.lora_A.weight", "0.mlp.up_proj.lora_A.x.y"), "not a name that PEFT"),
        (lambda name: name.replace("0.mlp.up_proj.lora_A.weight", "0.mlp.up_proj.lora_A.bias"), "not a name that PEFT"),
        (lambda name: name.replace("0.mlp.up_proj.lora_A.weight", "0.mlp.up_proj.lora_C.weight"), "not a name that PEFT"),
        (lambda name: name.replace("0.mlp.up_proj.lora_A.weight", "0.mlp.up_proj.lora_A"), "not a name that PEFT"),
        (lambda name: name.replace("0.mlp.up_proj.lora_A.", "0.mlp.up_proj.lora_A.one.") if "0.mlp" in name
            else name.replace("lora_A.", "lora_A.two."), "is of the adapter one while others are of two"),
        (lambda name: name.removeprefix(P) if "0.mlp.up_proj.lora_A" in name else name, "has no prefix base_model.model. while"),
        (lambda name: P + name if "0.mlp.up_proj.lora_A" in name else name, "has the prefix base_model.model.base_model.model."),
        (lambda name: name.replace(P, P + "model.") if "0.mlp.up_proj.lora_A" in name else name, "while other layers lie in"),
    ],
)  # fmt: skip
def test_names_that_are_unclear_are_refused(dora: Path, tiny_spec: BaseSpec, change: Callable[[str], str], says: str) -> None:
    edit(dora, change)
    upload, report = read(dora, tiny_spec)
    (failure,) = failures(report)
    assert "0.mlp.up_proj" in failure[0]
    assert says in failure[1]
    assert upload is not None
    assert len(upload.tensors) == 41


def test_two_names_of_one_tensor(dora: Path, tiny_spec: BaseSpec) -> None:
    path = dora / "adapter_model.safetensors"
    tensors = load_file(path)
    name = f"{P}{LAYER}mlp.up_proj.lora_A"
    save_file(tensors | {f"{name}.default.weight": tensors[f"{name}.weight"].clone()}, path)
    _, report = read(dora, tiny_spec)
    assert failures(report) == [(f"{name}.weight", f"means the same tensor as {name}.default.weight")]


def test_unsloth(dora: Path, tiny_spec: BaseSpec) -> None:
    plain = json.loads((dora / "adapter_config.json").read_text())
    mapping = {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers", "unsloth_fixed": True}
    edit_config(dora, auto_mapping=mapping, unsloth_version="2025.1", merge_weights=False)
    upload, report = read_well(dora, tiny_spec)
    assert upload.config == plain | {"auto_mapping": mapping}
    assert [finding.message for finding in report.findings if finding.check == "dialect"] == ["written by Unsloth, on PEFT"]


def test_a_folder_of_llama_factory(dora: Path, tiny_spec: BaseSpec) -> None:
    expected = golden(dora)
    for name in ("trainer_state.json", "all_results.json", "trainer_log.jsonl", "training_args.bin", "README.md"):
        (dora / name).write_text("{}")
    upload, report = read_well(dora, tiny_spec)
    assert_same(values(upload), expected)
    ignored = [finding.field for finding in report.findings if finding.result == "warn"]
    assert ignored == ["trainer_log.jsonl", "training_args.bin"]


def test_everything_else_that_peft_saves(dora: Path, tiny_spec: BaseSpec) -> None:
    """Names as PEFT 0.21 was seen to write them, and older forms of some."""
    sent = {
        "lm_head.lora_A.weight": ("lm_head", "lora_A"),
        "lm_head.lora_B.weight": ("lm_head", "lora_B"),
        "lm_head.lora_magnitude_vector": ("lm_head", "lora_magnitude_vector"),
        "lm_head.base_layer.weight": ("lm_head", "base_layer.weight"),
        "lm_head.token_adapter.trainable_tokens_delta": ("lm_head", "token_rows"),
        "model.embed_tokens.lora_embedding_A": ("model.embed_tokens", "lora_embedding_A"),
        "model.embed_tokens.lora_embedding_B.default": ("model.embed_tokens", "lora_embedding_B"),
        "model.embed_tokens.lora_magnitude_vector": ("model.embed_tokens", "lora_magnitude_vector"),
        "model.embed_tokens.base_layer.weight": ("model.embed_tokens", "base_layer.weight"),
        "model.embed_tokens.token_adapter.trainable_tokens_delta": ("model.embed_tokens", "token_rows"),
        "model.norm.modules_to_save.default.weight": ("model.norm", "weight"),
        "model.norm.original_module.weight": ("model.norm", "base_layer.weight"),
        "model.layers.0.input_layernorm.weight": ("model.layers.0.input_layernorm", "weight"),
        "model.layers.1.self_attn.v_proj.modules_to_save.weight": ("model.layers.1.self_attn.v_proj", "weight"),
        "model.layers.1.self_attn.v_proj.bias": ("model.layers.1.self_attn.v_proj", "bias"),
        "model.layers.0.self_attn.q_proj.base_layer.bias": ("model.layers.0.self_attn.q_proj", "bias"),
        "model.layers.0.self_attn.q_proj.lora_B.bias": ("model.layers.0.self_attn.q_proj", "lora_B.bias"),
        "model.layers.0.self_attn.k_proj.lora_B.default.bias": ("model.layers.0.self_attn.k_proj", "lora_B.bias"),
        "model.layers.1.self_attn.modules_to_save.default.k_proj.bias": ("model.layers.1.self_attn.k_proj", "bias"),
        "model.layers.0.self_attn.modules_to_save.k_proj.bias": ("model.layers.0.self_attn.k_proj", "bias"),
        "model.layers.1.self_attn.original_module.k_proj.bias": ("model.layers.1.self_attn.k_proj", "base_layer.bias"),
        "model.layers.1.mlp.modules_to_save.default.up_proj.weight": ("model.layers.1.mlp.up_proj", "weight"),
        "model.layers.0.modules_to_save.default.mlp.up_proj.weight": ("model.layers.0.mlp.up_proj", "weight"),
        "score.weight": ("score", "weight"),
    }
    save_file({P + name: torch.ones(2, 2) for name in sent}, dora / "adapter_model.safetensors")
    upload, _ = read_well(dora, tiny_spec)
    assert {tensor.source.sent_as.removeprefix(P): (tensor.module, tensor.part) for tensor in upload.tensors} == sent


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.token_adapter.trainable_tokens_original",
        "model.embed_tokens.token_adapter.token_indices",
        "model.layers.0.self_attn.q_proj.weight.absmax",
        "model.layers.0.self_attn.q_proj.lora_embedding_A.weight",
        "model.layers.0.self_attn.q_proj.lora_A.default.x.weight",
        "model.layers.0.self_attn.q_proj.ia3_l",
        "model.layers.0.self_attn.modules_to_save.default.lora_A.bias",
        "model.layers.0.self_attn.modules_to_save.default.other.bias",
        "model.layers.0.self_attn.original_module.other.bias",
    ],
)
def test_other_parts_of_peft_layers_are_unknown(dora: Path, tiny_spec: BaseSpec, name: str) -> None:
    path = dora / "adapter_model.safetensors"
    save_file(load_file(path) | {P + name: torch.ones(2, 2)}, path)
    _, report = read(dora, tiny_spec)
    assert [(where, "not a name that PEFT gives" in says) for where, says in failures(report)] == [(P + name, True)]
