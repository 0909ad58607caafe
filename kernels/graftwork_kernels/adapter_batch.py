"""Sorts a step's rows by adapter, so that each adapter is read once a step. Knows rows and numbers, not requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graftwork_kernels.layout import NO_ADAPTER, AdapterBatch
from graftwork_kernels.step_arrays import HostArrays, StepArrays


class AdapterGroups:
    """An `AdapterBatch` of up to ``num_rows`` rows in ``arrays``, memory that stays where it is from step to step.

    ``whole`` is all of it, for whoever keeps its addresses.
    """

    def __init__(self, num_rows: int, arrays: StepArrays | None = None) -> None:
        self._arrays = arrays = arrays or HostArrays()
        self._token_adapter = arrays.array(num_rows, np.int32)
        self._permutation = arrays.array(num_rows, np.int64)
        self._segment_start = arrays.array(num_rows + 1, np.int32)
        self._segment_adapter = arrays.array(num_rows, np.int32)
        self._num_segments = arrays.array(1, np.int32)
        self._token_adapter.fill(NO_ADAPTER)
        self._permutation[:] = np.arange(num_rows)
        self._segment_adapter.fill(NO_ADAPTER)
        self._begins = np.ones(num_rows, dtype=np.bool_)  # where a group begins: at row 0 always
        self._num_rows = 0
        self.whole = self.first(num_rows)

    def first(self, num_rows: int) -> AdapterBatch:
        """The part of ``whole`` that `group` wrote for as many rows."""
        tensor = self._arrays.tensor
        return AdapterBatch(
            tensor(self._token_adapter[:num_rows]),
            tensor(self._permutation[:num_rows]),
            tensor(self._segment_start[: num_rows + 1]),
            tensor(self._segment_adapter[:num_rows]),
            tensor(self._num_segments),
        )

    def group(self, token_adapter: npt.NDArray[np.int32]) -> None:
        """Write the groups of these rows' adapters, unless they are what the last step's were."""
        num_rows = len(token_adapter)
        if num_rows == self._num_rows and (token_adapter == self._token_adapter[:num_rows]).all():
            return
        self._num_rows = num_rows
        self._token_adapter[:num_rows] = token_adapter
        # As an unsigned number -1 is the largest: base rows sort last, a tail that grouped work never visits.
        order = np.argsort(token_adapter.view(np.uint32), kind="stable")
        self._permutation[:num_rows] = order
        ordered = token_adapter[order]
        num_grouped = num_rows if num_rows and ordered[-1] != NO_ADAPTER else int(np.count_nonzero(token_adapter != NO_ADAPTER))
        grouped, begins = ordered[:num_grouped], self._begins[:num_grouped]
        np.not_equal(grouped[1:], grouped[:-1], out=begins[1:])
        starts = np.flatnonzero(begins)
        num_segments = len(starts)
        self._segment_start[:num_segments] = starts
        self._segment_start[num_segments : num_rows + 1] = num_grouped
        self._segment_adapter[:num_segments] = grouped[starts]
        self._segment_adapter[num_segments:num_rows] = NO_ADAPTER
        self._num_segments[0] = num_segments


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
    groups = AdapterGroups(num_rows)
    groups.group(rows.to(torch.int32).numpy())
    batch = groups.whole
    return AdapterBatch(
        batch.token_adapter.to(device),
        batch.permutation.to(device),
        batch.segment_start.to(device),
        batch.segment_adapter.to(device),
        batch.num_segments.to(device),
    )
