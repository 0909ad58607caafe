"""The adapter linear of the Triton kernels, interpreted, against a dense W + BA for each row; all that is no adapter's row is NaN.

Each case has one value of every factor below; a set of cases in which every pair of values meets is run, and with
`--hypothesis-profile=full` the whole matrix of those that decide how rows are shared out, the others drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations, product

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import settings
from torch import Tensor

from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import AdapterMemory, LinearSite, RowType, Weight
from graftwork_kernels.triton import linear
from graftwork_kernels.triton.adapter_rows import decode_e4m3
from graftwork_kernels.triton.linear import K_CHUNK, Form

SIZES = (20, 50)
SITES = (LinearSite(0, 0, SIZES[0]), LinearSite(1, SIZES[0], SIZES[1]))
NUM_OUT = sum(SIZES)

FACTORS: Mapping[str, tuple[object, ...]] = {
    "num_rows": (0, 1, 2, 3, 7, 33, 133),
    "popularity": ("identical", "distinct", "uniform", "zipf"),
    "rank": (1, 2, 7, 16, 17, 65, 256),
    "row_type": tuple(RowType),
    "form": tuple(Form),
    "base_share": (0.0, 0.3),
    "num_in": (70, K_CHUNK + 70),
    "has_bias": (False, True),
    "own_vectors": ("none", "scale", "bias"),
}
MATRIX = ("num_rows", "popularity", "rank", "form", "base_share")
"""Every value of which meets every other in the full matrix."""

MOST_ADAPTERS = 20
"""Of the distinct ones too: the rest of 133 rows come again. More than rows of a tile, and than a power of two."""

Case = Mapping[str, object]


def covering_cases() -> list[Case]:
    """A small set of cases in which every value of a factor meets every value of every other; of those that bring as much, the
    least work: many rows, a high rank and long ones need not meet all at once.
    """
    names = list(FACTORS)
    missing = {
        ((first, one), (second, other))
        for first, second in combinations(names, 2)
        for one, other in product(FACTORS[first], FACTORS[second])
    }
    draw = random.Random(0)
    cases = []
    while missing:
        candidates = [{name: draw.choice(values) for name, values in FACTORS.items()} for _ in range(300)]
        best = max(candidates, key=lambda case: (len(missing.intersection(pairs(case))), -work(case)))
        missing -= pairs(best)
        cases.append(best)
    return cases


def pairs(case: Case) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    return set(combinations(case.items(), 2))


def work(case: Case) -> int:
    """In products, about."""
    return math.prod(int(str(case[name])) for name in ("num_rows", "rank", "num_in"))


def matrix_cases() -> Iterator[Case]:
    draw = random.Random(0)
    for values in product(*(FACTORS[name] for name in MATRIX)):
        yield {name: draw.choice(values) for name, values in FACTORS.items()} | dict(zip(MATRIX, values, strict=True))


def is_full() -> bool:
    return settings().max_examples > settings.get_profile("quick").max_examples


def token_adapters(case: Case) -> list[int]:
    num_rows, draw = int(str(case["num_rows"])), random.Random(1)
    number = max(1, min(num_rows, MOST_ADAPTERS))
    weights = {
        "identical": [1.0] + [0.0] * (number - 1),
        "distinct": [],
        "uniform": [1.0] * number,
        "zipf": [1.0 / (place + 1) for place in range(number)],
    }[str(case["popularity"])]
    adapters = [row % number for row in range(num_rows)] if not weights else draw.choices(range(number), weights, k=num_rows)
    return [-1 if draw.random() < float(str(case["base_share"])) else adapter for adapter in adapters]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is handed out full of NaN, so that what is read before it was written is seen."""
    empty = torch.empty

    def poisoned(*shape, **options) -> Tensor:
        tensor = empty(*shape, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(-1)

    monkeypatch.setattr(linear.torch, "empty", poisoned)


def poisoned_rows(x: Tensor) -> Tensor:
    """``x`` as a part of memory that is NaN beside, above and below it."""
    whole = torch.full((x.shape[0] + 2, x.shape[1] + 9), torch.nan)
    whole[1:-1, :-9] = x
    return whole[1:-1, :-9]


def cases() -> Iterator[Case]:
    return chain(covering_cases(), matrix_cases() if is_full() else ())


def dense(x, weight, bias, sites, adapters) -> Tensor:
    out = x.double() @ weight.double().T
    shift = torch.zeros(len(adapters), NUM_OUT, dtype=torch.float64)
    if bias is not None:
        shift += bias.double()
    for (row, adapter), site in product(enumerate(adapters), SITES):
        part, columns = sites.get((adapter, site.index)), slice(site.start, site.start + site.size)
        if part is not None:
            out[row, columns] += x[row].double() @ part.a.double().T @ part.b.double()
            if part.scale is not None:
                out[row, columns] *= part.scale.double()
            if part.bias is not None:
                shift[row, columns] = part.bias.double()
    return out + shift


def test_every_pair_of_what_a_step_may_be(memory_builder, make_interpreted):
    for case in cases():
        rank, num_in, row_type = int(str(case["rank"])), int(str(case["num_in"])), case["row_type"]
        adapters = token_adapters(case)
        builder = memory_builder(2)
        for adapter in range(max(adapters, default=-1) + 2):  # one more than is used
            # True ranks differ: the second site's is a third of the first's, and of some adapters it is none. One is large.
            rank = int(str(case["rank"])) if adapter == 0 else 1 + (rank + 7 * adapter) % 24
            vectors = {"has_scale": case["own_vectors"] == "scale", "has_bias": case["own_vectors"] == "bias"}
            builder.add(adapter, 0, rank=rank, size=(num_in, SIZES[0]), row_type=row_type, **vectors)
            builder.add(adapter, 1, rank=rank // 3 * (adapter % 4 > 0), size=(num_in, SIZES[1]), row_type=row_type)
        memory = builder.build(scattered=True, rubbish=0xFF)
        x = poisoned_rows(torch.randn(len(adapters), num_in))
        weight, bias = torch.randn(NUM_OUT, num_in), torch.randn(NUM_OUT) if case["has_bias"] else None
        out = make_interpreted(case["form"]).adapter_linear(
            x, Weight.plain(weight), bias, memory, build_adapter_batch(adapters), SITES, torch.float32
        )
        expected = dense(x, weight, bias, builder.dense, adapters)
        tolerance = 2e-5 * float(expected.abs().max()) if adapters else 0.0
        torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=tolerance, msg=lambda text, case=case: f"{case}: {text}")


@pytest.mark.parametrize("form", list(Form))
def test_a_row_keeps_every_bit_whatever_its_neighbours(make_interpreted, many_ranks, form):
    """Whatever they hold, whose they are, and however many programs share the work. Rows change no places: the interpreter
    multiplies by a BLAS, to which a row's place in a tile matters.
    """
    x, bias = torch.randn(40, 70), torch.randn(70)
    nothing = Weight.plain(torch.zeros(70, 70))  # the base's product is BLAS's: what is left is the adapters' share
    adapters = [number * 5 % 6 - 1 for number in range(40)]
    batch = build_adapter_batch(adapters)
    together = make_interpreted(form).adapter_linear(x, nothing, bias, many_ranks, batch, SITES, torch.float32)
    for num_programs in (1, 200):
        again = make_interpreted(form, num_programs).adapter_linear(x, nothing, bias, many_ranks, batch, SITES, torch.float32)
        assert torch.equal(again, together)
    for adapter in range(5):
        mine = torch.tensor(adapters) == adapter
        others = torch.where(mine[:, None], x, torch.full_like(x, torch.nan))
        again = make_interpreted(form).adapter_linear(others, nothing, bias, many_ranks, batch, SITES, torch.float32)
        assert torch.equal(again[mine], together[mine])
        alone = build_adapter_batch([adapter if is_mine else -1 for is_mine in mine.tolist()])
        again = make_interpreted(form).adapter_linear(others, nothing, bias, many_ranks, alone, SITES, torch.float32)
        assert torch.equal(again[mine], together[mine])


def test_both_forms_give_the_same_bits(make_interpreted, many_ranks):
    x, weight = torch.randn(40, 70), Weight.plain(torch.randn(70, 70))
    batch = build_adapter_batch([number * 5 % 6 - 1 for number in range(40)])
    two, fused = (
        make_interpreted(form).adapter_linear(x, weight, None, many_ranks, batch, SITES, torch.float32)
        for form in (Form.TWO, Form.FUSED)
    )
    assert torch.equal(two, fused)


def test_arrivals_are_back_at_zero(make_interpreted, many_ranks):
    """So that the next launch, in the same captured graph, counts from there."""
    ops = make_interpreted(Form.FUSED)
    batch, x, weight = build_adapter_batch([0, 1, 1, 3, -1, 4]), torch.randn(6, 70), Weight.plain(torch.randn(70, 70))
    tasks = linear.AdapterLauncher(3, 512, Form.FUSED, is_exact=True, is_wide=True, has_e4m3=False).plan(many_ranks, batch)
    planned = replace(batch, tasks=tasks)
    first = ops.adapter_linear(x, weight, None, many_ranks, planned, SITES, torch.float32)
    assert not tasks.arrivals.any()
    assert torch.equal(ops.adapter_linear(x, weight, None, many_ranks, planned, SITES, torch.float32), first)


@pytest.mark.parametrize("num_chunks", [8, 11, 18])
def test_many_chunks_of_k_are_added_in_rounds(make_interpreted, memory_builder, monkeypatch, num_chunks):
    """One round; two, of which the second is shorter; three even ones."""
    monkeypatch.setattr(linear, "K_CHUNK", 16)
    num_in = 16 * num_chunks - 5
    builder = memory_builder(1)
    part = builder.add(0, 0, rank=18, size=(num_in, NUM_OUT))
    x, nothing, site = torch.randn(3, num_in), Weight.plain(torch.zeros(NUM_OUT, num_in)), (LinearSite(0, 0, NUM_OUT),)
    memory, batch = builder.build(scattered=True, rubbish=0xFF), build_adapter_batch([0] * 3)
    for form in Form:
        out = make_interpreted(form).adapter_linear(x, nothing, None, memory, batch, site, torch.float32)
        torch.testing.assert_close(out, x @ part.a.T @ part.b, rtol=1e-4, atol=1e-3)


@triton.jit
def _decode_all(codes, values, HAS_E4M3: tl.constexpr):
    place = tl.arange(0, 256)
    tl.store(values + place, decode_e4m3(tl.load(codes + place), HAS_E4M3))


def test_both_ways_to_decode_e4m3_are_torchs():
    """All codes by moving bits; by the type's own conversion all but its NaN, which the interpreter takes for 480."""
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    moved, converted = torch.empty(2, 256)
    _decode_all[(1,)](codes, moved, HAS_E4M3=False)
    _decode_all[(1,)](codes, converted, HAS_E4M3=True)
    assert torch.equal(moved.isnan(), expected.isnan())
    for values in (moved, converted):
        assert torch.equal(values[~expected.isnan()].view(torch.int32), expected[~expected.isnan()].view(torch.int32))


def test_both_ways_to_decode_e4m3_give_the_same_bits(make_interpreted, memory_builder):
    builder = memory_builder(1)
    builder.add(0, 0, rank=9, size=(70, NUM_OUT), row_type=RowType.E4M3)
    memory, site = builder.build(scattered=True), (LinearSite(0, 0, NUM_OUT),)
    x, weight, batch = torch.randn(3, 70), Weight.plain(torch.randn(NUM_OUT, 70)), build_adapter_batch([0, -1, 0])
    for form in Form:
        moved, converted = (
            make_interpreted(form, has_e4m3=has_e4m3).adapter_linear(x, weight, None, memory, batch, site, torch.float32)
            for has_e4m3 in (False, True)
        )
        assert torch.equal(converted, moved)


def test_rows_that_another_adapter_took_over(make_interpreted, memory_builder):
    """An evicted adapter's rows hold another's now: the next step reads the new one's, through records that point there."""
    before, after = memory_builder(1), memory_builder(1)
    for builder, ranks in ((before, (9, 5)), (after, (3, 12))):
        for adapter, rank in enumerate(ranks):
            builder.add(adapter, 0, rank=rank, size=(70, NUM_OUT))
    old, new = (builder.build(scattered=True, rubbish=0xFF) for builder in (before, after))
    x, nothing, site = torch.randn(3, 70), Weight.plain(torch.zeros(NUM_OUT, 70)), (LinearSite(0, 0, NUM_OUT),)
    ops, batch = make_interpreted(Form.TWO), build_adapter_batch([0, 1, 0])
    pool = torch.full((max(old.pool.numel(), new.pool.numel()),), 0xFF, dtype=torch.uint8)
    for memory, dense in ((old, before.dense), (new, after.dense)):
        pool[: memory.pool.numel()] = memory.pool
        out = ops.adapter_linear(x, nothing, None, AdapterMemory(pool, memory.row_offset, memory.sites), batch, site, torch.float32)
        for row, adapter in enumerate([0, 1, 0]):
            part = dense[adapter, 0]
            torch.testing.assert_close(out[row], x[row] @ part.a.T @ part.b, rtol=1e-4, atol=1e-4)
