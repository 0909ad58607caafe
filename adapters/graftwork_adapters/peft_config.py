"""PEFT's `adapter_config.json`, read as what it does to the output. Fields we do not serve are refused, never ignored.

Every field of PEFT's `LoraConfig` stands in exactly one of the tables below (a test walks them); a field in none of them is refused
when it is set. Patterns and module selection follow PEFT's own matching (`peft.utils.other.get_pattern_key`,
`peft.tuners.tuners_utils.check_target_module_exists`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from graftwork_adapters.errors import PatternTooSlow
from graftwork_adapters.pattern_budget import Pattern, PatternBudget
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown

SERVED_FIELDS = frozenset(
    {
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "base_model_name_or_path",
    }
)

IGNORED_FIELDS = MappingProxyType(
    {
        "auto_mapping": "tells PEFT which Python class to load the base with",
        "peft_version": "names the writer",
        "revision": "names the base's revision; the tensors' shapes are checked instead",
        "inference_mode": "says whether training goes on",
        "lora_dropout": "acts in training only",
        "runtime_config": "says where PEFT computes",
        "eva_config": "says how A began",
        "qalora_group_size": "is read only with use_qalora, which is refused",
    }
)
"""Fields that cannot change the output, and why."""

REFUSED_UNLESS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM",),
        "fan_in_fan_out": (False,),
        "bias": ("none",),
        "modules_to_save": ([],),
        "megatron_config": ({},),
        "megatron_core": ("megatron.core",),
        "trainable_token_indices": ([], {}),
        "loftq_config": ({},),
        "corda_config": ({},),
        "lora_ga_config": ({},),
        "use_dora": (False,),
        "velora_config": ({},),
        "alora_invocation_tokens": (),
        "use_qalora": (False,),
        "monteclora_config": ({},),
        "layer_replication": ([],),
        "lora_bias": (False,),
        "target_parameters": ([],),
        "use_bdlora": (False,),
        "arrow_config": ({},),
        "kasa_config": ({},),
        "ensure_weight_tying": (False,),
    }
)
"""Fields not served, and the values beside null at which they ask for nothing."""

_HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")

_DEFAULT_TARGETS = ("q_proj", "v_proj")  # PEFT's own for the llama, qwen2 and qwen3 families
_ALL_LINEAR = "all-linear"
_MAX_ALPHA = 1e30

# PEFT's own expressions around what a config holds.
_PATTERN_KEY = r"(.*\.)?({})$"
_LAYERS_PATTERN = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
_ANY_LAYER = Pattern("layers_to_transform", r".*?\.[^.]*\.(?P<idx>\d+)\.")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The part of `adapter_config.json` that decides the output.

    Patterns run within ``budget``: what matches modules may raise `PatternTooSlow`.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[Pattern, int], ...]
    alpha_pattern: tuple[tuple[Pattern, float], ...]
    target_modules: frozenset[str] | Pattern
    exclude_modules: frozenset[str] | Pattern
    layers_to_transform: frozenset[int]
    layers_pattern: tuple[Pattern, ...]
    base_name: str | None
    budget: PatternBudget = field(compare=False, repr=False)

    def rank_of(self, module: str) -> int:
        """The rank PEFT gives ``module``: that of the first pattern that matches."""
        return self._first_match(self.rank_pattern, module, self.r)

    def alpha_of(self, module: str) -> float:
        """The alpha PEFT gives ``module``."""
        return self._first_match(self.alpha_pattern, module, self.lora_alpha)

    def selects(self, module: str) -> bool:
        """True if PEFT would adapt ``module`` on account of this config alone."""
        if isinstance(self.exclude_modules, Pattern):
            if self.exclude_modules.regex and self.budget.first_match([self.exclude_modules], module, full=True):
                return False
        elif _is_listed(self.exclude_modules, module):
            return False
        if isinstance(self.target_modules, Pattern):
            if self.target_modules.regex.lower() == _ALL_LINEAR:
                return module not in ("lm_head", "model.embed_tokens")
            return self.budget.first_match([self.target_modules], module, full=True) is not None
        if module in self.target_modules:
            return True
        return _is_listed(self.target_modules, module) and self._selects_layer(module)

    def _selects_layer(self, module: str) -> bool:
        if not self.layers_to_transform:
            return True
        found = self.budget.first_match(self.layers_pattern or [_ANY_LAYER], module)
        return found is not None and int(found[1]["idx"]) in self.layers_to_transform

    def _first_match(self, patterns: tuple[tuple[Pattern, _T], ...], module: str, default: _T) -> _T:
        found = self.budget.first_match([pattern for pattern, _ in patterns], module)
        return default if found is None else patterns[found[0]][1]


def read_peft_config(path: Path, report: Report, max_bytes: int, pattern_seconds: float) -> PeftConfig | None:
    """Read ``path``, adding a finding for every field that is malformed or not served.

    Returns what the served fields say, so that the tensors can be checked against it even where another field was refused; None
    where they say nothing usable.
    """
    raw = _read_object(path, report, max_bytes)
    if raw is None:
        return None
    _refuse_unserved(raw, report)
    reader = _FieldReader(raw, report)
    config = PeftConfig(
        r=reader.rank("r", raw.get("r", 8)),
        lora_alpha=reader.number("lora_alpha", raw.get("lora_alpha", 8)),
        use_rslora=reader.flag("use_rslora"),
        rank_pattern=tuple((key, reader.rank(key.field, value)) for key, value in reader.pattern("rank_pattern")),
        alpha_pattern=tuple((key, reader.number(key.field, value)) for key, value in reader.pattern("alpha_pattern")),
        target_modules=reader.modules("target_modules", _DEFAULT_TARGETS),
        exclude_modules=reader.modules("exclude_modules", ()),
        layers_to_transform=reader.layers("layers_to_transform"),
        layers_pattern=reader.layer_patterns("layers_pattern"),
        base_name=reader.text("base_model_name_or_path"),
        budget=PatternBudget(pattern_seconds),
    )
    _check_combinations(config, raw, reader)
    try:
        _check_patterns(config, reader)
    except PatternTooSlow as error:
        report_slow_pattern(error, report)
        return None
    if reader.failed:
        return None
    report.passed("config", "adapter_config.json is readable", path.name)
    return config


def report_slow_pattern(error: PatternTooSlow, report: Report) -> None:
    """The finding that ``error`` is."""
    fix = "list the modules by name, or write an expression in which nothing repeated is repeated again"
    report.fail("config", error.field, str(error), fix)


def _is_listed(names: frozenset[str], module: str) -> bool:
    """True if a name is ``module`` or what follows one of its dots."""
    parts = module.split(".")
    return any(".".join(parts[start:]) in names for start in range(len(parts)))


def _read_object(path: Path, report: Report, max_bytes: int) -> dict[str, object] | None:
    if path.stat().st_size > max_bytes:
        report.fail("config", path.name, f"has {path.stat().st_size} bytes, more than the {max_bytes} allowed")
        return None
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        report.fail("config", path.name, f"is not valid JSON: {shown(str(error))}", "save the adapter again with save_pretrained")
        return None
    if not isinstance(raw, dict):
        report.fail("config", path.name, "is not a JSON object", "save the adapter again with save_pretrained")
        return None
    return raw


def _refuse_unserved(raw: dict[str, object], report: Report) -> None:
    """A finding for every field that is set and not served; afterwards nothing that could change the output is left unread."""
    if raw.get("peft_type") is None:
        report.fail("config", "peft_type", "is missing; only LORA is served")
    for name, value in raw.items():
        if name in SERVED_FIELDS or name in IGNORED_FIELDS or value is None:
            continue
        if name in REFUSED_UNLESS:
            neutral = REFUSED_UNLESS[name]
            if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
                wanted = " or ".join(json.dumps(allowed) for allowed in (*neutral, None))
                report.fail("config", name, f"is {_brief(value)}; served is {wanted}", "train or convert the adapter without it")
        elif not (value is False or (isinstance(value, str | list | dict) and not value)):
            report.fail(
                "config", shown(name), f"is {_brief(value)}, and this field is not known here", "remove it if it has no effect"
            )
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        fix = "save it with path_initial_model_for_weight_conversion, which turns it into plain LoRA"
        report.fail("config", "init_lora_weights", f"is {_brief(init)}, which changes the base's weights as well", fix)
    elif not (init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in _HARMLESS_INITS)):
        report.fail("config", "init_lora_weights", f"is {_brief(init)}, and this initialisation is not known here")


def _check_combinations(config: PeftConfig, raw: dict[str, object], reader: _FieldReader) -> None:
    """What PEFT itself refuses to load."""
    if isinstance(config.target_modules, Pattern):
        for name in ("layers_to_transform", "layers_pattern"):
            if raw.get(name) is not None:
                reader.fail(name, "cannot be used when target_modules is a string")
    elif config.layers_pattern and raw.get("layers_to_transform") is None:
        reader.fail("layers_pattern", "needs layers_to_transform")


def _check_patterns(config: PeftConfig, reader: _FieldReader) -> None:
    """A finding for every pattern that is not a regular expression. Raises `PatternTooSlow`."""
    modules = [value for value in (config.target_modules, config.exclude_modules) if isinstance(value, Pattern)]
    keys = [key for key, _ in (*config.rank_pattern, *config.alpha_pattern)]
    for pattern in (*modules, *keys, *config.layers_pattern):
        try:
            config.budget.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            reader.fail(pattern.field, f"is not a regular expression: {shown(str(error))}")


def _brief(value: object) -> str:
    return shown(json.dumps(value))


class _FieldReader:
    """Reads typed fields out of a config; what is malformed becomes a finding and a harmless stand-in."""

    def __init__(self, raw: dict[str, object], report: Report) -> None:
        self._raw = raw
        self._report = report
        self.failed = False

    def fail(self, name: str, message: str) -> None:
        self._report.fail("config", name, message)
        self.failed = True

    def rank(self, name: str, value: object) -> int:
        if type(value) is int and 0 < value < 1 << 31:
            return value
        self.fail(name, f"is {_brief(value)}, not a positive whole number")
        return 1

    def number(self, name: str, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_ALPHA:
            return float(value)
        self.fail(name, f"is {_brief(value)}, not a number between -{_MAX_ALPHA:g} and {_MAX_ALPHA:g}")
        return 1.0

    def flag(self, name: str) -> bool:
        value = self._raw.get(name, False)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.fail(name, f"is {_brief(value)}, not true or false")
        return False

    def text(self, name: str) -> str | None:
        value = self._raw.get(name)
        if value is None or isinstance(value, str):
            return value
        self.fail(name, f"is {_brief(value)}, not a string")
        return None

    def pattern(self, name: str) -> list[tuple[Pattern, object]]:
        value = self._raw.get(name)
        if value is None:
            return []
        if isinstance(value, dict):
            return [(Pattern(f"{name}[{shown(key)}]", _PATTERN_KEY.format(key)), item) for key, item in value.items()]
        self.fail(name, f"is {_brief(value)}, not an object")
        return []

    def modules(self, name: str, default: tuple[str, ...]) -> frozenset[str] | Pattern:
        """A list of names, or, where PEFT takes it for one, a regular expression."""
        value = self._raw.get(name)
        if value is None:
            return frozenset(default)
        if isinstance(value, str):
            return Pattern(name, value)
        return frozenset(self._strings(name, value))

    def layer_patterns(self, name: str) -> tuple[Pattern, ...]:
        value = self._raw.get(name)
        if not value:
            return ()
        names = (value,) if isinstance(value, str) else self._strings(name, value)
        return tuple(Pattern(f"{name}[{shown(item)}]", _LAYERS_PATTERN.format(item)) for item in names)

    def layers(self, name: str) -> frozenset[int]:
        value = self._raw.get(name)
        if value is None:
            return frozenset()
        items = value if isinstance(value, list) else [value]
        if all(type(item) is int for item in items):
            return frozenset(items)
        self.fail(name, f"is {_brief(value)}, not a layer number or a list of them")
        return frozenset()

    def _strings(self, name: str, value: object) -> tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self.fail(name, f"is {_brief(value)}, not a string or a list of strings")
        return ()
