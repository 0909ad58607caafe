"""PEFT's config: every field is classified, patterns and selection resolve as PEFT resolves them."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
from peft import LoraConfig, PeftType, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import LlamaForCausalLM

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.config_fields import IGNORED_FIELDS, REFUSED_UNLESS, SERVED_FIELDS
from graftwork_adapters.peft_config import PeftConfig, read_peft_config
from graftwork_adapters.report import Report
from graftwork_adapters.upload_json import read_json_object

LORA_FIELDS = [field.name for field in dataclasses.fields(LoraConfig)]

SET_VALUES: dict[str, object] = {
    "peft_type": "IA3",
    "task_type": "SEQ_CLS",
    "fan_in_fan_out": True,
    "megatron_config": {"tp": 2},
    "megatron_core": "my.megatron",
    "loftq_config": {"loftq_bits": 4},
    "use_qalora": True,
    "monteclora_config": {"num_samples": 2},
    "layer_replication": [[0, 1]],
    "target_parameters": ["experts.gate"],
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 0.1},
}


def read(tmp_path: Path, raw: object) -> tuple[PeftConfig | None, Report]:
    path = tmp_path / "adapter_config.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    report = Report()
    fields = read_json_object(path, report, "config", 1 << 16)
    return None if fields is None else read_peft_config(fields, report, 60.0), report


def failed_fields(report: Report) -> list[str | None]:
    return [finding.field for finding in report.findings if finding.result == "fail"]


def test_every_field_of_peft_is_in_exactly_one_table() -> None:
    tables = [SERVED_FIELDS, IGNORED_FIELDS.keys(), REFUSED_UNLESS.keys()]
    for name in LORA_FIELDS:
        assert sum(name in table for table in tables) == 1, f"{name} is new in PEFT: serve, ignore or refuse it"


@pytest.mark.parametrize("name", [name for name in LORA_FIELDS if name not in SERVED_FIELDS and name not in IGNORED_FIELDS])
def test_an_unserved_field_that_is_set_is_refused_by_name(tmp_path: Path, name: str) -> None:
    _, report = read(tmp_path, {"peft_type": "LORA", name: SET_VALUES[name]})
    assert failed_fields(report) == [name]
    assert all(finding.fix for finding in report.findings if finding.result == "fail")


def test_peft_defaults_as_saved_are_served(tmp_path: Path) -> None:
    LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    config, report = read(tmp_path, (tmp_path / "adapter_config.json").read_text())
    assert report.ok
    assert config is not None
    assert (config.r, config.lora_alpha, config.use_rslora) == (8, 8.0, False)


@pytest.mark.parametrize("name", ["use_flying_lora", "runtime_flag", "r_"])
@pytest.mark.parametrize(
    ("value", "is_set"),
    [(True, True), (0, True), ("x", True), ([1], True), (None, False), (False, False), ([], False), ({}, False), ("", False)],
)
def test_an_unknown_field_is_refused_only_if_set(tmp_path: Path, name: str, value: object, is_set: bool) -> None:
    _, report = read(tmp_path, {"peft_type": "LORA", name: value})
    assert failed_fields(report) == ([name] if is_set else [])


def test_a_zero_is_not_false_and_every_field_is_named(tmp_path: Path) -> None:
    _, report = read(tmp_path, {"peft_type": "LORA", "use_qalora": 0, "use_dora": 0, "lora_bias": 1, "bias": "some"})
    assert failed_fields(report) == ["use_qalora", "bias", "lora_bias", "use_dora"]


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica", "EVA"])
def test_initialisations_that_leave_the_base_alone(tmp_path: Path, init: object) -> None:
    _, report = read(tmp_path, {"peft_type": "LORA", "init_lora_weights": init, "eva_config": {"rho": 2.0}})
    assert report.ok


@pytest.mark.parametrize(
    "raw",
    [
        {"use_dora": True, "use_rslora": True, "bias": "all"},
        {"lora_bias": True, "bias": "lora_only"},
        {"modules_to_save": ["lm_head", "norm"], "ensure_weight_tying": True},
        {"modules_to_save": [], "trainable_token_indices": [], "alora_invocation_tokens": None},
        {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [7]}},
        {"alora_invocation_tokens": [5, 6, 5], "task_type": "CAUSAL_LM"},
        {"velora_config": {"num_groups": 4}},
        # A converted folder keeps what says how it began.
        {"init_lora_weights": True, "corda_config": {"corda_method": "kpm"}, "lora_ga_config": {"direction": "ArBr"}},
    ],
)
def test_formats_of_peft_are_served(tmp_path: Path, raw: dict[str, object]) -> None:
    config, report = read(tmp_path, {"peft_type": "LORA", **raw})
    assert config is not None
    assert report.ok


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        ({"use_dora": True, "lora_bias": True}, ["lora_bias"]),
        ({"use_dora": True, "alora_invocation_tokens": [5], "task_type": "CAUSAL_LM"}, ["alora_invocation_tokens"]),
        ({"use_dora": True, "velora_config": {"num_groups": 4}}, ["velora_config"]),
        ({"use_dora": True, "init_lora_weights": "mica"}, ["init_lora_weights"]),
        ({"velora_config": {"num_groups": 4}, "init_lora_weights": "mica"}, ["init_lora_weights"]),
        ({"alora_invocation_tokens": [5]}, ["task_type"]),
        ({"alora_invocation_tokens": [], "task_type": "CAUSAL_LM"}, ["alora_invocation_tokens"]),
        ({"alora_invocation_tokens": [-1], "task_type": "CAUSAL_LM"}, ["alora_invocation_tokens"]),
        (
            {
                "alora_invocation_tokens": [5],
                "task_type": "CAUSAL_LM",
                "modules_to_save": ["norm"],
                "trainable_token_indices": [1],
                "bias": "all",
            },
            ["modules_to_save", "trainable_token_indices", "bias"],
        ),
        ({"trainable_token_indices": [1, 1]}, ["trainable_token_indices[model.embed_tokens]"]),
        ({"trainable_token_indices": {"lm_head": [True]}}, ["trainable_token_indices[lm_head]"]),
        ({"modules_to_save": "lm_head"}, ["modules_to_save"]),
        ({"modules_to_save": ["("]}, ["modules_to_save[(]"]),
        ({"bias": "some"}, ["bias"]),
    ],
)
def test_what_peft_does_not_load_together_is_refused(tmp_path: Path, raw: dict[str, object], fields: list[str]) -> None:
    config, report = read(tmp_path, {"peft_type": "LORA", **raw})
    assert config is None
    assert failed_fields(report) == fields
    assert all(finding.fix for finding in report.findings)


@pytest.mark.parametrize("kind", [kind.value for kind in PeftType if kind is not PeftType.LORA])
def test_every_other_kind_of_adapter_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    _, report = read(tmp_path, {"peft_type": kind})
    (finding,) = [finding for finding in report.findings if finding.result == "fail"]
    assert finding.field == "peft_type"
    assert kind in finding.message
    assert '"LORA"' in finding.message
    assert finding.fix is not None


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "PiSSA", "olora", "corda", "lora_ga", "loftq", "new", 1, ["eva"]])
def test_other_initialisations_are_refused(tmp_path: Path, init: object) -> None:
    _, report = read(tmp_path, {"peft_type": "LORA", "init_lora_weights": init})
    assert failed_fields(report) == ["init_lora_weights"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0), ("r", -1), ("r", "8"), ("r", True), ("r", 8.0), ("r", None), ("r", 1 << 40),
        ("lora_alpha", "16"), ("lora_alpha", None), ("lora_alpha", True), ("lora_alpha", 1e300), ("lora_alpha", 10**400),
        ("use_rslora", "yes"), ("use_rslora", 1),
        ("rank_pattern", [1]), ("alpha_pattern", "x"),
        ("target_modules", 3), ("target_modules", ["a", 1]), ("target_modules", {"a": 1}), ("target_modules", "(q_proj"),
        ("exclude_modules", 3), ("exclude_modules", "*"),
        ("layers_to_transform", "1"), ("layers_to_transform", [True]), ("layers_pattern", "layers"),
        ("base_model_name_or_path", 3),
    ],
)  # fmt: skip
def test_malformed_fields_are_named(tmp_path: Path, field: str, value: object) -> None:
    config, report = read(tmp_path, {"peft_type": "LORA", field: value})
    assert config is None
    assert failed_fields(report) == [field]


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        ({"rank_pattern": {"q_proj": 0, "v_proj": 4}}, ["rank_pattern[q_proj]"]),
        ({"alpha_pattern": {"q_proj": "x"}}, ["alpha_pattern[q_proj]"]),
        ({"rank_pattern": {"(": 4}, "alpha_pattern": {"[": 4}}, ["rank_pattern[(]", "alpha_pattern[[]"]),
        ({"layers_to_transform": [0], "layers_pattern": ["h", "(?P<idx>x)"]}, ["layers_pattern[(?P<idx>x)]"]),
        ({"target_modules": "x", "layers_to_transform": [0], "layers_pattern": "h"}, ["layers_to_transform", "layers_pattern"]),
        ({"r": 0, "lora_alpha": "x", "use_qalora": True}, ["use_qalora", "r", "lora_alpha"]),
    ],
)
def test_all_that_is_wrong_is_named(tmp_path: Path, raw: dict[str, object], fields: list[str]) -> None:
    config, report = read(tmp_path, {"peft_type": "LORA", **raw})
    assert config is None
    assert failed_fields(report) == fields


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"a": ', "[" * 5000, "\x00"])
def test_what_is_not_an_object_is_refused(tmp_path: Path, text: str) -> None:
    config, report = read(tmp_path, text)
    assert config is None
    assert failed_fields(report) == ["adapter_config.json"]


def test_size_and_missing_type_are_refused(tmp_path: Path) -> None:
    _, report = read(tmp_path, {"peft_type": "LORA", "revision": "x" * 70_000})
    assert "more than the 65536 allowed" in report.findings[0].message
    assert failed_fields(read(tmp_path, {"r": 4})[1]) == ["peft_type"]


SELECTIONS: list[dict[str, object]] = [
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": ["proj"], "exclude_modules": ["q_proj"]} | {"target_modules": ["o_proj", "q_proj"]},
    {"target_modules": "all-linear"},
    {"target_modules": "all-linear", "exclude_modules": ["o_proj", "model.layers.0.mlp.up_proj"]},
    {"target_modules": "all-linear", "exclude_modules": r".*layers\.1\..*"},
    {"target_modules": r".*layers\.1\.self_attn\.(q|k)_proj"},
    {"target_modules": r"model\.layers\.\d+\.mlp\.[a-z]+_proj"},
    {"target_modules": ["self_attn.k_proj", "model.layers.0.mlp.down_proj"]},
    {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": []},
    {"target_modules": r"(?i).*Layers\.1.*Q_PROJ", "exclude_modules": ""},
    {},
]

PATTERNS: list[dict[str, object]] = [
    {"rank_pattern": {"q_proj": 2, "layers.0.self_attn.q_proj": 3}, "alpha_pattern": {"v_proj": 1}},
    {"rank_pattern": {"layers.0.self_attn.q_proj": 3, "q_proj": 2}},
    {"rank_pattern": {"^model.layers.1.mlp.*": 5, ".*_proj": 6}, "alpha_pattern": {r"layers\.0\..*": 32, "^mlp": 64}},
    {"rank_pattern": {"roj": 2, r"self_attn\.(q|k)_proj": 7}, "alpha_pattern": {"down_proj|up_proj": 3}, "use_rslora": True},
    {"alpha_pattern": {"model.layers.1.self_attn.o_proj": 5}, "use_rslora": True},
]


@pytest.mark.parametrize("raw", [*SELECTIONS, *({"target_modules": "all-linear", **raw} for raw in PATTERNS)])
def test_selection_ranks_and_scales_are_those_of_peft(
    tmp_path: Path, tiny_base_model: LlamaForCausalLM, tiny_spec: BaseSpec, raw: dict[str, object]
) -> None:
    model = get_peft_model(copy.deepcopy(tiny_base_model), LoraConfig(**raw, r=4, lora_alpha=12)).base_model.model
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    config, report = read(tmp_path, {"peft_type": "LORA", "r": 4, "lora_alpha": 12, **raw})
    assert report.ok
    assert config is not None
    modules = {"lm_head", "model.embed_tokens"} | {site.module for site in tiny_spec.sites}
    assert {module for module in modules if config.selects(module)} == layers.keys()
    for module, layer in layers.items():
        rank = config.rank_of(module)
        assert rank == layer.r["default"]
        assert config.alpha_of(module) / (rank**0.5 if config.use_rslora else rank) == layer.scaling["default"]
