"""LoRA on a mixture's experts: the layouts that are written are told apart, held against their rules, and refused until served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dialect_reading import P, failures, read_well
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.experts import expert_findings, flat_factors, is_expert
from graftwork_adapters.report import Report

MLP = f"{P}model.layers.0.mlp."
EXPERTS, RANK = 3, 4


def judge(folder: Path, spec: BaseSpec, tensors: dict[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, folder / "adapter_model.safetensors")
    upload, _ = read_well(folder, spec)
    assert [tensor.part for tensor in upload.tensors] == ["expert"] * len(tensors)
    report = Report()
    expert_findings(upload.tensors, lambda _: RANK, report)
    return failures(report)


@pytest.mark.parametrize(
    ("module", "a", "b", "says"),
    [
        ("experts.2.gate_proj", (4, 32), (16, 4), "an expert of a mixture with rank 4, per-expert"),
        ("experts.gate_up_proj", (3, 4, 32), (3, 32, 4), "3 experts of a mixture with rank 4, stacked"),
        ("experts", (12, 32), (32, 12), "3 experts of a mixture with rank 4, flat"),
        ("experts.base_layer", (12, 32), (32, 12), "3 experts of a mixture with rank 4, flat"),
        ("experts", (13, 32), (32, 13), "flat layout, and A [13, 32] and B [32, 13] are not of one rank (r is 4)"),
        ("experts", (12, 32), (12, 32), "are not of one rank"),
        ("experts.1.up_proj", (4, 32), (16, 5), "per-expert layout, and A [4, 32] and B [16, 5] are not"),
        ("experts.up_proj", (3, 4, 32), (2, 32, 4), "stacked layout"),
        ("experts.up_proj", (12, 32), (32, 12), "in no layout that is known here"),
        ("experts.up_proj", (3, 4, 32), (32, 12), "in no layout that is known here"),
        ("experts.up_proj", (3,), (3,), "in no layout that is known here"),
    ],
)
@pytest.mark.parametrize("suffix", [".weight", ""])
def test_layouts(
    upload: Path, tiny_spec: BaseSpec, module: str, a: tuple[int, ...], b: tuple[int, ...], says: str, suffix: str
) -> None:
    (failure,) = judge(upload, tiny_spec, {f"{MLP}{module}.lora_A{suffix}": a, f"{MLP}{module}.lora_B{suffix}": b})
    assert failure[0] == f"{MLP}{module}.lora_A{suffix}"
    assert says in failure[1]


def test_half_a_pair_and_other_tensors_of_experts(upload: Path, tiny_spec: BaseSpec) -> None:
    tensors = {f"{MLP}experts.1.up_proj.lora_B.weight": (16, 4), f"{MLP}experts.1.up_proj.weight": (2, 2)}
    assert [(where, says.partition(",")[0]) for where, says in judge(upload, tiny_spec, tensors)] == [
        (f"{MLP}experts.1.up_proj.weight", "is neither A nor B of an expert"),
        (f"{MLP}experts.1.up_proj.lora_B.weight", "adapts experts"),
    ]


def test_peft_names_and_lays_out_target_parameters_so(upload: Path, tiny_spec: BaseSpec) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_experts=EXPERTS, moe_intermediate_size=16, num_experts_per_tok=2, decoder_sparse_step=1,
    )  # fmt: skip
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=[], target_parameters=parameters, init_lora_weights=False)
    model = get_peft_model(Qwen3MoeForCausalLM(config), lora)
    saved = get_peft_model_state_dict(model)
    found = judge(upload, tiny_spec, {name: tuple(tensor.shape) for name, tensor in saved.items()})
    assert [where for where, _ in found] == [f"{MLP}experts.lora_A.weight", f"{MLP}experts.base_layer.lora_A.weight"]
    assert all("adapts 3 experts of a mixture with rank 4, flat" in says for _, says in found)
    wrapper = model.base_model.model.model.layers[0].mlp.experts
    for prefix, layer in ((f"{MLP}experts.", wrapper), (f"{MLP}experts.base_layer.", wrapper.base_layer)):
        a, b = (saved[f"{prefix}lora_{side}.weight"].numpy() for side in "AB")
        stacked_a, stacked_b = flat_factors(a, b, EXPERTS)
        delta = layer.get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(stacked_b @ stacked_a, delta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("model.layers.0.mlp.experts", True),
        ("model.layers.0.mlp.experts.3.up_proj", True),
        ("model.layers.0.mlp.switch_mlp.up_proj", True),
        ("model.layers.0.mlp.shared_experts_gate", False),
        ("model.layers.0.mlp.up_proj", False),
    ],
)
def test_paths_into_experts(module: str, expected: bool) -> None:
    assert is_expert(module) is expected
