"""config.json as transformers 4 and 5 write it, and the refusal of whatever is not served, by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config

from graftwork_engine.errors import UnsupportedModel
from graftwork_engine.model.config import Llama3Scaling, ModelConfig, RopeConfig

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE}
LLAMA3_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def read(folder: Path, config: dict[str, object], generation: dict[str, object] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_dir(folder)


def test_a_bare_llama_config_takes_the_defaults_of_its_family(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10000.0),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        max_position_embeddings=2048,
        eos_token_ids=(),
    )
    assert config.num_sites == 14


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (LlamaConfig, "LlamaForCausalLM"),
        (Qwen2Config, "Qwen2ForCausalLM"),
        (Qwen3Config, "Qwen3ForCausalLM"),
        (Phi3Config, "Phi3ForCausalLM"),
    ],
)
def test_what_transformers_saves_reads_back(tmp_path: Path, family: type[LlamaConfig], name: str) -> None:
    saved = family(**SHAPE, rms_norm_eps=1e-5, tie_word_embeddings=True, eos_token_id=7, architectures=[name], head_dim=24)
    saved.save_pretrained(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (2, 24, 1e-5)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (7,)
    assert config.rope == RopeConfig(saved.rope_parameters["rope_theta"])
    assert config.max_position_embeddings == saved.max_position_embeddings


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (LlamaConfig, "LlamaForCausalLM"),
        (Qwen2Config, "Qwen2ForCausalLM"),
        (Qwen3Config, "Qwen3ForCausalLM"),
        (Phi3Config, "Phi3ForCausalLM"),
    ],
)
def test_defaults_are_those_of_transformers(tmp_path: Path, family: type[LlamaConfig], name: str) -> None:
    needed = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"} | {"num_attention_heads": 32}
    ours = read(tmp_path, {"architectures": [name], **needed})
    theirs = family(**needed)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


def test_biases_and_norms_follow_the_family(tmp_path: Path) -> None:
    llama = read(tmp_path, {**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    qwen2 = read(tmp_path, {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    qwen3 = read(tmp_path, {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": True})
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias, qwen3.qk_norm) == (True, True, False, True)
    assert qwen3.head_dim == 128
    phi3 = read(tmp_path, {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": True})
    assert (phi3.qkv_bias, phi3.o_bias, phi3.mlp_bias, phi3.qk_norm) == (False, False, False, False)  # its code has none
    assert [config.fuses_projections for config in (llama, qwen2, qwen3, phi3)] == [False, False, False, True]


def test_an_explicit_null_means_one_kv_head_for_each_head(tmp_path: Path) -> None:
    assert read(tmp_path, {**LLAMA, "num_key_value_heads": None}).num_kv_heads == 4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_SCALING}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_SCALING}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", **LLAMA3_SCALING}},
    ],
)
def test_llama3_scaling_in_every_spelling(tmp_path: Path, rope: dict[str, object]) -> None:
    assert read(tmp_path, {**LLAMA, **rope}).rope == RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 16))


def test_llama3_scaling_without_an_original_length_starts_from_the_models(tmp_path: Path) -> None:
    scaling = {key: value for key, value in LLAMA3_SCALING.items() if key != "original_max_position_embeddings"}
    config = read(tmp_path, {**LLAMA, "max_position_embeddings": 512, "rope_scaling": {"rope_type": "llama3", **scaling}})
    assert config.rope.scaling is not None
    assert config.rope.scaling.original_max_positions == 512


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, {"eos_token_id": [2, 5]}, (2, 5)),
        (None, {"eos_token_id": 9}, (9,)),
        (4, {"temperature": 0.6}, (4,)),
        (None, None, ()),
    ],
)
def test_eos_token_ids(tmp_path: Path, config: object, generation: dict[str, object] | None, expected: tuple[int, ...]) -> None:
    assert read(tmp_path, {**LLAMA, "eos_token_id": config}, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"model_type": "mistral"}, "model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING, "factor": None}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING, "low_freq_factor": 4.0}}, "rope_scaling.low_freq_factor"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, change: dict[str, object], field: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{field} = "):
        read(tmp_path, {**LLAMA, **change})


def test_the_refusal_shows_the_value(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"MixtralForCausalLM.*LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"):
        read(tmp_path, {**LLAMA, "architectures": ["MixtralForCausalLM"]})


@pytest.mark.parametrize("content", [None, "{", "[]", "\xff"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_qwen_may_name_a_window_it_does_not_use(tmp_path: Path) -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 131072}
    assert read(tmp_path, {**qwen, "use_sliding_window": False, "max_window_layers": 1}).architecture == "Qwen2ForCausalLM"


def test_reading_a_config_imports_no_torch() -> None:
    code = "import sys, graftwork_engine.model.config; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "set()"
