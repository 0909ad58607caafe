"""The GPU check sees what is wrong: results that a broken kernel would give, in every type that it asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gpu_exact
from gpu_bench import Wrong, compare, must_equal, spoiled_memory
from gpu_loads import (
    BLOCK_SIZE,
    TINY,
    attention_step,
    attention_values,
    exact_adapter_linear,
    exact_attention,
    random_adapters,
    random_weight,
)
from gpu_sections_logits import check_draws, random_logits, random_sampling
from graftwork_kernels import reference
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import RowType, SiteField, Weight

CPU = torch.device("cpu")
MEDIUM = replace(TINY, hidden=512, intermediate=1536)
"""Wide enough for an adapter's part to be lost in its sums, if the sizes of both were not alike."""

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("row_type", RowType)
@pytest.mark.parametrize("dtype", DTYPES)
def test_missing_and_wrong_adapters_are_seen(dtype, row_type, scattered):
    ranks = [1, 7, 16, 40]
    memory = random_adapters(MEDIUM, ranks, row_type, CPU, layers=1, scattered=scattered)
    adapters = [-1, 0, 1, 2, 3, -1, 3]
    for name, (num_in, sites) in MEDIUM.linears(0).items():
        num_out = sum(site.size for site in sites)
        x, weight = torch.randn(len(adapters), num_in).to(dtype), random_weight(num_out, num_in, dtype, CPU)
        bias = torch.randn(num_out).to(dtype)

        def result(adapters=adapters, sites=sites, x=x, weight=weight, bias=bias):
            return exact_adapter_linear(x, weight, bias, memory, adapters, sites)

        exact = result()
        assert compare(name, exact.to(dtype), exact) < 1e-2
        wrong = {
            "no adapters": result([-1] * len(adapters)),
            "no adapter in one row": result([*adapters[:-1], -1]),
            "an adapter in a row of the base": result([0, *adapters[1:]]),
            "other adapters": result([-1 if adapter < 0 else (adapter + 1) % 4 for adapter in adapters]),
            "another adapter in one row": result([*adapters[:1], 1, *adapters[2:]]),
            "no last site": result(sites=sites[:-1]),
            "no bias": result(bias=torch.zeros_like(bias)),
            "nothing written": torch.full_like(exact, torch.nan),
        }
        for what, out in wrong.items():
            with pytest.raises(Wrong, match="off by"):
                compare(f"{name}: {what}", out.to(dtype), exact)


@pytest.mark.parametrize("row_type", RowType)
def test_what_an_adapter_adds_is_as_large_as_the_bases_product(row_type):
    memory = random_adapters(MEDIUM, [1, 16, 64], row_type, CPU, layers=1)
    num_in, sites = MEDIUM.linears(0)["gate_up"]
    x, weight = torch.randn(48, num_in), random_weight(2 * MEDIUM.intermediate, num_in, torch.float32, CPU)
    base = x.double() @ weight.double().T
    for adapter in range(3):
        added = exact_adapter_linear(x, weight, None, memory, [adapter] * 48, sites) - base
        assert 0.6 < float(added.std() / base.std()) < 1.6


def test_a_missing_rank_is_seen():
    """One of 64 is an eighth of what is added."""
    memory = random_adapters(MEDIUM, [64], RowType.BF16, CPU, layers=1)
    num_in, sites = MEDIUM.linears(0)["down"]
    x, weight = torch.randn(3, num_in).bfloat16(), random_weight(MEDIUM.hidden, num_in, torch.bfloat16, CPU)
    exact = exact_adapter_linear(x, weight, None, memory, [0] * 3, sites)
    memory.sites[:, :, SiteField.RANK] = 63
    with pytest.raises(Wrong):
        compare("63 ranks", exact_adapter_linear(x, weight, None, memory, [0] * 3, sites).bfloat16(), exact)


@pytest.mark.parametrize("row_type", RowType)
def test_the_reference_agrees_about_adapters_with_vectors_of_their_own(row_type):
    memory = random_adapters(TINY, [1, 7, 16, 40], row_type, CPU, layers=1, scattered=True)
    adapters = [3, 1, -1, 0, 1, 2]
    num_in, sites = TINY.linears(0)["qkv"]
    num_out = sum(site.size for site in sites)
    x, weight, bias = torch.randn(6, num_in), random_weight(num_out, num_in, torch.float32, CPU), torch.randn(num_out)
    exact = exact_adapter_linear(x, weight, bias, memory, adapters, sites)
    out = reference.adapter_linear(x, Weight.plain(weight), bias, memory, build_adapter_batch(adapters), sites, torch.float32)
    compare("reference", out, exact)


@pytest.mark.parametrize("query_len", [[1, 1, 1], [5, 33, 1]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_contexts_blocks_and_scales_are_seen(dtype, query_len):
    context_len, num_blocks, scale = [33, 8999, 700], 3 * 563, TINY.head_dim**-0.5
    batch = attention_step(query_len, context_len, num_blocks, CPU, first_row=1)
    q, keys, values = attention_values(TINY, batch, sum(query_len) + 3, num_blocks, scale, dtype, CPU)
    exact = exact_attention(q, keys, values, batch, scale)
    assert compare("exact", exact.to(dtype), exact) < 1e-2
    assert not exact[0].any()
    rows = [slice(start, end) for start, end in zip(batch.query_start[:-1].tolist(), batch.query_start[1:].tolist(), strict=True)]
    wrong = {}
    for request in range(3):
        for change in (-1, 1):
            lengths = batch.context_len.clone()
            lengths[request] += change
            wrong[f"context {request} {change:+}", request] = replace(batch, context_len=lengths)
        table = batch.block_table.clone()
        last = (context_len[request] - 1) // BLOCK_SIZE
        for block in {0, last // 2, last}:
            other = table.clone()
            other[request, block] = table[(request + 1) % 3, 0]
            wrong[f"request {request}, block {block} of another", request] = replace(batch, block_table=other)
    for (what, request), broken in wrong.items():
        out = exact_attention(q, keys, values, broken, scale)
        with pytest.raises(Wrong):
            compare(what, out[rows[request]].to(dtype), exact[rows[request]])
        with pytest.raises(Wrong):
            compare(what, out.to(dtype), exact)
    for times in (0.95, 1.05):
        with pytest.raises(Wrong):
            compare("scale", exact_attention(q, keys, values, batch, scale * times).to(dtype), exact)
    padding = exact.clone()
    padding[0, 0, 0] = 1e-3
    with pytest.raises(Wrong):
        compare("a row of nobody", padding.to(dtype), exact)


def test_wrong_draws_are_seen():
    """The reference's tokens are right; tokens of other noise, and of rows without their filters, are not."""
    for name, logits in random_logits(64, 300, CPU).items():
        batch = random_sampling(64, 300, CPU)
        noise = gpu_exact.philox_uniform(batch.seed, batch.choice, batch.position)
        assert torch.equal(noise, reference.philox_uniform(batch.seed, batch.choice, batch.position))
        check_draws(name, logits, batch, noise, reference.sample(logits, batch))
        for change in (
            {"seed": batch.seed + 1},
            {"top_k": torch.zeros_like(batch.top_k), "top_p": torch.ones_like(batch.top_p), "min_p": torch.zeros_like(batch.min_p)},
            {"temperature": torch.ones_like(batch.temperature)},
        ):
            with pytest.raises(Wrong):
                check_draws(name, logits, batch, noise, reference.sample(logits, replace(batch, **change)))


def test_bits_are_compared_as_bits():
    out = torch.tensor([1.0, torch.nan, -torch.inf])
    must_equal("the same", out.clone(), out)
    for wrong in ([1.0, 2.0, -torch.inf], [1.0000001, torch.nan, -torch.inf], [torch.nan, torch.nan, -torch.inf]):
        with pytest.raises(Wrong):
            must_equal("another", torch.tensor(wrong), out)


def test_new_memory_is_full_of_rubbish_only_while_it_is_asked_for():
    with spoiled_memory():
        made = [torch.empty(3), torch.empty_like(torch.zeros(3)), torch.zeros(3).new_empty(3)]
        numbers = torch.empty(3, dtype=torch.int32)
    assert all(tensor.isnan().all() for tensor in made)
    assert (numbers < -1000).all()
    assert torch.empty is not None
    assert "spoiled" not in torch.empty.__qualname__
