"""How near do the kernels come to what memory allows? The adapters' part of all linears, attention, and loading an adapter."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_bench import Bench, Figures, compare
from gpu_loads import BLOCK_SIZE, attention_step, random_adapters
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import AdapterBatch, AdapterMemory, AttentionBatch, LinearSite, RowType
from graftwork_kernels.row_codec import row_bytes
from graftwork_kernels.triton.linear import AdapterLauncher, Form

COPY = "copy, GB/s"


def copy_rate(bench: Bench, figures: Figures) -> None:
    """The ceiling: bytes that a plain copy reads and writes."""
    if bench.is_dry:
        figures["skipped"] = "an interpreter's times mean nothing"
        return
    source = torch.empty(1 << 30, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    figures[COPY] = 2 * source.numel() / bench.seconds(lambda: target.copy_(source)) / 1e9


def adapter_bandwidth(bench: Bench, figures: Figures) -> None:
    """What adapters add to all linears of a step: bytes that must move, over time, as a share of a copy's rate."""
    num_rows = 3 if bench.is_dry else 64
    mixed = (8, 16, 32, 64)
    cases = [
        (number, ranks, row_type, form)
        for number, ranks, row_type in (
            (64, (16,), RowType.BF16), (64, mixed, RowType.BF16), (64, (30,), RowType.BF16), (1, (16,), RowType.BF16),
            (16, (16,), RowType.BF16), (64, (16,), RowType.INT8), (64, (16,), RowType.E4M3), (64, (8,), RowType.BF16),
            (64, (64,), RowType.BF16),
        )
        for form in Form
    ]  # fmt: skip
    for number, ranks, row_type, form in bench.in_time(cases[1:2] + cases[-4:-3] if bench.is_dry else cases):
        number = min(number, num_rows)
        each = [ranks[adapter % len(ranks)] for adapter in range(number)]
        shape = replace(bench.shape, num_layers=1) if bench.is_dry else bench.shape
        memory = random_adapters(shape, each, row_type, bench.device)
        batch = build_adapter_batch([row % number for row in range(num_rows)], bench.device)
        run, num_bytes = _all_linears(replace(bench, shape=shape), bench.launcher(form), memory, batch, each, row_type)
        seconds = bench.seconds(run)
        name = f"{number} adapters r{'/'.join(map(str, ranks))} {row_type.name.lower()} {form.value}"
        figures[f"{name}, ms"] = seconds * 1e3
        if bench.copy_gbps:
            figures[f"{name}, share of copy"] = num_bytes / seconds / 1e9 / bench.copy_gbps
        del memory, run


def _all_linears(
    bench: Bench,
    launcher: AdapterLauncher,
    memory: AdapterMemory,
    batch: AdapterBatch,
    ranks: Sequence[int],
    row_type: RowType,
) -> tuple[Callable[[], object], int]:
    """The adapters' part of every linear of a step, and the bytes that it must move: rows once, x, h written and read, y twice."""
    dtype, num_rows = bench.dtypes[0], len(batch.token_adapter)
    planned = replace(batch, tasks=bench.plan_adapters(launcher, memory, batch))
    work: list[tuple[Tensor, Tensor, tuple[LinearSite, ...]]] = []
    num_bytes = 0
    for layer in range(bench.shape.num_layers):
        for num_in, sites in bench.shape.linears(layer).values():
            num_out = sum(site.size for site in sites)
            x, out = (torch.randn(num_rows, width, device=bench.device).to(dtype) for width in (num_in, num_out))
            work.append((x, out, sites))
            num_bytes += num_rows * (num_in + 2 * num_out) * dtype.itemsize
            for rank in ranks:
                num_bytes += sum(rank * (row_bytes(row_type, num_in) + row_bytes(row_type, site.size)) for site in sites)
            num_bytes += sum(2 * 4 * rank * len(sites) for rank in ranks) * num_rows // len(ranks)

    def run() -> None:
        for x, out, sites in work:
            launcher.add(out, out, x, None, memory, planned, sites)

    return run, num_bytes


def attention_bandwidth(bench: Bench, figures: Figures) -> None:
    """Decode of 64 contexts of 2,048 tokens and one prompt of as many, beside torch's attention over contiguous memory, and beside
    FlashInfer's over the same pages where there is one.
    """
    requests, context = (3, 40) if bench.is_dry else (64, 2048)
    shape, dtype, scale = bench.shape, bench.dtypes[0], bench.shape.head_dim**-0.5
    num_blocks, ops = requests * -(-context // BLOCK_SIZE), bench.operators()
    size = (num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    k_cache, v_cache = (torch.randn(size, device=bench.device).to(dtype) for _ in range(2))
    cases = {"decode": ([1] * requests, [context] * requests), "prompt": ([context], [context])}
    decode: tuple[Tensor, AttentionBatch] | None = None
    for name, (query_len, context_len) in bench.in_time(list(cases.items())):
        batch = attention_step(query_len, context_len, num_blocks, bench.device)
        q = torch.randn(sum(query_len), shape.num_heads, shape.head_dim, device=bench.device).to(dtype)
        ours = bench.seconds(partial(ops.paged_attention, q, k_cache, v_cache, batch, scale))
        figures[f"{name}, ms"] = ours * 1e3
        if name == "decode":
            decode = q, batch
            if bench.copy_gbps:
                num_bytes = 2 * requests * context * shape.num_kv_heads * shape.head_dim * dtype.itemsize
                figures["decode, share of copy"] = num_bytes / ours / 1e9 / bench.copy_gbps
        rows = query_len[0]
        dense_q, keys, values = (
            torch.randn(len(query_len), heads, length, shape.head_dim, device=bench.device).to(dtype)
            for heads, length in ((shape.num_heads, rows), (shape.num_kv_heads, context), (shape.num_kv_heads, context))
        )
        theirs = bench.seconds(partial(scaled_dot_product_attention, dense_q, keys, values, is_causal=rows > 1, enable_gqa=True))
        figures[f"{name}, times as fast as SDPA"] = theirs / ours
    if decode is not None:
        _beside_flashinfer(bench, figures, decode[0], k_cache, v_cache, decode[1], scale)


def _beside_flashinfer(
    bench: Bench, figures: Figures, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float
) -> None:
    """Last, since it may compile for a long time; what it cannot do here is said, and no fault of ours."""
    name = "decode, times as fast as FlashInfer"
    try:
        flashinfer = importlib.import_module("flashinfer")
    except Exception as error:  # noqa: BLE001 - a package that is broken is not there
        figures[name] = f"not here: {type(error).__name__}"
        return
    figures[name] = "not measured"
    try:
        context, (_, num_heads, head_dim) = batch.max_context_len, q.shape
        pages = -(-context // BLOCK_SIZE)
        indptr = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) * pages
        last = torch.full((len(q),), context - (pages - 1) * BLOCK_SIZE, dtype=torch.int32, device=q.device)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
        theirs = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        theirs.plan(
            indptr, batch.block_table[:, :pages].flatten(), last, num_heads, k_cache.shape[1], head_dim, BLOCK_SIZE,
            q_data_type=q.dtype, kv_data_type=q.dtype, sm_scale=scale,
        )  # fmt: skip
        ours = partial(bench.operators().paged_attention, q, k_cache, v_cache, batch, scale)
        run = partial(theirs.run, q, (k_cache, v_cache))
        figures["decode, ours beside FlashInfer's"] = compare("attention beside FlashInfer's", ours(), run().double())
        figures[name] = bench.seconds(run) / bench.seconds(ours)
    except Exception as error:  # noqa: BLE001 - another's package fails in ways of its own
        figures[name] = f"failed: {type(error).__name__}: {error}"


def adapter_load(bench: Bench, figures: Figures) -> None:
    """Host → device on a stream of its own, in pages, beside one plain copy of as many bytes."""
    if bench.is_dry:
        figures["skipped"] = "there is no device to copy to"
        return
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

    figures["one copy, GB/s"] = timed(lambda: pool[: host.numel()].copy_(host, non_blocking=True))
    figures["in pages, GB/s"] = timed(pages)
