"""What is known of a base model, read without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import graftwork_adapters
from graftwork_adapters.base_spec import PROJECTIONS, BaseSpec, load_base_spec
from graftwork_adapters.errors import UnsupportedBase

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def test_sites_follow_the_tensors(tiny_spec: BaseSpec, tiny_base_model: LlamaForCausalLM) -> None:
    assert tiny_spec.architecture == "LlamaForCausalLM"
    assert tiny_spec.name == "tiny-base"
    assert [site.index for site in tiny_spec.sites] == list(range(2 * len(PROJECTIONS)))
    for site in tiny_spec.sites:
        linear = tiny_base_model.get_submodule(site.module)
        assert (site.in_features, site.out_features) == (linear.in_features, linear.out_features)
        assert site.has_bias == (linear.bias is not None)
    assert {"lm_head", "model.embed_tokens", "model.norm"} <= tiny_spec.module_names


@pytest.mark.parametrize(("config", "model"), [(Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)])
def test_qwen_families_in_shards(tmp_path: Path, config: type, model: type) -> None:
    base = model(config(**SMALL, tie_word_embeddings=True))
    base.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    spec = load_base_spec(tmp_path, None, name="vendor/tiny-qwen")
    assert spec.name == "vendor/tiny-qwen"
    assert spec.num_layers == 3
    assert "lm_head" in spec.module_names  # tied: it has no tensor
    for site in spec.sites:
        linear = base.get_submodule(site.module)
        assert (site.in_features, site.out_features) == (linear.in_features, linear.out_features)
        assert site.has_bias == (linear.bias is not None)


def test_base_id_is_of_the_contents(tiny_base_dir: Path, tiny_spec: BaseSpec, tmp_path: Path) -> None:
    tensors = load_file(tiny_base_dir / "model.safetensors")
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "config.json").write_bytes((tiny_base_dir / "config.json").read_bytes())
    # Split over two files: the same tensors, the same base.
    names = sorted(tensors)
    parts = {"part-1.safetensors": names[::2], "part-2.safetensors": names[1::2]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, other / part)
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_base_spec(other, tmp_path).base_id == tiny_spec.base_id
    tensors[names[0]] = tensors[names[0]] + torch.finfo(torch.float32).eps
    save_file({name: tensors[name] for name in parts["part-1.safetensors"]}, other / "part-1.safetensors")
    assert load_base_spec(other, tmp_path).base_id != tiny_spec.base_id


@pytest.mark.parametrize("beside", [True, False])
def test_base_id_is_remembered_until_a_file_changes(tiny_base_dir: Path, tmp_path: Path, beside: bool) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "model.safetensors"):
        (base / name).write_bytes((tiny_base_dir / name).read_bytes())
    cache_dir = None if beside else tmp_path / "cache"
    first = load_base_spec(base, cache_dir).base_id
    (cache,) = base.glob(".graftwork-*") if beside else (tmp_path / "cache").iterdir()
    known = json.loads(cache.read_text())
    cache.write_text(json.dumps(known | {"base_id": "remembered"}))
    assert load_base_spec(base, cache_dir).base_id == "remembered"
    os.utime(base / "model.safetensors", ns=(1, 1))
    assert load_base_spec(base, cache_dir).base_id == first
    cache.write_text("not json")
    assert load_base_spec(base, cache_dir).base_id == first


def break_config(base: Path, **fields: object) -> None:
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | fields))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda base: break_config(base, architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not served"),
        (lambda base: break_config(base, architectures=None), "architecture None"),
        (lambda base: break_config(base, num_hidden_layers=0), "num_hidden_layers is 0"),
        (lambda base: break_config(base, num_hidden_layers=3), "model.layers.2.self_attn.q_proj.weight"),
        (lambda base: (base / "config.json").write_text("[]"), "not a JSON object"),
        (lambda base: (base / "config.json").unlink(), "config.json cannot be read"),
        (lambda base: (base / "model.safetensors").unlink(), "model.safetensors cannot be read"),
        (lambda base: os.truncate(base / "model.safetensors", 5000), "truncated"),
        (
            lambda base: (base / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'),
            "names the shard",
        ),
        (lambda base: (base / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    ],
)
def test_other_folders_are_unsupported(tiny_base_dir: Path, tmp_path: Path, spoil: object, says: str) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "model.safetensors"):
        (base / name).write_bytes((tiny_base_dir / name).read_bytes())
    spoil(base)
    with pytest.raises(UnsupportedBase, match=says):
        load_base_spec(base, tmp_path / "cache")


def test_the_api_process_side_imports_no_torch(tiny_base_dir: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from graftwork_adapters import base_spec, digest, errors, keys, publish, publish_worker, publisher, report, store
base_spec.load_base_spec(Path({str(tiny_base_dir)!r}), Path({str(tmp_path)!r}))
print(sorted(sys.modules.keys() & {{"torch", "transformers", "peft"}}))
"""
    root = str(Path(graftwork_adapters.__file__).parent.parent)
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": root}, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
