"""Tensors whose elements lie apart: an operator gives what it gives for a copy of them, or says that it cannot read them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import AttentionBatch, LinearSite
from graftwork_kernels.ops import Operators

NUM_IN, NUM_OUT = 40, 24


def apart(tensor: Tensor) -> Tensor:
    """The same elements with others between them, all the way down."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 7).to(tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def assert_same_or_refused(run: Callable[..., Tensor], **tensors: Tensor) -> None:
    expected = run(**tensors)
    for name, tensor in tensors.items():
        refusal = ""
        try:
            actual = run(**{**tensors, name: apart(tensor)})
        except ValueError as error:
            actual, refusal = expected, str(error)
        assert not refusal or name in refusal
        torch.testing.assert_close(actual, expected, msg=f"{name}: read as if its elements lay side by side")


def test_linears_with_adapters(ops: Operators, memory_builder) -> None:
    builder = memory_builder(1)
    builder.add(0, 0, rank=4, size=(NUM_IN, NUM_OUT))
    memory, batch, site = builder.build(), build_adapter_batch([0, -1, 0, 0, -1]), (LinearSite(0, 0, NUM_OUT),)
    weight = ops.prepare_weight(torch.randn(NUM_OUT, NUM_IN))

    def run(x: Tensor, bias: Tensor) -> Tensor:
        return ops.adapter_linear(x, weight, bias, memory, batch, site)

    assert_same_or_refused(run, x=torch.randn(5, NUM_IN), bias=torch.randn(NUM_OUT))


def test_norms(ops: Operators) -> None:
    x, residual, weight = torch.randn(3, NUM_IN), torch.randn(3, NUM_IN), torch.randn(NUM_IN)
    assert_same_or_refused(lambda x, weight: ops.rms_norm(x, weight, 1e-5), x=x, weight=weight)
    assert_same_or_refused(
        lambda x, residual, weight: ops.add_rms_norm(x, residual, weight, 1e-5)[0], x=x, residual=residual, weight=weight
    )


def test_rotary_and_the_cache(ops: Operators) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, kv_slot: Tensor) -> Tensor:
        caches = torch.zeros(2, 2, 2, 4, 16)
        turned = ops.rotary_and_write_kv(q, k, v, positions, cos_sin, caches[0], caches[1], kv_slot)
        return torch.cat([turned.flatten(), caches.flatten()])

    q, k, v = torch.randn(3, 3, 2, 16).unbind()
    assert_same_or_refused(
        run, q=q, k=k, v=v, positions=torch.tensor([1, 2, 3]), cos_sin=torch.randn(16, 16), kv_slot=torch.tensor([0, 1, 6])
    )


def test_attention(ops: Operators) -> None:
    caches = torch.randn(2, 8, 2, 4, 16)

    def run(q: Tensor, query_start: Tensor, context_len: Tensor, block_table: Tensor) -> Tensor:
        batch = AttentionBatch(query_start, context_len, block_table, torch.tensor([5]), 1, 6)
        return ops.paged_attention(q, caches[0], caches[1], batch, 0.3)

    assert_same_or_refused(
        run,
        q=torch.randn(1, 2, 16),
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        context_len=torch.tensor([6], dtype=torch.int32),
        block_table=torch.tensor([[0, 1]], dtype=torch.int32),
    )
