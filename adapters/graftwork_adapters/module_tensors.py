"""An upload's tensors by the module that they belong to, and what all checks of a module share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.base_weights import BaseWeights, is_copy
from graftwork_adapters.peft_config import PeftConfig
from graftwork_adapters.publish_job import Limits
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.tensor_source import AdapterTensor, TensorSource
from graftwork_adapters.tensor_values import SERVED_DTYPES

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_SHAPE_FIX = "make sure that the adapter was trained on this base"
_RANK_FIX = "train with a rank that the server allows, and save A and B together"
UNUSED_FIX = "remove it, or save the adapter again with PEFT's save_pretrained"
_COPY_FIX = "name the module in modules_to_save if it was trained, or make sure that the adapter was trained on this base"


@dataclass(frozen=True)
class ShapeChecks:
    """What can be said of an upload's tensors without its config, and where the findings go."""

    spec: BaseSpec
    limits: Limits
    report: Report

    def has_shape(self, source: TensorSource, shape: Sequence[int | str], module: str) -> bool:
        """True if ``source`` is of ``shape``, where names stand for sizes left open, and of a type that is read.

        Another shape is a finding; of another type and of an empty tensor there is one already (`upload_tensors.read_upload`).
        """
        fits = len(source.shape) == len(shape) and all(
            isinstance(wanted, str) or size == wanted for size, wanted in zip(source.shape, shape, strict=True)
        )
        if not fits and 0 not in source.shape:
            wanted = f"[{', '.join(map(str, shape))}]"
            message = f"has shape {list(source.shape)}; {module} needs {wanted}"
            self.report.fail("shapes", shown(source.sent_as), message, _SHAPE_FIX)
        return fits and source.dtype in SERVED_DTYPES

    def have_one_rank(self, a: TensorSource, b: TensorSource, in_features: int, out_features: int, module: str) -> bool:
        """True if A and B fit ``module`` and each other, with a rank that the limits allow."""
        fits = self.has_shape(a, ("rank", in_features), module)
        fits = self.has_shape(b, (out_features, "rank"), module) and fits
        if len(a.shape) != 2 or len(b.shape) != 2:
            return False
        rank = a.shape[0]
        problems: list[tuple[str | None, str]] = []
        if rank != b.shape[1] and 0 not in (*a.shape, *b.shape):
            message = f"has rank {b.shape[1]} (shape {list(b.shape)}), its lora_A rank {rank} ({list(a.shape)})"
            problems.append((shown(b.sent_as), message))
        if rank > self.limits.max_rank:
            problems.append((shown(a.sent_as), f"has rank {rank}, more than the {self.limits.max_rank} allowed"))
        self.report.fail_each("shapes", problems, _RANK_FIX)
        return fits and rank > 0 and not problems


@dataclass(frozen=True)
class Matching(ShapeChecks):
    """What an upload's tensors are held against. ``left_out`` collects copies of the base's own."""

    config: PeftConfig
    base: BaseWeights
    left_out: list[str] = field(default_factory=list)

    def leave_out_copy(self, tensor: AdapterTensor, name: str) -> None:
        """Leave ``tensor`` out if it is the base's own tensor ``name``; else a finding: it would change the base for everybody."""
        own = self.base.tensor(name)
        if tensor.source.dtype in SERVED_DTYPES and is_copy(tensor.source, own):
            self.left_out.append(tensor.source.sent_as)
            return
        what = "holds other values than" if tensor.source.shape == own.shape else f"has shape {list(tensor.source.shape)}, unlike"
        message = f"{what} the base's own {name}, and modules_to_save does not name it"
        self.report.fail("tensors", shown(tensor.source.sent_as), message, _COPY_FIX)


class ModuleTensors:
    """The tensors of one module, by part; each is taken by whoever knows what it does, and what nobody took is refused."""

    def __init__(self, module: str) -> None:
        self.module = module
        self._parts: dict[str, AdapterTensor] = {}

    def add(self, tensor: AdapterTensor) -> AdapterTensor:
        """The tensor that now stands for its part: ``tensor``, or one that was there before."""
        return self._parts.setdefault(tensor.part, tensor)

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    def take(self, part: str) -> AdapterTensor | None:
        """The tensor of ``part``, which is then no longer among the rest."""
        return self._parts.pop(part, None)

    @property
    def trained_module(self) -> str:
        """The module by the name that the config knows it by: of its A or B, or of its weight, where it has one."""
        parts = ("lora_A", "lora_embedding_A", "lora_B", "lora_embedding_B", "weight")
        named = [self._parts[part] for part in parts if part in self._parts]
        return named[0].trained_module if named else self.module

    def refuse_rest(self, report: Report) -> None:
        """A finding for every tensor that nobody took."""
        report.fail_each("tensors", [(shown(t.source.sent_as), f"is {_describe(t)}") for t in self._parts.values()], UNUSED_FIX)
        self._parts.clear()

    def refuse_all(self, check: str, message: str, fix: str, report: Report) -> None:
        """The same finding for every tensor of the module."""
        report.fail_each(check, [(shown(t.source.sent_as), message) for t in self._parts.values()], fix)
        self._parts.clear()


def group_by_module(tensors: Iterable[AdapterTensor], report: Report) -> dict[str, ModuleTensors]:
    """Tensors by module path; a finding for each that means the same as another."""
    modules: dict[str, ModuleTensors] = {}
    twice: list[tuple[str | None, str]] = []
    for tensor in tensors:
        other = modules.setdefault(tensor.module, ModuleTensors(tensor.module)).add(tensor)
        if other is not tensor:
            twice.append((shown(tensor.source.sent_as), f"means the same tensor as {shown(other.source.sent_as)}"))
    report.fail_each("tensors", twice, "send one of them")
    return modules


def why_no_place(module: str, spec: BaseSpec) -> str:
    """Why tensors of ``module`` cannot be applied."""
    if module.rpartition(".")[2] in ("score", "classifier", "classification_head", "v_head"):
        return f"belongs to {shown(module)}, a head that scores or classifies; served are heads that give logits of tokens"
    layer = _LAYER.match(module)
    if layer and int(layer[1]) >= spec.num_layers:
        return f"adapts layer {layer[1]}; the base has {spec.num_layers} layers, numbered from 0"
    return f"adapts {shown(module)}, which the base does not have"


_PARTS = {
    "lora_A": "half of a LoRA pair, which this module cannot have by that name",
    "lora_B": "half of a LoRA pair, which this module cannot have by that name",
    "lora_embedding_A": "half of an embedding's LoRA pair, and this module is no embedding",
    "lora_embedding_B": "half of an embedding's LoRA pair, and this module is no embedding",
    "lora_B.bias": "a bias of B, which this module's LoRA cannot have",
    "lora_magnitude_vector": "a magnitude of DoRA without a LoRA pair",
    "bias": "a bias of a module that has none in the base",
    "base_layer.bias": "the base's bias of a module that is not saved whole, or has none",
    "base_layer.weight": "a second weight of a module that is given whole",
    "weight": "a weight of a module that cannot be given whole",
    "training_state": "a state of training by a method that the config does not name",
    "token_rows": "rows of tokens, for a module that the config's trainable_token_indices do not name",
}


def _describe(tensor: AdapterTensor) -> str:
    return _PARTS.get(tensor.part, "nothing that is known here") + ", and would not be applied"
