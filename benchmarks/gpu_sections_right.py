"""Are the kernels of a layer right? Each against fp64 on fresh random data, over memory that is full of NaN before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

import gpu_exact
from gpu_bench import Bench, Figures, Wrong, compare, must_equal, spoiled_memory
from gpu_loads import (
    BLOCK_SIZE,
    attention_step,
    attention_values,
    exact_adapter_linear,
    exact_attention,
    random_adapters,
    random_weight,
)
from graftwork_engine.model.config import RopeConfig
from graftwork_engine.model.layers import rotary_table
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import RowType, Weight
from graftwork_kernels.triton.linear import Form

EPSILON = 1e-5


def note_worst(figures: Figures, name: str, error: float) -> None:
    """Keep the largest error of a name."""
    figures[name] = max(error, float(figures.get(name, 0.0)))


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def adapters_are_right(bench: Bench, figures: Figures) -> None:
    """The adapter linear in both forms: mixes of adapters of all ranks, row types, rows scattered over NaN."""
    ranks = [1, 7, 18] if bench.is_dry else [1, 7, 16, 17, 40, bench.max_rank]
    row_counts = (5,) if bench.is_dry else (33, 133, 1, 5)
    cases = list(product(bench.dtypes, row_counts, RowType, Form))
    for dtype, num_rows, row_type, form in bench.in_time(cases):
        adapters = mixed(num_rows, len(ranks))
        check_adapters(bench, figures, ranks, adapters, row_type, dtype, form)


def mixed(num_rows: int, num_adapters: int) -> list[int]:
    """An adapter of each row, or none, in any order; all of them where there are rows enough."""
    places = torch.randperm(num_rows)
    return [int(place) % (num_adapters + 1) - 1 if num_rows > 1 else 0 for place in places]


def check_adapters(
    bench: Bench, figures: Figures, ranks: Sequence[int], adapters: Sequence[int], row_type: RowType, dtype: torch.dtype, form: Form
) -> None:
    """Of a layer's four linears: one with a bias, all but it with results in fp32 as a model asks for them too."""
    memory = random_adapters(bench.shape, ranks, row_type, bench.device, layers=1, scattered=True)
    batch = build_adapter_batch(adapters, bench.device)
    ops = bench.operators(form)
    for name, (num_in, sites) in bench.shape.linears(0).items():
        if bench.is_dry and name in ("o", "gate_up"):
            continue
        num_out = sum(site.size for site in sites)
        x = torch.randn(len(adapters), num_in, device=bench.device).to(dtype)
        weight = random_weight(num_out, num_in, dtype, bench.device)
        bias = torch.randn(num_out, device=bench.device).to(dtype) if name == "qkv" else None
        exact = exact_adapter_linear(x, weight, bias, memory, adapters, sites)
        for out_dtype in (dtype,) if name == "qkv" else dict.fromkeys((dtype, torch.float32)):
            with spoiled_memory():
                out = ops.adapter_linear(x, Weight.plain(weight), bias, memory, batch, sites, out_dtype)
            key = f"{type_name(dtype)}, {row_type.name.lower()} rows, {form.value}"
            # Where the inputs are bf16, the second half multiplies bf16 however its result is kept.
            error = compare(f"{name}, {key}, {len(adapters)} rows", out.to(dtype), exact)
            note_worst(figures, key, error)


def attention_is_right(bench: Bench, figures: Figures) -> None:
    """Decode rows, prompts and both together; caches hold NaN wherever nothing is to be read."""
    longest = 70 if bench.is_dry else 9000
    mixes = {
        "decode": ([1, 1, 1], [1, 17, longest]),
        "both": ([1, 33, 0, 1], [longest, 33, 0, 2]),
        "prompts": ([5, 40], [5, longest]),
    }
    for dtype, (name, (query_len, context_len)) in bench.in_time(list(product(bench.dtypes, mixes.items()))):
        scale = bench.shape.head_dim**-0.5
        num_blocks = 4 * -(-longest // BLOCK_SIZE)
        batch = attention_step(query_len, context_len, num_blocks, bench.device, first_row=1)
        num_rows = sum(query_len) + 3  # one before the first request's, two after the last's
        q, *cache = attention_values(bench.shape, batch, num_rows, num_blocks, scale, dtype, bench.device)
        with spoiled_memory():
            out = bench.operators().paged_attention(q, cache[0], cache[1], batch, scale)
        error = compare(f"attention, {name}", out, exact_attention(q, cache[0], cache[1], batch, scale))
        figures[f"{name}, {type_name(dtype)}"] = error


def layers_are_right(bench: Bench, figures: Figures) -> None:
    """Norms, rotary with the KV write, gates, and the linear without adapters."""
    shape, ops, device = bench.shape, bench.operators(), bench.device
    num_rows = 5 if bench.is_dry else 133
    for dtype in bench.in_time(bench.dtypes):
        name = type_name(dtype)

        def random(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(size, device=device).to(dtype)

        heads, weight = random(num_rows, shape.num_heads, shape.head_dim), random(shape.head_dim)
        with spoiled_memory():
            out = ops.rms_norm(heads, weight, EPSILON)
        figures[f"norm, {name}"] = compare("norm", out, gpu_exact.rms_norm(heads, weight, EPSILON))
        weight = random(shape.hidden)
        for x, residual in (
            (random(num_rows, shape.hidden), None),
            (random(num_rows, shape.hidden, dtype=torch.float32), random(num_rows, shape.hidden, dtype=torch.float32)),
        ):
            with spoiled_memory():
                out, total = ops.add_rms_norm(x, residual, weight, EPSILON)
            exact = x.double() if residual is None else x.double() + residual.double()
            note_worst(figures, f"residual and norm, {name}", compare("sum", total, exact))
            error = compare("residual and norm", out, gpu_exact.rms_norm(exact, weight, EPSILON))
            note_worst(figures, f"residual and norm, {name}", error)
        gate_up = random(num_rows, 2 * shape.intermediate) * 3
        for gate, exact_gate in ((ops.silu_and_mul, gpu_exact.silu_and_mul), (ops.gelu_and_mul, gpu_exact.gelu_and_mul)):
            for given in (gate_up, gate_up.float()):
                with spoiled_memory():
                    out = gate(given, dtype)
                note_worst(figures, f"gates, {name}", compare(gate.__name__, out, exact_gate(given)))
        x, matrix = random(num_rows, shape.hidden), random_weight(shape.intermediate, shape.hidden, dtype, device)
        with spoiled_memory():
            out = ops.linear(x, Weight.plain(matrix), None, torch.float32)
        figures[f"linear to fp32, {name}"] = compare("linear", out, x.double() @ matrix.double().T)
        figures[f"rotary and keys, {name}"] = check_rotary(bench, dtype, num_rows)


def check_rotary(bench: Bench, dtype: torch.dtype, num_rows: int) -> float:
    """Rows of one packed product, some of which write nowhere; the rest of the caches keeps every bit. The largest error."""
    shape, device = bench.shape, bench.device
    sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    packed = torch.randn(num_rows, sum(sizes) * shape.head_dim, device=device).to(dtype)
    q, k, v = (
        part.view(num_rows, -1, shape.head_dim) for part in packed.split_with_sizes([size * shape.head_dim for size in sizes], -1)
    )
    positions = torch.randint(0, 8000, (num_rows,)).to(device)
    cos_sin = rotary_table(RopeConfig(500000.0), shape.head_dim, 8000, device)
    num_blocks = -(-2 * num_rows // BLOCK_SIZE)
    slots = torch.randperm(num_blocks * BLOCK_SIZE)[:num_rows]
    slots[::4] = -1
    slots = slots.to(device)
    size = (num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    caches = [torch.full(size, torch.nan, dtype=dtype, device=device) for _ in range(2)]
    with spoiled_memory():
        turned = bench.operators().rotary_and_write_kv(q, k, v, positions, cos_sin, caches[0], caches[1], slots)
    worst = compare("rotary, queries", turned, gpu_exact.rotated(q, positions, cos_sin))
    written = slots >= 0
    places = slots[written]
    keys, values = (cache.transpose(1, 2).flatten(0, 1) for cache in caches)  # [slots, heads, D]
    worst = max(worst, compare("rotary, keys", keys[places], gpu_exact.rotated(k, positions, cos_sin)[written]))
    must_equal("rotary, values", values[places], v[written])
    others = torch.ones(len(keys), dtype=torch.bool, device=device)
    others[places] = False
    if not (keys[others].isnan().all() and values[others].isnan().all()):
        raise Wrong("rotary: a slot was written that is no row's")
    return worst
