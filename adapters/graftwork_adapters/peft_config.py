"""PEFT's `adapter_config.json`, read as what it does to the output. Fields we do not serve are refused, never ignored.

Patterns and module selection follow PEFT's own matching (`peft.utils.other.get_pattern_key`,
`peft.tuners.tuners_utils.check_target_module_exists`, `peft.utils.other._set_trainable`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from graftwork_adapters.config_fields import FieldReader, refuse_unserved
from graftwork_adapters.errors import PatternTooSlow
from graftwork_adapters.pattern_budget import Pattern, PatternBudget
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown

EMBEDDING_MODULE = "model.embed_tokens"
HEAD_MODULE = "lm_head"

BIAS_KINDS = ("none", "all", "lora_only")

_DEFAULT_TARGETS = ("q_proj", "v_proj")  # PEFT's own for the llama, qwen2 and qwen3 families
_ALL_LINEAR = "all-linear"
_VOCABULARY_NAMES = ("embed_tokens", "lm_head")

# PEFT's own expressions around what a config holds.
_PATTERN_KEY = r"(.*\.)?({})$"
_LAYERS_PATTERN = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
_SAVED_MODULE = r"(^|.*\.){}($|\..*)"
_LITERAL = re.compile(r"\w+(\.\w+)*")  # a name of a module: its dots are dots, though PEFT takes it for an expression
_ANY_LAYER = Pattern("layers_to_transform", r".*?\.[^.]*\.(?P<idx>\d+)\.")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The part of `adapter_config.json` that decides the output.

    ``token_indices`` are the trainable tokens by the name of the module, as the config has it, in the config's order. Patterns run
    within ``budget``: what matches modules may raise `PatternTooSlow`. ``saved_patterns`` are those of ``modules_to_save`` that are
    more than names.
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
    bias: str
    lora_bias: bool
    use_dora: bool
    has_velora: bool
    modules_to_save: frozenset[str]
    saved_patterns: tuple[Pattern, ...]
    token_indices: tuple[tuple[str, tuple[int, ...]], ...]
    invocation_token_ids: tuple[int, ...]
    ensure_weight_tying: bool
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
        if self._is_in_saved(module):
            return False
        if isinstance(self.target_modules, Pattern):
            if self.target_modules.regex.lower() == _ALL_LINEAR:
                return module not in (HEAD_MODULE, EMBEDDING_MODULE)
            return self.budget.first_match([self.target_modules], module, full=True) is not None
        if module in self.target_modules:
            return True
        return _is_listed(self.target_modules, module) and self._selects_layer(module)

    def saves(self, module: str) -> bool:
        """True if PEFT would train ``module`` whole: it or a module around it ends like a name in ``modules_to_save``."""
        parts = module.split(".")
        around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return any(path[start:] in self.modules_to_save for path in around for start in range(len(path) + 1))

    @property
    def ties_saved(self) -> bool:
        """True if PEFT makes one of the embedding and the head of a tied base where both are saved whole."""
        return self.ensure_weight_tying and any(name.rpartition(".")[2] in _VOCABULARY_NAMES for name in self.modules_to_save)

    def ties_targets(self) -> bool:
        """True if PEFT gives the embedding and the head of a tied base one and the same LoRA."""
        if not self.ensure_weight_tying or self.ties_saved:
            return False
        if isinstance(self.target_modules, Pattern):
            targets = self.target_modules
            return any(self.budget.first_match([targets], name, full=True) for name in _VOCABULARY_NAMES)
        return any(name.rpartition(".")[2] in _VOCABULARY_NAMES for name in self.target_modules)

    def _is_in_saved(self, module: str) -> bool:
        """True if some part of the path, from one dot to another, is named in ``modules_to_save``."""
        parts = module.split(".")
        runs = (".".join(parts[start:end]) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1))
        if self.modules_to_save and any(run in self.modules_to_save for run in runs):
            return True
        return bool(self.saved_patterns) and self.budget.first_match(self.saved_patterns, module) is not None

    def _selects_layer(self, module: str) -> bool:
        if not self.layers_to_transform:
            return True
        found = self.budget.first_match(self.layers_pattern or [_ANY_LAYER], module)
        return found is not None and int(found[1]["idx"]) in self.layers_to_transform

    def _first_match(self, patterns: tuple[tuple[Pattern, _T], ...], module: str, default: _T) -> _T:
        found = self.budget.first_match([pattern for pattern, _ in patterns], module)
        return default if found is None else patterns[found[0]][1]


def read_peft_config(raw: Mapping[str, object], report: Report, pattern_seconds: float) -> PeftConfig | None:
    """Read a config's fields, adding a finding for every one that is malformed or not served.

    Returns what the served fields say, so that the tensors can be checked against it even where another field was refused; None
    where they say nothing usable.
    """
    refuse_unserved(raw, report)
    reader = FieldReader(raw, report)
    saved = reader.strings("modules_to_save", raw.get("modules_to_save"))
    config = PeftConfig(
        r=reader.rank("r", raw.get("r", 8)),
        lora_alpha=reader.number("lora_alpha", raw.get("lora_alpha", 8)),
        use_rslora=reader.flag("use_rslora"),
        rank_pattern=tuple((key, reader.rank(key.field, value)) for key, value in reader.pattern("rank_pattern", _PATTERN_KEY)),
        alpha_pattern=tuple((key, reader.number(key.field, value)) for key, value in reader.pattern("alpha_pattern", _PATTERN_KEY)),
        target_modules=reader.modules("target_modules", _DEFAULT_TARGETS),
        exclude_modules=reader.modules("exclude_modules", ()),
        layers_to_transform=reader.layers("layers_to_transform"),
        layers_pattern=reader.layer_patterns("layers_pattern", _LAYERS_PATTERN),
        base_name=reader.text("base_model_name_or_path"),
        bias=reader.choice("bias", BIAS_KINDS),
        lora_bias=reader.flag("lora_bias"),
        use_dora=reader.flag("use_dora"),
        has_velora=bool(raw.get("velora_config")),
        modules_to_save=frozenset(saved),
        saved_patterns=tuple(
            Pattern(f"modules_to_save[{shown(name)}]", _SAVED_MODULE.format(name)) for name in saved if not _LITERAL.fullmatch(name)
        ),
        token_indices=_read_token_indices(raw, reader),
        invocation_token_ids=_read_invocation(raw, reader),
        ensure_weight_tying=reader.flag("ensure_weight_tying"),
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
    report.passed("config", "adapter_config.json is readable", "adapter_config.json")
    return config


def report_slow_pattern(error: PatternTooSlow, report: Report) -> None:
    """The finding that ``error`` is."""
    fix = "list the modules by name, or write an expression in which nothing repeated is repeated again"
    report.fail("config", error.field, str(error), fix)


def _is_listed(names: frozenset[str], module: str) -> bool:
    """True if a name is ``module`` or what follows one of its dots."""
    parts = module.split(".")
    return any(".".join(parts[start:]) in names for start in range(len(parts)))


def _read_token_indices(raw: Mapping[str, object], reader: FieldReader) -> tuple[tuple[str, tuple[int, ...]], ...]:
    value, name = raw.get("trainable_token_indices"), "trainable_token_indices"
    if value is None or value == [] or value == {}:
        return ()
    found = value if isinstance(value, dict) else {EMBEDDING_MODULE: value}
    indices = tuple((module, reader.token_ids(f"{name}[{shown(module)}]", ids)) for module, ids in found.items())
    for module, ids in indices:
        if len(set(ids)) != len(ids):
            reader.fail(f"{name}[{shown(module)}]", "lists a token more than once, so that its row is not defined", "list it once")
    return indices


def _read_invocation(raw: Mapping[str, object], reader: FieldReader) -> tuple[int, ...]:
    value, name = raw.get("alora_invocation_tokens"), "alora_invocation_tokens"
    if value is None:
        return ()
    ids = reader.token_ids(name, value)
    if not ids and isinstance(value, list) and not value:
        reader.fail(name, "is empty, so the adapter has no place where it begins", "set it to the tokens trained with, or to null")
    return ids


def _check_combinations(config: PeftConfig, raw: Mapping[str, object], reader: FieldReader) -> None:
    """What PEFT itself refuses to load, or serves as something else than it says."""
    if isinstance(config.target_modules, Pattern):
        for name in ("layers_to_transform", "layers_pattern"):
            if raw.get(name) is not None:
                reader.fail(name, "cannot be used when target_modules is a string", "set it to null")
    elif config.layers_pattern and raw.get("layers_to_transform") is None:
        reader.fail("layers_pattern", "needs layers_to_transform", "set both or neither")
    if config.lora_bias and config.use_dora:
        reader.fail("lora_bias", "cannot be used with use_dora: PEFT does not load such an adapter", "train with one of them")
    variants = [
        name
        for name, is_set in (
            ("use_dora", config.use_dora),
            ("alora_invocation_tokens", bool(config.invocation_token_ids)),
            ("velora_config", config.has_velora),
            ("init_lora_weights", raw.get("init_lora_weights") == "mica"),
        )
        if is_set
    ]
    if len(variants) > 1:
        message = f"cannot be used with {variants[0]}: PEFT does not load such an adapter"
        reader.fail(variants[1], message, "train with one of them")
    if config.invocation_token_ids:
        _check_activated(config, raw, reader)


def _check_activated(config: PeftConfig, raw: Mapping[str, object], reader: FieldReader) -> None:
    """An activated adapter begins in the middle of a prompt; what PEFT applies from the first token on cannot be served."""
    if raw.get("task_type") != "CAUSAL_LM":
        message = "must be CAUSAL_LM with alora_invocation_tokens: without it PEFT never activates the adapter"
        reader.fail("task_type", message, "set it to CAUSAL_LM")
    for name, is_set in (
        ("modules_to_save", bool(config.modules_to_save)),
        ("trainable_token_indices", bool(config.token_indices)),
        ("bias", config.bias != "none"),
    ):
        if is_set:
            message = "cannot be used with alora_invocation_tokens: it would act on tokens before the invocation as well"
            reader.fail(name, message, "train the activated adapter without it")


def _check_patterns(config: PeftConfig, reader: FieldReader) -> None:
    """A finding for every pattern that is not a regular expression. Raises `PatternTooSlow`."""
    modules = [value for value in (config.target_modules, config.exclude_modules) if isinstance(value, Pattern)]
    keys = [key for key, _ in (*config.rank_pattern, *config.alpha_pattern)]
    for pattern in (*modules, *keys, *config.layers_pattern, *config.saved_patterns):
        try:
            config.budget.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            message = f"is not a regular expression: {shown(str(error))}"
            reader.fail(pattern.field, message, "write it as Python's re module reads it, or list modules by name")
