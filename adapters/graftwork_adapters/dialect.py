"""What every dialect's reader takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.experts import is_expert
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.tensor_source import AdapterTensor, TensorSource
from graftwork_adapters.upload_shards import SentTensor

EXPORT_FIX = "export the adapter to PEFT's form with the trainer's own converter, and upload that"


@dataclass(frozen=True, slots=True)
class Sent:
    """An upload as it was sent. ``config`` is None where it could not be read, which is a failing finding already.

    ``outputs`` holds the rows of each of the base's projections by module path.
    """

    tensors: Sequence[SentTensor]
    config: dict[str, object] | None
    spec: BaseSpec
    outputs: Mapping[str, int]


@dataclass(slots=True)
class Read:
    """An upload in PEFT's terms, as far as it was understood; every tensor that is not in ``tensors`` has a failing finding."""

    config: dict[str, object] | None
    tensors: list[AdapterTensor] = field(default_factory=list)


Reader = Callable[[Sent, Report], Read]


def source_of(sent: SentTensor, *, transposed: bool = False, rows: tuple[range, ...] | None = None) -> TensorSource:
    """A sent tensor's bytes, turned as asked."""
    return TensorSource(sent.path, sent.entry, sent.name, transposed, rows)


def adapter_tensor(module: str, part: str, source: TensorSource, trained_module: str | None = None) -> AdapterTensor:
    """A tensor of the adapter; a LoRA factor of an expert is of part "expert"."""
    return AdapterTensor(module, "expert" if is_expert(module) else part, source, trained_module or module)


def refuse_unknown(names: Sequence[str], dialect: str, report: Report) -> None:
    """A finding for each tensor whose name means nothing in the dialect that the others are in."""
    problems: list[tuple[str | None, str]] = [
        (shown(name), f"is not a name that {dialect} gives to a tensor of an adapter, and would not be applied") for name in names
    ]
    report.fail_each("tensors", problems, EXPORT_FIX)


def positive_int(config: dict[str, object], name: str, report: Report) -> int | None:
    """A field that must be a positive whole number, or None after a finding."""
    value = config.get(name)
    if type(value) is int and 0 < value < 1 << 31:
        return value
    report.fail("config", shown(name), f"is {shown(str(value))}; it must be a positive whole number", EXPORT_FIX)
    return None


def finite_number(config: dict[str, object], name: str, report: Report) -> float | None:
    """A field that must be a number, or None after a finding."""
    value = config.get(name)
    if (type(value) is int or isinstance(value, float)) and abs(value) < 1e30:
        return float(value)
    report.fail("config", shown(name), f"is {shown(str(value))}; it must be a number", EXPORT_FIX)
    return None
