"""Sorts a step's rows by adapter, so that each adapter is read once a step. Knows rows and numbers, not requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graftwork_kernels.layout import NO_ADAPTER, AdapterBatch


def build_adapter_batch(token_adapter: Sequence[int] | Tensor, device: torch.device | str = "cpu") -> AdapterBatch:
    """Group the T rows of a step by the adapter each uses (-1: the base), as `AdapterBatch` describes, on ``device``.

    The sort is stable: rows of one adapter keep their order. Raises ValueError for anything but a vector of integers >= -1.
    """
    rows = torch.as_tensor(token_adapter, device="cpu")
    if rows.numel() == 0:
        rows = rows.to(torch.int32)  # an empty list has no integer type of its own
    if rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
        raise ValueError(f"token_adapter: expected a vector of integers, got {rows.dtype} {tuple(rows.shape)}")
    num_rows = rows.numel()
    if num_rows and int(rows.min()) < NO_ADAPTER:
        raise ValueError(f"token_adapter: expected adapters >= {NO_ADAPTER}, got {int(rows.min())}")

    token_adapter = rows.to(torch.int32)
    # Base rows sort last: they are a tail that grouped work never visits.
    sort_key = token_adapter.masked_fill(token_adapter == NO_ADAPTER, torch.iinfo(torch.int32).max)
    permutation = torch.argsort(sort_key, stable=True)
    num_grouped = int((token_adapter != NO_ADAPTER).sum())
    adapters, sizes = torch.unique_consecutive(token_adapter[permutation[:num_grouped]], return_counts=True)
    num_segments = adapters.numel()

    segment_start = torch.full((num_rows + 1,), num_grouped, dtype=torch.int32)
    segment_start[:num_segments] = sizes.cumsum(0) - sizes
    segment_adapter = torch.full((num_rows,), NO_ADAPTER, dtype=torch.int32)
    segment_adapter[:num_segments] = adapters
    return AdapterBatch(
        token_adapter=token_adapter.to(device),
        permutation=permutation.to(device),
        segment_start=segment_start.to(device),
        segment_adapter=segment_adapter.to(device),
        num_segments=torch.tensor([num_segments], dtype=torch.int32, device=device),
    )
