"""torchtune's own names, as its checkpointer writes them before they are converted to PEFT's.

Its Llama rotates neighbouring pairs of a head's outputs, Hugging Face's the two halves of a head. torchtune therefore reorders the
rows of q and k when it reads a base, and here B's rows and DoRA's magnitudes, which follow those rows, are put back. Its Qwen
models rotate as Hugging Face's do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from graftwork_adapters.dialect import EXPORT_FIX, Read, Sent, adapter_tensor, refuse_unknown, source_of
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "attn.q_proj": "self_attn.q_proj",
        "attn.k_proj": "self_attn.k_proj",
        "attn.v_proj": "self_attn.v_proj",
        "attn.output_proj": "self_attn.o_proj",
        "mlp.w1": "mlp.gate_proj",
        "mlp.w2": "mlp.down_proj",
        "mlp.w3": "mlp.up_proj",
    }
)
_TARGETS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "output": "lm_head"}
_PARTS = {"lora_a.weight": "lora_A", "lora_b.weight": "lora_B", "magnitude": "lora_magnitude_vector"}
_NAME = re.compile(
    rf"(?:layers\.(?P<layer>\d+)\.(?P<module>{'|'.join(map(re.escape, _MODULES))})|(?P<head>output))"
    rf"\.(?P<part>{'|'.join(map(re.escape, _PARTS))})"
)
_PAIRWISE = "LlamaForCausalLM"


def is_torchtune_name(name: str) -> bool:
    """True for a name that only torchtune gives."""
    return _NAME.fullmatch(name) is not None


def read_torchtune(sent: Sent, report: Report) -> Read:
    """Read an upload by torchtune's names."""
    read = Read(None)
    unknown: list[str] = []
    unturned: list[tuple[str | None, str]] = []
    for tensor in sent.tensors:
        match = _NAME.fullmatch(tensor.name)
        if match is None:
            unknown.append(tensor.name)
            continue
        module = "lm_head" if match["head"] else f"model.layers.{match['layer']}.{_MODULES[match['module']]}"
        part = _PARTS[match["part"]]
        rows = None
        if part != "lora_A" and match["module"] in ("attn.q_proj", "attn.k_proj") and sent.spec.architecture == _PAIRWISE:
            rows = _halves(sent.outputs.get(module), tensor.entry.shape, sent.spec.head_dim)
            if rows is None:
                message = f"has shape {list(tensor.entry.shape)}, which is not of the heads of {module}"
                unturned.append((shown(tensor.name), message))
                continue
        read.tensors.append(adapter_tensor(module, part, source_of(tensor, rows=rows)))
    refuse_unknown(unknown, "torchtune", report)
    report.fail_each("shapes", unturned, EXPORT_FIX)
    report.warn("dialect", None, "written by torchtune: names are read as PEFT's, and the rows of q and k as the base has them")
    if sent.config is not None:
        has_magnitudes = any(tensor.part == "lora_magnitude_vector" for tensor in read.tensors)
        read.config = _to_peft_config(sent.config, has_magnitudes)
    return read


def _halves(outputs: int | None, shape: tuple[int, ...], size: int | None) -> tuple[range, ...] | None:
    """The rows of torchtune's order in the base's: of each head first those of even places, then those of odd ones."""
    if outputs is None or size is None or size % 2 or outputs % size or not shape or shape[0] != outputs:
        return None
    heads = range(0, outputs, size)
    return tuple(range(head + place, head + size, 2) for head in heads for place in (0, 1))


def _to_peft_config(config: dict[str, object], has_magnitudes: bool) -> dict[str, object]:
    """torchtune writes PEFT's fields, with its own names of modules; it does not write whether there is DoRA."""
    targets = config.get("target_modules")
    peft = dict(config)
    if isinstance(targets, list):
        peft["target_modules"] = [_TARGETS.get(name, name) if isinstance(name, str) else name for name in targets]
    return {"peft_type": "LORA", "use_dora": has_magnitudes} | peft
