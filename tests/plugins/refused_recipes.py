"""Adapters that must be refused, and the field that the refusal must name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from adapter_edits import CONFIG, add, cast, change_values, drop, in_order, set_config
from peft import IA3Config, LoHaConfig, LoraConfig, PeftConfig, TaskType, VeraConfig, get_peft_model
from peft_zoo import Recipe, randomise
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM

PLAIN = {"target_modules": ["q_proj", "v_proj"]}
ALORA = {"target_modules": ["q_proj", "v_proj"], "alora_invocation_tokens": [5, 77, 9]}
ALORA_EVERYWHERE = "aLoRA with what acts on all tokens"
EXPERTS = "MoE experts"
CHANGED_BASE = "PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ: not converted"


def _save_other(config: PeftConfig, base_dir: Path, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
        get_peft_model(base, config).save_pretrained(folder)


def _ia3(base_dir: Path, folder: Path) -> None:
    _save_other(IA3Config(task_type="CAUSAL_LM"), base_dir, folder)


def _loha(base_dir: Path, folder: Path) -> None:
    _save_other(LoHaConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]), base_dir, folder)


def _vera(base_dir: Path, folder: Path) -> None:
    _save_other(VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4), base_dir, folder)


def _classifier(base_dir: Path, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForSequenceClassification.from_pretrained(base_dir, dtype=torch.float32, num_labels=3)
        model = get_peft_model(base, LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["q_proj"]))
        randomise(model)
        model.save_pretrained(folder)


def _pickle(base_dir: Path, folder: Path) -> None:
    _save_other(LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]), base_dir, folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _experts_by_peft(base_dir: Path, folder: Path) -> None:
    """Stacked 3-D parameters, as `target_parameters` adapts them."""
    config = Qwen3MoeConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        lora = LoraConfig(
            r=2, task_type="CAUSAL_LM", target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        )
        model = get_peft_model(Qwen3MoeForCausalLM(config), lora)
        randomise(model)
        model.save_pretrained(folder)


def _experts_one_by_one(base_dir: Path, folder: Path) -> None:
    """One 2-D pair for each expert, as models that hold their experts in a list are adapted."""
    tensors = {}
    for expert in range(4):
        for projection, (width_in, width_out) in {"gate_proj": (32, 24), "up_proj": (32, 24), "down_proj": (24, 32)}.items():
            name = f"base_model.model.model.layers.0.mlp.experts.{expert}.{projection}"
            tensors[f"{name}.lora_A.weight"] = torch.full((2, width_in), 0.1 + expert)
            tensors[f"{name}.lora_B.weight"] = torch.full((width_out, 2), 0.1 + expert)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = ["gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": targets}
    (folder / CONFIG).write_text(json.dumps(config))


REFUSED = [
    Recipe("pissa", CHANGED_BASE, {**PLAIN, "init_lora_weights": "pissa"}, refused="init_lora_weights"),
    Recipe("olora", CHANGED_BASE, {**PLAIN, "init_lora_weights": "olora"}, refused="init_lora_weights"),
    Recipe(
        "corda",
        CHANGED_BASE,
        PLAIN,
        convert=set_config(init_lora_weights="corda", corda_config={"corda_method": "kpm"}),
        refused="init_lora_weights|corda_config",
    ),
    Recipe("lora-ga", CHANGED_BASE, PLAIN, convert=set_config(init_lora_weights="lora_ga"), refused="init_lora_weights"),
    Recipe("loftq", CHANGED_BASE, PLAIN, convert=set_config(init_lora_weights="loftq"), refused="init_lora_weights"),
    Recipe("kasa", "KaSA", {**PLAIN, "kasa_config": {"beta": 0.1}}, refused="kasa_config"),
    Recipe("qalora", "QA-LoRA", PLAIN, convert=set_config(use_qalora=True), refused="use_qalora"),
    Recipe(
        "bdlora",
        "BD-LoRA",
        {
            "target_modules": ["q_proj", "o_proj"],
            "use_bdlora": {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["o_proj"], "nblocks": 2},
        },
        refused="use_bdlora",
    ),
    Recipe("arrow", "Arrow", PLAIN, convert=set_config(arrow_config={"top_k": 2}), refused="arrow_config"),
    Recipe("monteclora", "MonteCLoRA", {**PLAIN, "monteclora_config": {"num_samples": 2}}, refused="monteclora_config"),
    Recipe("layer-replication", "layer_replication", {**PLAIN, "layer_replication": [[0, 2], [1, 3]]}, refused="layer_replication"),
    Recipe("ia3", "every other peft_type", {}, make=_ia3, refused="peft_type"),
    Recipe("loha", "every other peft_type", {}, make=_loha, refused="peft_type"),
    Recipe("vera", "every other peft_type", {}, make=_vera, refused="peft_type"),
    Recipe("classifier", "classifier heads", {}, make=_classifier, refused="task_type"),
    Recipe("experts-listed", EXPERTS, {}, make=_experts_one_by_one, refused=r".*mlp\.experts\..*"),
    Recipe("experts-stacked", EXPERTS, {}, make=_experts_by_peft, refused="target_parameters|.*experts.*"),
    Recipe("fan-in", "fan_in_fan_out", PLAIN, convert=set_config(fan_in_fan_out=True), refused="fan_in_fan_out"),
    Recipe("megatron-config", "megatron_config", PLAIN, convert=set_config(megatron_config={"tp": 2}), refused="megatron_config"),
    Recipe(
        "base-copy",
        "a base matrix beside a LoRA that is not the base's",
        {"target_modules": ["q_proj", "lm_head"]},
        convert=change_values("lm_head.base_layer", lambda tensor: tensor + 0.1),
        refused=r".*lm_head\.base_layer\.weight",
    ),
    Recipe("alora-head", ALORA_EVERYWHERE, {**ALORA, "modules_to_save": ["lm_head"]}, refused="modules_to_save"),
    Recipe("alora-all-biases", ALORA_EVERYWHERE, {**ALORA, "bias": "all"}, "qwen2", refused="bias"),
    Recipe(
        "alora-rows",
        ALORA_EVERYWHERE,
        {**ALORA, "trainable_token_indices": [5, 9]},
        "qwen2-tied",
        refused="trainable_token_indices",
    ),
    Recipe(
        "alora-empty",
        "aLoRA without invocation tokens",
        {**ALORA, "alora_invocation_tokens": []},
        refused="alora_invocation_tokens",
    ),
    Recipe(
        "alora-outside",
        "aLoRA with invocation tokens outside the vocabulary",
        ALORA,
        convert=set_config(alora_invocation_tokens=[5, 160]),
        refused="alora_invocation_tokens",
    ),
    Recipe("pickle", "pickles", {}, make=_pickle, refused=r"adapter_model\.bin"),
    Recipe(
        "half-a-pair",
        "lora_A without lora_B",
        PLAIN,
        convert=drop(r"layers\.1\..*v_proj\.lora_B"),
        refused=r".*layers\.1\.self_attn\.v_proj.*",
    ),
    Recipe("unknown-tensor", "tensors that are used nowhere", PLAIN, convert=add(foo__bar=torch.ones(2)), refused=r"foo\.bar"),
    Recipe(
        "vision",
        "tensors that are used nowhere",
        PLAIN,
        convert=add(base_model__model__vision_tower__q_proj__lora_A__weight=torch.ones(4, 32)),
        refused=".*vision_tower.*",
    ),
    Recipe("rank", "a rank over the server's limit", {"r": 300, **PLAIN}, refused=r"r|.*q_proj.*"),
    Recipe(
        "not-finite",
        "values that are not finite or over bfloat16's range",
        PLAIN,
        convert=change_values("lora_A", lambda tensor: tensor / 0),
        refused=r".*lora_A\.weight",
    ),
    Recipe("integers", "tensors of other types", PLAIN, convert=in_order(cast(torch.int8, "lora_B")), refused=r".*lora_B\.weight"),
    Recipe(
        "rows-outside",
        "trainable_token_indices outside the vocabulary",
        {**PLAIN, "trainable_token_indices": [5, 9]},
        convert=set_config(trainable_token_indices=[5, 900]),
        refused=r"trainable_token_indices.*",
    ),
]
