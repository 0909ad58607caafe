"""An upload passes with everything applied, or is refused with everything that is wrong named."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.publish import Validation, validate
from graftwork_adapters.publish_job import Limits
from graftwork_adapters.report import MAX_FINDINGS_PER_CHECK, Finding, Report

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
MODULE = "model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens"
ONLY_PROJECTIONS = "only the decoder's projections are served yet"
Tensors = dict[str, Tensor]


def edit_config(upload: Path, **fields: object) -> None:
    path = upload / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(upload: Path, change: Callable[[Tensors], object]) -> None:
    path = upload / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def findings(validation: Validation, result: str) -> list[Finding]:
    return [finding for finding in validation.report.findings if finding.result == result]


def assert_refused(validation: Validation, *expected: tuple[str, str]) -> None:
    """Exactly these findings fail: (part of the field, part of the message)."""
    failed = findings(validation, "fail")
    assert not validation.report.ok
    assert validation.digest is None
    assert len(failed) == len(expected), failed
    for finding, (where, says) in zip(failed, expected, strict=True):
        assert where in (finding.field or ""), finding
        assert says in finding.message, finding


def test_a_good_adapter_passes(upload: Path, tiny_spec: BaseSpec) -> None:
    validation = validate(upload, tiny_spec, Limits())
    assert validation.report.ok
    assert validation.digest is not None
    assert findings(validation, "warn") == []
    messages = [finding.message for finding in findings(validation, "pass")]
    assert "applied 28 of 28 tensors" in messages
    assert "14 modules of rank 4" in messages
    size = sum((upload / name).stat().st_size for name in validation.files.stored)
    assert f"{size} bytes in 2 files" in messages
    assert [pair.site.index for pair in validation.pairs] == list(range(14))
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
    validation = validate(folder, tiny_spec, Limits())
    assert validation.report.ok, validation.report.findings
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_base_dir), folder).base_model.model
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    assert {pair.site.module for pair in validation.pairs} == layers.keys()
    for pair in validation.pairs:
        layer = layers[pair.site.module]
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
        (replace_rank(0, 0), [(f"{Q0}.lora_A.weight", "has rank 0")]),
        (
            replace_rank(3, 3),
            [(f"{Q0}.lora_A.weight", "has rank 3; adapter_config.json (r and rank_pattern) gives " + MODULE + " rank 4")],
        ),
        (replace_rank(17, 17), [(f"{Q0}.lora_A.weight", "has rank 17, more than the 16 allowed")]),
        (add(f"{Q0}.lora_A.weight", torch.ones(4, 32, dtype=torch.float64)), [(f"{Q0}.lora_A.weight", "has dtype F64")]),
        (add(f"{Q0}.lora_magnitude_vector", torch.ones(32)), [("lora_magnitude_vector", "DoRA")]),
        (add(f"{Q0}.lora_B.bias", torch.ones(32)), [("lora_B.bias", "lora_bias")]),
        (add(f"{Q0}.base_layer.weight", torch.ones(2, 2)), [("base_layer.weight", "would not be applied")]),
        (add("base_model.model.lm_head.weight", torch.ones(2, 2)), [("lm_head.weight", "a whole output head")]),
        (add(f"{EMBEDDING}.weight", torch.ones(2, 2)), [("embed_tokens.weight", "a whole embedding")]),
        (add(f"{EMBEDDING}.lora_embedding_A", torch.ones(2, 2)), [("lora_embedding_A", "LoRA on an embedding")]),
        (add(f"{EMBEDDING}.lora_B.weight", torch.ones(4, 32)), [("embed_tokens", ONLY_PROJECTIONS)]),
        (add("base_model.model.lm_head.lora_A.weight", torch.ones(4, 32)), [("lm_head", ONLY_PROJECTIONS)]),
        (add("base_model.model.model.layers.0.mlp.fc1.lora_A.weight", torch.ones(4, 32)), [("fc1", "the base does not have")]),
        (add(f"{MODULE}.lora_A.weight", torch.ones(4, 32)), [("model.layers.0", "has no prefix base_model.model.")]),
        (add(f"{Q0}.lora_A.default.weight", torch.ones(4, 32)), [(f"{Q0}.lora_A.weight", "means the same tensor")]),
        (
            rename(f"{Q0}.lora_A.weight", f"{Q0}.lora_A.mine.weight"),
            [("lora_A.mine.weight", "not a lora_A or lora_B weight"), ("q_proj.lora_A.weight", "is missing")],
        ),
        (rename_layer_of_q(1, 7), [("layers.7", "adapts layer 7; the base has 2 layers")] * 2),
        (lambda tensors: tensors.clear(), [("", "hold no LoRA tensors")]),
    ],
)  # fmt: skip
def test_tensors_that_could_not_be_applied_are_named(
    upload: Path, tiny_spec: BaseSpec, change: Callable[[Tensors], object], expected: list[tuple[str, str]]
) -> None:
    edit_tensors(upload, change)
    assert_refused(validate(upload, tiny_spec, Limits(max_rank=16)), *expected)


def test_one_report_names_everything(upload: Path, tiny_spec: BaseSpec) -> None:
    edit_tensors(upload, drop(f"{Q0}.lora_B.weight"))
    edit_tensors(upload, poke(Q0.replace("q_proj", "v_proj") + ".lora_A.weight", float("nan")))
    edit_config(upload, use_dora=True, bias="all")
    (upload / "sub").mkdir()
    assert_refused(
        validate(upload, tiny_spec, Limits()),
        ("sub", "is a folder"),
        ("bias", '"all"'),
        ("use_dora", "true"),
        ("q_proj.lora_B.weight", "is missing"),
        ("v_proj.lora_A.weight", "NaN"),
    )


def test_many_findings_of_a_kind_are_counted() -> None:
    report = Report()
    report.fail_each("check", [(str(i), "bad") for i in range(MAX_FINDINGS_PER_CHECK + 7)])
    assert len(report.findings) == MAX_FINDINGS_PER_CHECK + 1
    assert "7 more" in report.findings[-1].message


def test_tensors_without_a_usable_config_are_still_checked(upload: Path, tiny_spec: BaseSpec) -> None:
    edit_tensors(upload, drop(f"{Q0}.lora_B.weight"))
    (upload / "adapter_config.json").unlink()
    assert_refused(
        validate(upload, tiny_spec, Limits()), ("adapter_config.json", "is missing"), ("q_proj.lora_B.weight", "is missing")
    )


@pytest.mark.parametrize("spoil", ["truncated", "trailing", "lying"])
def test_a_broken_weights_file_is_refused(upload: Path, tiny_spec: BaseSpec, spoil: str) -> None:
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
    assert_refused(validate(upload, tiny_spec, Limits()), ("adapter_model.safetensors", says))


def test_dialects_are_read_with_a_warning(upload: Path, tiny_spec: BaseSpec) -> None:
    expected = validate(upload, tiny_spec, Limits()).pairs
    edit_tensors(upload, rename_all("base_model.model.", ""))
    validation = validate(upload, tiny_spec, Limits())
    assert validation.report.ok
    assert [pair.site for pair in validation.pairs] == [pair.site for pair in expected]
    assert "PEFT itself would not load them" in findings(validation, "warn")[0].message
    edit_tensors(upload, rename_all(".weight", ".default.weight"))
    assert [pair.site for pair in validate(upload, tiny_spec, Limits()).pairs] == [pair.site for pair in expected]


def test_selected_modules_without_tensors_are_a_warning(upload: Path, tiny_spec: BaseSpec) -> None:
    edit_tensors(upload, drop(f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"))
    validation = validate(upload, tiny_spec, Limits())
    assert validation.report.ok
    (warning,) = findings(validation, "warn")
    assert "1 modules that the config selects have no tensors" in warning.message
    assert "model.layers.0.self_attn.q_proj" in warning.message
    assert len(validation.pairs) == 13


def test_tensors_that_peft_would_not_load_are_refused(upload: Path, tiny_spec: BaseSpec) -> None:
    edit_config(upload, layers_to_transform=[0])
    says = "the config does not select it"
    assert_refused(validate(upload, tiny_spec, Limits()), *[("model.layers.1.", says)] * 7)


def test_a_zero_b_is_a_warning(upload: Path, tiny_spec: BaseSpec) -> None:
    edit_tensors(upload, lambda tensors: tensors[f"{Q0}.lora_B.weight"].zero_())
    validation = validate(upload, tiny_spec, Limits())
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
def test_a_zero_scale_is_a_warning(upload: Path, tiny_spec: BaseSpec, fields: dict[str, object], says: str) -> None:
    edit_config(upload, **fields)
    validation = validate(upload, tiny_spec, Limits())
    assert validation.report.ok
    (warning,) = findings(validation, "warn")
    assert (warning.check, warning.field) == ("values", "lora_alpha")
    assert says in warning.message


@pytest.mark.parametrize(
    ("name", "matches"),
    [("tiny-base", True), ("vendor/tiny-base", True), ("/home/me/models/tiny-base/", True), ("other/tiny", False), (None, None)],
)
def test_the_base_name(upload: Path, tiny_spec: BaseSpec, name: str | None, matches: bool | None) -> None:
    edit_config(upload, base_model_name_or_path=name)
    lenient = validate(upload, tiny_spec, Limits())
    assert lenient.report.ok
    assert [finding.field for finding in findings(lenient, "warn")] == (["base_model_name_or_path"] if matches is False else [])
    strict = validate(upload, tiny_spec, Limits(require_base_name=True))
    assert [finding.field for finding in findings(strict, "fail")] == ([] if matches else ["base_model_name_or_path"])


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_model.pkl"])
@pytest.mark.parametrize("alone", [True, False])
def test_pickled_weights_are_refused_unopened(upload: Path, tmp_path: Path, tiny_spec: BaseSpec, name: str, alone: bool) -> None:
    (upload / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    expected = [(name, "is a pickle")]
    if alone:
        (upload / "adapter_model.safetensors").unlink()
        expected.append(("adapter_model.safetensors", "is missing"))
    assert_refused(validate(upload, tiny_spec, Limits()), *expected)
    assert not (tmp_path / "exploded").exists()


def test_only_what_the_digest_covers_is_stored_and_only_what_is_unusual_is_warned_of(upload: Path, tiny_spec: BaseSpec) -> None:
    for name in ("training_args.bin", "optimizer.pt", "events.out.tfevents.1"):
        (upload / name).write_bytes(b"x")
    for name in ("tokenizer.json", "chat_template.jinja", "notes.txt", "trainer_state.json", ".gitattributes", "LICENSE"):
        (upload / name).write_text("{}")
    validation = validate(upload, tiny_spec, Limits())
    assert validation.report.ok
    warned = {finding.field: finding.message for finding in findings(validation, "warn")}
    assert "a pickle" in warned["training_args.bin"]
    assert "a pickle" in warned["optimizer.pt"]
    assert "not part of an adapter" in warned["events.out.tfevents.1"]
    assert "the base's own files" in warned["chat_template.jinja, tokenizer.json"]
    assert not {"notes.txt", "trainer_state.json", ".gitattributes", "LICENSE", "README.md"} & {*warned}
    assert validation.files.stored == (
        "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.json"
    )  # fmt: skip


def test_entries_that_may_not_be_there(upload: Path, tiny_spec: BaseSpec) -> None:
    (upload / "folder").mkdir()
    (upload / "tokenizer.json").symlink_to("/etc/passwd")
    os.mkfifo(upload / "pipe.txt")
    (upload / "a\nb.txt").write_text("x")
    (upload / "..sneaky").write_text("x")
    (upload / "model.safetensors").write_bytes(b"x")
    (upload / "adapter_model-00001-of-00002.safetensors").write_bytes(b"x")
    (upload / "adapter_model.safetensors.index.json").write_text("{}")
    assert_refused(
        validate(upload, tiny_spec, Limits()),
        ("a\\nb.txt", "has a name that is not served"),
        ("adapter_model-00001-of-00002.safetensors", "weights in several files"),
        ("adapter_model.safetensors.index.json", "weights in several files"),
        ("folder", "is a folder"),
        ("model.safetensors", "further weights"),
        ("pipe.txt", "not a regular file"),
        ("tokenizer.json", "symbolic link"),
    )


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_linked_config_or_weights_is_not_read(upload: Path, tmp_path: Path, tiny_spec: BaseSpec, name: str) -> None:
    (upload / name).rename(tmp_path / name)
    (upload / name).symlink_to(tmp_path / name)
    assert_refused(validate(upload, tiny_spec, Limits()), (name, "symbolic link"), (name, "is missing"))


def test_limits_name_both_numbers(upload: Path, tiny_spec: BaseSpec) -> None:
    size = sum(path.stat().st_size for path in upload.iterdir())
    limits = Limits(max_upload_bytes=100, max_files=2, max_header_bytes=50)
    assert_refused(
        validate(upload, tiny_spec, limits),
        ("", "3 files, more than the 2 allowed"),
        ("", f"{size} bytes, more than the 100 allowed"),
        ("adapter_model.safetensors", "more than the 50 allowed"),
    )
