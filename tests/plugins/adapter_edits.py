"""Changes to a saved adapter's folder: config, names and types of tensors, how many files they lie in, other trainers' forms."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Tensors = dict[str, Tensor]
Edit = Callable[[Path], None]


def in_order(*edits: Edit) -> Edit:
    """One edit after the other."""

    def edit(folder: Path) -> None:
        for each in edits:
            each(folder)

    return edit


def set_config(**fields: object) -> Edit:
    """Set fields of the config."""

    def edit(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def keep_config(*names: str) -> Edit:
    """Leave only these fields in the config."""

    def edit(folder: Path) -> None:
        path = folder / CONFIG
        config = json.loads(path.read_text())
        path.write_text(json.dumps({name: config[name] for name in names}))

    return edit


def on_tensors(change: Callable[[Tensors], Tensors]) -> Edit:
    """Put other tensors in the place of the file's."""

    def edit(folder: Path) -> None:
        tensors = {name: tensor.clone().contiguous() for name, tensor in change(load_file(folder / WEIGHTS)).items()}
        save_file(tensors, folder / WEIGHTS)

    return edit


def rename(pattern: str, replacement: str) -> Edit:
    """Substitute in every tensor's name; at least one must change."""

    def change(tensors: Tensors) -> Tensors:
        renamed = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
        assert renamed.keys() != tensors.keys()
        return renamed

    return on_tensors(change)


def drop(pattern: str) -> Edit:
    """Leave out the tensors whose names match; at least one must."""

    def change(tensors: Tensors) -> Tensors:
        kept = {name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)}
        assert len(kept) < len(tensors)
        return kept

    return on_tensors(change)


def add(**tensors: Tensor) -> Edit:
    """Add tensors; two underscores stand for a dot."""
    return on_tensors(lambda old: {**old, **{name.replace("__", "."): tensor for name, tensor in tensors.items()}})


def change_values(pattern: str, change: Callable[[Tensor], Tensor]) -> Edit:
    """Give the tensors whose names match other values; at least one must."""

    def edit(tensors: Tensors) -> Tensors:
        assert any(re.search(pattern, name) for name in tensors)
        return {name: change(tensor) if re.search(pattern, name) else tensor for name, tensor in tensors.items()}

    return on_tensors(edit)


def cast(dtype: torch.dtype, pattern: str = "") -> Edit:
    """Save the tensors whose names match in another type."""
    return change_values(pattern, lambda tensor: tensor.to(dtype))


def shard(folder: Path) -> None:
    """Spread the tensors over three files with an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for number in range(3):
        file = f"adapter_model-{number + 1:05}-of-00003.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number::3]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def share_a(tensors: Tensors) -> Tensors:
    """Give the projections that are one in a fused model the same A, as an adapter trained on that model has it."""
    shared = dict(tensors)
    for first, *others in FUSED.values():
        for name, tensor in tensors.items():
            if f"{first}.lora_A" in name:
                shared |= {name.replace(first, other): tensor for other in others}
    return shared


def fuse(tensors: Tensors) -> Tensors:
    """Stack what `share_a` prepared into one pair for each fused projection."""
    fused = {}
    for name, tensor in tensors.items():
        whole = next((whole for whole, parts in FUSED.items() if any(part in name for part in parts)), None)
        if whole is None:
            fused[name] = tensor
            continue
        first = FUSED[whole][0]
        if first in name:
            parts = [tensors[name.replace(first, part)] for part in FUSED[whole]]
            fused[name.replace(first, whole)] = tensor if "lora_A" in name else torch.cat(parts)
    return fused


def split(sizes: dict[str, tuple[int, ...]]) -> Edit:
    """The reverse of `fuse`: each part of a fused projection gets its A and its own rows of B, so many as ``sizes`` has."""

    def change(tensors: Tensors) -> Tensors:
        parted = {}
        for name, tensor in tensors.items():
            whole = next((whole for whole in FUSED if whole in name), None)
            if whole is None:
                parted[name] = tensor
                continue
            rows = [tensor] * len(FUSED[whole]) if "lora_A" in name else tensor.split(sizes[whole])
            parted |= {name.replace(whole, part): value for part, value in zip(FUSED[whole], rows, strict=True)}
        return parted

    return in_order(on_tensors(change), set_config(target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]))


def to_mlx(folder: Path) -> None:
    """As mlx-lm writes an adapter: matrices the other way round, the scale itself in the config."""
    config = json.loads((folder / CONFIG).read_text())
    tensors = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        kind = part.removesuffix(".weight")
        if kind == "magnitude_vector":
            tensors[f"{module}.m"] = tensor
        else:
            tensors[f"{module}.lora_{kind.lower()}"] = tensor.T.contiguous()
    keys = sorted({re.sub(r"^model\.layers\.\d+\.", "", name.rpartition(".")[0]) for name in tensors})
    scale = config["lora_alpha"] / config["r"]
    parameters = {"rank": config["r"], "scale": scale, "dropout": 0.0, "keys": keys}
    kind = "dora" if config["use_dora"] else "lora"
    for file in (CONFIG, WEIGHTS):
        (folder / file).unlink()
    save_file(tensors, folder / "adapters.safetensors", {"format": "mlx"})
    (folder / CONFIG).write_text(
        json.dumps({"fine_tune_type": kind, "lora_parameters": parameters, "num_layers": -1, "model": "somewhere/llama"})
    )


MEGATRON = {
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.qkv_proj": "self_attention.linear_qkv",
    "mlp.gate_up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
}


def to_megatron(num_groups: int) -> Edit:
    """As NeMo writes what `share_a` prepared: one pair for q, k and v, whose rows go group by group of heads."""

    def change(tensors: Tensors) -> Tensors:
        renamed = {}
        for name, value in fuse(tensors).items():
            tensor = value
            _, layer, module, part = re.fullmatch(r"(.*layers)\.(\d+)\.(\w+\.\w+)\.lora_(A|B)\.weight", name).groups()  # type: ignore[union-attr]
            if module == "self_attn.qkv_proj" and part == "B":
                stacked = [tensors[name.replace(module, each)].unflatten(0, (num_groups, -1)) for each in FUSED[module]]
                tensor = torch.cat(stacked, 1).flatten(0, 1)
            end = {"A": "linear_in", "B": "linear_out"}[part]
            renamed[f"decoder.layers.{layer}.{MEGATRON[module]}.adapter.{end}.weight"] = tensor
        return renamed

    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        on_tensors(change)(folder)
        (folder / CONFIG).write_text(json.dumps({"dim": config["r"], "alpha": config["lora_alpha"]}))

    return edit


TORCHTUNE = {
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.output_proj",
    "mlp.gate_proj": "mlp.w1",
    "mlp.down_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w3",
}


def to_torchtune(head_dim: int) -> Edit:
    """As torchtune's own checkpoint of a Llama has it: the two halves of each head of q and k lie in pairs."""

    def change(tensors: Tensors) -> Tensors:
        renamed = {}
        for name, value in tensors.items():
            tensor = value
            module, part = name.removeprefix("base_model.model.model.").split(".lora_")
            number, projection = re.fullmatch(r"layers\.(\d+)\.(.+)", module).groups()  # type: ignore[union-attr]
            if part == "B.weight" and projection in ("self_attn.q_proj", "self_attn.k_proj"):
                halves = tensor.unflatten(0, (-1, 2, head_dim // 2))
                tensor = halves.transpose(1, 2).flatten(0, 2)
            renamed[f"layers.{number}.{TORCHTUNE[projection]}.lora_{part.lower()}"] = tensor
        return renamed

    def edit(folder: Path) -> None:
        on_tensors(change)(folder)
        keep_config("r", "lora_alpha", "peft_type")(folder)
        set_config(target_modules=["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"])(folder)

    return edit
