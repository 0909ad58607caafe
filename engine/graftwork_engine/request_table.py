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
from operator import is_

import numpy as np
import numpy.typing as npt

from graftwork_engine.request import Request
from graftwork_engine.sched.plan import ScheduledRequest

COLUMNS = np.dtype(
    [
        ("num_prompt", np.int64),
        ("num_blocks", np.int64),  # written to the block table so far
        ("adapter", np.int32),
        ("adapter_start", np.int64),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("choice", np.int32),
        ("wants_logprobs", np.bool_),
        ("wants_prompt_logprobs", np.bool_),
        ("has_bias", np.bool_),
        ("has_penalties", np.bool_),
    ]
)
"""What does not change while a request runs, but ``num_blocks``."""


class RequestTable:
    """One entry of `COLUMNS` and one row of ``block_table`` int32 [places, blocks] for each request of the last plan.

    Beyond the blocks of the requests that sit, the block table is 0.
    """

    def __init__(self, num_places: int, num_blocks: int, block_size: int) -> None:
        self.columns = np.zeros(num_places, dtype=COLUMNS)
        self.block_table = np.zeros((num_places, num_blocks), dtype=np.int32)
        self.is_plain = True
        """No request that sits wants logprobs, biases or penalties."""
        self._block_size = block_size
        self._requests: list[Request] = []
        self._block_lists: list[list[int]] = []

    def seat(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Give the plan's requests the places 0, 1, 2 ... in its order; False if all of them sat there already.

        A request whose list of blocks is another one than before has run anew, and is written anew.
        """
        requests, block_lists = [s.request for s in scheduled], [s.block_ids for s in scheduled]
        if requests == self._requests and all(map(is_, block_lists, self._block_lists)):
            return False
        place_of = {
            (id(request), id(blocks)): place
            for place, (request, blocks) in enumerate(zip(self._requests, self._block_lists, strict=True))
        }
        origins = [place_of.get((id(request), id(blocks)), -1) for request, blocks in zip(requests, block_lists, strict=True)]
        self._move(np.array(origins, dtype=np.int64), len(self._requests))
        for place, origin in enumerate(origins):
            if origin < 0:
                self.columns[place] = _entry(scheduled[place])
        self._requests, self._block_lists = requests, block_lists
        seated = self.columns[: len(requests)]
        self.is_plain = not any(
            seated[name].any() for name in ("wants_logprobs", "wants_prompt_logprobs", "has_bias", "has_penalties")
        )
        return True

    def cover(self, scheduled: Sequence[ScheduledRequest], ends: npt.NDArray[np.int64]) -> None:
        """Write the blocks that tokens up to ``ends`` int64 [R] need and that are not in the block table yet."""
        written = self.columns["num_blocks"][: len(ends)]
        needed = (ends + (self._block_size - 1)) // self._block_size
        for place in np.flatnonzero(needed > written).tolist():
            first, last = int(written[place]), int(needed[place])
            self.block_table[place, first:last] = scheduled[place].block_ids[first:last]
            written[place] = last

    def _move(self, origins: npt.NDArray[np.int64], num_before: int) -> None:
        """Bring the rows ``origins`` to the places 0, 1, 2 ... and clear the others that were taken; -1 gives an empty row."""
        num_places = len(origins)
        stays = origins[:num_before] == np.arange(min(num_places, num_before))
        first = len(stays) if stays.all() else int(np.argmin(stays))  # those before it sit where they sat
        width = int(self.columns["num_blocks"][:num_before].max(initial=0))
        moved = origins[first:]
        self.columns[first:num_places] = self.columns[moved]
        self.block_table[first:num_places, :width] = self.block_table[moved, :width]
        self.block_table[first:num_places, :width][moved < 0] = 0
        self.block_table[num_places:num_before, :width] = 0


def _entry(scheduled: ScheduledRequest) -> tuple[int | float | bool, ...]:
    """What `COLUMNS` say of a request that sits down."""
    request = scheduled.request
    sampling = request.sampling
    return (
        len(request.prompt_ids),
        0,
        scheduled.adapter_index,
        request.adapter_start,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.choice,
        sampling.logprobs is not None,
        sampling.prompt_logprobs is not None,
        bool(sampling.logit_bias) or bool(sampling.min_tokens and sampling.stop_token_ids),
        sampling.repetition_penalty != 1.0 or bool(sampling.frequency_penalty) or bool(sampling.presence_penalty),
    )
