"""The LoRA of one module out of its tensors: of a projection, the head or the embedding. Reads names and shapes, never values."""

from __future__ import annotations

from collections.abc import Iterable

from graftwork_adapters.adapter_content import LoraPair, SiteContent, WholeModule
from graftwork_adapters.base_spec import Site
from graftwork_adapters.module_tensors import Matching, ModuleTensors, ShapeChecks
from graftwork_adapters.peft_config import EMBEDDING_MODULE, HEAD_MODULE
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.tensor_source import AdapterTensor, TensorSource

_AGAIN = "save the adapter again with PEFT's save_pretrained"
_CONFIG_FIX = "upload the adapter_config.json that was saved with these tensors"


def read_site(site: Site, tensors: ModuleTensors, matching: Matching) -> SiteContent | WholeModule | None:
    """What the upload does to a projection; None after a finding, or if it does nothing."""
    report = matching.report
    if "weight" in tensors and matching.config.saves(tensors.trained_module):
        return read_whole_linear(site, tensors, matching)
    for part in ("weight", "base_layer.weight"):
        copy = tensors.take(part)
        if copy is not None:
            matching.leave_out_copy(copy, f"{site.module}.weight")
    has_pair = "lora_A" in tensors or "lora_B" in tensors
    bias = _read_bias(site, tensors, matching, has_pair)
    pair = read_pair(tensors, site.in_features, site.out_features, matching) if has_pair else None
    tensors.refuse_rest(report)
    return None if pair is None and bias is None else SiteContent(site, pair, bias)


def read_whole_linear(site: Site, tensors: ModuleTensors, matching: Matching) -> WholeModule | None:
    """A projection that is trained whole, with its bias where the base's has one."""
    weight, bias = tensors.take("weight"), tensors.take("bias") if site.has_bias else None
    for part in ("weight", "bias") if site.has_bias else ("weight",):
        original = tensors.take(f"base_layer.{part}")  # what PEFT goes back to without the adapter
        if original is not None:
            matching.leave_out_copy(original, f"{site.module}.{part}")
    if "lora_A" in tensors or "lora_B" in tensors:
        message = f"adapts {site.module}, which modules_to_save replaces whole: PEFT would apply one of the two"
        tensors.refuse_all("modules", message, "leave the module out of modules_to_save or out of target_modules", matching.report)
        return None
    tensors.refuse_rest(matching.report)
    if site.has_bias and bias is None:
        matching.report.fail("tensors", f"{site.module}.bias", "is missing, its weight is there", _AGAIN)
        return None
    if weight is None or not matching.has_shape(weight.source, (site.out_features, site.in_features), site.module):
        return None
    if bias is not None and not matching.has_shape(bias.source, (site.out_features,), site.module):
        return None
    return WholeModule(site.module, weight.source, None if bias is None else bias.source)


def _read_bias(site: Site, tensors: ModuleTensors, matching: Matching, has_pair: bool) -> TensorSource | None:
    """The bias in place of the base's: PEFT names it `base_layer.bias` where there is LoRA beside it."""
    if not site.has_bias:
        return None
    bias = tensors.take("bias")
    if bias is None or not matching.has_shape(bias.source, (site.out_features,), site.module):
        return None
    kind = matching.config.bias
    if kind == "none" or (kind == "lora_only" and not has_pair):
        message = f"is a bias in place of the base's, and the config's bias is \"{kind}\""
        matching.report.fail("tensors", shown(bias.source.sent_as), message, _CONFIG_FIX)
        return None
    return bias.source


def read_pair(
    tensors: ModuleTensors, in_features: int, out_features: int, matching: Matching, *, of_embedding: bool = False
) -> LoraPair | None:
    """The LoRA of a module; None after a finding that it is not whole or does not fit."""
    report, config, module = matching.report, matching.config, tensors.module
    trained = tensors.trained_module
    names = ("lora_embedding_A", "lora_embedding_B") if of_embedding else ("lora_A", "lora_B")
    a, b = (tensors.take(name) for name in names)
    magnitude = tensors.take("lora_magnitude_vector")
    b_bias = None if of_embedding else tensors.take("lora_B.bias")
    if a is None or b is None:
        (missing, found) = names if a is None else names[::-1]
        suffix = "" if of_embedding else ".weight"
        report.fail("tensors", shown(f"{module}.{missing}{suffix}"), f"is missing, its {found} is there", _AGAIN)
        return None
    fits = matching.have_one_rank(a.source, b.source, in_features, out_features, module)
    fits = fits and _has_rank_of_config(a.source, trained, matching)
    fits = _check_extra(magnitude, config.use_dora, "lora_magnitude_vector", "use_dora", out_features, matching, module) and fits
    if not of_embedding:
        fits = _check_extra(b_bias, config.lora_bias, "lora_B.bias", "lora_bias", out_features, matching, module) and fits
    elif config.lora_bias:
        message = f"gives {module} a bias: PEFT does not make such an adapter"
        report.fail("config", "lora_bias", message, f"train without lora_bias, or leave {module} out of target_modules")
        fits = False
    if of_embedding and (config.invocation_token_ids or config.has_velora):
        field = "alora_invocation_tokens" if config.invocation_token_ids else "velora_config"
        report.fail(
            "config", field, f"cannot be used with LoRA on {module}: PEFT does not load such an adapter", "train one of them"
        )
        fits = False
    if not fits:
        return None
    return LoraPair(
        module,
        a.source,
        b.source,
        a.source.shape[0],
        config.alpha_of(trained),
        config.use_rslora,
        None if magnitude is None else magnitude.source,
        None if b_bias is None else b_bias.source,
    )


def _has_rank_of_config(a: TensorSource, trained: str, matching: Matching) -> bool:
    rank, expected = a.shape[0], matching.config.rank_of(trained)
    if rank != expected:
        message = f"has rank {rank}; adapter_config.json (r and rank_pattern) gives {trained} rank {expected}"
        matching.report.fail("ranks", shown(a.sent_as), message, _CONFIG_FIX)
    return rank == expected


def _check_extra(
    tensor: AdapterTensor | None, is_set: bool, part: str, field: str, size: int, matching: Matching, module: str
) -> bool:
    """True if a vector beside A and B is there exactly if the config says so, and of the right size."""
    if tensor is None:
        if is_set:
            matching.report.fail("tensors", f"{module}.{part}", f"is missing, and {field} is true", _AGAIN)
        return not is_set
    if not is_set:
        matching.report.fail("tensors", shown(tensor.source.sent_as), f"is there, and {field} is not true", _CONFIG_FIX)
        return False
    return matching.has_shape(tensor.source, (size,), module)


def check_pair_without_config(site: Site, tensors: ModuleTensors, checks: ShapeChecks) -> None:
    """The findings about A and B that need no config, for an upload whose config is of no use."""
    a, b = tensors.take("lora_A"), tensors.take("lora_B")
    if a is not None and b is not None:
        checks.have_one_rank(a.source, b.source, site.in_features, site.out_features, site.module)
    elif a is not None or b is not None:
        missing, found = ("lora_A", "lora_B") if a is None else ("lora_B", "lora_A")
        checks.report.fail("tensors", f"{site.module}.{missing}.weight", f"is missing, its {found} is there", _AGAIN)


def check_selection(adapted: Iterable[tuple[str, str]], projections: Iterable[str], matching: Matching) -> None:
    """Hold the modules that have LoRA, as (module, trained module), against those the config selects.

    ``projections`` are the base's, by the names that the config knows them by.
    """
    config, spec, report = matching.config, matching.spec, matching.report
    tied = (EMBEDDING_MODULE, HEAD_MODULE) if spec.is_tied and config.ties_targets() else ()
    pairs = sorted(adapted)
    unselected = [module for module, trained in pairs if module not in tied and not config.selects(trained)]
    problems: list[tuple[str | None, str]] = [
        (shown(module), "has tensors, but the config does not select it: PEFT would not apply them") for module in unselected
    ]
    fix = "make target_modules, layers_to_transform and exclude_modules select it, or remove its tensors"
    report.fail_each("modules", problems, fix)
    candidates = {*projections} | {HEAD_MODULE, EMBEDDING_MODULE}
    absent = [module for module in sorted(candidates - {name for pair in pairs for name in pair}) if config.selects(module)]
    if absent:
        names = ", ".join(absent[:5]) + (", …" if len(absent) > 5 else "")
        message = f"{len(absent)} modules that the config selects have no tensors and stay as in the base: {names}"
        report.warn("modules", "target_modules", message)
