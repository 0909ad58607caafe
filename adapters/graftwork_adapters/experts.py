"""LoRA on the experts of a mixture: which layout an upload writes it in, and whether its shapes are that layout's.

    per expert   `….experts.3.gate_proj.lora_A.weight`      A [r, in], B [out, r]
    stacked      `….experts.gate_up_proj.lora_A.weight`     A [experts, r, in], B [experts, out, r]
    flat         `….experts.lora_A.weight`, PEFT's `target_parameters`: A [experts·r, in], B [out, r·experts]; where it adapts
                 several parameters of one module, the inner ones have `base_layer` in their names, once for each around them

In the flat layout a row of A is number expert·r + i (the expert changes slowest), a column of B number i·experts + expert (the
expert changes fastest).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.tensor_source import AdapterTensor
from graftwork_adapters.tensor_values import Matrix

Layout = Literal["per-expert", "stacked", "flat"]

_EXPERT_PATH = re.compile(r"(.+\.)?(experts|local_experts|switch_mlp|switch_glu)(\..+)?")
_ONE_EXPERT = re.compile(r".+\.(?:experts|local_experts)\.\d+\..+")
_FLAT = re.compile(r".+\.experts(?:\.base_layer)*")
_PART = re.compile(r"\.(lora_[AaBb]|linear_in|linear_out)(?:\.[^.]+)?(?:\.weight)?$")
_FIX = "train it on the attention's projections, or on a base without experts"


def is_expert(module: str) -> bool:
    """True for a path into the experts of a mixture."""
    return _EXPERT_PATH.fullmatch(module) is not None


def layout_of(module: str, num_dimensions: int) -> Layout | None:
    """The layout of an expert's A or B by its module path and dimensions; None for a shape that no layout has."""
    if num_dimensions == 3:
        return "stacked"
    if num_dimensions != 2:
        return None
    if _ONE_EXPERT.fullmatch(module):
        return "per-expert"
    return "flat" if _FLAT.fullmatch(module) else None


def expert_findings(tensors: Sequence[AdapterTensor], rank_of: Callable[[str], int], report: Report) -> None:
    """Hold the tensors of part "expert" against their layouts' rules, and refuse them.

    ``rank_of`` gives the config's rank of a module, which a flat layout's shapes alone do not.
    """
    pairs: defaultdict[str, dict[str, AdapterTensor]] = defaultdict(dict)
    problems: list[tuple[str | None, str]] = []
    for tensor in tensors:
        if tensor.part != "expert":
            continue
        match = _PART.search(tensor.source.sent_as)
        if match is None:
            problems.append((shown(tensor.source.sent_as), "is neither A nor B of an expert, and would not be applied"))
        else:
            pairs[tensor.module]["A" if match[1] in ("lora_A", "lora_a", "linear_in") else "B"] = tensor
    problems += [_judge(module, pairs[module], rank_of) for module in sorted(pairs)]
    report.fail_each("experts", problems, _FIX)


def _judge(module: str, pair: Mapping[str, AdapterTensor], rank_of: Callable[[str], int]) -> tuple[str | None, str]:
    a, b = pair.get("A"), pair.get("B")
    if a is None or b is None:
        (there,) = pair.values()
        return shown(there.source.sent_as), "adapts experts, and the other factor of its pair is missing"
    a_shape, b_shape = a.source.shape, b.source.shape
    layout = layout_of(module, len(a_shape))
    rank = rank_of(a.trained_module)
    what = f"A {list(a_shape)} and B {list(b_shape)}"
    if layout is None or len(a_shape) != len(b_shape):
        return shown(a.source.sent_as), f"adapts experts, and {what} are in no layout that is known here"
    if layout == "stacked":
        fits = a_shape[0] == b_shape[0] and a_shape[1] == b_shape[2] > 0
        count, rank = a_shape[0], a_shape[1]
    elif layout == "flat":
        fits = a_shape[0] == b_shape[1] and rank > 0 and a_shape[0] % rank == 0 and a_shape[0] > 0
        count = a_shape[0] // rank if fits else 0
    else:
        fits, count, rank = a_shape[0] == b_shape[1] > 0, 1, a_shape[0]
    if not fits:
        return shown(a.source.sent_as), f"adapts experts in the {layout} layout, and {what} are not of one rank (r is {rank})"
    experts = f"{count} experts" if count > 1 else "an expert"
    message = f"adapts {experts} of a mixture with rank {rank}, {layout}; it is well formed, and served when MoE bases are"
    return shown(a.source.sent_as), message


def flat_factors(a: Matrix, b: Matrix, num_experts: int) -> tuple[Matrix, Matrix]:
    """The factors [experts, r, in] and [experts, out, r] of PEFT's flat layout."""
    return a.reshape(num_experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, num_experts).transpose(2, 0, 1)
