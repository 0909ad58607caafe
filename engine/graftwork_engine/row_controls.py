"""What the rows of a step want of their logits beyond temperature and filters: bias, penalties, logprobs. Knows no operators.

Who wants what is found once for a company of rows; a step of the same rows adds the tokens that they drew since.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from graftwork_engine.request import Request
from graftwork_engine.request_table import Entries
from graftwork_kernels.layout import LogitBias, Penalties

Upload = Callable[[Tensor], Tensor]
"""Brings a tensor of the host's to where the operators run."""


class RowControls:
    """Of ``requests``, one for each row, with their ``entries`` of a `RequestTable`, in the same order."""

    def __init__(self, requests: Sequence[Request], entries: Entries) -> None:
        self._num_rows = len(requests)
        wanting = np.flatnonzero(entries["wants_logprobs"]).tolist()
        self.num_top_logprobs = {row: requests[row].sampling.logprobs or 0 for row in wanting}
        """Rows whose logprobs are wanted, with the number of alternatives beside the drawn token."""
        self._biased = {row: requests[row] for row in np.flatnonzero(entries["has_bias"]).tolist()}
        rows = np.flatnonzero(entries["has_penalties"]).tolist()
        self._counts = {row: counts for row in rows if (counts := requests[row].token_counts()) is not None}
        self._output_ids = [requests[row].output_ids for row in self._counts]
        self._token_ids = [counts.token_ids for counts in self._counts.values()]  # both grow in place
        self._output_counts = [counts.counts for counts in self._counts.values()]
        self._repetition, self._frequency, self._presence = (
            torch.from_numpy(entries[name].copy()) for name in ("repetition", "frequency", "presence")
        )

    def logit_bias(self, upload: Upload) -> LogitBias | None:
        """What is added to the next tokens' logits, where ``upload`` brings it; None if it is nothing."""
        biases = {row: bias for row, request in self._biased.items() if (bias := request.token_bias()) is not None}
        if not biases:
            return None
        return LogitBias(
            row_start=upload(self._row_start(list(biases), [len(bias.token_ids) for bias in biases.values()])),
            token_id=upload(_joined([bias.token_ids for bias in biases.values()], np.dtype(np.int32))),
            value=upload(_joined([bias.values for bias in biases.values()], np.dtype(np.float32))),
        )

    def penalties(self, upload: Upload) -> Penalties | None:
        """The tokens of each row up to the newest, with what they cost, where ``upload`` brings it; None if no row has any."""
        if not self._counts:
            return None
        for counts, output_ids in zip(self._counts.values(), self._output_ids, strict=True):
            counts.catch_up(output_ids)
        return Penalties(
            row_start=upload(self._row_start(list(self._counts), list(map(len, self._token_ids)))),
            token_id=upload(_joined(self._token_ids, np.dtype(np.int32))),
            output_count=upload(_joined(self._output_counts, np.dtype(np.int32))),
            repetition=upload(self._repetition),
            frequency=upload(self._frequency),
            presence=upload(self._presence),
        )

    def _row_start(self, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """int32 [rows + 1]: where the entries of each row begin; the other rows have none."""
        row_start = np.zeros(self._num_rows + 1, dtype=np.int32)
        row_start[1:][rows] = lengths
        return torch.from_numpy(row_start.cumsum(dtype=np.int32))


def _joined(arrays: Sequence[array[int]] | Sequence[array[float]], dtype: np.dtype) -> Tensor:
    """The arrays laid end to end, in one copy."""
    return torch.from_numpy(np.frombuffer(bytearray().join(arrays), dtype))
