"""What each field of PEFT's `adapter_config.json` is to us, and how a typed value is read out of one. Knows no modules.

Every field of PEFT's `LoraConfig` stands in exactly one of the tables below (a test walks them); a field in none of them is refused
when it is set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from graftwork_adapters.pattern_budget import Pattern
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.upload_json import brief

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
        "bias",
        "lora_bias",
        "use_dora",
        "modules_to_save",
        "trainable_token_indices",
        "alora_invocation_tokens",
        "ensure_weight_tying",
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
        "corda_config": "says how A and B began; is read only with init_lora_weights corda, which is refused",
        "lora_ga_config": "says how A and B began; is read only with init_lora_weights lora_ga, which is refused",
        "velora_config": "acts in the backward pass only",
        "qalora_group_size": "is read only with use_qalora, which is refused",
    }
)
"""Fields that cannot change the output, and why."""

REFUSED_UNLESS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM",),
        "fan_in_fan_out": (False,),
        "megatron_config": ({},),
        "megatron_core": ("megatron.core",),
        "loftq_config": ({},),
        "use_qalora": (False,),
        "monteclora_config": ({},),
        "layer_replication": ([],),
        "target_parameters": ([],),
        "use_bdlora": (False,),
        "arrow_config": ({},),
        "kasa_config": ({},),
    }
)
"""Fields not served, and the values beside null at which they ask for nothing."""

_PLAIN = "train a plain LoRA or DoRA adapter instead"
_CONVERT = "save it with path_initial_model_for_weight_conversion, which turns it into plain LoRA"
_MERGE = "extract a plain LoRA from the merged model, of which the base served here is the starting point"

_FIXES: Mapping[str, str] = MappingProxyType(
    {
        "peft_type": "train a LORA adapter, or convert this one with PEFT's own conversion to LoRA where it has one",
        "task_type": "save the adapter with task_type CAUSAL_LM; heads that classify or embed are not served",
        "fan_in_fan_out": "set it to false: the base's projections are ordinary linear layers, for which PEFT sets it so itself",
        "megatron_config": "convert the adapter to the base's Hugging Face layout and save it with PEFT",
        "megatron_core": "convert the adapter to the base's Hugging Face layout and save it with PEFT",
        "loftq_config": f"LoftQ changes the base's weights as well: {_MERGE}",
        "use_qalora": f"QALoRA pools the inputs of a quantised base: {_PLAIN}",
        "monteclora_config": f"MonteCLoRA draws weights at random: {_PLAIN}",
        "layer_replication": "merge the replicated layers into a base of their own and train on that",
        "target_parameters": (
            "name the module in target_modules where it is a linear layer; parameters of experts are served when MoE bases are"
        ),
        "use_bdlora": f"BD-LoRA's matrices are blocks of a diagonal: write them out as plain lora_A and lora_B, or {_PLAIN}",
        "arrow_config": "Arrow routes between adapters: upload the adapters that it routes between, each by itself",
        "kasa_config": f"KaSA changes the base's weights as well: {_MERGE}",
    }
)
"""What to do about each of them."""

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "use_qalora": "QALoRA, which is not served",
        "use_bdlora": "BD-LoRA, which is not served",
        "arrow_config": "Arrow, which is not served",
        "monteclora_config": "MonteCLoRA, which is not served",
        "kasa_config": "KaSA, which changes the base's weights as well",
        "loftq_config": "LoftQ, which changes the base's weights as well",
    }
)

_HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "velora"})
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")

_MAX_ALPHA = 1e30


def refuse_unserved(raw: Mapping[str, object], report: Report) -> None:
    """A finding for every field that is set and not served; afterwards nothing that could change the output is left unread."""
    if raw.get("peft_type") is None:
        report.fail("config", "peft_type", "is missing; only LORA is served", _FIXES["peft_type"])
    for name, value in raw.items():
        if name in SERVED_FIELDS or name in IGNORED_FIELDS or value is None:
            continue
        if name in REFUSED_UNLESS:
            neutral = REFUSED_UNLESS[name]
            if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
                wanted = " or ".join(json.dumps(allowed) for allowed in (*neutral, None))
                asked = f" and asks for {_NAMES[name]}" if name in _NAMES else ""
                report.fail("config", name, f"is {brief(value)}{asked}; served is {wanted}", _FIXES[name])
        elif not (value is False or (isinstance(value, str | list | dict) and not value)):
            report.fail(
                "config", shown(name), f"is {brief(value)}, and this field is not known here", "remove it if it has no effect"
            )
    _refuse_initialisation(raw.get("init_lora_weights"), report)


def _refuse_initialisation(init: object, report: Report) -> None:
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        fix = _MERGE if init.lower().startswith("loftq") else _CONVERT
        report.fail("config", "init_lora_weights", f"is {brief(init)}, which changes the base's weights as well", fix)
    elif not (init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in _HARMLESS_INITS)):
        message = f"is {brief(init)}, and this initialisation is not known here"
        report.fail("config", "init_lora_weights", message, "set it to true if the adapter leaves the base's weights as they were")


class FieldReader:
    """Reads typed fields out of a config; what is malformed becomes a finding and a harmless stand-in."""

    def __init__(self, raw: Mapping[str, object], report: Report) -> None:
        self._raw = raw
        self._report = report
        self.failed = False

    def fail(self, name: str, message: str, fix: str = "set it as PEFT's save_pretrained would") -> None:
        """A finding about the field ``name``."""
        self._report.fail("config", name, message, fix)
        self.failed = True

    def rank(self, name: str, value: object) -> int:
        """A rank."""
        if type(value) is int and 0 < value < 1 << 31:
            return value
        self.fail(name, f"is {brief(value)}, not a positive whole number")
        return 1

    def number(self, name: str, value: object) -> float:
        """A finite number."""
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_ALPHA:
            return float(value)
        self.fail(name, f"is {brief(value)}, not a number between -{_MAX_ALPHA:g} and {_MAX_ALPHA:g}")
        return 1.0

    def flag(self, name: str) -> bool:
        """True or false; null counts as false."""
        value = self._raw.get(name, False)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.fail(name, f"is {brief(value)}, not true or false")
        return False

    def text(self, name: str) -> str | None:
        """A string or null."""
        value = self._raw.get(name)
        if value is None or isinstance(value, str):
            return value
        self.fail(name, f"is {brief(value)}, not a string")
        return None

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of ``choices``, the first where it is null."""
        value = self._raw.get(name)
        if value is None or value in choices:
            return choices[0] if value is None else str(value)
        self.fail(name, f"is {brief(value)}; served are {', '.join(choices)}", f"set it to one of {', '.join(choices)}")
        return choices[0]

    def token_ids(self, name: str, value: object) -> tuple[int, ...]:
        """A list of token ids."""
        if isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 31 for item in value):
            return tuple(value)
        self.fail(name, f"is {brief(value)}, not a list of token ids")
        return ()

    def pattern(self, name: str, form: str) -> list[tuple[Pattern, object]]:
        """The entries of an object whose keys are regular expressions, each put into ``form``."""
        value = self._raw.get(name)
        if value is None:
            return []
        if isinstance(value, dict):
            return [(Pattern(f"{name}[{shown(key)}]", form.format(key)), item) for key, item in value.items()]
        self.fail(name, f"is {brief(value)}, not an object")
        return []

    def modules(self, name: str, default: tuple[str, ...]) -> frozenset[str] | Pattern:
        """A list of names, or, where PEFT takes it for one, a regular expression."""
        value = self._raw.get(name)
        if value is None:
            return frozenset(default)
        if isinstance(value, str):
            return Pattern(name, value)
        return frozenset(self.strings(name, value))

    def layer_patterns(self, name: str, form: str) -> tuple[Pattern, ...]:
        """One regular expression or several, each put into ``form``."""
        value = self._raw.get(name)
        if not value:
            return ()
        names = (value,) if isinstance(value, str) else self.strings(name, value)
        return tuple(Pattern(f"{name}[{shown(item)}]", form.format(item)) for item in names)

    def layers(self, name: str) -> frozenset[int]:
        """One layer number or several."""
        value = self._raw.get(name)
        if value is None:
            return frozenset()
        items = value if isinstance(value, list) else [value]
        if all(type(item) is int for item in items):
            return frozenset(items)
        self.fail(name, f"is {brief(value)}, not a layer number or a list of them")
        return frozenset()

    def strings(self, name: str, value: object) -> tuple[str, ...]:
        """A list of strings; null counts as an empty one."""
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self.fail(name, f"is {brief(value)}, not a string or a list of strings")
        return ()
