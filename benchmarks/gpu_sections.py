"""The parts of the GPU check, in the order of their worth: right first, then what one step of a server spends its time on.

Each part takes a `Bench` and gives named figures; it raises `Wrong` where a kernel is. Sizes come from the bench, so that the same
code runs on a CPU under the interpreter, where no time means anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_loads import BLOCK_SIZE, Shape, attention_step, exact_adapter_linear, exact_attention, random_adapters
from graftwork_engine.kv_memory import allocate_kv_cache
from graftwork_engine.model.layers import ForwardBatch, Placement
from graftwork_engine.model.registry import build_model
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import AdapterBatch, AdapterMemory, LinearSite, RowType, SiteField, Weight
from graftwork_kernels.ops import Operators
from graftwork_kernels.row_codec import row_bytes
from graftwork_kernels.triton.linear import AdapterLauncher, Form, has_e4m3
from graftwork_kernels.triton.operators import TritonOperators

Figures = dict[str, float | str]
Item = TypeVar("Item")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1.6e-2}
"""Of a result's own magnitude and the root mean square of all together: sums in another order, and two roundings to bf16."""


class Wrong(Exception):
    """A kernel's result is not what it must be."""


@dataclass
class Bench:
    """Where the check runs and how large it is. ``deadline`` is on `time.monotonic` and set anew for each part."""

    device: torch.device
    shape: Shape
    is_dry: bool
    max_rank: int
    copy_gbps: float = 0.0
    deadline: float = 0.0
    cut: list[str] = field(default_factory=list)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What is computed in, the usual one first; the interpreter cannot multiply bf16."""
        return (torch.float32,) if self.is_dry else (torch.bfloat16, torch.float32)

    def operators(self, form: Form = Form.TWO) -> TritonOperators:
        """The kernels, interpreted where there is no GPU."""
        if self.is_dry:
            return TritonOperators(3, self.max_rank, has_e4m3=False, form=form, is_exact=True, is_wide=True)
        return TritonOperators.on(self.device, self.max_rank, form=form)

    def in_time(self, items: Sequence[Item], name: Callable[[Item], str]) -> Iterator[Item]:
        """``items`` until the deadline; what is left out is told."""
        for item in items:
            if time.monotonic() > self.deadline:
                self.cut.append(name(item))
            else:
                yield item

    def seconds(self, run: Callable[[], object], rounds: int = 10) -> float:
        """Of one ``run``: the median of replays of a captured graph, in which there are no gaps between launches."""
        if self.is_dry:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        graph = captured(run)
        times = []
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / 1e3)
        return statistics.median(times)


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``run`` as a graph, compiled and warm."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def compare(name: str, out: Tensor, exact: Tensor) -> float:
    """The largest error, as `TOLERANCE` measures it; raises `Wrong` above it, and for NaN."""
    scale = exact.abs() + exact.square().mean().sqrt()
    error = float(((out.double() - exact).abs() / scale).nan_to_num(torch.inf).max()) if exact.numel() else 0.0
    if error > TOLERANCE[out.dtype]:
        raise Wrong(f"{name}: off by {error:.3g} of its magnitude, {TOLERANCE[out.dtype]:g} is allowed")
    return error


def adapters_are_right(bench: Bench) -> Figures:
    """The adapter linear in both forms against fp64: row types, ranks, mixes of adapters, rows scattered over NaN."""
    small = replace(bench.shape, num_layers=1)
    ranks = [1, 7, 16, 17, 40 if bench.is_dry else bench.max_rank]
    worst: Figures = {}
    row_counts = (5,) if bench.is_dry else (1, 5, 33, 133)
    cases = list(product(row_counts, bench.dtypes, RowType, Form))
    for num_rows, dtype, row_type, form in bench.in_time(cases, str):
        memory = random_adapters(small, ranks, row_type, bench.device, scattered=True)
        adapters = [(row * 5) % (len(ranks) + 1) - 1 for row in range(num_rows)]
        batch = build_adapter_batch(adapters, bench.device)
        for name, (num_in, sites) in small.linears(0).items():
            x, weight = _random(bench, num_rows, num_in, dtype=dtype), _random(bench, _width(sites), num_in, dtype=dtype)
            bias = _random(bench, _width(sites), dtype=dtype) if name == "qkv" else None
            out = bench.operators(form).adapter_linear(x, Weight.plain(weight), bias, memory, batch, sites, dtype)
            key = f"{form.value} {row_type.name.lower()} {str(dtype).removeprefix('torch.')}"
            error = compare(f"{name}, {key}, {num_rows} rows", out, exact_adapter_linear(x, weight, bias, memory, adapters, sites))
            worst[key] = max(error, float(worst.get(key, 0.0)))
    return worst


def attention_is_right(bench: Bench) -> Figures:
    """Decode rows, prompts and both together against fp64."""
    longest = 70 if bench.is_dry else 9000
    mixes = {
        "decode": ([1, 1, 1], [1, 17, longest]),
        "prompts": ([5, 40], [5, longest]),
        "both": ([1, 33, 0, 1], [longest, 33, 0, 2]),
    }
    worst: Figures = {}
    for name, (query_len, context_len) in bench.in_time(list(mixes.items()), str):
        for dtype in bench.dtypes:
            batch = attention_step(query_len, context_len, 4 * -(-longest // BLOCK_SIZE), bench.device)
            cache = _cache(bench, 4 * -(-longest // BLOCK_SIZE), dtype)
            q = _random(bench, sum(query_len), bench.shape.num_heads, bench.shape.head_dim, dtype=dtype)
            out = bench.operators().paged_attention(q, *cache, batch, bench.shape.head_dim**-0.5)
            error = compare(f"attention, {name}", out, exact_attention(q, *cache, batch, bench.shape.head_dim**-0.5))
            worst[f"{name} {str(dtype).removeprefix('torch.')}"] = error
    return worst


def graphs_follow_the_mix(bench: Bench) -> Figures:
    """One captured graph under changing mixes, joins, leaves and moved adapters: bit for bit what a fresh launch gives."""
    if bench.is_dry:
        return {"skipped": "a CPU captures no graph"}
    num_rows, small = 64, replace(bench.shape, num_layers=1)
    memory = random_adapters(small, [8, 16, 64, 33, 1, 16], RowType.BF16, bench.device, scattered=False)
    (num_in, sites), dtype = small.linears(0)["qkv"], torch.bfloat16
    x, weight = _random(bench, num_rows, num_in, dtype=dtype), Weight.plain(_random(bench, _width(sites), num_in, dtype=dtype))
    static = build_adapter_batch([-1] * num_rows, bench.device)
    checked = 0
    for form in Form:
        results: list[Tensor] = []

        def run(ops: TritonOperators, results: list[Tensor]) -> None:
            results.append(ops.adapter_linear(x, weight, None, memory, static, sites, dtype))

        graph = captured(partial(run, bench.operators(form), results))
        for number in range(20):
            adapters = torch.randint(-1, 6, (num_rows,)).tolist()
            adapters[num_rows - number :] = [-1] * number  # rows of padding, more and more
            _copy_batch(build_adapter_batch(adapters, bench.device), static)
            if number % 5 == 4:
                _swap_first_two(memory)
            x.normal_()
            graph.replay()
            eager = bench.operators(form).adapter_linear(x, weight, None, memory, static, sites, dtype)
            if not torch.equal(results[-1], eager):
                raise Wrong(f"{form.value}: a replayed graph differs from a fresh launch, mix {number}")
            checked += 1
    return {"mixes": float(checked)}


def adapter_bandwidth(bench: Bench) -> Figures:
    """What adapters add to all linears of a step: bytes that must move, over time, as a share of a copy's rate."""
    num_rows = 4 if bench.is_dry else 64
    mixed = (8, 16, 32, 64)
    cases = [
        (number, ranks, row_type, form)
        for number, ranks, row_type in (
            (64, (16,), RowType.BF16), (1, (16,), RowType.BF16), (16, (16,), RowType.BF16), (64, (16,), RowType.INT8),
            (64, (16,), RowType.E4M3), (64, mixed, RowType.BF16), (64, (30,), RowType.BF16), (64, (8,), RowType.BF16),
            (64, (64,), RowType.BF16),
        )
        for form in Form
    ]  # fmt: skip
    figures: Figures = {}
    for number, ranks, row_type, form in bench.in_time(cases[:2] + cases[-4:-2] if bench.is_dry else cases, str):
        number = min(number, num_rows)
        each = [ranks[adapter % len(ranks)] for adapter in range(number)]
        memory = random_adapters(bench.shape, each, row_type, bench.device, scattered=False)
        batch = build_adapter_batch([row % number for row in range(num_rows)], bench.device)
        how = {"is_exact": bench.is_dry, "is_wide": bench.is_dry, "has_e4m3": has_e4m3(bench.device)}
        launcher = AdapterLauncher(4 * _processors(bench), bench.max_rank, form, **how)
        run, num_bytes = _all_linears(bench, launcher, memory, batch, each, row_type, num_rows)
        seconds = bench.seconds(run)
        name = f"{number} adapters r{'/'.join(map(str, ranks))} {row_type.name.lower()} {form.value}"
        figures[f"{name}, ms"] = seconds * 1e3
        if bench.copy_gbps:
            figures[f"{name}, share of copy"] = num_bytes / seconds / 1e9 / bench.copy_gbps
        del memory, run
    return figures


def attention_bandwidth(bench: Bench) -> Figures:
    """Decode of 64 contexts of 2,048 tokens and one prompt of as many, beside torch's attention over contiguous memory."""
    requests, context = (3, 40) if bench.is_dry else (64, 2048)
    shape, dtype = bench.shape, bench.dtypes[0]
    num_blocks = requests * -(-context // BLOCK_SIZE)
    cache, ops, scale = _cache(bench, num_blocks, dtype), bench.operators(), shape.head_dim**-0.5
    figures: Figures = {}
    for name, query_len, context_len in (
        ("decode", [1] * requests, [context] * requests),
        ("prompt", [context], [context]),
    ):
        batch = attention_step(query_len, context_len, num_blocks, bench.device)
        q = _random(bench, sum(query_len), shape.num_heads, shape.head_dim, dtype=dtype)
        ours = bench.seconds(partial(ops.paged_attention, q, *cache, batch, scale))
        rows = query_len[0]
        dense_q = _random(bench, len(query_len), shape.num_heads, rows, shape.head_dim, dtype=dtype)
        keys, values = (_random(bench, len(query_len), shape.num_kv_heads, context, shape.head_dim, dtype=dtype) for _ in range(2))
        theirs = bench.seconds(partial(scaled_dot_product_attention, dense_q, keys, values, is_causal=rows > 1, enable_gqa=True))
        figures[f"{name}, ms"], figures[f"{name}, times as fast as SDPA"] = ours * 1e3, theirs / ours
        if name == "decode" and bench.copy_gbps:
            num_bytes = 2 * requests * context * shape.num_kv_heads * shape.head_dim * dtype.itemsize
            figures["decode, share of copy"] = num_bytes / ours / 1e9 / bench.copy_gbps
    return figures


def decode_step(bench: Bench) -> Figures:
    """A whole decode step of a random model of these sizes, with adapters as a share of its own base, captured and called."""
    rows, context = (2, 20) if bench.is_dry else (64, 1024)
    dtype = bench.dtypes[0]
    config = bench.shape.config(2 * context)
    model = build_model(config, 2 * context, Placement(dtype, bench.device))
    for _, parameter in model.destinations():
        parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    blocks = rows * -(-context // BLOCK_SIZE)
    kv = allocate_kv_cache(config, blocks, BLOCK_SIZE, dtype, bench.device)
    tokens = torch.arange(rows, device=bench.device)
    requests = attention_step([1] * rows, [context] * rows, blocks, bench.device)
    positions = torch.full((rows,), context - 1, device=bench.device)
    ops = Operators(bench.operators())
    group = bench.shape.num_heads // bench.shape.num_kv_heads

    def step(memory: AdapterMemory, adapters: AdapterBatch) -> Tensor:
        planned, planned_requests = ops.plan_step(memory, adapters, requests, group, dtype)
        batch = ForwardBatch(ops, positions, planned_requests, planned, memory)
        return model.logits(ops, model.hidden_states(tokens, batch, kv))

    figures: Figures = {}
    base = 0.0
    cases = [(0, 16, RowType.BF16), (1, 16, RowType.BF16), (64, 16, RowType.BF16), (16, 16, RowType.BF16), (64, 16, RowType.INT8)]
    for number, rank, row_type in bench.in_time(cases, str):
        number = min(number, rows)
        memory = random_adapters(bench.shape, [rank] * max(number, 1), row_type, bench.device, scattered=False)
        adapters = build_adapter_batch([row % number if number else -1 for row in range(rows)], bench.device)
        seconds = bench.seconds(partial(step, memory, adapters))
        base = base or seconds
        name = f"{number} adapters {row_type.name.lower()}"
        figures[f"{name}, ms"], figures[f"{name}, share of base"] = seconds * 1e3, base / seconds
        if not bench.is_dry:
            figures |= _called(name, partial(step, memory, adapters))
        del memory
    return figures


def adapter_load(bench: Bench) -> Figures:
    """Host → device on a stream of its own, in pages, beside one plain copy of as many bytes."""
    if bench.is_dry:
        return {"skipped": "there is no device to copy to"}
    page, num_pages = 256 * 1024, 320
    host = torch.empty(page * num_pages, dtype=torch.uint8, pin_memory=True)
    pool = torch.empty(2 * page * num_pages, dtype=torch.uint8, device=bench.device)
    places = torch.randperm(2 * num_pages)[:num_pages].tolist()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def timed(copy: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            with torch.cuda.stream(stream):
                copy()
            stream.synchronize()
            times.append(time.perf_counter() - started)
        return host.numel() / statistics.median(times) / 1e9

    def pages() -> None:
        for number, place in enumerate(places):
            pool[place * page : (place + 1) * page].copy_(host[number * page : (number + 1) * page], non_blocking=True)

    whole = timed(lambda: pool[: host.numel()].copy_(host, non_blocking=True))
    return {"one copy, GB/s": whole, "in pages, GB/s": timed(pages)}


def copy_rate(bench: Bench) -> Figures:
    """The ceiling: bytes that a plain copy reads and writes."""
    if bench.is_dry:
        return {"skipped": "an interpreter's times mean nothing"}
    source = torch.empty(1 << 30, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    bench.copy_gbps = 2 * source.numel() / bench.seconds(lambda: target.copy_(source)) / 1e9
    return {"copy, GB/s": bench.copy_gbps}


def _called(name: str, step: Callable[[], object]) -> Figures:
    """The same step called operator by operator: until it is issued, and until it is done."""
    issued, done = [], []
    for _ in range(7):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        issued.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        done.append(time.perf_counter() - started)
    return {
        f"{name}, called, ms": statistics.median(done) * 1e3,
        f"{name}, called: the host's share": statistics.median(issued) / statistics.median(done),
    }


def _all_linears(
    bench: Bench,
    launcher: AdapterLauncher,
    memory: AdapterMemory,
    batch: AdapterBatch,
    ranks: Sequence[int],
    row_type: RowType,
    num_rows: int,
) -> tuple[Callable[[], object], int]:
    """The adapters' part of every linear of a step, and the bytes that it must move: rows once, x, h written and read, y twice."""
    dtype = bench.dtypes[0]
    planned = replace(batch, tasks=launcher.plan(memory, batch))
    work: list[tuple[Tensor, Tensor, tuple[LinearSite, ...]]] = []
    num_bytes = 0
    for layer in range(bench.shape.num_layers):
        for num_in, sites in bench.shape.linears(layer).values():
            work.append(
                (_random(bench, num_rows, num_in, dtype=dtype), _random(bench, num_rows, _width(sites), dtype=dtype), sites)
            )
            num_bytes += num_rows * (num_in + 2 * _width(sites)) * dtype.itemsize
            for rank in ranks:
                num_bytes += sum(rank * (row_bytes(row_type, num_in) + row_bytes(row_type, site.size)) for site in sites)
            num_bytes += sum(2 * 4 * rank * len(sites) for rank in ranks) * num_rows // len(ranks)

    def run() -> None:
        for x, out, sites in work:
            launcher.add(out, out, x, None, memory, planned, sites)

    return run, num_bytes


def _cache(bench: Bench, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (num_blocks, bench.shape.num_kv_heads, BLOCK_SIZE, bench.shape.head_dim)
    return _random(bench, *shape, dtype=dtype), _random(bench, *shape, dtype=dtype)


def _random(bench: Bench, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=bench.device).to(dtype)


def _width(sites: Sequence[LinearSite]) -> int:
    return sum(site.size for site in sites)


def _processors(bench: Bench) -> int:
    return 1 if bench.is_dry else torch.cuda.get_device_properties(bench.device).multi_processor_count


def _copy_batch(source: AdapterBatch, target: AdapterBatch) -> None:
    for name in ("token_adapter", "permutation", "segment_start", "segment_adapter", "num_segments"):
        getattr(target, name).copy_(getattr(source, name))


def _swap_first_two(memory: AdapterMemory) -> None:
    """Two adapters change places, as after evictions and loads: records point to other rows from the next step on."""
    first = memory.sites[0].clone()
    memory.sites[0].copy_(memory.sites[1])
    memory.sites[1].copy_(first)
    if bool((memory.sites[:2, :, SiteField.RANK] < 0).any()):
        raise Wrong("a record was damaged while it was moved")
