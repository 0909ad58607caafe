"""How many bytes and launches the Triton kernels of a decode step need, worked out and not measured, beside what nobody can avoid.

    python benchmarks/kernel_model.py            a table for Llama 3.1 8B in bf16, 64 rows

``memory`` counts the adapters' rows once, and activations as often as a launch writes or reads them, as if the cache kept nothing
from one launch to the next; at 64 rows it keeps them. ``cache`` counts every read. The roofline is the adapters' rows alone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gpu_loads import LLAMA_8B, Shape
from graftwork_kernels.layout import RowType
from graftwork_kernels.row_codec import row_bytes
from graftwork_kernels.triton.adapter_tasks import TILE_RANKS, TILE_ROWS
from graftwork_kernels.triton.linear import BLOCK_COLUMNS, K_CHUNK, Form

ELEMENT, WIDE = 2, 4
"""Bytes of a bf16 activation and of an fp32 sum."""

STEP_LAUNCHES = {"lists of work": 3, "counters set to 0": 1, "embedding": 1, "last norm": 1, "head": 1}
"""Of a step up to its logits, whatever its layers."""

LAYER_LAUNCHES = {"norms": 2, "rotary and keys": 1, "attention": 2, "activation": 1, "products": 4}
"""Beside what adapters add. A decode step's attention is its parts and their sum."""

ADAPTER_LAUNCHES = {Form.TWO: 2, Form.FUSED: 1}
"""For each of a layer's four linears."""


@dataclass(frozen=True)
class Traffic:
    """Bytes: of the adapters' rows, of memory, of the cache."""

    rows: int
    memory: int
    cache: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.rows + other.rows, self.memory + other.memory, self.cache + other.cache)


def linear_traffic(num_in: int, sizes: Sequence[int], adapters: Sequence[tuple[int, int]], row_type: RowType) -> Traffic:
    """What adapters add to one linear of ``num_in`` features and projections of ``sizes``; adapters as (rank, rows of the step)."""
    num_rows, num_chunks = sum(rows for _, rows in adapters), math.ceil(num_in / K_CHUNK)
    columns = sum(row_bytes(row_type, num_in) + row_bytes(row_type, size) for size in sizes)
    rows_of_adapters = sum(rank * columns for rank, _ in adapters)
    h = sum(rank * rows for rank, rows in adapters) * len(sizes) * num_chunks * WIDE
    y = 2 * num_rows * sum(sizes) * ELEMENT
    memory = rows_of_adapters + num_rows * num_in * ELEMENT + 2 * h + y
    cache = y + h  # written once
    for rank, rows in adapters:
        row_tiles, rank_tiles = math.ceil(rows / TILE_ROWS), math.ceil(rank / TILE_RANKS)
        for size in sizes:
            cache += row_tiles * rank * (row_bytes(row_type, num_in) + row_bytes(row_type, size))
            cache += rank_tiles * rows * num_in * ELEMENT
            cache += math.ceil(size / BLOCK_COLUMNS) * rows * rank * num_chunks * WIDE
    return Traffic(rows_of_adapters, memory, cache)


def step_traffic(shape: Shape, adapters: Sequence[tuple[int, int]], row_type: RowType) -> Traffic:
    """Of all linears of a step."""
    total = Traffic(0, 0, 0)
    for num_in, sites in shape.linears(0).values():
        total += linear_traffic(num_in, [site.size for site in sites], adapters, row_type)
    return Traffic(*(shape.num_layers * part for part in (total.rows, total.memory, total.cache)))


def base_bytes(shape: Shape) -> int:
    """Weights that a step reads: the layers' linears and the head."""
    layer = sum(num_in * num_out for num_in, num_out in shape.widths)
    return ELEMENT * (shape.num_layers * layer + shape.hidden * shape.vocab)


def launches(shape: Shape, form: Form) -> int:
    """Of a decode step without sampling."""
    return sum(STEP_LAUNCHES.values()) + shape.num_layers * (sum(LAYER_LAUNCHES.values()) + 4 * ADAPTER_LAUNCHES[form])


@dataclass(frozen=True)
class Row:
    """One step of 64 rows. ``share``: the base's bytes over all, the adapters' as the kernels move them; the best there can be."""

    adapters: str
    rows_mb: float
    memory_mb: float
    cache_mb: float
    memory_over_roofline: float
    share_at_roofline: float
    share: float


def table(shape: Shape, num_rows: int = 64) -> list[Row]:
    """1, 16 and 64 distinct adapters, 8-bit rows, and mixed ranks."""
    cases = {
        "1 × r16": ([(16, num_rows)], RowType.BF16),
        "16 × r16": ([(16, num_rows // 16)] * 16, RowType.BF16),
        "64 × r16": ([(16, num_rows // 64)] * 64, RowType.BF16),
        "64 × r16, 8 bits": ([(16, num_rows // 64)] * 64, RowType.INT8),
        "64 × r8/16/32/64": ([(rank, num_rows // 64) for rank in (8, 16, 32, 64) for _ in range(16)], RowType.BF16),
    }
    base, rows = base_bytes(shape), []
    for name, (adapters, row_type) in cases.items():
        traffic = step_traffic(shape, adapters, row_type)
        rows.append(
            Row(
                name, traffic.rows / 1e6, traffic.memory / 1e6, traffic.cache / 1e6, traffic.memory / traffic.rows,
                base / (base + traffic.rows), base / (base + traffic.memory),
            )
        )  # fmt: skip
    return rows


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Bytes and launches of a decode step, worked out.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    rows = table(LLAMA_8B)
    counts = {form.value: launches(LLAMA_8B, form) for form in Form}
    if given.json:
        print(json.dumps({"steps": [asdict(row) for row in rows], "launches": counts}, indent=1))
        return 0
    print(f"{'adapters':18}{'rows MB':>9}{'memory MB':>11}{'cache MB':>10}{'memory ÷ rows':>15}{'roofline':>13}{'as built':>15}")
    for row in rows:
        print(
            f"{row.adapters:18}{row.rows_mb:9.0f}{row.memory_mb:11.0f}{row.cache_mb:10.0f}{row.memory_over_roofline:15.2f}"
            f"{row.share_at_roofline:13.1%}{row.share:15.1%}"
        )
    print("launches of a step: " + ", ".join(f"{number} in the form {form!r}" for form, number in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
