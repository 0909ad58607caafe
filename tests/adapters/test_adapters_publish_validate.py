"""An upload passes with everything applied, or is refused with everything that is wrong named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM
from upload_changes import assert_refused, findings

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.publish import validate
from graftwork_adapters.publish_job import Limits, PublishResult, decode_result, encode_result
from graftwork_adapters.report import MAX_FINDINGS_PER_CHECK, MAX_TEXT, Report

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
MODULE = "model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens"
UNSELECTED = "the config does not select it"
EMBEDDING_UNSELECTED = ("model.embed_tokens", UNSELECTED)
Tensors = dict[str, Tensor]


def edit_config(upload: Path, **fields: object) -> None:
    path = upload / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(upload: Path, change: Callable[[Tensors], object]) -> None:
    path = upload / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def test_a_good_adapter_passes(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    validation = validate(upload, tiny_base_dir, tiny_spec, Limits())
    assert validation.report.ok
    assert validation.digest is not None
    assert findings(validation, "warn") == []
    messages = [finding.message for finding in findings(validation, "pass")]
    assert "applied 28 of 28 tensors" in messages
    assert "14 modules of rank 4" in messages
    size = sum((upload / name).stat().st_size for name in validation.files.stored)
    assert f"{size} bytes in 2 files" in messages
    assert [site.site.index for site in validation.content.sites] == list(range(14))
    assert validation.files.stored == ("adapter_config.json", "adapter_model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"r": 5, "target_modules": ["k_proj"]},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1], "use_rslora": True},
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 24, "layers.1.mlp.*": 2}, "alpha_pattern": {"up_proj": 3}},
        {"target_modules": r".*layers\.0.*(gate|v)_proj", "r": 1, "lora_alpha": 2.5},
    ],
)
def test_pairs_agree_with_what_peft_loads(
    tmp_path: Path,
    tiny_base_dir: Path,
    tiny_spec: BaseSpec,
    make_adapter: Callable[..., Path],
    dtype: torch.dtype,
    settings: dict[str, object],
) -> None:
    folder = make_adapter(tmp_path / "adapter", dtype=dtype, **settings)
    validation = validate(folder, tiny_base_dir, tiny_spec, Limits())
    assert validation.report.ok, validation.report.findings
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_base_dir), folder).base_model.model
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    assert {pair.module for pair in validation.content.pairs} == layers.keys()
    for pair in validation.content.pairs:
        layer = layers[pair.module]
        assert pair.rank == layer.r["default"]
        assert pair.scale == layer.scaling["default"]


def add(name: str, tensor: Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def drop(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def rename_all(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.update({name.replace(old, new): tensors.pop(name)}) for name in list(tensors)]


def rename_layer_of_q(old: int, new: int) -> Callable[[Tensors], object]:
    return rename_all(f"layers.{old}.self_attn.q_proj", f"layers.{new}.self_attn.q_proj")


def poke(name: str, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].view(-1)[3].fill_(value)


def replace_rank(rank_a: int, rank_b: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update(
        {f"{Q0}.lora_A.weight": torch.ones(rank_a, 32), f"{Q0}.lora_B.weight": torch.ones(32, rank_b)}
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (drop(f"{Q0}.lora_B.weight"), [("layers.0.self_attn.q_proj.lora_B.weight", "is missing")]),
        (drop(f"{Q0}.lora_A.weight"), [("layers.0.self_attn.q_proj.lora_A.weight", "is missing")]),
        (poke(f"{Q0}.lora_A.weight", float("nan")), [(f"{Q0}.lora_A.weight", "1 values that are NaN or infinite")]),
        (poke(f"{Q0}.lora_B.weight", float("inf")), [(f"{Q0}.lora_B.weight", "1 values that are NaN or infinite")]),
        (poke(f"{Q0}.lora_B.weight", 3e38), [(f"{Q0}.lora_B.weight", "too large for bfloat16")]),
        (poke(f"{Q0}.lora_A.weight", 3.4e38), [(f"{Q0}.lora_A.weight", "too large for bfloat16")]),
        (add(f"{Q0}.lora_A.weight", torch.ones(4, 31)), [(f"{Q0}.lora_A.weight", "[4, 31]; " + MODULE + " needs [rank, 32]")]),
        (add(f"{Q0}.lora_B.weight", torch.ones(33, 4)), [(f"{Q0}.lora_B.weight", "[33, 4]; " + MODULE + " needs [32, rank]")]),
        (add(f"{Q0}.lora_A.weight", torch.ones(4)), [(f"{Q0}.lora_A.weight", "has shape [4]")]),
        (replace_rank(4, 3), [(f"{Q0}.lora_B.weight", "has rank 3")]),
        (replace_rank(0, 0), [(f"{Q0}.lora_A.weight", "is empty: its shape is [0, 32]"), (f"{Q0}.lora_B.weight", "is empty")]),
        (add(f"{Q0}.lora_A.weight", torch.ones(0)), [(f"{Q0}.lora_A.weight", "is empty: its shape is [0]")]),
        (
            replace_rank(3, 3),
            [(f"{Q0}.lora_A.weight", "has rank 3; adapter_config.json (r and rank_pattern) gives " + MODULE + " rank 4")],
        ),
        (replace_rank(17, 17), [(f"{Q0}.lora_A.weight", "has rank 17, more than the 16 allowed")]),
        (add(f"{Q0}.lora_A.weight", torch.ones(4, 32, dtype=torch.int32)), [(f"{Q0}.lora_A.weight", "has dtype I32")]),
        (add(f"{Q0}.lora_magnitude_vector", torch.ones(32)), [("lora_magnitude_vector", "is there, and use_dora is not true")]),
        (add(f"{Q0}.lora_B.bias", torch.ones(32)), [("lora_B.bias", "is there, and lora_bias is not true")]),
        (add(f"{Q0}.base_layer.weight", torch.ones(2, 2)), [("base_layer.weight", "unlike the base's own " + MODULE)]),
        (add("base_model.model.lm_head.weight", torch.ones(2, 2)), [("lm_head.weight", "unlike the base's own lm_head.weight")]),
        (add(f"{EMBEDDING}.weight", torch.ones(2, 2)), [("embed_tokens.weight", "unlike the base's own model.embed_tokens")]),
        (add(f"{EMBEDDING}.lora_embedding_A", torch.ones(2, 2)), [("lora_embedding_B", "is missing"), EMBEDDING_UNSELECTED]),
        (add(f"{EMBEDDING}.lora_B.weight", torch.ones(4, 32)), [("embed_tokens", "half of a LoRA pair"), EMBEDDING_UNSELECTED]),
        (
            add("base_model.model.lm_head.lora_A.weight", torch.ones(4, 32)),
            [("lm_head.lora_B", "is missing"), ("lm_head", UNSELECTED)],
        ),
        (add("base_model.model.model.layers.0.mlp.fc1.lora_A.weight", torch.ones(4, 32)), [("fc1", "the base does not have")]),
        (add(f"{MODULE}.lora_A.weight", torch.ones(4, 32)), [("model.layers.0", "has no prefix base_model.model.")]),
        (add(f"{Q0}.lora_A.default.weight", torch.ones(4, 32)), [(f"{Q0}.lora_A.weight", "means the same tensor")]),
        (
            rename(f"{Q0}.lora_A.weight", f"{Q0}.lora_C.weight"),
            [("lora_C.weight", ""), ("q_proj.lora_A.weight", "is missing")],
        ),
        (rename_layer_of_q(1, 7), [("layers.7", "adapts layer 7; the base has 2 layers")] * 2),
        (lambda tensors: tensors.clear(), [("", "hold no LoRA tensors")]),
    ],
)  # fmt: skip
def test_tensors_that_could_not_be_applied_are_named(
    upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec, change: Callable[[Tensors], object], expected: list[tuple[str, str]]
) -> None:
    edit_tensors(upload, change)
    assert_refused(validate(upload, tiny_base_dir, tiny_spec, Limits(max_rank=16)), *expected)


def test_one_report_names_everything(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    edit_tensors(upload, drop(f"{Q0}.lora_B.weight"))
    edit_tensors(upload, poke(Q0.replace("q_proj", "v_proj") + ".lora_A.weight", float("nan")))
    edit_config(upload, use_qalora=True, fan_in_fan_out=True)
    (upload / "sub").mkdir()
    assert_refused(
        validate(upload, tiny_base_dir, tiny_spec, Limits()),
        ("sub", "is a folder"),
        ("fan_in_fan_out", "true"),
        ("use_qalora", "asks for QALoRA"),
        ("q_proj.lora_B.weight", "is missing"),
        ("v_proj.lora_A.weight", "NaN"),
    )


def test_a_config_is_checked_beside_weights_that_cannot_be_read(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    edit_config(upload, use_qalora=True)
    weights = upload / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    assert_refused(
        validate(upload, tiny_base_dir, tiny_spec, Limits()),
        ("adapter_model.safetensors", "truncated"),
        ("use_qalora", "asks for QALoRA"),
    )


def test_many_findings_of_a_kind_are_counted() -> None:
    report = Report()
    report.fail_each("check", [(str(i), "bad") for i in range(MAX_FINDINGS_PER_CHECK)])
    for number in range(7):
        report.fail("check", f"later {number}", "bad", "mend it")
    report.warn("check", "a", "b" * 5000)
    assert len(report.findings) == MAX_FINDINGS_PER_CHECK + 1
    assert len(report.findings[-1].message) == MAX_TEXT + 1
    assert report.as_json()[-1] == {
        "check": "check",
        "result": "fail",
        "field": "later 0",
        "message": "and 7 more of the same kind",
        "fix": "mend it",
    }
    both = report.copy()
    both.add(report)
    assert both.as_json()[-1]["message"] == f"and {14 + MAX_FINDINGS_PER_CHECK} more of the same kind"
    assert report.as_json()[-1]["message"] == "and 7 more of the same kind"
    assert decode_result(encode_result(PublishResult(ok=False, report=both))).report == both


def test_a_report_of_very_many_faults_is_short(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    """Each kind is noted one by one, by different parts of the reader."""
    edit_config(
        upload,
        **{f"unknown_{i}": i + 1 for i in range(2000)},
        rank_pattern={f"m{i}": "x" for i in range(2000)},
        trainable_token_indices={f"t{i}": "x" for i in range(2000)},
        modules_to_save=[f"module_{i}" for i in range(2000)],
    )
    layers = {f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32) for i in range(100, 2100)}
    edit_tensors(upload, lambda tensors: tensors.update(layers))
    report = validate(upload, tiny_base_dir, tiny_spec, Limits()).report
    assert not report.ok
    assert len(json.dumps(report.as_json())) < 200_000


def test_tensors_without_a_usable_config_are_still_checked(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    edit_tensors(upload, drop(f"{Q0}.lora_B.weight"))
    (upload / "adapter_config.json").unlink()
    assert_refused(
        validate(upload, tiny_base_dir, tiny_spec, Limits()),
        ("adapter_config.json", "is missing"),
        ("q_proj.lora_B.weight", "is missing"),
    )


@pytest.mark.parametrize("spoil", ["truncated", "trailing", "lying"])
def test_a_broken_weights_file_is_refused(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec, spoil: str) -> None:
    path = upload / "adapter_model.safetensors"
    data = path.read_bytes()
    if spoil == "truncated":
        path.write_bytes(data[:-10])
        says = "truncated"
    elif spoil == "trailing":
        path.write_bytes(data + b"x")
        says = "1 bytes after the last tensor"
    else:
        path.write_bytes(data.replace(b'"F32","shape":[4,32]', b'"F32","shape":[5,32]', 1))
        says = "needs 640 bytes"
    assert_refused(validate(upload, tiny_base_dir, tiny_spec, Limits()), ("adapter_model.safetensors", says))


def test_dialects_are_read_with_a_warning(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    expected = validate(upload, tiny_base_dir, tiny_spec, Limits()).content.sites
    edit_tensors(upload, rename_all("base_model.model.", ""))
    validation = validate(upload, tiny_base_dir, tiny_spec, Limits())
    assert validation.report.ok
    assert [site.site for site in validation.content.sites] == [site.site for site in expected]
    assert "PEFT itself would not load them" in findings(validation, "warn")[0].message
    edit_tensors(upload, rename_all(".weight", ".default.weight"))
    assert [site.site for site in validate(upload, tiny_base_dir, tiny_spec, Limits()).content.sites] == [
        site.site for site in expected
    ]


def test_selected_modules_without_tensors_are_a_warning(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    edit_tensors(upload, drop(f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"))
    validation = validate(upload, tiny_base_dir, tiny_spec, Limits())
    assert validation.report.ok
    (warning,) = findings(validation, "warn")
    assert "1 modules that the config selects have no tensors" in warning.message
    assert "model.layers.0.self_attn.q_proj" in warning.message
    assert len(validation.content.sites) == 13


def test_tensors_that_peft_would_not_load_are_refused(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    edit_config(upload, layers_to_transform=[0])
    says = "the config does not select it"
    assert_refused(validate(upload, tiny_base_dir, tiny_spec, Limits()), *[("model.layers.1.", says)] * 7)


def test_a_zero_b_is_a_warning(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    edit_tensors(upload, lambda tensors: tensors[f"{Q0}.lora_B.weight"].zero_())
    validation = validate(upload, tiny_base_dir, tiny_spec, Limits())
    assert validation.report.ok
    assert "1 of 14 lora_B are all zero" in findings(validation, "warn")[0].message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lora_alpha": 0}, "14 of 14 modules have a scale of 0 and change nothing: model.layers.0.self_attn.q_proj,"),
        ({"lora_alpha": 1e-60}, "14 of 14 modules have a scale of 0"),
        (
            {"alpha_pattern": {"layers.1.mlp.down_proj": 0}},
            "1 of 14 modules have a scale of 0 and change nothing: model.layers.1",
        ),
    ],
)
def test_a_zero_scale_is_a_warning(
    upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec, fields: dict[str, object], says: str
) -> None:
    edit_config(upload, **fields)
    validation = validate(upload, tiny_base_dir, tiny_spec, Limits())
    assert validation.report.ok
    (warning,) = findings(validation, "warn")
    assert (warning.check, warning.field) == ("values", "lora_alpha")
    assert says in warning.message


@pytest.mark.parametrize(
    ("name", "matches"),
    [("tiny-base", True), ("vendor/tiny-base", True), ("/home/me/models/tiny-base/", True), ("other/tiny", False), (None, None)],
)
def test_the_base_name(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec, name: str | None, matches: bool | None) -> None:
    edit_config(upload, base_model_name_or_path=name)
    lenient = validate(upload, tiny_base_dir, tiny_spec, Limits())
    assert lenient.report.ok
    assert [finding.field for finding in findings(lenient, "warn")] == (["base_model_name_or_path"] if matches is False else [])
    strict = validate(upload, tiny_base_dir, tiny_spec, Limits(require_base_name=True))
    assert [finding.field for finding in findings(strict, "fail")] == ([] if matches else ["base_model_name_or_path"])
