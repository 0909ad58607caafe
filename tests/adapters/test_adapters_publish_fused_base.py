"""A base whose files fuse projections takes adapters trained on fused ones and on split ones, and packs the same of both."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from graftwork_adapters import publish as publishing
from graftwork_adapters import wholes
from graftwork_adapters.base_spec import load_base_spec
from graftwork_adapters.errors import UnsupportedBase
from graftwork_adapters.packed import read_packed
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import PublishJob
from graftwork_adapters.whole_checks import weight_sites, whole_shapes
from graftwork_adapters.whole_memory import WholeLimits, WholeMemory

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
ROWS = {"self_attn.qkv_proj": {"q": 32, "k": 16, "v": 16}, "mlp.gate_up_proj": {"gate": 48, "up": 48}}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Phi3, and a Llama with the same weights."""
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    Phi3ForCausalLM(Phi3Config(**SHAPE, pad_token_id=None)).save_pretrained(folder / "phi3")
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder / "llama")
    save_file(split(load_file(folder / "phi3" / "model.safetensors")), folder / "llama" / "model.safetensors")
    return {"phi3": folder / "phi3", "llama": folder / "llama"}


def split(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with fused weights, or the B of fused pairs, cut into their parts; A is every part's."""
    found = {}
    for name, tensor in tensors.items():
        fused = next((fused for fused in ROWS if f".{fused}." in name), None)
        if fused is None:
            found[name] = tensor
            continue
        module = fused.partition(".")[0]
        is_shared = ".lora_A." in name
        parts = [tensor] * len(ROWS[fused]) if is_shared else tensor.split(list(ROWS[fused].values()))
        for part, rows in zip(ROWS[fused], parts, strict=True):
            found[name.replace(fused, f"{module}.{part}_proj")] = rows.clone()
    return found


@pytest.fixture(scope="module")
def uploads(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter that PEFT saved of the Phi3, a DoRA with a pattern, and the same as one of the Llama."""
    folder = tmp_path_factory.mktemp("uploads")
    torch.manual_seed(1)
    base = Phi3ForCausalLM.from_pretrained(bases["phi3"], dtype=torch.float32)
    names = ["qkv_proj", "gate_up_proj", "down_proj"]
    lora = LoraConfig(
        r=4, rank_pattern={"gate_up_proj": 6}, target_modules=names, use_dora=True, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(base, lora).save_pretrained(folder / "fused")
    config = json.loads((folder / "fused" / "adapter_config.json").read_text())
    config |= {
        "target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
        "rank_pattern": {"gate_proj": 6, "up_proj": 6},
    }
    (folder / "split").mkdir()
    (folder / "split" / "adapter_config.json").write_text(json.dumps(config))
    save_file(split(load_file(folder / "fused" / "adapter_model.safetensors")), folder / "split" / "adapter_model.safetensors")
    return {"fused": folder / "fused", "split": folder / "split"}


def test_all_four_ways_pack_the_same_rows(bases: dict[str, Path], uploads: dict[str, Path], tmp_path: Path) -> None:
    rows = {}
    for base, base_dir in bases.items():
        for upload, folder in uploads.items():
            out = tmp_path / f"{base}-{upload}"
            result = publish(PublishJob(folder, out, load_base_spec(base_dir), "float32", base_dir=base_dir))
            assert result.packed_key is not None, result.report
            index, found = read_packed(out, result.packed_key)
            assert len(index.sites) == 12
            rows[base, upload] = (index.sites, found.copy())
    ((sites, first), *others) = rows.values()
    for other_sites, other in others:
        assert other_sites == sites
        np.testing.assert_array_equal(other, first)


def test_a_fused_matrix_of_other_heads_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((bases["phi3"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    (tmp_path / "model.safetensors").symlink_to(bases["phi3"] / "model.safetensors")
    with pytest.raises(UnsupportedBase, match=r"qkv_proj.weight has 64 rows, config.json calls for \[32, 32, 32\]"):
        load_base_spec(tmp_path)


def test_a_fused_projection_saved_whole_is_its_parts(bases: dict[str, Path], tmp_path: Path) -> None:
    base = Phi3ForCausalLM.from_pretrained(bases["phi3"], dtype=torch.float32)
    lora = LoraConfig(target_modules=["o_proj"], modules_to_save=["gate_up_proj"], task_type="CAUSAL_LM")
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = {name: tensor + 1 if "gate_up" in name else tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    out = tmp_path / "out"
    spec = load_base_spec(bases["phi3"])
    result = publish(PublishJob(tmp_path / "adapter", out, spec, "float32", base_dir=bases["phi3"]))
    index, rows = read_packed(out, str(result.packed_key))
    fused = tensors["base_model.model.model.layers.1.mlp.gate_up_proj.weight"].numpy()
    starts = dict(zip([whole.name for whole in index.wholes], index.whole_starts, strict=True))
    assert len(starts) == 4
    for part, expected in (("gate", fused[:48]), ("up", fused[48:])):
        start = starts[f"model.layers.1.mlp.{part}_proj.weight"]
        np.testing.assert_array_equal(rows[start : start + expected.nbytes].view(np.float32).reshape(expected.shape), expected)


def train(base_dir: Path, folder: Path, **config: object) -> Path:
    """An adapter that PEFT saved of the Phi3."""
    base = Phi3ForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    get_peft_model(base, LoraConfig(**config, task_type="CAUSAL_LM")).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("saved", ["qkv_proj", "self_attn", "gate_up_proj", "mlp"])
def test_the_engines_own_check_takes_what_is_saved_whole(bases: dict[str, Path], tmp_path: Path, saved: str) -> None:
    upload = train(bases["phi3"], tmp_path / "adapter", target_modules=["lm_head"], modules_to_save=[saved])
    for base_dir in bases.values():
        spec = load_base_spec(base_dir)
        result = publish(PublishJob(upload, tmp_path / "out", spec, "float32", base_dir=base_dir))
        index, _ = read_packed(tmp_path / "out", str(result.packed_key))
        memory = WholeMemory(WholeLimits(1 << 20, whole_shapes(spec), weight_sites(spec)), torch.device("cpu"))
        assert memory.num_bytes(index) == index.num_whole_bytes


def test_what_the_engine_would_not_load_is_not_published(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = train(bases["phi3"], tmp_path / "adapter", target_modules=["o_proj"], modules_to_save=["mlp"])
    monkeypatch.setattr(publishing, "whole_shapes", lambda spec: {wholes.EMBEDDING: (spec.vocab_size, spec.hidden_size)})
    spec = load_base_spec(bases["phi3"])
    result = publish(PublishJob(upload, tmp_path / "out", spec, "float32", base_dir=bases["phi3"]))
    [finding] = [finding for finding in result.report.findings if finding.result == "fail"]
    assert (finding.check, finding.field) == ("packed", "adapter_model.safetensors")
    assert "has no place in this base" in finding.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("saved", "missing"),
    [
        ("qkv_proj", "self_attn.qkv_proj"),
        ("v_proj", "self_attn.qkv_proj"),  # PEFT compares ends of names
        ("self_attn", "self_attn.qkv_proj"),
        ("gate_up_proj", "mlp.gate_up_proj"),
    ],
)
def test_a_fused_projection_that_was_not_sent_is_missed(bases: dict[str, Path], tmp_path: Path, saved: str, missing: str) -> None:
    upload = train(bases["phi3"], tmp_path / "adapter", target_modules=["down_proj"], modules_to_save=[saved])
    path = upload / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "lora" in name}, path)
    spec = load_base_spec(bases["phi3"])
    result = publish(PublishJob(upload, tmp_path / "out", spec, "float32", base_dir=bases["phi3"]))
    failed = {finding.field: finding.message for finding in result.report.findings if finding.result == "fail"}
    for layer in range(2):
        assert failed[f"model.layers.{layer}.{missing}.weight"] == "is missing, and modules_to_save names it"
    assert not any(field and "v_proj" in field and "qkv_proj" not in field for field in failed)


def test_a_split_projection_saved_whole_needs_no_other(bases: dict[str, Path], tmp_path: Path) -> None:
    """One who trains a Phi3 with its projections split saves the value projection alone."""
    base = LlamaForCausalLM.from_pretrained(bases["llama"], dtype=torch.float32)
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["v_proj"], task_type="CAUSAL_LM")
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    for base_dir in bases.values():
        job = PublishJob(tmp_path / "adapter", tmp_path / "out", load_base_spec(base_dir), "float32", base_dir=base_dir)
        result = publish(job)
        assert result.ok, result.report


def test_a_fused_projection_that_the_config_selects_and_that_was_not_sent_is_said(bases: dict[str, Path], tmp_path: Path) -> None:
    upload = train(bases["phi3"], tmp_path / "adapter", target_modules=["qkv_proj", "down_proj"])
    path = upload / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "layers.1.self_attn" not in name}, path)
    result = publish(PublishJob(upload, tmp_path / "out", load_base_spec(bases["phi3"]), "float32", base_dir=bases["phi3"]))
    [warning] = [f.message for f in result.report.findings if f.field == "target_modules"]
    assert warning == "1 modules that the config selects have no tensors and stay as in the base: model.layers.1.self_attn.qkv_proj"
