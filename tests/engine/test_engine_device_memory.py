"""A start on a device whose memory is its own: what is taken of it, and what is said where there is too little."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from compiled_kernels import KERNEL_DIR
from device_twins import TwinDevice
from transformers import AutoModelForCausalLM, LlamaConfig

from graftwork_adapters.store import StoreConfig
from graftwork_engine import assembly
from graftwork_engine.config import EngineConfig
from graftwork_engine.errors import ConfigError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=128, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> TwinDevice:
    twin = TwinDevice()
    monkeypatch.setattr(assembly, "open_device", lambda _config: twin)
    return twin


@pytest.fixture
def start(model_dir: Path, tmp_path: Path) -> Callable[..., assembly.EngineAssembly]:
    def make(**settings: object) -> assembly.EngineAssembly:
        defaults = {
            "model_dir": str(model_dir),
            "dtype": "float32",
            "kv_memory_bytes": 1 << 20,
            "cache_dir": str(tmp_path),
            "kernel_dir": str(KERNEL_DIR),
            "kernels": {"all": "cpu"},
        }
        return assembly.build_engine(msgspec.convert({**defaults, **settings}, EngineConfig))

    return make


def out_of_memory(*_arguments: object, **_options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("build_model", "the base model does not fit: .* bytes are free on cpu; choose a smaller base"),
        ("_largest_step", "the largest step takes for a time does not fit: .*; lower max_num_batched_tokens"),
        ("warm_up", "what steps take beside the KV memory does not fit: .*; lower kv_memory_fraction"),
    ],
)
def test_what_does_not_fit_is_named_with_what_makes_room(
    device: TwinDevice, start: Callable[..., object], monkeypatch: pytest.MonkeyPatch, where: str, says: str
) -> None:
    monkeypatch.setattr(assembly, where, out_of_memory)
    with pytest.raises(ConfigError, match=says):
        start()
    assert device.num_measured == (where == "warm_up")


def test_adapters_get_their_share_and_never_less_than_uploads_are_held_to(
    device: TwinDevice, start: Callable[..., assembly.EngineAssembly], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(assembly, "free_memory", lambda _place: 100 << 20)
    device.adapter_fraction = 0.2
    sizes = {}
    for name, settings in {
        "the device's share": {},
        "a share of one's own": {"adapter_memory_fraction": 0.05},
        "the least": {"adapter_memory_bytes": 30 << 20},
        "no share": {"adapter_memory_fraction": 0.0},
    }.items():
        least = {"adapter_memory_bytes": 1 << 20, "adapter_page_bytes": 1 << 18, "store": StoreConfig(str(tmp_path / "store"))}
        engine = start(**{**least, **settings})
        sizes[name] = int(engine.stats()["adapter_device_capacity_bytes"]) >> 20
        engine.close()
    assert sizes == {"the device's share": 20, "a share of one's own": 5, "the least": 30, "no share": 1}


def test_wholes_get_their_share_beside_it(
    device: TwinDevice, start: Callable[..., assembly.EngineAssembly], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More than uploads are held to where the device has it, none where none are served."""
    monkeypatch.setattr(assembly, "free_memory", lambda _place: 100 << 20)
    device.whole_fraction = 0.2
    sizes = {}
    for name, num_bytes in {"the device's share": 1 << 20, "the least": 30 << 20, "none": 0}.items():
        settings = {"adapter_memory_bytes": 1 << 20, "adapter_page_bytes": 1 << 18, "store": StoreConfig(str(tmp_path / "store"))}
        engine = start(**settings, adapter_whole_bytes=num_bytes)
        sizes[name] = int(engine.stats()["adapter_whole_capacity_bytes"]) >> 20
        engine.close()
    assert sizes == {"the device's share": 20, "the least": 30, "none": 0}


def test_a_start_says_that_it_is_warm_and_what_is_left(
    device: TwinDevice, start: Callable[..., object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "graftwork_engine"):
        start()
    assert device.num_measured == 1
    assert "MiB are left free" in caplog.text
