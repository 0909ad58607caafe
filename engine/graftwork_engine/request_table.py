"""Who sits where in a step, and what of each request the tensors of its steps are made of. Knows no tokens and no operators.

A request keeps its place for as long as the requests before it stay; when some leave, those behind move up, and those that join sit
down behind them. So a step of the same requests as the last one costs nothing here but the blocks that they grew into.

    place            0      1      2      3
    before         [ A ]  [ B ]  [ C ]  [ D ]
    B leaves       [ A ]  [ C ]  [ D ]             one move of whole columns
    E joins        [ A ]  [ C ]  [ D ]  [ E ]      one entry is written
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_

import numpy as np
import numpy.typing as npt

from graftwork_engine.sched.plan import ScheduledRequest

COLUMNS = np.dtype(
    [
        ("num_prompt", np.int64),
        ("num_blocks", np.int64),  # written to the block table so far
        ("adapter_start", np.int64),
        ("draw", np.int64),  # which of the tokens that the last step drew is its own; written by the steps
        ("seed", np.uint64),
        ("adapter", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("choice", np.int32),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("is_plain", np.bool_),  # it wants none of these:
        ("wants_logprobs", np.bool_),
        ("wants_prompt_logprobs", np.bool_),
        ("has_bias", np.bool_),
        ("has_penalties", np.bool_),
    ],
    align=True,
)
"""What does not change while a request runs, but ``num_blocks`` and ``draw``."""

Entries = npt.NDArray[np.void]

_WHOLE = np.dtype((np.void, COLUMNS.itemsize))
"""An entry as its bytes, which NumPy moves in one piece."""


class RequestTable:
    """One entry of `COLUMNS` and one row of ``block_table`` int32 [places, blocks] for each request of the last plan.

    Beyond the blocks of the requests that sit, the block table, which is given to it, is 0.
    """

    def __init__(self, block_table: npt.NDArray[np.int32], block_size: int) -> None:
        self.columns: Entries = np.zeros(len(block_table), dtype=COLUMNS)
        self.block_table = block_table
        self.is_plain = True
        """No request that sits wants logprobs, biases or penalties."""
        self._entries = self.columns.view(_WHOLE)
        self._block_size = block_size
        self._block_lists: list[list[int]] = []

    def seat(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Give the plan's requests the places 0, 1, 2 ... in its order; False if all of them sat there already.

        A request is known by its list of blocks: one that has another list than before has run anew, and is written anew.
        """
        block_lists, before = [s.block_ids for s in scheduled], self._block_lists
        num_places, num_before = len(block_lists), len(before)
        if num_places == num_before and all(map(is_, block_lists, before)):
            return False
        place_of = dict(zip(map(id, before), range(num_before), strict=True))
        origins = np.fromiter(map(place_of.get, map(id, block_lists), repeat(-1)), np.int64, num_places)
        width = int(self.columns["num_blocks"][:num_before].max(initial=0))
        self._move(origins, width)
        for place in np.flatnonzero(origins < 0).tolist():
            self.columns[place] = _entry(scheduled[place])
            self.block_table[place, :width] = 0
        self.block_table[num_places:num_before, :width] = 0
        self._block_lists = block_lists
        self.is_plain = bool(self.columns["is_plain"][:num_places].all())
        return True

    def take(self, places: npt.NDArray[np.int64]) -> Entries:
        """A copy of the entries at ``places``."""
        return self._entries[places].view(COLUMNS)

    def cover(self, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Write the blocks that tokens up to ``ends`` int64 [R] need and that are not in the block table yet.

        What was written, counted through the table row by row.
        """
        written = self.columns["num_blocks"][: len(ends)]
        needed = (ends + (self._block_size - 1)) // self._block_size
        growing = np.flatnonzero(needed > written)
        if not len(growing):
            return growing
        first, due, width = written[growing], needed[growing], self.block_table.shape[1]
        places: npt.NDArray[np.int64] = growing * width + first
        if (due - first == 1).all():  # most of all
            lists = self._block_lists
            self.block_table.reshape(-1)[places] = [
                lists[place][number] for place, number in zip(growing.tolist(), first.tolist(), strict=True)
            ]
        else:
            for place, begin, end in zip(growing.tolist(), first.tolist(), due.tolist(), strict=True):
                self.block_table[place, begin:end] = self._block_lists[place][begin:end]
            counts = due - first
            places = np.repeat(places - counts.cumsum() + counts, counts) + np.arange(counts.sum())
        written[growing] = due
        return places

    def _move(self, origins: npt.NDArray[np.int64], width: int) -> None:
        """Bring those who sat at ``origins`` to the places 0, 1, 2 ..., with ``width`` blocks; where -1 stands anything may be."""
        moving = np.flatnonzero(origins != np.arange(len(origins)))
        if len(moving):
            first, sources = int(moving[0]), origins[moving[0] :]  # mostly all from the first on move
            self._entries[first : len(origins)] = self._entries[sources]
            self.block_table[first : len(origins), :width] = self.block_table[sources, :width]


def _entry(scheduled: ScheduledRequest) -> tuple[int | float | bool, ...]:
    """What `COLUMNS` say of a request that sits down."""
    request = scheduled.request
    sampling = request.sampling
    wants = (
        sampling.logprobs is not None,
        sampling.prompt_logprobs is not None,
        bool(sampling.logit_bias) or bool(sampling.min_tokens and sampling.stop_token_ids),
        sampling.repetition_penalty != 1.0 or bool(sampling.frequency_penalty) or bool(sampling.presence_penalty),
    )
    return (
        len(request.prompt_ids),
        0,
        request.adapter_start,
        -1,
        sampling.seed,
        scheduled.adapter_index,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.choice,
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
        not any(wants),
        *wants,
    )
