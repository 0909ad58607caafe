"""Loading a folder: packed parameters are filled exactly once, rotary tables are transformers' own, broken folders are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from graftwork_engine.errors import UnsupportedModel
from graftwork_engine.model.config import FAMILIES, Llama3Scaling, ModelConfig, RopeConfig
from graftwork_engine.model.layers import Placement, rotary_table
from graftwork_engine.model.llama import Llama
from graftwork_engine.model.loader import load_weights
from graftwork_engine.model.registry import MODELS, build_model

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "mlp_bias": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Llama:
    model = build_model(ModelConfig.from_dir(folder), 16, Placement(dtype, CPU))
    load_weights(model, folder)
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def set_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_every_served_architecture_has_a_model() -> None:
    assert set(MODELS) == set(FAMILIES)


def test_an_unknown_architecture_has_no_model(folder: Path) -> None:
    config = ModelConfig.from_dir(folder)
    unknown = ModelConfig(**{name: getattr(config, name) for name in config.__slots__} | {"architecture": "OtherForCausalLM"})
    with pytest.raises(UnsupportedModel, match="OtherForCausalLM"):
        build_model(unknown, 16, Placement(torch.float32, CPU))


def test_packed_rows_are_the_checkpoints(folder: Path) -> None:
    model, saved = load(folder), tensors_of(folder)
    assert {name for name, _ in model.destinations()} == set(saved)
    for name, part in model.destinations():
        assert torch.equal(part, saved[name]), name
    attention = model.layers[1].self_attn
    expected = torch.cat([saved[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(attention.qkv_proj.weight.data, expected)
    assert [(s.index, s.start, s.size) for s in attention.qkv_proj.sites] == [(7, 0, 32), (8, 32, 16), (9, 48, 16)]
    assert [s.index for s in model.layers[1].mlp.gate_up_proj.sites] == [11, 12]
    assert model.layers[1].mlp.down_proj.sites[0].index == 13


def test_destinations_cover_every_parameter_once(folder: Path) -> None:
    model = load(folder)
    for _, part in model.destinations():
        part.zero_()
    for _, part in model.destinations():
        part.add_(1)
    layer = model.layers[0]
    packed = [layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]
    for linear in packed:
        assert linear.bias is not None
        assert torch.all(linear.weight.data == 1)
        assert torch.all(linear.bias == 1)


def test_weights_are_cast(folder: Path) -> None:
    model, saved = load(folder, torch.bfloat16), tensors_of(folder)
    assert model.norm.weight.dtype == torch.bfloat16
    name, part = next(model.destinations())
    assert torch.equal(part, saved[name].bfloat16())


def test_shards_are_read_through_their_index(folder: Path) -> None:
    whole = dict(load(folder).destinations())
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, part in load(folder).destinations():
        assert torch.equal(part, whole[name])
    save_file({name: tensors[name] for name in [*names[1::2], names[0]]}, folder / "b.safetensors")
    with pytest.raises(UnsupportedModel, match=f"{names[0]} is there twice"):
        load(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"b\.safetensors cannot be read"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"index\.json cannot be read"):
        load(folder)


def test_two_sets_of_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="holds both"):
        load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    tensors = tensors_of(folder)
    del tensors["model.layers.1.mlp.up_proj.bias"]
    rewrite(folder, tensors)
    with pytest.raises(UnsupportedModel, match=r"1 tensors are missing: model\.layers\.1\.mlp\.up_proj\.bias$"):
        load(folder)


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    rewrite(folder, {**tensors_of(folder), "model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.self_attn\.q_norm\.weight has no place in LlamaForCausalLM"):
        load(folder)


def test_derived_frequencies_are_passed_over(folder: Path) -> None:
    rewrite(folder, {**tensors_of(folder), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert load(folder).norm.weight.shape == (32,)


def test_a_wrong_shape_shows_both(folder: Path) -> None:
    set_config(folder, intermediate_size=40)
    with pytest.raises(
        UnsupportedModel, match=r"mlp\.\w+ is \[48.*config says \[40|mlp\.\w+\.weight is \[.*48.*config says \[.*40"
    ):
        load(folder)


def test_a_wrong_element_type_is_named(folder: Path) -> None:
    rewrite(folder, {**tensors_of(folder), "model.norm.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is torch\.int8"):
        load(folder)


def test_a_folder_of_another_format_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"neither model\.safetensors nor"):
        load(folder)


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors cannot be read"):
        load(folder)


def test_a_tied_head_is_the_embedding(folder: Path) -> None:
    set_config(folder, tie_word_embeddings=True)
    tensors = tensors_of(folder)
    with pytest.raises(UnsupportedModel, match=r"tie_word_embeddings is true, but lm_head\.weight is not the embedding"):
        load(folder)
    rewrite(folder, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    model = load(folder)
    assert model.lm_head.weight.data is model.embed_tokens.weight.data
    del tensors["lm_head.weight"]
    rewrite(folder, tensors)
    assert torch.equal(load(folder).lm_head.weight.data, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RopeConfig(10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
        (
            RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 64)),
            {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_rotary_tables_are_transformers_own(ours: RopeConfig, theirs: dict[str, object]) -> None:
    """Bit for bit: an angle that is off by one rounding is off by 1e-3 a thousand positions on."""
    config = LlamaConfig(**{**SHAPE, "head_dim": 64, "max_position_embeddings": 4096, "rope_parameters": theirs})
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(4096)[None])
    table = rotary_table(ours, 64, 4096, CPU)
    assert table.dtype == torch.float32
    assert torch.equal(table, torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=-1))
