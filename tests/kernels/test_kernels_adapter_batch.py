"""Sorting a step's rows by adapter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork_kernels.adapter_batch import build_adapter_batch


def test_an_example_in_full():
    batch = build_adapter_batch([2, -1, 0, 2, -1, 0])
    assert batch.token_adapter.tolist() == [2, -1, 0, 2, -1, 0]
    assert batch.permutation.tolist() == [2, 5, 0, 3, 1, 4]
    assert batch.segment_start.tolist() == [0, 2, 4, 4, 4, 4, 4]
    assert batch.segment_adapter.tolist() == [0, 2, -1, -1, -1, -1]
    assert batch.num_segments.tolist() == [2]


@given(st.lists(st.integers(-1, 6), max_size=40))
def test_every_row_is_in_its_own_adapters_segment(token_adapter):
    batch = build_adapter_batch(token_adapter)
    num_rows, num_segments = len(token_adapter), int(batch.num_segments)
    assert batch.permutation.dtype == torch.int64
    assert {t.dtype for t in (batch.token_adapter, batch.segment_start, batch.segment_adapter, batch.num_segments)} == {torch.int32}
    assert (batch.segment_start.shape, batch.segment_adapter.shape) == ((num_rows + 1,), (num_rows,))
    adapters, starts = batch.segment_adapter.tolist(), batch.segment_start.tolist()
    assert adapters[:num_segments] == sorted(set(token_adapter) - {-1})
    assert set(adapters[num_segments:]) <= {-1}
    groups = [batch.permutation[starts[i] : starts[i + 1]].tolist() for i in range(num_segments)]
    expected = [[row for row, other in enumerate(token_adapter) if other == adapter] for adapter in adapters[:num_segments]]
    assert groups == expected
    assert set(starts[num_segments:]) == {sum(map(len, groups))}
    assert batch.permutation[starts[-1] :].tolist() == [row for row, adapter in enumerate(token_adapter) if adapter == -1]


def test_a_tensor_and_a_list_are_one():
    from_list, from_tensor = build_adapter_batch([1, -1, 1]), build_adapter_batch(torch.tensor([1, -1, 1]))
    assert torch.equal(from_list.permutation, from_tensor.permutation)


@pytest.mark.parametrize("bad", [[0, -2], [0.5], torch.zeros(2, 2, dtype=torch.int32), [True]])
def test_anything_else_is_refused(bad):
    with pytest.raises(ValueError, match=r"^token_adapter:"):
        build_adapter_batch(bad)
