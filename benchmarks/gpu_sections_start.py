"""What comes first and what is left to compile: the machine, all variants of the kernels at once, and steps of odd sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import triton

from gpu_bench import Bench, Figures, noted_compiles
from gpu_loads import attention_step, attention_values, random_adapters, random_weight
from gpu_model import RandomModel
from gpu_sections_logits import random_bias, random_penalties, random_sampling
from gpu_sections_right import layers_are_right
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import LinearSite, RowType, Weight
from graftwork_kernels.triton.linear import Form

WARM_SIZES = (1, 4, 8, 16, 64, 256)
"""Requests of steps that a server warms up with, as far as `compiles` needs them."""

ODD_SIZES = (3, 7, 11, 5, 33, 133)


def machine(bench: Bench, figures: Figures) -> None:
    """What runs here."""
    figures["device"] = "CPU, interpreted" if bench.is_dry else torch.cuda.get_device_name(bench.device)
    figures["torch"], figures["triton"] = torch.__version__, triton.__version__
    if not bench.is_dry:
        capability, memory = torch.cuda.get_device_capability(bench.device), torch.cuda.mem_get_info(bench.device)
        figures["compute capability"], figures["memory, GB"] = "{}.{}".format(*capability), memory[1] / 1e9


def warm_cache(bench: Bench, figures: Figures) -> None:
    """This process's part of the calls that between them launch every variant that other parts use: so that all processors compile
    at once, and others find them in Triton's cache.
    """
    mine = list(_calls(bench).items())[bench.part :: bench.parts]
    name = f"process {bench.part + 1}"
    for number, (_, call) in enumerate(bench.in_time(mine, lambda item: item[0])):
        call()
        figures[f"{name}, calls"] = number + 1.0


def _calls(bench: Bench) -> dict[str, Callable[[], object]]:
    """By name, what is most needed first."""
    calls: dict[str, Callable[[], object]] = {}
    for dtype in bench.dtypes:
        for form in (Form.FUSED, Form.TWO):
            for name, (num_in, sites) in bench.shape.linears(0).items():
                for out_dtype in (dtype,) if name == "qkv" else dict.fromkeys((dtype, torch.float32)):
                    for has_bias in (False, True) if name == "qkv" else (False,):
                        call = partial(_call_linear, bench, dtype, form, num_in, sites, out_dtype, has_bias)
                        calls[f"{name} {dtype} → {out_dtype}, {form.value}, bias: {has_bias}"] = call
        for number in (2, 3, *WARM_SIZES) if dtype == bench.dtypes[0] else (2, 3, 4):
            calls[f"attention {dtype}, {number}"] = partial(_call_attention, bench, dtype, number)
    calls["tasks"] = partial(_call_tasks, bench)
    calls["logits"] = partial(_call_logits, bench)
    calls["layers"] = partial(layers_are_right, bench, {})
    if bench.is_dry:  # nothing is compiled, so one of each kind is enough to see that it can be called
        return {name: calls[name] for name in (f"down {dtype} → {dtype}, two, bias: False", f"attention {dtype}, 2", "logits")}
    return calls


def _call_linear(
    bench: Bench,
    dtype: torch.dtype,
    form: Form,
    num_in: int,
    sites: tuple[LinearSite, ...],
    out_dtype: torch.dtype,
    has_bias: bool,
) -> None:
    memory = random_adapters(bench.shape, [1, 17], RowType.BF16, bench.device, layers=1)
    num_out = sum(site.size for site in sites)
    x, bias = (torch.randn(*size, device=bench.device).to(dtype) for size in ((3, num_in), (num_out,)))
    weight = Weight.plain(random_weight(num_out, num_in, dtype, bench.device))
    batch = build_adapter_batch([1, -1, 0], bench.device)
    bench.operators(form).adapter_linear(x, weight, bias if has_bias else None, memory, batch, sites, out_dtype)


def _call_tasks(bench: Bench) -> None:
    """The list of tasks, whose kernel is another for every power of two of adapters in a step."""
    for number in (1, 2, 4, 8, 16, 32, 64):
        memory = random_adapters(bench.shape, [1] * number, RowType.BF16, bench.device, layers=1)
        bench.plan_adapters(bench.launcher(Form.TWO), memory, build_adapter_batch(list(range(number)), bench.device))


def _call_attention(bench: Bench, dtype: torch.dtype, number: int) -> None:
    """Requests that decode, and one with a prompt."""
    query_len = [1] * (number - 1) + [3]
    num_blocks = number
    batch = attention_step(query_len, [5] * number, num_blocks, bench.device)
    q, keys, values = attention_values(bench.shape, batch, sum(query_len), num_blocks, 1.0, dtype, bench.device)
    bench.operators().paged_attention(q, keys, values, batch, 1.0)


def _call_logits(bench: Bench) -> None:
    rows, vocab, ops, device = 3, bench.shape.vocab, bench.operators(), bench.device
    logits = torch.randn(rows, vocab, device=device)
    ops.finite_rows(logits)
    ops.apply_logit_bias(logits, random_bias(rows, vocab, device))
    ops.apply_penalties(logits, random_penalties(rows, vocab, device))
    batch = random_sampling(rows, vocab, device)
    tokens = ops.sample(logits, batch)
    ops.philox_uniform(batch.seed, batch.choice, batch.position)
    for dtype in (torch.float32, torch.bfloat16):
        ops.token_logprobs(logits.to(dtype), tokens, 5)


def compiles(bench: Bench, figures: Figures) -> None:
    """Steps with every kernel in them, first of the sizes that a server warms up with, then of odd ones, decode alone and with
    prompts: kernels that are new to this process in the second half would each cost a request a second or more. 0 is wanted.
    """
    warm, odd = ((2,), (1,)) if bench.is_dry else (WARM_SIZES, ODD_SIZES)
    kinds = [(5, Form.TWO)] if bench.is_dry else list(product((1, 5), Form))
    model = RandomModel(bench, 2 * max(warm) + 64, 1)
    memory = random_adapters(replace(bench.shape, num_layers=16), [1, 16, 17, 64], RowType.BF16, bench.device, layers=1)
    for name, sizes in (("warm-up", warm), ("odd sizes", odd)):
        with noted_compiles() as found:
            figures[f"kernels compiled, {name}"] = 0.0
            for number, (prompt, form) in bench.in_time(list(product(sizes, kinds))):
                query_len = [prompt, *[1] * (number - 1)]
                contexts = [prompt + request % 7 for request in range(number)]
                adapters = [request % 5 - 1 for request in range(number)]
                step = model.step(adapters, query_len, contexts, sum(query_len))
                model.whole_step(bench.operators(form), step, memory)
                figures[f"kernels compiled, {name}"] = float(len(found))
        if name == "odd sizes" and found:
            figures["which"] = ", ".join(f"{kernel} ({count})" for kernel, count in Counter(kernel for kernel, _ in found).items())
    if not bench.is_dry and not figures["kernels compiled, warm-up"]:
        figures["which"] = "nothing was noted at all: this Triton tells nobody what it compiles"
