"""Logit bias, repetition, frequency and presence penalties, and the search for rows that are not finite, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from graftwork_kernels.layout import LogitBias, Penalties


def apply_logit_bias(logits: Tensor, bias: LogitBias) -> None:
    """See `graftwork_kernels.ops.Operators.apply_logit_bias`."""
    place = _entries(bias.row_start, bias.token_id)
    logits[place] = logits[place] + bias.value


def apply_penalties(logits: Tensor, penalties: Penalties) -> None:
    """See `graftwork_kernels.ops.Operators.apply_penalties`."""
    row, token_id = _entries(penalties.row_start, penalties.token_id)
    count = penalties.output_count.to(torch.float32)
    chosen, repetition = logits[row, token_id], penalties.repetition[row]
    chosen = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    chosen -= penalties.frequency[row] * count
    chosen -= penalties.presence[row] * (count > 0)
    logits[row, token_id] = chosen


def finite_rows(logits: Tensor) -> Tensor:
    """See `graftwork_kernels.ops.Operators.finite_rows`."""
    return logits.amax(-1).isfinite()  # the maximum of a row that holds NaN is NaN


def _entries(row_start: Tensor, token_id: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every entry, int64 [N] each."""
    rows = torch.arange(row_start.numel() - 1, device=row_start.device)
    return torch.repeat_interleave(rows, row_start.diff(), output_size=token_id.numel()), token_id.to(torch.int64)
