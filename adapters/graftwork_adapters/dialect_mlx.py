"""MLX's adapters: `adapters.safetensors` beside the training arguments.

`mlx_lm` computes `y + scale · (x a) b` with a [in, r] and b [r, out], both the other way round than PEFT's, and DoRA's norms over
the same rows as PEFT does. Of the arguments it reads three when it loads an adapter; the others are the trainer's own.
"""

from __future__ import annotations

import re

from graftwork_adapters.dialect import (
    EXPORT_FIX,
    Read,
    Sent,
    adapter_tensor,
    finite_number,
    positive_int,
    refuse_unknown,
    source_of,
)
from graftwork_adapters.experts import is_expert
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.upload_json import brief

_NAME = re.compile(r"(?:language_model\.)?(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_PARTS = {"lora_a": "lora_A", "lora_b": "lora_B", "m": "lora_magnitude_vector"}
_LORA_FIELDS = ("rank", "scale", "dropout", "keys", "alpha")
_EMBEDDINGS = ("model.embed_tokens",)


def is_mlx_name(name: str) -> bool:
    """True for a name that only MLX gives."""
    return re.search(r"\.lora_[ab]$", name) is not None


def is_mlx_config(config: dict[str, object]) -> bool:
    """True for the arguments that MLX writes beside an adapter."""
    return "lora_parameters" in config or "fine_tune_type" in config


def read_mlx(sent: Sent, report: Report) -> Read:
    """Read an upload by MLX's names and arguments."""
    read = Read(None if sent.config is None else _to_peft_config(sent.config, report))
    unknown: list[str] = []
    embeddings: list[tuple[str | None, str]] = []
    for tensor in sent.tensors:
        match = _NAME.fullmatch(tensor.name)
        if match is None:
            unknown.append(tensor.name)
        elif match["module"] in _EMBEDDINGS:
            message = "is LoRA on the embedding, which MLX applies to a tied head as well and PEFT does not"
            embeddings.append((shown(tensor.name), message))
        else:
            module = match["module"]
            # Experts' factors are stacked as PEFT's would be.
            transposed = match["part"] != "m" and not is_expert(module) and len(tensor.entry.shape) == 2
            read.tensors.append(adapter_tensor(module, _PARTS[match["part"]], source_of(tensor, transposed=transposed)))
    refuse_unknown(unknown, "MLX", report)
    report.fail_each("tensors", embeddings, "train without the embedding among lora_parameters' keys")
    report.warn("dialect", None, "written by MLX: A and B are read transposed, and lora_alpha is scale · rank")
    if read.config is not None:
        read.config["target_modules"] = sorted({tensor.module for tensor in read.tensors})
    return read


def _to_peft_config(config: dict[str, object], report: Report) -> dict[str, object] | None:
    kind = config.get("fine_tune_type", "dora" if config.get("use_dora") is True else "lora")
    if kind not in ("lora", "dora"):
        fix = "train with fine_tune_type lora or dora"
        report.fail("config", "fine_tune_type", f"is {brief(kind)}; served are lora and dora", fix)
        return None
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        report.fail("config", "lora_parameters", f"is {brief(parameters)}; it must hold rank and scale", EXPORT_FIX)
        return None
    rank = positive_int(parameters, "rank", report)
    scale = finite_number(parameters, "scale", report)
    for name in parameters:
        if name not in _LORA_FIELDS:
            report.fail("config", shown(f"lora_parameters.{name}"), "is not known here", "remove it if it has no effect")
    if rank is None or scale is None:
        return None
    alpha = parameters.get("alpha")
    if alpha is not None and alpha != rank:
        message = f"is {brief(alpha)} and rank {rank}: early versions of MLX scaled by alpha / rank as well, later ones do not"
        fix = "remove alpha, and make scale the whole factor"
        report.fail("config", "lora_parameters.alpha", message, fix)
        return None
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.get("model", config.get("base_model_name_or_path")),
        "r": rank,
        "lora_alpha": scale * rank,
        "use_dora": kind == "dora",
    }
