"""One adapter of PEFT's, written as MLX, torchtune and NeMo write it, is read as the same tensors bit for bit, or refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dialect_reading import P, Tensors, assert_same, dialect_findings, edit_config, failures, golden, read, read_well, values
from safetensors.torch import load_file, save_file

from graftwork_adapters.base_spec import BaseSpec

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def to_mlx(folder: Path, **fields: object) -> None:
    """MLX's own form: names, both factors transposed, the trainer's arguments."""
    written: Tensors = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, part = name.removeprefix(P).removesuffix(".weight").rsplit(".", 1)
        if part == "lora_magnitude_vector":
            written[f"{module}.m"] = tensor
        else:
            written[f"{module}.{part.lower()}"] = tensor.T.contiguous()
    (folder / "adapter_model.safetensors").unlink()
    save_file(written, folder / "adapters.safetensors")
    arguments = {
        "model": "somewhere/tiny-base", "fine_tune_type": "dora", "num_layers": 2, "iters": 100, "optimizer": "adam",
        "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(arguments | fields))


def test_mlx(dora: Path, tiny_spec: BaseSpec) -> None:
    expected = golden(dora)
    to_mlx(dora)
    upload, report = read_well(dora, tiny_spec)
    assert_same(values(upload), expected)
    assert (upload.dialect, upload.shards, dialect_findings(report)) == ("mlx", ("adapters.safetensors",), ["warn"])
    assert upload.config == {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "somewhere/tiny-base", "r": 4, "lora_alpha": 8.0,
        "use_dora": True, "target_modules": sorted({module for module, _ in expected}),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "where", "says"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type", "served are lora and dora"),
        ({"lora_parameters": None}, "lora_parameters", "must hold rank and scale"),
        ({"lora_parameters": {"rank": 0, "scale": 1.0}}, "rank", "positive whole number"),
        ({"lora_parameters": {"rank": 4, "scale": "1"}}, "scale", "must be a number"),
        ({"lora_parameters": {"rank": 4, "scale": 1.0, "alpha": 16}}, "lora_parameters.alpha", "early versions of MLX"),
        ({"lora_parameters": {"rank": 4, "scale": 1.0, "twist": 1}}, "lora_parameters.twist", "is not known here"),
    ],
)
def test_arguments_of_mlx_that_are_not_served(
    dora: Path, tiny_spec: BaseSpec, fields: dict[str, object], where: str, says: str
) -> None:
    to_mlx(dora, **fields)
    _, report = read(dora, tiny_spec)
    assert [(field, says in message) for field, message in failures(report)] == [(where, True)]


def test_what_mlx_computes_otherwise_is_refused(dora: Path, tiny_spec: BaseSpec) -> None:
    to_mlx(dora)
    path = dora / "adapters.safetensors"
    save_file(load_file(path) | {"model.embed_tokens.lora_a": torch.ones(96, 4), "x.weight": torch.ones(1)}, path)
    _, report = read(dora, tiny_spec)
    assert [where for where, _ in failures(report)] == ["x.weight", "model.embed_tokens.lora_a"]


TORCHTUNE = {
    "self_attn.q_proj": "attn.q_proj", "self_attn.k_proj": "attn.k_proj", "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.output_proj", "mlp.gate_proj": "mlp.w1", "mlp.down_proj": "mlp.w2", "mlp.up_proj": "mlp.w3",
}  # fmt: skip


def to_torchtune(folder: Path, *, is_llama: bool) -> None:
    """As torchtune would have trained it: its base has q and k with each head's two halves interleaved."""
    written: Tensors = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        layer, projection, part = re.fullmatch(rf"{P}model\.layers\.(\d+)\.(\w+\.\w+)\.(lora_\w+)(?:\.weight)?", name).groups()  # type: ignore[union-attr]
        if is_llama and part != "lora_A" and projection in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = HEADS if projection == "self_attn.q_proj" else KV_HEADS
            tensor = tensor.view(heads, 2, HEAD_DIM // 2, -1).transpose(1, 2).reshape(tensor.shape)
        part = "magnitude" if part == "lora_magnitude_vector" else f"{part.lower()}.weight"
        written[f"layers.{layer}.{TORCHTUNE[projection]}.{part}"] = tensor.contiguous()
    save_file(written, folder / "adapter_model.safetensors")
    targets = ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]
    config = {"r": 4, "lora_alpha": 8, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_torchtune(dora: Path, tiny_spec: BaseSpec, architecture: str) -> None:
    expected = golden(dora)
    to_torchtune(dora, is_llama=architecture == "LlamaForCausalLM")
    upload, report = read_well(dora, replace(tiny_spec, architecture=architecture))
    assert_same(values(upload), expected)
    assert (upload.dialect, dialect_findings(report)) == ("torchtune", ["warn"])
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj"]
    assert upload.config == {"peft_type": "LORA", "use_dora": True, "r": 4, "lora_alpha": 8, "target_modules": targets}


def test_heads_that_cannot_be_put_in_order_are_refused(dora: Path, tiny_spec: BaseSpec) -> None:
    to_torchtune(dora, is_llama=True)
    _, report = read(dora, replace(tiny_spec, head_dim=None))
    assert len(failures(report)) == 8
    assert all("which is not of the heads of" in says for _, says in failures(report))


def to_megatron(folder: Path, *, is_canonical: bool) -> Tensors:
    """As NeMo would have trained it: one A for q, k and v, and one for gate and up; B's rows as Megatron fuses them."""
    peft = {name.removeprefix(P): tensor for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    written: Tensors = {}
    parts = {"self_attention.linear_qkv": ["q", "k", "v"], "mlp.linear_fc1": ["gate", "up"]}
    for layer in range(2):
        ours, theirs = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for fused, names in parts.items():
            block = "self_attn" if "attention" in fused else "mlp"
            factors = [{side: peft[f"{ours}{block}.{name}_proj.lora_{side}.weight"] for side in "AB"} for name in names]
            if is_canonical:
                for name, factor in zip(names, factors, strict=True):
                    for side, place in (("A", "in"), ("B", "out")):
                        written[f"{theirs}{fused}.adapter.adapter_{name}.linear_{place}.weight"] = factor[side]
                continue
            written[f"{theirs}{fused}.adapter.linear_in.weight"] = factors[0]["A"]
            rows = torch.cat([factor["B"] for factor in factors])
            if block == "self_attn":
                q, k, v = (factor["B"].view(KV_HEADS, -1, HEAD_DIM, 4) for factor in factors)
                rows = torch.cat([q, k, v], dim=1).reshape(-1, 4)
            written[f"{theirs}{fused}.adapter.linear_out.weight"] = rows
        for ours_name, theirs_name in (("self_attn.o_proj", "self_attention.linear_proj"), ("mlp.down_proj", "mlp.linear_fc2")):
            for side, place in (("A", "in"), ("B", "out")):
                written[f"{theirs}{theirs_name}.adapter.linear_{place}.weight"] = peft[f"{ours}{ours_name}.lora_{side}.weight"]
    save_file({name: tensor.clone() for name, tensor in written.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"dim": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["linear_qkv"]})
    )
    return written


@pytest.mark.parametrize("is_canonical", [False, True])
def test_megatron(good_adapter: Path, tmp_path: Path, tiny_spec: BaseSpec, is_canonical: bool) -> None:
    folder = Path(shutil.copytree(good_adapter, tmp_path / "upload"))
    expected = golden(folder)
    to_megatron(folder, is_canonical=is_canonical)
    if not is_canonical:
        for layer in ("model.layers.0.", "model.layers.1."):
            for name, first in (("k", "q"), ("v", "q")):
                expected[f"{layer}self_attn.{name}_proj", "lora_A"] = expected[f"{layer}self_attn.{first}_proj", "lora_A"]
            expected[f"{layer}mlp.up_proj", "lora_A"] = expected[f"{layer}mlp.gate_proj", "lora_A"]
    upload, report = read_well(folder, tiny_spec)
    assert_same(values(upload), expected)
    assert (upload.dialect, dialect_findings(report)) == ("megatron", ["warn"])
    assert upload.num_sent == (28 if is_canonical else 16)
    assert upload.config == {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "use_dora": False, "r": 4, "lora_alpha": 8.0,
        "target_modules": sorted({module for module, _ in expected}),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "config", "where", "says"),
    [
        ({"0.mlp.linear_fc1.adapter.weight_magnitude": (96,)}, {}, "weight_magnitude", "how many GPUs"),
        ({"0.mlp.linear_fc1.adapter.linear_out.weight": (95, 4)}, {}, "linear_fc1.adapter.linear_out", "whose rows are not"),
        ({"7.self_attention.linear_qkv.adapter.linear_out.weight": (64, 4)}, {}, "layers.7", "whose rows are not"),
        ({"0.self_attention.linear_kv.adapter.linear_out.weight": (64, 4)}, {}, "linear_kv", "not a name that Megatron"),
        ({}, {"dim": None}, "dim", "positive whole number"),
        ({}, {"r": 8}, "r", "and dim is 4"),
    ],
)  # fmt: skip
def test_megatron_that_is_unclear_is_refused(
    upload: Path, tiny_spec: BaseSpec, change: dict[str, tuple[int, ...]], config: dict[str, object], where: str, says: str
) -> None:
    written = to_megatron(upload, is_canonical=False)
    save_file(
        written | {f"decoder.layers.{name}": torch.ones(shape) for name, shape in change.items()},
        upload / "adapter_model.safetensors",
    )
    edit_config(upload, **config)
    _, report = read(upload, tiny_spec)
    (failure,) = failures(report)
    assert where in failure[0]
    assert says in failure[1]


def test_names_of_two_trainers_together_are_refused(upload: Path, tiny_spec: BaseSpec) -> None:
    path = upload / "adapter_model.safetensors"
    save_file(load_file(path) | {"layers.0.attn.q_proj.lora_a.weight": torch.ones(4, 32)}, path)
    read_tensors, report = read(upload, tiny_spec)
    assert read_tensors is not None
    assert read_tensors.dialect == "torchtune"
    assert len(failures(report)) == 28
    assert all("not a name that torchtune gives" in says for _, says in failures(report))
