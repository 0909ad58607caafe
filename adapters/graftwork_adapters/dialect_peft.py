"""PEFT's own names, of every version, and what trainers built on PEFT leave in them.

PEFT saves `base_model.model.<module>.<part>`. Beside it are read, with a warning: the adapter's name in the middle
(`lora_A.default.weight`), `base_model.model.` missing or doubled, what wrappers put into a path (DDP, FSDP, torch.compile,
activation checkpointing), and a decoder that lies within a multimodal model. What holds for one tensor must hold for all, so that
nothing is guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from graftwork_adapters.dialect import EXPORT_FIX, Read, Sent, adapter_tensor, refuse_unknown, source_of
from graftwork_adapters.experts import is_expert
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.tensor_source import AdapterTensor
from graftwork_adapters.upload_shards import SentTensor

PREFIX = "base_model.model."

_WRAPPER = "_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
_WRAPPERS = re.compile(  # DDP's "module" is one around a whole model alone: further in it may be somebody's name
    rf"(?:^|(?<=base_model\.)|(?<=base_model\.model\.))(?:(?:module|{_WRAPPER})\.)+|(?<=\.)(?:{_WRAPPER})\."
)
_TRUNK = re.compile(r"(?P<before>(?:(?:model|language_model)\.)*)(?P<rest>(?:layers\.\d+\..+|embed_tokens|norm)(?:\..+)?)")
_HEAD = re.compile(r"(?P<before>(?:(?:model|language_model)\.)*)(?P<rest>lm_head(?:\..+)?)")
_TRUNK_PATH = "model."
_EXPERT_FACTOR = "expert"  # a parameter of its own, which has no name behind its module's
_CHILD = r"(?:self_attn|mlp|\w+_proj|\w*norm)"  # of a module that may be saved whole, with all that is in it
_INSIDE = rf"(?P<inside>(?:\.{_CHILD})*)"
_ADAPTER = r"(?:\.(?P<adapter>(?!(?:weight|bias)(?:\.|$))[^.]+))?"
_PARTS = tuple(
    (re.compile(rf"(?P<module>.+?)\.{pattern}"), part)
    for pattern, part in (
        (rf"lora_A{_ADAPTER}\.weight", "lora_A"),
        (rf"lora_B{_ADAPTER}\.weight", "lora_B"),
        (rf"lora_B{_ADAPTER}\.bias", "lora_B.bias"),
        (r"lora_A", _EXPERT_FACTOR),
        (r"lora_B", _EXPERT_FACTOR),
        (r"lora_magnitude_vector(?:\.weight)?", "lora_magnitude_vector"),
        (rf"lora_magnitude_vector{_ADAPTER}(?:\.weight)?", "lora_magnitude_vector"),
        (rf"lora_embedding_A{_ADAPTER}", "lora_embedding_A"),
        (rf"lora_embedding_B{_ADAPTER}", "lora_embedding_B"),
        (rf"token_adapter\.trainable_tokens_delta{_ADAPTER}", "token_rows"),
        (rf"lora_velora_embed{_ADAPTER}", "training_state"),
        (r"token_adapter\.base_layer\.weight", "base_layer.weight"),
        (rf"modules_to_save(?!\.{_CHILD}\.){_ADAPTER}{_INSIDE}\.(?P<kind>weight|bias)", "{kind}"),
        (rf"modules_to_save{_INSIDE}\.(?P<kind>weight|bias)", "{kind}"),
        (rf"original_module{_INSIDE}\.(?P<kind>weight|bias)", "base_layer.{kind}"),
        (r"base_layer\.weight", "base_layer.weight"),
        (r"base_layer\.bias", "bias"),  # PEFT saves it only where biases were trained
        (r"(?P<kind>weight|bias)", "{kind}"),
    )
)
_INNER = re.compile(r"(?:^|\.)(?:lora_\w+|token_adapter|modules_to_save|original_module|base_layer)(?:\.|$)")
"""Within the path of what is saved whole: a part of some layer of PEFT that is not known here."""

_OLD_FIELDS = ("merge_weights",)
"""Fields of PEFT's first versions that say how it computes, not what."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A tensor's name taken apart: ``peft`` and ``before`` are what stood before the module's path as the base has it."""

    sent: SentTensor
    peft: str
    before: str | None  # None for a path outside the decoder's trunk
    module: str
    trained_module: str
    part: str
    adapter: str | None
    is_wrapped: bool

    @property
    def is_exact(self) -> bool:
        return self.peft == PREFIX and self.before in (None, _TRUNK_PATH) and self.adapter is None and not self.is_wrapped


def read_peft(sent: Sent, report: Report) -> Read:
    """Read an upload by PEFT's names."""
    names: list[_Name] = []
    unknown: list[str] = []
    for tensor in sent.tensors:
        name = _take_apart(tensor)
        if name is None:
            unknown.append(tensor.name)
        else:
            names.append(name)
    refuse_unknown(unknown, "PEFT", report)
    names = _agreeing(names, report)
    _report_dialect(names, sent.config, report)
    return Read(_without_extras(sent.config), [_to_tensor(name) for name in names])


def _take_apart(tensor: SentTensor) -> _Name | None:
    path = _WRAPPERS.sub("", tensor.name)
    is_wrapped = path != tensor.name
    peft = ""
    while path.startswith(PREFIX):
        peft += PREFIX
        path = path.removeprefix(PREFIX)
    match, part = next(((found, part) for pattern, part in _PARTS if (found := pattern.fullmatch(path))), (None, ""))
    if match is None:
        return None
    groups = match.groupdict()
    part = part.format(kind=groups.get("kind"))
    trained = match["module"] + (groups.get("inside") or "")
    if part in ("weight", "bias") and _INNER.search(trained):
        return None
    if part == _EXPERT_FACTOR and not is_expert(trained):
        return None
    module, before = trained, None
    if trunk := _TRUNK.fullmatch(trained):
        module, before = _TRUNK_PATH + trunk["rest"], trunk["before"]
    elif head := _HEAD.fullmatch(trained):
        module = head["rest"]
    return _Name(tensor, peft, before, module, trained, part, groups.get("adapter"), is_wrapped)


def _agreeing(names: list[_Name], report: Report) -> list[_Name]:
    """Those that agree with most on what stands before a path and on the adapter's name; a finding for each other."""
    problems: list[tuple[str | None, str]] = []
    usual_prefix = _most(Counter(name.peft for name in names))
    usual_path = _most(Counter(name.before for name in names if name.before is not None))
    adapters = Counter(name.adapter for name in names if name.adapter is not None)
    usual_adapter = _most(adapters)
    agreeing: list[_Name] = []
    for name in names:
        where = shown(name.sent.name)
        if name.peft != usual_prefix:
            has = f"has the prefix {name.peft}" if name.peft else f"has no prefix {PREFIX}"
            others = "have it" if not name.peft else f"have {usual_prefix or 'none'}"
            problems.append((where, f"{has} while other tensors {others}, so what it means is unclear"))
        elif name.before is not None and name.before != usual_path:
            message = f"lies in {name.before or 'the top'} while other layers lie in {usual_path or 'the top'}, so it is unclear"
            problems.append((where, message))
        elif name.adapter is not None and name.adapter != usual_adapter:
            problems.append((where, f"is of the adapter {shown(name.adapter)} while others are of {shown(usual_adapter)}"))
        else:
            agreeing.append(name)
    report.fail_each("tensors", problems, "save one adapter with PEFT's save_pretrained")
    return agreeing


def _most(counts: Counter[str] | Counter[str | None]) -> str:
    """The most frequent, the longest of several."""
    found = max(counts.items(), key=lambda item: (item[1], len(item[0] or "")), default=("", 0))[0]
    return found or ""


def _to_tensor(name: _Name) -> AdapterTensor:
    return adapter_tensor(name.module, name.part, source_of(name.sent), name.trained_module)


def _report_dialect(names: list[_Name], config: dict[str, object] | None, report: Report) -> None:
    """The one finding that says whose way of writing this is."""
    other = [name for name in names if not name.is_exact]
    trainer = "Unsloth, on PEFT" if config is not None and _unsloth_fields(config) else "PEFT"
    if other:
        message = (
            f"{len(other)} tensors are not named as PEFT names them, and were read as meant "
            f"({shown(other[0].module)}, {other[0].part}); PEFT itself would not load them"
        )
        report.warn("dialect", shown(other[0].sent.name), message, EXPORT_FIX)
    else:
        report.passed("dialect", f"written by {trainer}")


def _unsloth_fields(config: dict[str, object]) -> list[str]:
    mapping = config.get("auto_mapping")
    in_mapping = [key for key in mapping if key.startswith("unsloth")] if isinstance(mapping, dict) else []
    return [key for key in config if key.startswith("unsloth_")] + in_mapping


def _without_extras(config: dict[str, object] | None) -> dict[str, object] | None:
    """The config without fields that other trainers and PEFT's first versions write, which say nothing of the adapter."""
    if config is None:
        return None
    return {
        key: value
        for key, value in config.items()
        if not (isinstance(value, bool | str) and (key.startswith("unsloth_") or key in _OLD_FIELDS))
    }
