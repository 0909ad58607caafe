"""Where the engine computes: what a configuration's device means here. What else the engine knows of CUDA is beside it."""

from __future__ import annotations

from typing import Literal

import torch

from graftwork_engine.errors import ConfigError


def resolve_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device that `graftwork_engine.config.EngineConfig.device` names here; of several GPUs the current one.

    Raises `ConfigError` for "cuda" where torch has no GPU.
    """
    if name == "cpu":
        return torch.device("cpu")
    # A build for AMD's GPUs answers for them under the same name, and has no version of CUDA.
    if torch.version.cuda is not None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if name == "auto":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ConfigError(
            f"device is cuda, and torch {torch.__version__} is built without CUDA; install one with it, or choose cpu"
        )
    raise ConfigError(
        "device is cuda, and torch finds no GPU; look at nvidia-smi, at CUDA_VISIBLE_DEVICES and, in a container, at whether it "
        "was given one, or choose cpu"
    )
