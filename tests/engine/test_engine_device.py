"""What the name of a device means on machines with a GPU and without one."""

from __future__ import annotations

import msgspec
import pytest
import torch

from graftwork_engine.config import EngineConfig
from graftwork_engine.device import resolve_device
from graftwork_engine.errors import ConfigError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Let torch be built so, and find so many GPUs."""

    def having(cuda: str | None, num_gpus: int) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: num_gpus - 1)

    return having


@pytest.mark.parametrize(("cuda", "num_gpus"), [(None, 0), ("13.0", 0), ("13.0", 2), (None, 2)])
def test_a_cpu_is_a_cpu_everywhere(machine, cuda: str | None, num_gpus: int) -> None:
    machine(cuda, num_gpus)
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("cuda", "num_gpus", "found"),
    [(None, 0, "cpu"), ("13.0", 0, "cpu"), ("13.0", 2, "cuda:1"), (None, 2, "cpu")],
    ids=["no cuda", "no gpu", "the current gpu", "another maker's gpu"],
)
def test_auto_is_a_gpu_where_there_is_one(machine, cuda: str | None, num_gpus: int, found: str) -> None:
    machine(cuda, num_gpus)
    assert resolve_device("auto") == torch.device(found)


def test_cuda_is_the_current_gpu_or_refused_with_what_to_do(machine) -> None:
    machine("13.0", 1)
    assert resolve_device("cuda") == torch.device("cuda", 0)
    machine("13.0", 0)
    with pytest.raises(
        ConfigError, match="device is cuda, and torch finds no GPU; look at nvidia-smi, at CUDA_VISIBLE_DEVICES and"
    ):
        resolve_device("cuda")
    machine(None, 0)
    with pytest.raises(ConfigError, match="is built without CUDA; install one with it, or choose cpu"):
        resolve_device("cuda")


def test_an_engine_looks_for_a_gpu_unless_it_is_told(machine) -> None:
    machine("13.0", 0)
    assert EngineConfig(model_dir=".").device == "auto"
    assert msgspec.json.decode(b'{"model_dir": ".", "device": "cuda"}', type=EngineConfig).device == "cuda"
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"model_dir": ".", "device": "tpu"}', type=EngineConfig)
