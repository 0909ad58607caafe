"""Copies of the base, whole matrices, and values at the ends of their range: left out, counted, warned of or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft_formats import BaseMaker, publish_fp32, save_adapter
from safetensors.torch import load_file
from upload_changes import EMBED, HEAD, TOP, Q, edit, failures, shift

from graftwork_adapters.publish_job import Limits, PublishResult, ServingMemory


@pytest.fixture(scope="module")
def make_base(tmp_path_factory: pytest.TempPathFactory) -> BaseMaker:
    return BaseMaker(tmp_path_factory.mktemp("bases"))


def test_only_copies_of_the_base_are_nothing(make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base(tied=False)
    folder = save_adapter(base, tmp_path / "adapter")
    edit(folder, lambda tensors: tensors.clear() or tensors.update({f"{HEAD}.weight": base.model.lm_head.weight.detach()}), {})
    (finding,) = failures(publish_fp32(base, folder))
    assert "nothing would be applied" in finding.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_copies_of_the_base_in_a_narrower_type_are_left_out_and_named(
    dtype: torch.dtype, make_base: BaseMaker, tmp_path: Path
) -> None:
    base = make_base(tied=False)
    folder = save_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    edit(folder, lambda tensors: tensors.update({f"{HEAD}.base_layer.weight": base.model.lm_head.weight.detach().to(dtype)}), {})
    result = publish_fp32(base, folder)
    assert result.ok, failures(result)
    messages = {finding.check: finding.message for finding in result.report.findings}
    assert messages["copies"] == f"1 tensors say nothing of their own and are left out: {HEAD}.base_layer.weight"
    assert messages["tensors"] == "applied 6 of 6 tensors"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("trained_in", [torch.bfloat16, torch.float16])
def test_a_copy_in_fp8_may_be_of_a_base_that_was_trained_on_in_half_precision(
    dtype: torch.dtype, trained_in: torch.dtype, make_base: BaseMaker, tmp_path: Path
) -> None:
    base = make_base(tied=False)
    folder = save_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    name, weight = f"{HEAD}.base_layer.weight", base.model.lm_head.weight.detach()
    edit(folder, lambda tensors: tensors.update({name: weight.to(trained_in).to(dtype)}), {})
    assert publish_fp32(base, folder).ok
    other = (weight * 1.2).to(trained_in).to(dtype)
    edit(folder, lambda tensors: tensors.update({name: other}), {})
    (finding,) = failures(publish_fp32(base, folder))
    assert (finding.field, "holds other values" in finding.message) == (name, True)


def test_whole_matrices_are_held_against_their_memory_and_their_cost_is_told(make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base(tied=False)
    folder = save_adapter(base, tmp_path / "adapter", modules_to_save=["lm_head", "norm"])
    result = publish_fp32(base, folder)
    num_bytes = result.traits.whole_bytes
    assert num_bytes == 4 * (96 * 32 + 5 * 32)
    weights = sum(path.stat().st_size for path in base.folder.glob("*.safetensors"))
    (cost,) = [finding.message for finding in result.report.findings if finding.check == "wholes"]
    assert f"whole matrices: {num_bytes} bytes, read once per step for each adapter that is in it" in cost
    assert 0.9 * weights < base.spec.num_weight_bytes < weights
    assert f"(base's own weights: {base.spec.num_weight_bytes} bytes)" in cost
    memory = ServingMemory(1 << 20, 4096, 1 << 20, whole_bytes=num_bytes, compute_type="float32")
    assert publish_fp32(base, folder, limits=Limits(memory=memory)).ok
    tight = Limits(memory=replace(memory, whole_bytes=num_bytes - 1))
    (finding,) = failures(publish_fp32(base, folder, limits=tight))
    assert finding.check == "memory"
    assert f"brings {num_bytes} bytes of whole matrices, adapters may use {num_bytes - 1}" in finding.message
    in_bf16 = replace(memory, whole_bytes=num_bytes // 2, compute_type="bfloat16")  # a base that computes in half of that
    assert publish_fp32(base, folder, limits=Limits(memory=in_bf16)).ok


def test_an_adapter_may_bring_wholes_alone(make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base(tied=False)
    folder = save_adapter(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "lora" in name], {})
    memory = ServingMemory(1 << 20, 4096, 1 << 20, whole_bytes=1 << 20)
    result = publish_fp32(base, folder, limits=Limits(memory=memory))
    assert result.ok, failures(result)
    assert (result.max_rank, result.num_bytes) == (0, result.traits.whole_bytes)


def test_an_output_whose_adapted_weight_is_nothing_has_no_scale(make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base(tied=False)
    folder = save_adapter(base, tmp_path / "adapter", use_dora=True, target_modules=["q_proj"], r=32, lora_alpha=32)
    weight = base.model.model.layers[0].self_attn.q_proj.weight.detach()
    cancelling = {f"{Q}.lora_A.weight": -weight, f"{Q}.lora_B.weight": torch.eye(32)}
    edit(folder, lambda tensors: tensors.update({name: tensor.clone() for name, tensor in cancelling.items()}), {})
    (finding,) = failures(publish_fp32(base, folder))
    assert finding.field == f"{Q}.lora_magnitude_vector"
    assert "32 outputs whose adapted weight has a norm of 0" in finding.message


def warnings(result: PublishResult) -> list[tuple[str | None, str]]:
    return [
        (f.field, f.message)
        for f in result.report.findings
        if (f.check, f.result) == ("values", "warn") and "overflow" in f.message
    ]


@pytest.mark.parametrize(
    ("config", "changes", "field"),
    [
        ({}, {f"{Q}.lora_A.weight": 3e38}, f"{Q}.lora_A.weight"),
        ({}, {f"{Q}.lora_A.weight": 1e20, f"{Q}.lora_B.weight": 1e20}, f"{Q}.lora_B.weight"),
        ({}, {f"{Q}.lora_A.weight": 1e-9, f"{Q}.lora_B.weight": 1e31}, f"{Q}.lora_B.weight"),
        ({"use_dora": True}, {f"{Q}.lora_magnitude_vector": 1e38}, f"{Q}.lora_magnitude_vector"),
        ({"use_dora": True}, {f"{Q}.lora_magnitude_vector": 1e9}, f"{Q}.lora_magnitude_vector"),
        ({"modules_to_save": ["norm"]}, {f"{TOP}model.norm.weight": 1e35}, f"{TOP}model.norm.weight"),
        ({"trainable_token_indices": [3]}, {f"{EMBED}.token_adapter.trainable_tokens_delta": 1e32}, EMBED),
    ],
)
def test_values_that_may_overflow_are_warned_of(
    config: dict[str, object], changes: dict[str, float], field: str, make_base: BaseMaker, tmp_path: Path
) -> None:
    base = make_base(tied=False)
    folder = save_adapter(base, tmp_path / "adapter", **config)
    assert warnings(publish_fp32(base, folder)) == []
    edit(folder, lambda tensors: [tensors[name].fill_(value) for name, value in changes.items()], {})
    result = publish_fp32(base, folder)
    assert result.ok, failures(result)
    found = warnings(result)
    assert found
    assert all("non_finite_output" in message for _, message in found)
    assert any((where or "").startswith(field) for where, _ in found), found


def test_weights_that_were_not_gathered_are_told_apart(make_base: BaseMaker, tmp_path: Path) -> None:
    """A process of DeepSpeed ZeRO-3 that saves without gathering has [0] for each."""
    base = make_base(tied=False)
    folder = save_adapter(base, tmp_path / "adapter")
    edit(folder, lambda tensors: [tensors.update({name: torch.zeros(0)}) for name in list(tensors)], {})
    found = failures(publish_fp32(base, folder))
    assert [finding.field for finding in found] == sorted(load_file(folder / "adapter_model.safetensors"))
    assert {finding.message for finding in found} == {"is empty: its shape is [0]"}
    assert all("gather the weights before saving" in (finding.fix or "") for finding in found)


def test_what_peft_saves_twice_must_be_the_same(make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base(tied=False)
    folder = save_adapter(base, tmp_path / "adapter", 100, modules_to_save=["embed_tokens", "lm_head"])
    result = publish_fp32(base, folder)
    messages = {finding.check: finding.message for finding in result.report.findings}
    assert "4 tensors say nothing of their own" in messages["copies"]
    edit(folder, shift(f"{HEAD}.modules_to_save.weight"), {})
    (finding,) = failures(publish_fp32(base, folder))
    assert "means the same tensor" in finding.message
