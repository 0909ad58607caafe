"""Writes random PEFT adapters for a base model. Each changes the output and none is trained: they are for load tests only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from results import BenchmarkFailed

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def projection_shapes(base: Path) -> dict[str, list[int]]:
    """[out, in] of every decoder projection of the base, by module path; raises `BenchmarkFailed` for weights that are none."""
    shapes: dict[str, list[int]] = {}
    for shard in sorted(base.glob("*.safetensors")):
        try:
            with safe_open(shard, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    module = name.removesuffix(".weight")
                    if module.rpartition(".")[2] in TARGETS:
                        shapes[module] = tensors.get_slice(name).get_shape()
        except (OSError, SafetensorError) as error:
            raise BenchmarkFailed(f"{shard} cannot be read: {error}") from error
    return shapes


def adapter_bytes(base: Path, rank: int) -> int:
    """Bytes of the weights of one adapter of `write_adapter`."""
    return 2 * rank * sum(sum(shape) for shape in projection_shapes(base).values())


def vocabulary(base: Path) -> int:
    """Token ids of a base are below it; raises `BenchmarkFailed` for no base."""
    try:
        return int(json.loads((base / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkFailed(f"{base / 'config.json'} names no vocabulary ({error!r}); is it a language model's?") from error


def row_norms(base: Path) -> dict[str, torch.Tensor]:
    """fp32 [out] of every decoder projection of the base, by module path: where the magnitudes of a DoRA begin."""
    norms: dict[str, torch.Tensor] = {}
    for shard in sorted(base.glob("*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                module = name.removesuffix(".weight")
                if module.rpartition(".")[2] in TARGETS:
                    norms[module] = tensors.get_tensor(name).float().norm(dim=1)
    return norms


def write_adapter(
    folder: Path, shapes: dict[str, list[int]], rank: int, seed: int, norms: dict[str, torch.Tensor] | None = None
) -> None:
    """One adapter in bfloat16 on all projections; with ``norms`` a DoRA (arXiv:2402.09353) with magnitudes up to a tenth off."""
    from peft import LoraConfig  # takes seconds, and every benchmark imports this module

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module, (out_features, in_features) in shapes.items():
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = (torch.randn(rank, in_features, generator=generator) * 0.02).bfloat16()
        tensors[f"{prefix}.lora_B.weight"] = (torch.randn(out_features, rank, generator=generator) * 0.08).bfloat16()
        if norms is not None:
            factor = 0.9 + 0.2 * torch.rand(out_features, generator=generator)
            tensors[f"{prefix}.lora_magnitude_vector"] = norms[module] * factor
    folder.mkdir(parents=True, exist_ok=True)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(TARGETS),
        task_type="CAUSAL_LM",
        inference_mode=True,
        use_dora=norms is not None,
    )
    config.save_pretrained(folder)
    unfinished = folder / ".unfinished"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.rename(folder / "adapter_model.safetensors")


def write_adapters(
    base: Path, out: Path, count: int, ranks: Sequence[int], stem: str = "a", *, use_dora: bool = False
) -> list[Path]:
    """``out``/``stem``0 and so on, ranks dealt in turn; those that are there are kept. Raises `BenchmarkFailed` for no base."""
    shapes = projection_shapes(base)
    if not shapes:
        raise BenchmarkFailed(f"{base} holds no decoder projections; name a folder of a base model in Hugging Face's format")
    folders = [out / f"{stem}{i}" for i in range(count)]
    missing = [i for i, folder in enumerate(folders) if not (folder / "adapter_model.safetensors").exists()]
    norms = row_norms(base) if use_dora and missing else None
    for i in missing:
        write_adapter(folders[i], shapes, ranks[i % len(ranks)], seed=i, norms=norms)
    return folders


def main(arguments: Sequence[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write random PEFT adapters for load tests.")
    parser.add_argument("base", type=Path, help="the base model's folder")
    parser.add_argument("out", type=Path, help="adapters are written to OUT/a0 and so on")
    parser.add_argument("count", type=int)
    parser.add_argument("--ranks", default="16", help="comma list, dealt in turn")
    parser.add_argument("--dora", action="store_true", help="with the magnitudes of DoRA")
    options = parser.parse_args(arguments)
    try:
        ranks = [int(rank) for rank in options.ranks.split(",")]
        write_adapters(options.base, options.out, options.count, ranks, use_dora=options.dora)
    except (BenchmarkFailed, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
