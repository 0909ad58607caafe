"""Values that would lead an adapter linear out of its memory, refused by implementations that look at them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import LinearSite, SiteField

NUM_IN = NUM_OUT = 40


def test_an_adapter_that_memory_does_not_hold_is_refused(host_ops, memory_builder):
    builder = memory_builder(1)
    builder.add(0, 0, rank=4, size=(NUM_IN, NUM_OUT))
    x, weight, site = torch.randn(2, NUM_IN), torch.randn(NUM_OUT, NUM_IN), (LinearSite(0, 0, NUM_OUT),)
    with pytest.raises((ValueError, IndexError), match=r"^batch\.token_adapter:"):
        host_ops.adapter_linear(x, host_ops.prepare_weight(weight), None, builder.build(), build_adapter_batch([0, 1]), site)


def test_records_that_point_outside_memory_are_refused(host_ops, memory_builder):
    builder = memory_builder(1)
    builder.add(0, 0, rank=4, size=(NUM_IN, NUM_OUT))
    memory = builder.build()
    x, weight, site = torch.randn(1, NUM_IN), torch.randn(NUM_OUT, NUM_IN), (LinearSite(0, 0, NUM_OUT),)
    batch = build_adapter_batch([0])
    for name, value in (
        ("row_offset", memory.row_offset[:6]),
        ("pool", memory.pool[:64]),
        ("row_offset", memory.row_offset + 64000),
        ("row_offset", memory.row_offset - 64000),
    ):
        with pytest.raises((ValueError, IndexError)):
            host_ops.adapter_linear(
                x, host_ops.prepare_weight(weight), None, dataclasses.replace(memory, **{name: value}), batch, site
            )


def test_a_row_type_that_there_is_not_is_refused(host_ops, memory_builder):
    builder = memory_builder(1)
    builder.add(0, 0, rank=4, size=(NUM_IN, NUM_OUT))
    memory = builder.build()
    memory.sites[0, 0, SiteField.ROW_TYPE] = 77
    x, weight, site = torch.randn(2, NUM_IN), torch.randn(NUM_OUT, NUM_IN), (LinearSite(0, 0, NUM_OUT),)
    with pytest.raises((ValueError, IndexError)):
        host_ops.adapter_linear(x, host_ops.prepare_weight(weight), None, memory, build_adapter_batch([0, -1]), site)


def test_a_rank_that_no_memory_could_hold_is_refused_at_once(host_ops, memory_builder):
    """Counted through, a chunk of ranks at a time, it would take days."""
    builder = memory_builder(1)
    builder.add(0, 0, rank=4, size=(NUM_IN, NUM_OUT))
    memory = builder.build()
    memory.sites[0, 0, SiteField.RANK] = 1 << 50
    x, weight, site = torch.randn(2, NUM_IN), torch.randn(NUM_OUT, NUM_IN), (LinearSite(0, 0, NUM_OUT),)
    with pytest.raises((ValueError, IndexError)):
        host_ops.adapter_linear(x, host_ops.prepare_weight(weight), None, memory, build_adapter_batch([0, -1]), site)
