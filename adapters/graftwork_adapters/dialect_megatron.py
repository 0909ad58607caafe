"""Megatron's names, as NeMo and Megatron-Bridge give them to their adapters.

`linear_qkv` holds for each key-value head its query heads, the key and the value, in turn; `linear_fc1` the gate's rows and then
those of the up projection. A canonical adapter has factors of its own for each part. The scale is alpha / dim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from graftwork_adapters.base_spec import FUSED_PROJECTIONS
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
from graftwork_adapters.fused import take_rows
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.tensor_source import AdapterTensor
from graftwork_adapters.upload_json import brief
from graftwork_adapters.upload_shards import SentTensor

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "self_attention.linear_qkv": "self_attn.qkv_proj",
        "self_attention.linear_proj": "self_attn.o_proj",
        "mlp.linear_fc1": "mlp.gate_up_proj",
        "mlp.linear_fc2": "mlp.down_proj",
        "self_attention.linear_qkv.adapter_q": "self_attn.q_proj",
        "self_attention.linear_qkv.adapter_k": "self_attn.k_proj",
        "self_attention.linear_qkv.adapter_v": "self_attn.v_proj",
        "mlp.linear_fc1.adapter_gate": "mlp.gate_proj",
        "mlp.linear_fc1.adapter_up": "mlp.up_proj",
    }
)
_PARTS = {"linear_in.weight": "lora_A", "linear_out.weight": "lora_B", "weight_magnitude": "lora_magnitude_vector"}
_NAME = re.compile(
    r"(?:module\.|model\.)*decoder\.layers\.(?P<layer>\d+)\.(?P<module>\w+\.linear_\w+)"
    rf"\.adapter(?:\.(?P<own>adapter_\w+))?\.(?P<part>{'|'.join(map(re.escape, _PARTS))})"
)
_EXPERT = re.compile(r"(?:module\.|model\.)*(?P<module>.+\.experts\..+)\.adapter\.(?P<part>linear_in|linear_out)\.weight")
_QKV = "self_attn.qkv_proj"
_GATE_UP = "mlp.gate_up_proj"
_TRAINING_FIELDS = (
    "dropout", "dropout_position", "lora_A_init_method", "lora_B_init_method", "lora_dtype", "a2a_experimental",
    "target_modules", "exclude_modules", "canonical_mapping",
)  # fmt: skip


def is_megatron_name(name: str) -> bool:
    """True for a name that only Megatron's trainers give."""
    return re.search(r"\.adapter\.(?:\w+\.)?(?:linear_in|linear_out)\.weight$", name) is not None


def read_megatron(sent: Sent, report: Report) -> Read:
    """Read an upload by Megatron's names."""
    read = Read(None)
    unknown: list[str] = []
    for tensor in sent.tensors:
        if found := _read_name(tensor):
            read.tensors += _split(found, sent, report) if found.part != "expert" else [found]
        else:
            unknown.append(tensor.name)
    refuse_unknown(unknown, "Megatron", report)
    report.warn("dialect", None, "written by NeMo or Megatron: names are read as PEFT's, fused rows as the base's projections")
    if sent.config is not None:
        read.config = _to_peft_config(sent.config, read.tensors, report)
    return read


def _read_name(tensor: SentTensor) -> AdapterTensor | None:
    if expert := _EXPERT.fullmatch(tensor.name):
        return adapter_tensor(expert["module"], expert["part"], source_of(tensor))
    match = _NAME.fullmatch(tensor.name)
    if match is None:
        return None
    name = ".".join(filter(None, (match["module"], match["own"])))
    if name not in _MODULES:
        return None
    return adapter_tensor(f"model.layers.{match['layer']}.{_MODULES[name]}", _PARTS[match["part"]], source_of(tensor))


def _split(tensor: AdapterTensor, sent: Sent, report: Report) -> list[AdapterTensor]:
    """The tensor as its parts', where it is of a fused projection; nothing after a finding that its rows are not the base's."""
    layer, _, name = tensor.module.partition("layers.")
    number, _, projection = name.partition(".")
    if projection not in FUSED_PROJECTIONS:
        return [tensor]
    parts = [f"{layer}layers.{number}.{part}" for part in FUSED_PROJECTIONS[projection]]
    if tensor.part == "lora_A":
        return [replace(tensor, module=part, trained_module=part) for part in parts]
    where, shape = shown(tensor.source.sent_as), tensor.source.shape
    if projection == _GATE_UP and tensor.part == "lora_magnitude_vector":
        message = "holds magnitudes of linear_fc1, whose order depends on how many GPUs trained it"
        report.fail("tensors", where, message, EXPORT_FIX)
        return []
    rows = _rows([sent.outputs.get(part) for part in parts], projection, sent.spec.head_dim)
    if rows is None or not shape or shape[0] != sum(len(one) for part in rows for one in part):
        report.fail("shapes", where, f"has shape {list(shape)}, whose rows are not those of {', '.join(parts)}", EXPORT_FIX)
        return []
    return [
        replace(tensor, module=part, trained_module=part, source=take_rows(tensor.source, one))
        for part, one in zip(parts, rows, strict=True)
    ]


def _rows(outputs: list[int | None], projection: str, size: int | None) -> list[tuple[range, ...]] | None:
    """Which rows of the fused matrix are each part's, of so many outputs each; None where the base does not have them so."""
    sizes = [rows for rows in outputs if rows is not None]
    if len(sizes) != len(outputs):
        return None
    if projection != _QKV:
        return [(range(sizes[0]),), (range(sizes[0], sum(sizes)),)]
    queries, keys, values = sizes
    if size is None or keys != values or keys % size or queries % keys:
        return None
    groups = keys // size
    per_group = queries // groups
    starts = [group * (per_group + 2 * size) for group in range(groups)]
    return [
        tuple(range(start, start + per_group) for start in starts),
        tuple(range(start + per_group, start + per_group + size) for start in starts),
        tuple(range(start + per_group + size, start + per_group + 2 * size) for start in starts),
    ]


def _to_peft_config(config: dict[str, object], tensors: list[AdapterTensor], report: Report) -> dict[str, object] | None:
    """PEFT's fields from dim and alpha; a config that has PEFT's own keeps them."""
    rest = {name: value for name, value in config.items() if name not in ("dim", "alpha", *_TRAINING_FIELDS)}
    peft: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "use_dora": any(tensor.part == "lora_magnitude_vector" for tensor in tensors),
    }
    for theirs, ours in (("dim", "r"), ("alpha", "lora_alpha")):
        if theirs not in config and ours in config:
            continue
        value = positive_int(config, theirs, report) if theirs == "dim" else finite_number(config, theirs, report)
        if value is None:
            return None
        if rest.get(ours, value) != value:
            report.fail("config", ours, f"is {brief(rest[ours])}, and {theirs} is {value}", "keep the one that it was trained with")
            return None
        peft[ours] = value
    return peft | rest | {"target_modules": sorted({tensor.trained_module for tensor in tensors})}
