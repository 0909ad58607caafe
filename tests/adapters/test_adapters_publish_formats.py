"""Whatever PEFT saves computes, from the packed form and by its formulas alone, what PEFT's own model computes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from packed_model import read_wholes
from peft import PeftModel
from peft_formats import IDS, BaseMaker, packed_logits, peft_logits, publish_fp32, save_adapter
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftwork_adapters import base_weights, value_checks, wholes
from graftwork_adapters.packed import ABSENT, read_packed
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import AdapterTraits, PublishJob


@pytest.fixture(scope="module")
def make_base(tmp_path_factory: pytest.TempPathFactory) -> BaseMaker:
    return BaseMaker(tmp_path_factory.mktemp("bases"))


LORA_ON_ENDS = ["q_proj", "embed_tokens", "lm_head"]

FORMATS: dict[str, dict[str, object]] = {
    "bias all": {"bias": "all"},
    "bias lora_only": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True, "use_rslora": True},
    "lora_bias and bias": {"lora_bias": True, "bias": "all"},
    "lora_bias of the head": {"lora_bias": True, "target_modules": ["q_proj", "lm_head"]},
    "DoRA": {"use_dora": True},
    "DoRA, rsLoRA, patterns": {
        "use_dora": True,
        "use_rslora": True,
        "target_modules": "all-linear",
        "rank_pattern": {"layers.0.mlp.*": 3, "k_proj": 1},
        "alpha_pattern": {"o_proj": 5},
    },
    "DoRA with biases": {"use_dora": True, "bias": "all"},
    "DoRA on embedding and head": {"use_dora": True, "target_modules": LORA_ON_ENDS, "alpha_pattern": {"lm_head": 3}},
    "LoRA on the embedding": {"target_modules": ["embed_tokens"]},
    "LoRA on the head": {"target_modules": ["q_proj", "lm_head"], "rank_pattern": {"lm_head": 7}},
    "LoRA on both, one weight": {"target_modules": LORA_ON_ENDS, "ensure_weight_tying": True},
    "LoRA on the embedding, a head of its own": {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
    "head": {"modules_to_save": ["lm_head"]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "embedding and head": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding and head, one weight": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "norms": {"modules_to_save": ["norm"]},
    "linears": {"modules_to_save": ["down_proj", "k_proj"], "target_modules": ["q_proj", "down_proj"]},
    "a whole block": {"modules_to_save": ["self_attn"], "target_modules": ["up_proj"]},
    "a whole block and all biases": {"modules_to_save": ["self_attn"], "target_modules": ["up_proj"], "bias": "all"},
    "a linear, a norm and all biases": {"modules_to_save": ["v_proj", "norm"], "target_modules": ["q_proj"], "bias": "all"},
    "rows of tokens": {"trainable_token_indices": [42, 3, 95]},
    "rows of tokens by name": {"trainable_token_indices": {"embed_tokens": [3, 1], "lm_head": [3, 1]}},
    "other rows of the head": {"trainable_token_indices": {"embed_tokens": [3, 1], "lm_head": [2]}},
    "rows of tokens, LoRA on the head": {"trainable_token_indices": [42, 3], "target_modules": ["q_proj", "lm_head"]},
    "rows of the head": {"trainable_token_indices": {"lm_head": [2, 0]}},
    "rows of tokens, one weight": {"trainable_token_indices": {"embed_tokens": [3]}, "ensure_weight_tying": True},
    "mica": {"init_lora_weights": "mica"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "velora": {"velora_config": {"num_groups": 4}},
    "velora on the head": {"velora_config": {"num_groups": 4}, "target_modules": ["q_proj", "lm_head"]},
    "layers": {"layers_to_transform": [1], "layers_pattern": "layers", "exclude_modules": ["down_proj"]},
}


@pytest.mark.parametrize("has_bias", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_packed_form_computes_what_peft_computes(
    name: str, tied: bool, has_bias: bool, make_base: BaseMaker, tmp_path: Path
) -> None:
    base = make_base(tied, has_bias)
    folder = save_adapter(base, tmp_path / "adapter", **FORMATS[name])
    expected = peft_logits(base, folder)
    result = publish_fp32(base, folder)
    logits = packed_logits(base, folder, result)
    assert (expected - base.model(input_ids=IDS).logits).abs().max() > 1e-2
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
    sent = len(load_file(folder / "adapter_model.safetensors"))
    left_out = sum(finding.check == "copies" for finding in result.report.findings)
    assert left_out or f"applied {sent} of {sent} tensors" in [finding.message for finding in result.report.findings]


ADDED: dict[str, dict[str, object]] = {
    "saved because resized": {},
    "saved whole": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "head saved whole": {"modules_to_save": ["lm_head"]},
    "embedding saved whole": {"modules_to_save": ["embed_tokens"]},
    "rows of tokens": {"trainable_token_indices": [97, 3]},
    "LoRA on both": {"target_modules": LORA_ON_ENDS, "use_dora": True},
}


@pytest.mark.parametrize("rows", [100, 90])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ADDED)
def test_added_and_removed_tokens(name: str, tied: bool, rows: int, make_base: BaseMaker, tmp_path: Path) -> None:
    config = ADDED[name] | ({"trainable_token_indices": [83, 3]} if name == "rows of tokens" and rows == 90 else {})
    base = make_base(tied)
    folder = save_adapter(base, tmp_path / "adapter", rows, **config)
    ids = torch.tensor([[1, 3, rows - 1, rows - 3, 7]])
    expected = peft_logits(base, folder, ids, rows)
    assert expected.shape[-1] == rows
    result = publish_fp32(base, folder)
    torch.testing.assert_close(packed_logits(base, folder, result, ids), expected, rtol=2e-5, atol=2e-5)
    index, _ = read_packed(folder.with_suffix(".packed"), str(result.packed_key))
    assert result.traits == AdapterTraits((), rows, index.num_whole_bytes)
    assert result.num_bytes == index.num_row_bytes + index.num_whole_bytes


@pytest.mark.parametrize("config", [{}, {"target_modules": ["q_proj", "lm_head"]}, {"lora_bias": True}])
def test_an_activated_adapter_says_where_it_begins(config: dict[str, object], make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base(tied=True)
    folder = save_adapter(base, tmp_path / "adapter", alora_invocation_tokens=[5, 6], **config)
    result = publish_fp32(base, folder)
    assert result.traits.invocation_token_ids == (5, 6)
    ids = torch.tensor([[5, 6, 1, 2, 9, 95]])  # active from its first token on
    logits = packed_logits(base, folder, result, ids)
    torch.testing.assert_close(logits, peft_logits(base, folder, ids), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(peft_logits(base, folder, IDS[:, :3]), base.model(input_ids=IDS[:, :3]).logits)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_scale_of_dora_is_that_of_peft(tied: bool, make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base(tied)
    folder = save_adapter(base, tmp_path / "adapter", use_dora=True, use_rslora=True, target_modules=[*LORA_ON_ENDS, "gate_proj"])
    result = publish_fp32(base, folder)
    index, rows = read_packed(folder.with_suffix(".packed"), str(result.packed_key))
    model = PeftModel.from_pretrained(copy.deepcopy(base.model), folder).base_model.model
    offsets = [0, *index.row_bytes.cumsum()]

    def expected(module: str) -> Tensor:
        layer = model.get_submodule(module)
        is_embedding = module.endswith("embed_tokens")
        weight = layer.base_layer.weight + layer.get_delta_weight("default")
        norm = torch.linalg.norm(weight.double(), dim=0 if is_embedding else 1)
        return (layer.lora_magnitude_vector["default"].weight / norm).float()

    assert len(index.sites) == 4
    for packed in index.sites:
        site = base.spec.sites[packed.index]
        assert packed.scale_row == packed.b_row + packed.rank
        start = offsets[packed.scale_row]
        scale = torch.from_numpy(rows[start : start + 4 * site.out_features].copy()).view(torch.float32)
        torch.testing.assert_close(scale, expected(site.module), rtol=1e-6, atol=0)
    found = read_wholes(index, rows)
    torch.testing.assert_close(found[wholes.EMBEDDING_SCALE], expected("model.embed_tokens"), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[wholes.HEAD_SCALE], expected("lm_head"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("row_type", ["bfloat16", "int8", "e4m3"])
def test_narrow_rows_keep_scale_and_bias_in_fp32_and_wholes_in_bf16(row_type: str, make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base(tied=False, bias=True)
    config: dict[str, object] = {"use_dora": True, "bias": "all", "target_modules": LORA_ON_ENDS, "modules_to_save": ["norm"]}
    folder = save_adapter(base, tmp_path / "adapter", **config)
    wide, narrow = publish_fp32(base, folder), tmp_path / "narrow"
    result = publish(PublishJob(folder, narrow, base.spec, row_type, base_dir=base.folder))  # type: ignore[arg-type]
    assert result.ok
    wide_index, wide_rows = read_packed(folder.with_suffix(".packed"), str(wide.packed_key))
    index, rows = read_packed(narrow, str(result.packed_key))
    assert [(s.index, s.rank, s.scale_row, s.bias_row) for s in index.sites] == [
        (s.index, s.rank, s.scale_row, s.bias_row) for s in wide_index.sites
    ]
    for ours, theirs in zip(index.sites, wide_index.sites, strict=True):
        assert ours.bias_row != ABSENT
        for row in {ours.scale_row, ours.bias_row} - {ABSENT}:
            start, wide_start = (int(i.row_bytes[:row].sum()) for i in (index, wide_index))
            size = int(index.row_bytes[row])
            assert (rows[start : start + size] == wide_rows[wide_start : wide_start + size]).all()
        assert theirs.bias_row == ours.bias_row
    exact = read_wholes(wide_index, wide_rows)
    for name, tensor in read_wholes(index, rows).items():
        assert torch.equal(tensor, exact[name] if name.endswith("scale") else exact[name].bfloat16().float()), name
    assert {whole.dtype for whole in index.wholes} == {"bfloat16", "float32"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_every_part_is_read_from_every_type(dtype: torch.dtype, make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base(tied=False, bias=True)
    config: dict[str, object] = {"use_dora": True, "bias": "all", "modules_to_save": ["norm", "lm_head"], "r": 3}
    folder = save_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "embed_tokens"], **config)
    path = folder / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if "base_layer.weight" not in name}
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path)
    logits = packed_logits(base, folder, publish_fp32(base, folder))
    save_file({name: tensor.to(dtype).float() for name, tensor in tensors.items()}, path)
    torch.testing.assert_close(logits, peft_logits(base, folder), rtol=2e-5, atol=2e-5)


def test_tensors_of_any_size_are_read_in_parts(make_base: BaseMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_base(tied=False)
    config: dict[str, object] = {"use_dora": True, "target_modules": LORA_ON_ENDS, "modules_to_save": ["norm", "up_proj"]}
    folder = save_adapter(base, tmp_path / "adapter", **config)
    at_once, in_parts = tmp_path / "at-once", tmp_path / "in-parts"
    assert publish(PublishJob(folder, at_once, base.spec, "bfloat16", base_dir=base.folder)).ok
    # More than one row of each tensor, and no whole number of parts.
    monkeypatch.setattr(base_weights, "PART_ELEMENTS", 7 * 32)
    monkeypatch.setattr(value_checks, "PART_ELEMENTS", 97)
    result = publish(PublishJob(folder, in_parts, base.spec, "bfloat16", base_dir=base.folder))
    assert "copies" in [finding.check for finding in result.report.findings]
    assert in_parts.read_bytes() == at_once.read_bytes()
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.lm_head.base_layer.weight"][95, 31] += 1
    tensors["base_model.model.model.norm.weight"][31] = torch.nan
    save_file(tensors, path)
    refused = publish(PublishJob(folder, in_parts, base.spec, "bfloat16", base_dir=base.folder)).report.findings
    assert {finding.check for finding in refused if finding.result == "fail"} == {"tensors", "values"}
