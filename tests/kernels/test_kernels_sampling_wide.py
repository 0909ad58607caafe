"""Sampling over the vocabularies of real models, flat and peaked, against float64; and filters whose edge falls on a rounding."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graftwork_kernels.cpu.build import SOURCES, build_library
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.layout import SamplingBatch
from graftwork_kernels.ops import Operators


@pytest.fixture
def ops(host_ops: Operators) -> Operators:
    """The interpreter takes a hundredth of a second for a row; its kernels have tests of fewer rows."""
    return host_ops


STEP = 1e-5
"""How near to a step of the running sum a draw may fall on either side."""

EDGE = 2e-6
"""How near to a token's end top-p may fall and take it or not: weights are fp32, and so is what they are compared with."""


def uniform(num_tokens: int) -> Tensor:
    return torch.zeros(num_tokens)


def flat(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens) * 1e-3


def bell(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens) * 2


def coarse(num_tokens: int) -> Tensor:
    """As a head in bf16 gives them: many equals."""
    return (torch.randn(num_tokens) * 2).bfloat16().float()


def peaked(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens) * 12


def spike(num_tokens: int) -> Tensor:
    """One token has half of all, the others are all but equal."""
    logits = torch.randn(num_tokens) * 1e-4
    logits[num_tokens // 3] = float(torch.tensor(num_tokens).log())
    return logits


TOP_P = (0.0, 1e-7, 1e-5, 1e-3, 0.5, 0.9, 0.999, 0.99999, 1 - 2**-24)


class Exact:
    """A row in float64: its tokens ordered once, and what the filters leave of them."""

    def __init__(self, logits: Tensor, temperature: float, top_k: int, min_p: float) -> None:
        order = logits.argsort(descending=True, stable=True)
        self._order = order[:top_k] if top_k else order
        self._sorted = ((logits.double()[self._order] - float(logits.max())) / temperature).exp()
        self._mass = self._sorted.cumsum(0)
        self._num_tokens, self._min_p = len(logits), min_p

    def kept(self, top_p: float) -> Tensor:
        """The weights that are left, by id; the others 0."""
        count = len(self._order) if top_p >= 1 else int(torch.searchsorted(self._mass, top_p * self._mass[-1])) + 1
        weights = torch.zeros(self._num_tokens, dtype=torch.float64)
        weights[self._order[:count]] = self._sorted[:count]
        return weights.masked_fill_(weights < self._min_p, 0.0)


def is_draw(weights: Tensor, token: int, noise: float) -> bool:
    """Whether ``token`` is that of ``noise``, or next to a step within `STEP` of it."""
    total, begin = float(weights.sum()), float(weights[:token].sum())
    weight = float(weights[token])
    return weight > 0 and begin / total - STEP <= noise < (begin + weight) / total + STEP


@pytest.mark.parametrize("num_tokens", [49152, 151936])
@pytest.mark.parametrize("kind", [uniform, flat, bell, coarse, peaked, spike])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 5000}, {"temperature": 1.4, "min_p": 1e-4}], ids=str)
def test_draws_from_a_wide_row_are_those_of_float64(ops: Operators, num_tokens, kind, options):
    """Every strength of top-p, near 0 and near 1 as well, alone and after or before the other filters."""
    wanted = {"temperature": 1.0, "top_k": 0, "min_p": 0.0} | options
    logits, top_p = kind(num_tokens), torch.tensor(TOP_P)
    num_rows = len(top_p)
    batch = SamplingBatch(
        temperature=torch.full((num_rows,), wanted["temperature"]),
        top_k=torch.full((num_rows,), wanted["top_k"], dtype=torch.int32),
        top_p=top_p,
        min_p=torch.full((num_rows,), wanted["min_p"]),
        seed=torch.arange(num_rows) + num_tokens,
        choice=torch.zeros(num_rows, dtype=torch.int32),
        position=torch.zeros(num_rows, dtype=torch.int32),
    )
    tokens = ops.sample(logits.expand(num_rows, -1), batch).tolist()
    noises = ops.philox_uniform(batch.seed, batch.choice, batch.position).tolist()
    exact = Exact(logits, **wanted)
    for share, token, noise in zip(top_p.tolist(), tokens, noises, strict=True):
        either = (exact.kept(share * (1 + shift)) for shift in (0, -EDGE, EDGE))
        assert any(is_draw(weights, token, noise) for weights in either), (share, token, noise)


SELECT = """
#include "select.h"
#include "step.h"
using namespace graftwork;

struct SelectArguments { const float* logits; int64_t num_tokens; double needed; float* scratch; int32_t* ids; int64_t* num_kept; };

// 1 for the first token, 2^-53 for all others: added to the first one by one, they are rounded away, and together they are not.
struct Grains {
    double wanted;
    template <int kCount>
    void operator()(Vec (&logits)[kCount]) const {
        for (Vec& part : logits) part = part >= 0.0f ? splat(1.0f) : part > -kInfinity ? splat(0x1p-53f) : Vec{};
    }
    double needed(double) const { return wanted; }
};

static void run(const SelectArguments& a, Step&, Team& team) {
    team.share(1, [&](int64_t) {
        const Cut cut = find_cut(a.logits, a.num_tokens, Grains{a.needed}, a.scratch);
        *a.num_kept = keep(a.logits, nullptr, a.num_tokens, cut, a.scratch, a.ids);
    });
}
GRAFTWORK_OPERATOR(graftwork_select, SelectArguments)
"""


class _SelectArguments(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("needed", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("scratch", "ids", "num_kept")),
    )


def test_an_edge_that_falls_on_a_rounding_stays_where_it_was_found(tmp_path: Path):
    """A bucket's sum reaches what is needed, the sum of its parts does not: what comes after the bucket is cut off all the same."""
    (sources := tmp_path / "src").mkdir()
    for name in ("run.cpp", "step.h", "vec.h", "groups.h", "vocabulary.h", "select.h"):
        shutil.copy(SOURCES / name, sources)
    (sources / "select.cpp").write_text(SELECT)
    issuer = Immediate(Library(build_library(tmp_path / "kernels", sources)), 1)
    num_grains = 600
    near = -500 - torch.rand(num_grains).sort().values / 4  # one bucket of the first round
    logits = torch.cat((torch.zeros(1), near, torch.linspace(-700, -1000, 1000)))
    needed = 1 + num_grains * 2**-53
    assert needed > 1 == 1 + 2**-53
    scratch, ids = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int32)
    num_kept = torch.zeros(1, dtype=torch.int64)
    pointers = (tensor.data_ptr() for tensor in (scratch, ids, num_kept))
    issuer.issue("graftwork_select", _SelectArguments(logits.data_ptr(), len(logits), needed, *pointers), [], 1)
    assert ids[: int(num_kept)].tolist() == list(range(1 + num_grains))
