"""Writes random PEFT adapters for a base model. Each changes the output and none is trained: they are for load tests only."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def projection_shapes(base: Path) -> dict[str, list[int]]:
    """[out, in] of every decoder projection of the base, by module path."""
    shapes: dict[str, list[int]] = {}
    for shard in sorted(base.glob("*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                module = name.removesuffix(".weight")
                if module.rpartition(".")[2] in TARGETS:
                    shapes[module] = tensors.get_slice(name).get_shape()
    return shapes


def write_adapter(folder: Path, shapes: dict[str, list[int]], rank: int, seed: int) -> None:
    """One adapter in bfloat16 on all projections."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module, (out_features, in_features) in shapes.items():
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = (torch.randn(rank, in_features, generator=generator) * 0.02).bfloat16()
        tensors[f"{prefix}.lora_B.weight"] = (torch.randn(out_features, rank, generator=generator) * 0.08).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), task_type="CAUSAL_LM", inference_mode=True)
    config.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("count", type=int)
    parser.add_argument("--ranks", default="16", help="comma list, dealt in turn")
    options = parser.parse_args()
    shapes = projection_shapes(options.base)
    if not shapes:
        parser.error(f"{options.base} holds no decoder projections")
    ranks = [int(rank) for rank in options.ranks.split(",")]
    for i in range(options.count):
        write_adapter(options.out / f"a{i}", shapes, ranks[i % len(ranks)], seed=i)


if __name__ == "__main__":
    main()
