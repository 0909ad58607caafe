"""Every field of PEFT's config and every kind of adapter: served, refused by name, or without effect for a reason said here.

A field or a kind that a new PEFT brings is in none of the tables and fails the first test.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, LoraRuntimeConfig
from peft.utils.peft_types import PeftType, TaskType
from peft_recipes import EXACT
from refused_recipes import REFUSED

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import PublishJob, PublishResult

FIELDS = {field.name: field for field in dataclasses.fields(LoraConfig)}

SERVED: dict[str, tuple[str, ...]] = {
    "r": ("rank1", "rank13", "rank64"),
    "lora_alpha": ("list", "rank64"),
    "target_modules": ("list", "paths", "regex", "all-linear"),
    "exclude_modules": ("excluded", "excluded-regex"),
    "layers_to_transform": ("layers", "layers-pattern"),
    "layers_pattern": ("layers-pattern",),
    "rank_pattern": ("patterns", "dora-patterns"),
    "alpha_pattern": ("patterns", "rslora-patterns"),
    "use_rslora": ("rslora", "dora-rslora"),
    "bias": ("bias-lora-only", "bias-all"),
    "lora_bias": ("lora-bias", "lora-bias-and-all"),
    "use_dora": ("dora", "dora-all"),
    "init_lora_weights": ("gaussian", "orthogonal", "eva", "mica"),
    "velora_config": ("velora",),
    "modules_to_save": ("head", "embedding", "norms", "linear"),
    "trainable_token_indices": ("rows", "rows-tied", "rows-dict", "rows-head"),
    "alora_invocation_tokens": ("alora",),
    "ensure_weight_tying": ("tied-whole", "tied-lora", "tied-dora", "tied-rows"),
}
"""Recipes that set the field and are compared with PEFT, token by token."""

REFUSED_AT: dict[str, object] = {
    "task_type": "SEQ_CLS",
    "fan_in_fan_out": True,
    "megatron_config": {"tensor_model_parallel_size": 2},
    "megatron_core": "my.megatron",
    "loftq_config": {"loftq_bits": 4},
    "use_qalora": True,
    "monteclora_config": {"num_samples": 2},
    "layer_replication": [[0, 1], [0, 2]],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 0.1},
}
"""A value that the field is refused at, by its own name and for nothing else."""

WITHOUT_EFFECT: dict[str, tuple[object, str]] = {
    "auto_mapping": ({"base_model_class": "LlamaForCausalLM"}, "tells PEFT which Python class to load the base with"),
    "peft_version": ("99.0", "names the writer"),
    "base_model_name_or_path": ("elsewhere/tiny-base", "a hint: shapes decide, and another name is warned of"),
    "revision": ("main", "names the base's revision; shapes decide"),
    "inference_mode": (False, "says whether training goes on"),
    "lora_dropout": (0.5, "acts in training only"),
    "eva_config": ({"rho": 3.0}, "says how A began"),
    "corda_config": ({"corda_method": "kpm"}, "is read with the initialisation corda only, which is refused"),
    "lora_ga_config": ({"direction": "ArBr"}, "is read with the initialisation lora_ga only, which is refused"),
    "qalora_group_size": (32, "is read with use_qalora only, which is refused"),
    "runtime_config": ({"ephemeral_gpu_offload": True}, "says where PEFT computes"),
}
"""A value other than the default, with which the adapter is what it is without it, and why."""

RUNTIME_FIELDS = {"ephemeral_gpu_offload"}

CONVERTIBLE = ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga"]


@pytest.fixture
def publish_with(upload: Path, tiny_spec: BaseSpec, tiny_base_dir: Path, tmp_path: Path) -> Any:
    """Publish a good adapter with these fields of its config set."""

    def run(**fields: object) -> PublishResult:
        folder = tmp_path / "with"
        shutil.copytree(upload, folder)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        result = publish(PublishJob(folder, tmp_path / "packed", tiny_spec, "float32", base_dir=tiny_base_dir))
        shutil.rmtree(folder)
        return result

    return run


def refused_fields(result: PublishResult) -> set[str | None]:
    """The fields of all findings that refuse it."""
    assert not result.ok
    return {finding.field for finding in result.report.findings if finding.result == "fail"}


def test_every_field_of_peft_is_in_exactly_one_table() -> None:
    tables = [SERVED, REFUSED_AT, WITHOUT_EFFECT, {"peft_type"}]
    assert {name: sum(name in table for table in tables) for name in FIELDS} == dict.fromkeys(FIELDS, 1)
    assert set().union(*tables) == FIELDS.keys(), "a field that PEFT no longer has"
    assert {field.name for field in dataclasses.fields(LoraRuntimeConfig)} == RUNTIME_FIELDS


@pytest.mark.parametrize("name", SERVED)
def test_a_served_field_is_set_in_the_recipes_that_show_it(name: str) -> None:
    recipes = {recipe.name: recipe for recipe in EXACT}
    field = FIELDS[name]
    default = field.default_factory() if field.default is dataclasses.MISSING else field.default  # type: ignore[misc]
    for recipe in SERVED[name]:
        made = {"r": 4, "lora_alpha": 8} | dict(recipes[recipe].config)
        if name == "init_lora_weights" and name not in made:  # what needs data to begin is set in the saved config
            continue
        if name == "lora_alpha":
            assert made["lora_alpha"] != made["r"]  # a scale of 1 would hide it
            continue
        assert made[name] != default, (recipe, name)


@pytest.mark.parametrize("name", REFUSED_AT)
def test_a_refused_field_is_refused_by_its_own_name(publish_with: Any, name: str) -> None:
    result = publish_with(**{name: REFUSED_AT[name]})
    assert refused_fields(result) == {name}
    assert all(finding.fix for finding in result.report.findings if finding.result == "fail"), "what to do about it"


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_field_without_effect_changes_neither_verdict_nor_digest(publish_with: Any, name: str) -> None:
    value, reason = WITHOUT_EFFECT[name]
    plain, changed = publish_with(), publish_with(**{name: value})
    assert reason
    assert changed.ok, changed.report
    assert (changed.digest, changed.packed_key) == (plain.digest, plain.packed_key)


def test_a_list_an_expression_and_all_linear_are_one_adapter(publish_with: Any) -> None:
    """The tensors say which modules are adapted; the config can only agree or be refused."""
    targets = [
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        r".*\.(self_attn|mlp)\..*_proj",
        "all-linear",
    ]
    results = [publish_with(target_modules=target, r=4) for target in targets]
    assert [result.ok for result in results] == [True] * 3
    assert len({result.packed_key for result in results}) == 1
    assert refused_fields(publish_with(target_modules=["q_proj"])) != set()


@pytest.mark.parametrize("kind", [kind.value for kind in PeftType if kind is not PeftType.LORA])
def test_every_other_kind_of_adapter_is_refused_by_its_name(publish_with: Any, kind: str) -> None:
    result = publish_with(peft_type=kind)
    assert refused_fields(result) == {"peft_type"}
    assert kind in " ".join(finding.message for finding in result.report.findings if finding.field == "peft_type")


@pytest.mark.parametrize("task", [task.value for task in TaskType if task is not TaskType.CAUSAL_LM])
def test_every_other_task_is_refused(publish_with: Any, task: str) -> None:
    assert refused_fields(publish_with(task_type=task)) == {"task_type"}


@pytest.mark.parametrize("init", [*CONVERTIBLE, "loftq"])
def test_an_initialisation_that_changed_the_base_is_refused_with_the_way_to_convert(publish_with: Any, init: str) -> None:
    result = publish_with(init_lora_weights=init)
    assert refused_fields(result) == {"init_lora_weights"}
    [finding] = [finding for finding in result.report.findings if finding.result == "fail"]
    assert finding.fix
    assert ("path_initial_model_for_weight_conversion" in finding.fix) == (init in CONVERTIBLE), "PEFT converts no LoftQ"


def test_an_initialisation_that_is_not_known_is_refused(publish_with: Any) -> None:
    assert refused_fields(publish_with(init_lora_weights="next_year")) == {"init_lora_weights"}


def test_names_of_recipes_are_unique() -> None:
    names = [recipe.name for recipe in (*EXACT, *REFUSED)]
    assert len(set(names)) == len(names)
