"""A tiny random base model and adapters that PEFT itself made for it."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from graftwork_adapters.base_spec import BaseSpec, load_base_spec

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

ALL_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="session")
def tiny_base_model() -> LlamaForCausalLM:
    """A Llama of two layers with grouped key-value heads, fp32. Copy it before changing it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="session")
def tiny_base_dir(tiny_base_model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base as a Hugging Face folder named `tiny-base`."""
    folder = tmp_path_factory.mktemp("base") / "tiny-base"
    tiny_base_model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_spec(tiny_base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(tiny_base_dir, tmp_path_factory.mktemp("base-id"))


@pytest.fixture(scope="session")
def make_adapter(tiny_base_model: LlamaForCausalLM) -> Callable[..., Path]:
    """``make_adapter(folder, seed=0, dtype=torch.float32, **lora_config)`` saves a PEFT adapter whose B is not zero."""

    def make(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **lora_config: object) -> Path:
        settings: dict[str, object] = {"r": 4, "lora_alpha": 8, "target_modules": ALL_PROJECTIONS, "task_type": "CAUSAL_LM"}
        model = get_peft_model(copy.deepcopy(tiny_base_model), LoraConfig(**(settings | lora_config)))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator).mul_(0.1).to(dtype)
        model.save_pretrained(folder)
        # Written afterwards: PEFT would look a name up on the network.
        config = folder / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "somewhere/tiny-base"}))
        return folder

    return make


@pytest.fixture(scope="session")
def good_adapter(make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 4 on every projection. Copy it before changing it."""
    return make_adapter(tmp_path_factory.mktemp("adapter") / "good")


@pytest.fixture
def upload(good_adapter: Path, tmp_path: Path) -> Path:
    """A copy of the good adapter to break."""
    return Path(shutil.copytree(good_adapter, tmp_path / "upload"))


@pytest.fixture
def dora(make_adapter: Callable[..., Path], tmp_path: Path) -> Path:
    """An adapter of rank 4 with DoRA on every projection, to break."""
    return make_adapter(tmp_path / "dora", use_dora=True, seed=3)
