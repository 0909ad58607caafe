"""Which tensor of an upload belongs to which projection of the base. Reads names and shapes, never values.

PEFT saves `base_model.model.<module>.lora_A.weight` [r, in] and `….lora_B.weight` [out, r]. Two dialects are taken as well, with a
warning: without the prefix throughout, and with the adapter's name `default` before `weight`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from graftwork_adapters.base_spec import BaseSpec, Site
from graftwork_adapters.peft_config import PeftConfig
from graftwork_adapters.publish_job import Limits
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import SafetensorsHeader, TensorEntry, shown

Part = Literal["A", "B"]

_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(?P<adapter>\.default)?\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
SERVED_DTYPES = ("F32", "F16", "BF16")
_UNSERVED_PARTS = (
    (".lora_magnitude_vector", "a magnitude of DoRA, which is not served yet"),
    (".lora_embedding_", "LoRA on an embedding, which is not served yet"),
    (".lora_B.bias", "a bias of B (lora_bias), which is not served yet"),
    (".modules_to_save.", "a module saved whole (modules_to_save), which is not served yet"),
    ("embed_tokens.", "a whole embedding, which is not served yet"),
    ("lm_head.", "a whole output head, which is not served yet"),
    (".bias", "a trained bias, which is not served yet"),
)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What an adapter does to one projection: ``scale`` · B · A is added to its weight. A is [rank, in], B is [out, rank]."""

    site: Site
    a: TensorEntry
    b: TensorEntry
    rank: int
    alpha: float
    use_rslora: bool

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def match_tensors(
    header: SafetensorsHeader, config: PeftConfig | None, spec: BaseSpec, limits: Limits, report: Report
) -> tuple[LoraPair, ...]:
    """Pair the tensors and hold them against the base and the config, in the base's site order.

    Every tensor that would not be applied is a failing finding; only if there is none is the result complete. Without a config
    the names and shapes are checked all the same and nothing is returned.
    """
    modules = _group_by_module(header, report)
    sites = {site.module: site for site in spec.sites}
    pairs: list[LoraPair] = []
    for module in sorted(modules):
        site = sites.get(module)
        if site is None:
            report.fail_each("modules", [(shown(entry.name), _why_no_site(module, spec)) for entry in modules[module].values()])
            continue
        a, b = modules[module].get("A"), modules[module].get("B")
        if a is None or b is None:
            found, missing = ("B", "A") if a is None else ("A", "B")
            report.fail("tensors", shown(f"{module}.lora_{missing}.weight"), f"is missing, its lora_{found} is there")
            continue
        if _check_shapes(site, a, b, limits, report) and config is not None and _check_rank(site, a, config, report):
            pairs.append(LoraPair(site, a, b, a.shape[0], config.alpha_of(module), config.use_rslora))
    if config is not None:
        _check_selection(set(modules), config, spec, report)
    return tuple(sorted(pairs, key=lambda pair: pair.site.index))


def _group_by_module(header: SafetensorsHeader, report: Report) -> dict[str, dict[Part, TensorEntry]]:
    """Tensors by module path and part; a finding for each that is neither A nor B of anything."""
    modules: defaultdict[str, dict[Part, TensorEntry]] = defaultdict(dict)
    unknown: list[tuple[str | None, str]] = []
    has_prefix = any(entry.name.startswith(_PREFIX) for entry in header.tensors)
    dialect: list[str] = []
    for entry in header.tensors:
        match = _NAME.fullmatch(entry.name.removeprefix(_PREFIX))
        if match is None:
            unknown.append((shown(entry.name), f"is {_describe(entry.name)}"))
        elif has_prefix and not entry.name.startswith(_PREFIX):
            unknown.append((shown(entry.name), f"has no prefix {_PREFIX} while other tensors have it, so what it means is unclear"))
        else:
            part: Part = "A" if match["part"] == "A" else "B"
            other = modules[match["module"]].setdefault(part, entry)
            if other is not entry:
                unknown.append((shown(entry.name), f"means the same tensor as {shown(other.name)}"))
            if match["adapter"] or not has_prefix:
                dialect.append(entry.name)
    report.fail_each("tensors", unknown, "save the adapter with PEFT's save_pretrained")
    if dialect:
        message = (
            f"{len(dialect)} tensors are not named as PEFT names them, and were read as meant; PEFT itself would not load them"
        )
        report.warn("tensors", shown(dialect[0]), message)
    if not modules:
        report.fail("tensors", None, "the weights hold no LoRA tensors, so nothing would be applied")
    return modules


def _describe(name: str) -> str:
    return next((what for part, what in _UNSERVED_PARTS if part in name), "not a lora_A or lora_B weight, and would not be applied")


def _why_no_site(module: str, spec: BaseSpec) -> str:
    if module in spec.module_names:
        return f"adapts {shown(module)}, which the base has, but only the decoder's projections are served yet"
    layer = _LAYER.match(module)
    if layer and int(layer[1]) >= spec.num_layers:
        return f"adapts layer {layer[1]}; the base has {spec.num_layers} layers, numbered from 0"
    return f"adapts {shown(module)}, which the base does not have"


def _check_shapes(site: Site, a: TensorEntry, b: TensorEntry, limits: Limits, report: Report) -> bool:
    """True if both tensors fit the projection, each other and the limits."""
    problems: list[tuple[str | None, str]] = [
        (shown(entry.name), f"has dtype {entry.dtype}; served are {', '.join(SERVED_DTYPES)}")
        for entry in (a, b)
        if entry.dtype not in SERVED_DTYPES
    ]
    if len(a.shape) != 2 or a.shape[1] != site.in_features:
        problems.append((shown(a.name), f"has shape {list(a.shape)}; {site.module} needs [rank, {site.in_features}]"))
    if len(b.shape) != 2 or b.shape[0] != site.out_features:
        problems.append((shown(b.name), f"has shape {list(b.shape)}; {site.module} needs [{site.out_features}, rank]"))
    if len(a.shape) == len(b.shape) == 2:
        rank = a.shape[0]
        if rank != b.shape[1]:
            problems.append(
                (shown(b.name), f"has rank {b.shape[1]} (shape {list(b.shape)}), its lora_A rank {rank} ({list(a.shape)})")
            )
        if rank > limits.max_rank:
            problems.append((shown(a.name), f"has rank {rank}, more than the {limits.max_rank} allowed"))
        if rank == 0:
            problems.append((shown(a.name), "has rank 0"))
    report.fail_each("shapes", problems)
    return not problems


def _check_rank(site: Site, a: TensorEntry, config: PeftConfig, report: Report) -> bool:
    expected = config.rank_of(site.module)
    if a.shape[0] == expected:
        return True
    message = f"has rank {a.shape[0]}; adapter_config.json (r and rank_pattern) gives {site.module} rank {expected}"
    report.fail("ranks", shown(a.name), message)
    return False


def _check_selection(adapted: set[str], config: PeftConfig, spec: BaseSpec, report: Report) -> None:
    """Hold the modules that have tensors against those the config selects."""
    known = {site.module for site in spec.sites}
    unselected = [module for module in sorted(adapted & known) if not config.selects(module)]
    problems: list[tuple[str | None, str]] = [
        (shown(module), "has tensors, but the config does not select it: PEFT would not apply them") for module in unselected
    ]
    fix = "make target_modules, layers_to_transform and exclude_modules select it, or remove its tensors"
    report.fail_each("modules", problems, fix)
    candidates = known | {"lm_head", "model.embed_tokens"}
    absent = [module for module in sorted(candidates - adapted) if config.selects(module)]
    if absent:
        names = ", ".join(absent[:5]) + (", …" if len(absent) > 5 else "")
        message = f"{len(absent)} modules that the config selects have no tensors and stay as in the base: {names}"
        report.warn("modules", "target_modules", message)
