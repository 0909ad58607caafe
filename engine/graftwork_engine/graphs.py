"""The model's pass for steps that decode, captured once for some numbers of rows and replayed. Knows no requests.

Nothing in a captured pass depends on which adapters a step has, where they lie or how long contexts are: all of that is read from
the step's arrays when it is replayed. A step between two sizes has rows more than it needs, which write nowhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graftwork_engine.batch import BatchBuilder, StepBatch
from graftwork_engine.forward import EagerForward, Forward, MakeForward
from graftwork_engine.kv_memory import KvCache
from graftwork_engine.model.llama import Llama

STEP_OF_SIZES = 8
"""From the first so many rows on, a size for each multiple: what a step pads is read by nobody and costs next to nothing."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A captured pass: ``run`` has the device do it again, and what comes of it lies in ``output``."""

    run: Callable[[], object]
    output: Tensor


Capture = Callable[[Callable[[], Tensor]], Replay]
"""Runs something once, or more often, and captures what the device was told to do."""


def graph_sizes(most: int) -> list[int]:
    """Numbers of rows to capture for steps of up to ``most``."""
    powers = [size for size in (1, 2, 4) if size < most]
    return [*powers, *range(STEP_OF_SIZES, most, STEP_OF_SIZES), most]


class GraphForward:
    """Replays steps of one row for each request, up to the largest of ``sizes``; calls ``eager`` for all others."""

    def __init__(self, eager: Forward, builder: BatchBuilder, sizes: Sequence[int], capture: Capture) -> None:
        self._eager = eager
        self._sizes = sorted(sizes)
        self._replays: dict[int, Replay] = {}
        with torch.inference_mode():
            for size in reversed(self._sizes):  # what the largest needs for a time is enough for all others
                self._replays[size] = capture(partial(eager, builder.idle(size)))

    def length(self, num_rows: int, num_requests: int) -> int:
        """The next size, of steps that are replayed."""
        if num_rows != num_requests or num_rows > self._sizes[-1]:
            return num_rows
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def __call__(self, batch: StepBatch) -> Tensor:
        """See `Forward`; ``batch`` is the builder's latest, of as many rows as `length` says."""
        if batch.forward.attention.max_query_len > 1 or (replay := self._replays.get(len(batch.token_ids))) is None:
            return self._eager(batch)
        replay.run()
        return replay.output


def capturing(sizes: Sequence[int], capture: Capture) -> MakeForward:
    """The pass of steps that decode as ``capture`` makes it for ``sizes``, operator by operator for all others."""

    def make(model: Llama, kv: KvCache, builder: BatchBuilder) -> Forward:
        return GraphForward(EagerForward(model, kv), builder, sizes, capture)

    return make
