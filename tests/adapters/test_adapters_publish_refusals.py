"""What PEFT would not load, or would load and not apply, is refused by the field or tensor that is to blame, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft_formats import BaseMaker, publish_fp32, save_adapter
from upload_changes import DOWN, EMBED, ENDS, HEAD, TOP, Change, Q, add, drop, edit, failures, shift, unchanged


@pytest.fixture(scope="module")
def make_base(tmp_path_factory: pytest.TempPathFactory) -> BaseMaker:
    return BaseMaker(tmp_path_factory.mktemp("bases"))


SPOILED: dict[str, tuple[dict[str, object], Change, dict[str, object], str, str]] = {
    # how it is saved; what becomes of its tensors; of its config; which field is named; what the message says
    "no magnitude": (
        {"use_dora": True},
        drop(f"{Q}.lora_magnitude_vector"),
        {},
        "q_proj.lora_magnitude_vector",
        "use_dora is true",
    ),
    "magnitude too short": (
        {"use_dora": True},
        lambda tensors: tensors.update({f"{Q}.lora_magnitude_vector": torch.ones(31)}),
        {},
        "lora_magnitude_vector",
        "needs [32]",
    ),
    "DoRA unsaid": ({"use_dora": True}, unchanged, {"use_dora": False}, "lora_magnitude_vector", "use_dora is not true"),
    "DoRA of a weight of nothing": (
        {"use_dora": True},
        lambda tensors: tensors[f"{Q}.lora_magnitude_vector"].fill_(3e38),
        {"lora_alpha": 1e-30},
        "lora_magnitude_vector",
        "beyond fp32",
    ),
    "no lora_bias": ({"lora_bias": True}, drop(f"{Q}.lora_B.bias"), {}, "q_proj.lora_B.bias", "lora_bias is true"),
    "biases unsaid": ({"bias": "all"}, unchanged, {"bias": "none"}, "bias", "in place of the base's"),
    "biases of more than LoRA": ({"bias": "all"}, unchanged, {"bias": "lora_only"}, "k_proj.bias", "in place of the base's"),
    "a bias where there is none": ({}, add(f"{DOWN}.bias", 32), {"bias": "all"}, "down_proj.bias", "has none in the base"),
    "a bias of the head": ({}, add(f"{HEAD}.bias", 96), {"bias": "all"}, "lm_head.bias", "has none in the base"),
    "a head unsaid": (
        {"modules_to_save": ["lm_head"]},
        unchanged,
        {"modules_to_save": None},
        "lm_head.weight",
        "other values than",
    ),
    "a norm unsaid": (
        {"modules_to_save": ["norm"]},
        unchanged,
        {"modules_to_save": ["model.norm"]},
        "layernorm.weight",
        "other values",
    ),
    "a head not sent": ({"modules_to_save": ["lm_head"]}, drop(f"{HEAD}.weight"), {}, "lm_head.weight", "modules_to_save names it"),
    "a linear not sent": (
        {"modules_to_save": ["up_proj"]},
        drop(f"{TOP}model.layers.1.mlp.up_proj.weight"),
        {},
        "layers.1.mlp.up_proj.weight",
        "modules_to_save names it",
    ),
    "a bias not sent": ({"modules_to_save": ["k_proj"]}, drop(f"{Q[:-6]}k_proj.bias"), {}, "k_proj.bias", "its weight is there"),
    "a linear of another shape": (
        {"modules_to_save": ["up_proj"]},
        lambda tensors: tensors.update({f"{TOP}model.layers.1.mlp.up_proj.weight": torch.ones(48, 31)}),
        {},
        "up_proj.weight",
        "needs [48, 32]",
    ),
    "replaced and adapted": (
        {"modules_to_save": ["up_proj"]},
        lambda tensors: tensors.update(
            {
                f"{TOP}model.layers.1.mlp.up_proj.lora_A.weight": torch.ones(4, 32),
                f"{TOP}model.layers.1.mlp.up_proj.lora_B.weight": torch.ones(48, 4),
            }
        ),
        {},
        "up_proj.lora_",
        "replaces whole",
    ),
    "a copy of another base": (
        {"target_modules": ENDS},
        shift(f"{EMBED}.base_layer.weight"),
        {},
        "base_layer.weight",
        "other values",
    ),
    "more tokens in the embedding alone": (
        {"modules_to_save": ["embed_tokens"]},
        lambda tensors: tensors.update({f"{EMBED}.weight": torch.ones(100, 32)}),
        {},
        "lm_head.weight",
        "has 96 rows while the embedding has 100",
    ),
    "no tokens at all": (
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        lambda tensors: tensors.update({f"{module}.weight": torch.ones(0, 32) for module in (EMBED, HEAD)}),
        {},
        "embed_tokens.weight",
        "has no rows",
    ),
    "another hidden size": (
        {"modules_to_save": ["lm_head"]},
        lambda tensors: tensors.update({f"{HEAD}.weight": torch.ones(96, 31)}),
        {},
        "lm_head.weight",
        "needs [tokens, 32]",
    ),
    "half of an embedding": ({"target_modules": ENDS}, drop(f"{EMBED}.lora_embedding_B"), {}, "lora_embedding_B", "is missing"),
    "a token too far": (
        {"trainable_token_indices": [3, 95]},
        unchanged,
        {"trainable_token_indices": [3, 96]},
        "token_indices",
        "has 96 rows",
    ),
    "rows of fewer tokens": (
        {"trainable_token_indices": [3, 95]},
        unchanged,
        {"trainable_token_indices": [3]},
        "tokens_delta",
        "needs [1,",
    ),
    "rows unsaid": ({"trainable_token_indices": [3]}, unchanged, {"trainable_token_indices": None}, "tokens_delta", "do not name"),
    "rows not sent": ({}, unchanged, {"trainable_token_indices": [3]}, "tokens_delta", "is missing"),
    "rows of a projection": (
        {},
        unchanged,
        {"trainable_token_indices": {"q_proj": [3]}},
        "trainable_token_indices[q_proj]",
        "neither",
    ),
    "rows and LoRA": (
        {"target_modules": ENDS},
        add(f"{EMBED}.token_adapter.trainable_tokens_delta", 1, 32),
        {"trainable_token_indices": [3]},
        "target_modules",
        "so does trainable_token_indices",
    ),
    "LoRA on an activated embedding": (
        {"target_modules": ENDS},
        unchanged,
        {"alora_invocation_tokens": [3]},
        "alora",
        "embed_tokens",
    ),
    "LoRA on a norm": ({}, add(f"{TOP}model.norm.lora_A.weight", 4, 32), {}, "model.norm.lora_A", "a norm has no LoRA"),
    "a classifier": ({}, add(f"{TOP}score.weight", 2, 32), {}, "score.weight", "scores or classifies"),
    "KaSA's diagonal": ({}, add(f"{Q}.lora_diag", 4), {}, "lora_diag", "would not be applied"),
    "VeLoRA unsaid": ({"velora_config": {"num_groups": 4}}, unchanged, {"velora_config": None}, "velora_embed", "does not name"),
    "a not finite norm": (
        {"modules_to_save": ["norm"]},
        lambda tensors: tensors[f"{TOP}model.norm.weight"][3].fill_(float("nan")),
        {},
        "model.norm.weight",
        "1 values that are NaN",
    ),
    "a head beyond bf16": (
        {"modules_to_save": ["lm_head"]},
        lambda tensors: tensors[f"{HEAD}.weight"][3].fill_(3.4e38),
        {},
        "lm_head.weight",
        "too large for bfloat16",
    ),
    "a saved bias said twice": (
        {"modules_to_save": ["self_attn"], "target_modules": ["down_proj"], "bias": "all"},
        shift(f"{TOP}model.layers.0.self_attn.modules_to_save.default.k_proj.bias"),
        {},
        "self_attn.modules_to_save.default.k_proj.bias",
        "means the same tensor as",
    ),
    "another bias of the base": (
        {"modules_to_save": ["v_proj"], "bias": "all"},
        shift(f"{TOP}model.layers.0.self_attn.v_proj.original_module.bias"),
        {},
        "v_proj.original_module.bias",
        "holds other values than the base's own model.layers.0.self_attn.v_proj.bias",
    ),
    "a bias of the base alone": (
        {"bias": "all"},
        add(f"{TOP}model.layers.0.self_attn.v_proj.original_module.bias", 16),
        {},
        "v_proj.original_module.bias",
        "would not be applied",
    ),
    "another norm of the base": (
        {"modules_to_save": ["norm"]},
        add(f"{TOP}model.norm.original_module.weight", 32),
        {},
        "model.norm.original_module.weight",
        "holds other values than",
    ),
    "a scaled bias beyond bf16": (
        {"lora_bias": True},
        lambda tensors: tensors[f"{Q}.lora_B.bias"].fill_(3e38),
        {},
        "lora_B.bias",
        "its scale is 2",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_it_is_refused_by_name(name: str, make_base: BaseMaker, tmp_path: Path) -> None:
    saved, change, config, field, says = SPOILED[name]
    base = make_base(tied=False, bias=True)
    folder = save_adapter(base, tmp_path / "adapter", **saved)
    if change is not unchanged or config:
        assert publish_fp32(base, folder).ok
        edit(folder, change, config)
    result = publish_fp32(base, folder)
    found = failures(result)
    assert any(field in (finding.field or "") and says in finding.message for finding in found), found
    assert all(finding.fix for finding in found), found
    assert not result.ok
    assert result.digest is None


TIED: dict[str, tuple[dict[str, object], Change, dict[str, object], str, str]] = {
    "one weight saved as two": (
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        shift(f"{HEAD}.weight"),
        {},
        "lm_head.weight",
        "PEFT has one matrix for both",
    ),
    "one LoRA saved as two": (
        {"target_modules": ENDS, "ensure_weight_tying": True},
        shift(f"{HEAD}.lora_A.weight"),
        {},
        "lm_head.lora_A",
        "PEFT has one for both",
    ),
    "one LoRA saved as half": (
        {"target_modules": ENDS, "ensure_weight_tying": True},
        drop(f"{HEAD}.lora_A.weight", f"{HEAD}.lora_B.weight"),
        {},
        "lm_head",
        "gives embedding and head the same",
    ),
    "rows of a replaced head": (
        {"modules_to_save": ["lm_head"]},
        add(f"{EMBED}.token_adapter.trainable_tokens_delta", 1, 32),
        {"trainable_token_indices": [3]},
        "trainable_token_indices",
        "changes the head's rows as well",
    ),
    "rows of a head with DoRA": (
        {"use_dora": True, "target_modules": ["q_proj", "lm_head"]},
        add(f"{EMBED}.token_adapter.trainable_tokens_delta", 1, 32),
        {"trainable_token_indices": [3]},
        "trainable_token_indices",
        "PEFT cannot where the head has DoRA or is replaced",
    ),
    "LoRA on a head whose rows are named": (
        {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [3]},
        unchanged,
        {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [3]}},
        "target_modules",
        "names lm_head, and so does trainable_token_indices",
    ),
    "LoRA on a head with rows of its own": (
        {"target_modules": ["q_proj", "lm_head"]},
        add(f"{HEAD}.token_adapter.trainable_tokens_delta", 1, 32),
        {"trainable_token_indices": {"lm_head": [3]}},
        "target_modules",
        "names lm_head, and so does trainable_token_indices",
    ),
    "other rows of one weight": (
        {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [2]}},
        unchanged,
        {"ensure_weight_tying": True},
        "trainable_token_indices",
        "ensure_weight_tying makes them one",
    ),
    "rows of the head that are not the embedding's": (
        {"trainable_token_indices": [3]},
        add(f"{HEAD}.token_adapter.trainable_tokens_delta", 1, 32),
        {},
        "lm_head.token_adapter",
        "PEFT has one for both",
    ),
}


@pytest.mark.parametrize("name", TIED)
def test_what_a_tied_base_cannot_have_is_refused_by_name(name: str, make_base: BaseMaker, tmp_path: Path) -> None:
    saved, change, config, field, says = TIED[name]
    base = make_base(tied=True)
    folder = save_adapter(base, tmp_path / "adapter", **saved)
    assert publish_fp32(base, folder).ok
    edit(folder, change, config)
    found = failures(publish_fp32(base, folder))
    assert any(field in (finding.field or "") and says in finding.message for finding in found), found
    assert all(finding.fix for finding in found), found


@pytest.mark.parametrize(("rows", "last"), [(None, 95), (100, 99), (90, 89)])
def test_an_invocation_is_of_tokens_that_a_prompt_can_hold(
    rows: int | None, last: int, make_base: BaseMaker, tmp_path: Path
) -> None:
    base = make_base(tied=False)
    folder = save_adapter(base, tmp_path / "adapter", rows, alora_invocation_tokens=[3, last])
    assert publish_fp32(base, folder).ok
    edit(folder, unchanged, {"alora_invocation_tokens": [3, last + 1]})
    (finding,) = failures(publish_fp32(base, folder))
    assert finding.field == "alora_invocation_tokens"
    assert f"names token {last + 1}; there are {last + 1}, numbered from 0" in finding.message
    assert finding.fix
