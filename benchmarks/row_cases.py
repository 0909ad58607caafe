"""Cases of what adapters' rows cost: 8-bit rows beside bf16 ones, and output scales, as DoRA has them, beside none. Times nothing.

All are of as many adapters as rows, which is when a step reads the most for what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from graftwork_kernels.cpu import linear
from graftwork_kernels.cpu.issue import Issuer
from graftwork_kernels.layout import AdapterBatch, AdapterMemory, LinearSite, RowType, Weight, empty_adapter_memory
from operator_cases import ELEMENT, RANK, ROWS, All, Shapes, adapter_linears, adapter_memory, random_rows, sites_of, weights_of
from timing import AddedBar, Bar, Case, RatioBar

ROW_RANK = 64
LEAST_GAIN = 1.6
"""Of int8 rows over bf16 ones, which have 1.84 times as many bytes with heads and padding."""

MOST_SCALE_COST = 1.02

ROW_TYPES: Mapping[str, RowType] = MappingProxyType({"int8": RowType.INT8, "e4m3": RowType.E4M3, "bf16": RowType.BF16})

ADDED_FACTOR, ADDED_SLACK_MS = 1.6, 2.0
"""Of what adapters may add, beside the time that reading their bytes takes."""


def row_cases(shapes: Shapes, ops: All, issuer: Issuer) -> Iterator[Case]:
    """Rows of each type in a step's linears, and with a product that is given, so that little but the adapters' part is left."""
    memories = {name: adapter_memory(shapes, [ROW_RANK] * ROWS, row_type) for name, row_type in ROW_TYPES.items()}
    ours, x = ops["cpu"], _inputs(shapes)
    weights = [ours.prepare_weight(weight) for weight in weights_of(shapes, head=False)]
    given = {weight.out_features: random_rows(ROWS, weight.out_features) for weight in weights}

    def whole(memory: AdapterMemory, rows: Sequence[int]) -> Callable[[], object]:
        return adapter_linears(ours.adapter_linear, weights, x, shapes, memory, rows)

    def alone(memory: AdapterMemory, rows: Sequence[int]) -> Callable[[], object]:
        def run(
            one: Tensor, weight: Weight, bias: None, memory: AdapterMemory, batch: AdapterBatch, sites: tuple[LinearSite, ...]
        ) -> Tensor:
            product = given[weight.out_features]
            return linear.adapter_linear(issuer, one, weight, bias, memory, batch, sites, one.dtype, product)

        return adapter_linears(run, weights, x, shapes, memory, rows)

    base_bytes = float(ELEMENT * shapes.layer_weights)
    for way, make, more in (("linears with", whole, base_bytes), ("given products with", alone, 0.0)):
        runs = {name: make(memory, range(ROWS)) for name, memory in memories.items()}
        base = make(empty_adapter_memory(shapes.layers * sites_of(shapes)), [-1] * ROWS)
        for name in ("int8", "e4m3"):
            added, bar = float(memories[name].pool.numel()), LEAST_GAIN if name == "int8" else None
            bars: tuple[Bar, ...] = (
                AddedBar("cpu", "base rows", added, ADDED_FACTOR, ADDED_SLACK_MS),
                RatioBar("what bf16 rows add beside it", "bf16 rows", "cpu", bar, without="base rows"),
            )
            candidates = {"cpu": runs[name], "bf16 rows": runs["bf16"], "base rows": base}
            yield Case(f"{way} {ROWS} adapters of rank {ROW_RANK} in {name}, batch {ROWS}", candidates, more + added, bars=bars)


def scale_cases(shapes: Shapes, ops: All) -> Iterator[Case]:
    """Half of the adapters have an output scale on every projection."""
    weights, x = [ops["cpu"].prepare_weight(weight) for weight in weights_of(shapes, head=False)], _inputs(shapes)
    ranks = [RANK] * ROWS
    plain, half = adapter_memory(shapes, ranks), adapter_memory(shapes, ranks, scaled=range(0, ROWS, 2))
    runs = {
        name: adapter_linears(ops["cpu"].adapter_linear, weights, x, shapes, memory, range(ROWS))
        for name, memory in (("cpu", half), ("plain adapters", plain))
    }
    bar = RatioBar("time beside plain ones", "cpu", "plain adapters", MOST_SCALE_COST, "at most")
    num_bytes = float(ELEMENT * shapes.layer_weights + half.pool.numel())
    yield Case(f"linears with {ROWS} adapters of rank {RANK}, half with output scales", runs, num_bytes, bars=(bar,))


def _inputs(shapes: Shapes) -> dict[int, Tensor]:
    return {packed.in_features: random_rows(ROWS, packed.in_features) for packed in shapes.packed}
