"""Adapters trained on fused projections act on a split base as they did on the fused one; one matrix gives each part its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from dialect_reading import LAYER, Named, P, edit_config, failures, read, read_well, values
from safetensors.torch import load_file, save_file

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.fused import parts_of, take_rows

QKV_ROWS = {"q_proj": slice(0, 32), "k_proj": slice(32, 48), "v_proj": slice(48, 64)}
GATE_UP_ROWS = {"gate_proj": slice(0, 48), "up_proj": slice(48, 96)}


@pytest.fixture
def fused(upload: Path) -> Path:
    """LoRA with DoRA and a bias of B on both fused projections, and one of them whole."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "self_attn.qkv_proj.lora_A.weight": (4, 32),
        "self_attn.qkv_proj.lora_B.weight": (64, 4),
        "self_attn.qkv_proj.lora_B.bias": (64,),
        "self_attn.qkv_proj.lora_magnitude_vector": (64,),
        "mlp.gate_up_proj.lora_A.weight": (4, 32),
        "mlp.gate_up_proj.lora_B.weight": (96, 4),
        "mlp.gate_up_proj.base_layer.bias": (96,),
        "mlp.down_proj.lora_A.weight": (4, 48),
        "mlp.down_proj.lora_B.weight": (32, 4),
    }
    sent = {P + LAYER + name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    sent[f"{P}model.layers.1.self_attn.qkv_proj.weight"] = torch.randn((64, 32), generator=generator)
    save_file(sent, upload / "adapter_model.safetensors")
    edit_config(upload, target_modules=["qkv_proj", "gate_up_proj", "down_proj"])
    return upload


def by_hand(folder: Path) -> Named:
    sent = {name.removeprefix(P): tensor.numpy() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    expected: Named = {}
    for name, tensor in sent.items():
        for fused, rows_of in (("self_attn.qkv_proj", QKV_ROWS), ("mlp.gate_up_proj", GATE_UP_ROWS)):
            if fused in name:
                layer, part = name.split(fused)
                part = part.removeprefix(".").removesuffix(".weight") if "lora_" in part else part.rpartition(".")[2]
                for projection, rows in rows_of.items():
                    expected[f"{layer}{fused.partition('.')[0]}.{projection}", part] = tensor if part == "lora_A" else tensor[rows]
    expected[f"{LAYER}mlp.down_proj", "lora_A"] = sent[f"{LAYER}mlp.down_proj.lora_A.weight"]
    expected[f"{LAYER}mlp.down_proj", "lora_B"] = sent[f"{LAYER}mlp.down_proj.lora_B.weight"]
    return expected


def test_rows_of_every_part(fused: Path, tiny_spec: BaseSpec) -> None:
    upload, _ = read_well(fused, tiny_spec)
    got, expected = values(upload), by_hand(fused)
    assert got.keys() == expected.keys()
    for key, matrix in expected.items():
        np.testing.assert_array_equal(got[key], matrix, err_msg=str(key))
    assert upload.num_sent == 10
    assert {tensor.source.sent_as for tensor in upload.tensors} == load_file(fused / "adapter_model.safetensors").keys()
    trained = {tensor.module: tensor.trained_module for tensor in upload.tensors}
    assert trained[f"{LAYER}self_attn.k_proj"] == f"{LAYER}self_attn.qkv_proj"
    assert trained[f"{LAYER}mlp.up_proj"] == f"{LAYER}mlp.gate_up_proj"
    assert trained[f"{LAYER}mlp.down_proj"] == f"{LAYER}mlp.down_proj"


def test_the_parts_together_are_the_fused_delta(fused: Path, tiny_spec: BaseSpec) -> None:
    upload, _ = read_well(fused, tiny_spec)
    named = values(upload)
    sent = load_file(fused / "adapter_model.safetensors")
    whole = (sent[f"{P}{LAYER}self_attn.qkv_proj.lora_B.weight"] @ sent[f"{P}{LAYER}self_attn.qkv_proj.lora_A.weight"]).numpy()
    parts = [named[f"{LAYER}self_attn.{name}", "lora_B"] @ named[f"{LAYER}self_attn.{name}", "lora_A"] for name in QKV_ROWS]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_add_up_are_refused(fused: Path, tiny_spec: BaseSpec) -> None:
    path = fused / "adapter_model.safetensors"
    name = f"{P}{LAYER}self_attn.qkv_proj.lora_B.weight"
    save_file(load_file(path) | {name: torch.ones(96, 4)}, path)
    _, report = read(fused, tiny_spec)
    (failure,) = failures(report)
    assert failure[0] == name
    assert "has shape [96, 4]; the base splits model.layers.0.self_attn.qkv_proj into rows [32, 16, 16], 64 in all" in failure[1]


def test_fused_and_split_for_one_projection_are_refused(fused: Path, tiny_spec: BaseSpec) -> None:
    path = fused / "adapter_model.safetensors"
    name = f"{P}{LAYER}self_attn.v_proj.lora_A.weight"
    save_file(load_file(path) | {name: torch.ones(4, 32)}, path)
    _, report = read(fused, tiny_spec)
    assert failures(report) == [(name, f"means the same tensor as {P}{LAYER}self_attn.qkv_proj.lora_A.weight")]


def test_a_layer_that_the_base_lacks_is_left_to_who_knows_the_base(upload: Path, tiny_spec: BaseSpec) -> None:
    save_file({f"{P}model.layers.9.self_attn.qkv_proj.lora_A.weight": torch.ones(4, 32)}, upload / "adapter_model.safetensors")
    tensors, _ = read_well(upload, tiny_spec)
    assert [tensor.module for tensor in tensors.tensors] == ["model.layers.9.self_attn.qkv_proj"]


@pytest.mark.parametrize("module", ["model.layers.0.self_attn.q_proj", "qkv_proj", "self_attn.qkv_proj", "lm_head"])
def test_only_fused_projections_of_a_layer_have_parts(module: str) -> None:
    assert parts_of(module) == ()


def test_rows_are_taken_once(fused: Path, tiny_spec: BaseSpec) -> None:
    upload, _ = read_well(fused, tiny_spec)
    source = next(tensor.source for tensor in upload.tensors if tensor.source.rows is not None)
    with pytest.raises(ValueError, match="rows are taken already"):
        take_rows(source, (range(1),))


def test_mlx_on_a_fused_projection(make_adapter: Callable[..., Path], tmp_path: Path, tiny_spec: BaseSpec) -> None:
    """Transposed and split: rows are those after turning."""
    folder = make_adapter(tmp_path / "mlx")
    (folder / "adapter_model.safetensors").unlink()
    b = torch.randn(4, 64)
    save_file({f"{LAYER}self_attn.qkv_proj.lora_b": b}, folder / "adapters.safetensors")
    edit_config(folder, lora_parameters={"rank": 4, "scale": 1.0})
    upload, _ = read_well(folder, tiny_spec)
    named = values(upload)
    for projection, rows in QKV_ROWS.items():
        np.testing.assert_array_equal(named[f"{LAYER}self_attn.{projection}", "lora_B"], b.T[rows].numpy())
