"""A step plan as the tensors that the model and the operators read, in memory that stays where it is from step to step.

    plan ──▶ RequestTable        who sits where; written where requests join, leave or grow into a block
                 │
                 ▼
             arrays of rows      positions, slots, adapters and token ids of this step, by a few operations over whole columns
                 │
                 ▼
             StepBatch           torch's views of their beginnings, where the operators run; the same objects while they have the
                                 same length

No loop goes over tokens; those over requests only pick attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graftwork_adapters.whole_memory import DeviceWholes
from graftwork_engine.model.layers import ForwardBatch
from graftwork_engine.request_table import RequestTable
from graftwork_engine.row_controls import RowControls
from graftwork_engine.sampling_arrays import SamplingArrays
from graftwork_engine.sched.plan import BASE, ScheduledRequest, StepPlan
from graftwork_engine.step_io import ALIGNMENT, HostIo, StepIo
from graftwork_engine.whole_rows import NO_WHOLES, StepWholes, WholeRows
from graftwork_kernels.adapter_batch import AdapterGroups
from graftwork_kernels.layout import AdapterBatch, AdapterMemory, AttentionBatch, LogitBias, Penalties, SamplingBatch
from graftwork_kernels.ops import Operators

Integers = npt.NDArray[np.int64]

_BYTES_OF_ROW, _BYTES_OF_REQUEST, _MOST_ARRAYS = 44, 48, 24
"""In the arrays of a step, beside the block table; a test holds the first two to what is made."""


@dataclass(frozen=True, slots=True)
class StepCapacity:
    """The largest step: ``num_rows`` tokens of ``num_requests`` requests, each of which has at most ``num_blocks`` blocks."""

    num_rows: int
    num_requests: int
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        """Room enough for the arrays that a `BatchBuilder` makes."""
        arrays = _BYTES_OF_ROW * self.num_rows + (_BYTES_OF_REQUEST + 4 * self.num_blocks) * self.num_requests
        return arrays + _MOST_ARRAYS * ALIGNMENT


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step of T rows and R requests, S of which draw a token. Its tensors hold until the next one is built.

    The first ``num_rows`` of the T are the plan's; those behind them, if the batch was to be longer, are of as many requests that
    have no tokens, and write nowhere. ``token_ids`` int64 [T]; one below 0 stands for ``drawn[-1 - id]``, where ``drawn`` int64 has
    the tokens that the step before this one drew (None: every id is known). ``sample_rows`` int64 [S] are the rows whose logits
    give a token, ``sampling`` says how, in the same order; ``logit_bias`` and ``penalties`` are None in a step where no request has
    any, ``num_top_logprobs`` maps those of the S whose logprobs are wanted to the number of alternatives. The logits of
    ``prompt_rows`` int64 [P] score the prompt tokens ``prompt_targets`` int64 [P], each the one that follows; ``num_scored`` maps
    the requests they belong to, by place in the plan, to how many of them are theirs. ``wholes`` has the rows whose adapters bring
    tensors whole.
    """

    num_rows: int
    token_ids: Tensor
    drawn: Tensor | None
    forward: ForwardBatch
    sample_rows: Tensor
    sampling: SamplingBatch
    logit_bias: LogitBias | None
    penalties: Penalties | None
    num_top_logprobs: dict[int, int]
    prompt_rows: Tensor
    prompt_targets: Tensor
    num_scored: dict[int, int]
    wholes: StepWholes = NO_WHOLES


class BatchBuilder:
    """Makes one `StepBatch` after the other of plans no larger than ``capacity``; ``io`` has the arrays that its tensors are.

    ``whole`` is the batch over all of the memory: whoever records a forward pass over it replays every step, given the step's
    numbers of rows and requests. Beyond those lies what earlier steps left. ``drawn`` int64 [requests], where given, has the tokens
    that the last step drew, in the order of its ``sample_rows``, by the time that the next one's operators run. ``wholes`` always
    says what the adapters in ``memory`` bring whole, by index.
    """

    def __init__(
        self,
        ops: Operators,
        memory: AdapterMemory,
        block_size: int,
        capacity: StepCapacity,
        io: StepIo | None = None,
        drawn: Tensor | None = None,
        wholes: Mapping[int, DeviceWholes] = MappingProxyType({}),
    ) -> None:
        num_rows, num_requests = capacity.num_rows, capacity.num_requests
        self._ops, self._memory, self._block_size, self._capacity = ops, memory, block_size, capacity
        self._io = io = io or HostIo()
        self._drawn = drawn
        self._groups = AdapterGroups(num_rows, io)
        self._wholes, self._whole_rows = wholes, WholeRows(wholes, io.upload)
        self._token_ids, self._positions, self._kv_slot = (io.array(num_rows, np.int64) for _ in range(3))
        self._query_start = io.array(num_requests + 1, np.int32)
        self._context_len = io.array(num_requests, np.int32)
        self._sampling = SamplingArrays(num_requests, io)
        self._sample_rows = io.array(num_requests, np.int64)
        # Last, since it is longest by far, and is sent whole only when requests have moved in it.
        block_table = io.array(num_requests * capacity.num_blocks, np.int32).reshape(num_requests, capacity.num_blocks)
        self._table = RequestTable(block_table, block_size)
        self._numbers = np.arange(max(num_rows, num_requests) + 1)
        self._no_rows = io.upload(torch.zeros(0, dtype=torch.int64))
        self._samples: list[bool] = []  # of the last step's requests: which drew a token
        self._drawing = np.zeros(0, dtype=np.int64)  # their places
        self._controls: RowControls | None = None  # what they want, if any request of the step wants something
        self._scorers: list[int] = []  # places of those that want their prompt's logprobs
        self.whole_token_ids = io.tensor(self._token_ids)
        self.whole = ForwardBatch(
            ops=ops,
            positions=io.tensor(self._positions),
            attention=AttentionBatch(
                query_start=io.tensor(self._query_start),
                context_len=io.tensor(self._context_len),
                block_table=io.tensor(self._table.block_table),
                kv_slot=io.tensor(self._kv_slot),
                max_query_len=num_rows,
                max_context_len=capacity.num_blocks * block_size,
            ),
            adapters=self._groups.whole,
            adapter_memory=memory,
        )
        self._rows, self._requests, self._draws = self._view_rows(0), self._view_requests(0), self._view_draws(0)

    def build(self, plan: StepPlan, length: int | None = None) -> StepBatch:
        """The tensors of ``plan``, which must not be empty; raises ValueError if it is larger than the capacity.

        ``length``: of the batch, at least as many rows as the plan has. Only a plan of one row for each request can be made longer.
        """
        scheduled = plan.scheduled
        num_requests = len(scheduled)
        num_rows = plan.num_tokens
        length = length or num_rows
        # Most steps have one row for each request.
        if num_rows == num_requests:
            counts = np.ones(num_requests, dtype=np.int64)
        else:
            counts = np.fromiter([s.num_tokens for s in scheduled], np.int64, num_requests)
        starts = np.fromiter([s.start for s in scheduled], np.int64, num_requests)
        ends = starts + counts
        longest = int(ends.max())
        self._check(max(num_rows, length), num_requests + length - num_rows, longest)
        moved = self._table.seat(scheduled)
        grown = self._table.cover(ends)
        self._context_len[:num_requests] = ends
        token_adapter = self._write_rows(scheduled, counts, starts, num_rows, length)
        self._write_sampling(scheduled, ends, moved)
        num_requests += length - num_rows
        self._view(length, num_requests, len(self._drawing))
        if moved:
            self._io.send(self._table.block_table[:num_requests])
        else:  # of a table as wide as the longest context, most of which no step has
            self._io.send(self._sample_rows)
            if len(grown):
                self._io.send_entries(self._table.block_table, grown)
        return self._batch(scheduled, num_rows, int(counts.max()), longest, token_adapter)

    def idle(self, length: int) -> StepBatch:
        """A batch of so many rows of requests that have no tokens, before there was any step."""
        self._idle_rows(0, 0, length)
        token_adapter = np.full(length, BASE, dtype=np.int32)
        self._groups.group(token_adapter)
        self._view(length, length, 0)
        self._table.block_table[:length] = 0
        self._io.send(self._table.block_table[:length])
        return self._batch([], 0, 1, 1, token_adapter)

    def _check(self, num_rows: int, num_requests: int, longest: int) -> None:
        capacity = self._capacity
        if num_rows > capacity.num_rows or num_requests > capacity.num_requests or longest > capacity.num_blocks * self._block_size:
            raise ValueError(f"a step of {num_rows} rows, {num_requests} requests, contexts up to {longest} exceeds {capacity}")

    def _write_rows(
        self, scheduled: Sequence[ScheduledRequest], counts: Integers, starts: Integers, num_rows: int, length: int
    ) -> npt.NDArray[np.int32]:
        """What each row of the step is: its token, where it stands in its request, where its keys go, and whose adapter it has;
        that last is returned, int32 [length].
        """
        num_requests = len(scheduled)
        query_start, columns = self._query_start[: num_requests + 1], self._table.columns[:num_requests]
        place, adapter, adapter_start = self._numbers[:num_requests], columns["adapter"], columns["adapter_start"]
        if num_rows == num_requests:  # one row each
            query_start[1:] = self._numbers[1 : num_requests + 1]
            positions = starts
        else:
            np.cumsum(counts, out=query_start[1:])
            place, adapter, adapter_start = np.repeat(place, counts), np.repeat(adapter, counts), np.repeat(adapter_start, counts)
            positions = self._numbers[:num_rows] + (starts - query_start[:-1])[place]
        block = positions // self._block_size
        offset = positions - block * self._block_size
        self._positions[:num_rows] = positions
        self._kv_slot[:num_rows] = self._table.block_table[place, block] * np.int64(self._block_size) + offset
        self._token_ids[:num_rows] = np.fromiter(_token_ids(scheduled), np.int64, num_rows)
        if self._drawn is not None:
            follows = query_start[:-1][[s.follows for s in scheduled]]
            self._token_ids[follows] = -1 - columns["draw"][place[follows]]
        token_adapter = np.where(positions >= adapter_start, adapter, np.int32(BASE))
        if length > num_rows:
            self._idle_rows(num_rows, num_requests, length)
            token_adapter = np.append(token_adapter, np.full(length - num_rows, BASE, dtype=np.int32))
        self._groups.group(token_adapter)
        return token_adapter

    def _idle_rows(self, num_rows: int, num_requests: int, length: int) -> None:
        """Rows behind those of the plan, up to ``length``, each as if of a request that has none."""
        rows, requests = slice(num_rows, length), slice(num_requests, num_requests + length - num_rows)
        self._token_ids[rows] = 0
        self._positions[rows] = 0
        self._kv_slot[rows] = -1
        self._query_start[num_requests : requests.stop + 1] = num_rows
        self._context_len[requests] = 0

    def _write_sampling(self, scheduled: Sequence[ScheduledRequest], ends: Integers, moved: bool) -> None:
        """From which row each token is drawn, and how."""
        samples = [s.samples for s in scheduled]
        if moved or samples != self._samples:
            self._samples, self._drawing = samples, np.flatnonzero(samples)
            entries = self._table.take(self._drawing)
            self._sampling.write(entries)
            self._controls, self._scorers = None, []
            if self._drawn is not None:
                self._table.columns["draw"][: len(scheduled)] = -1
                self._table.columns["draw"][self._drawing] = self._numbers[: len(self._drawing)]
            if not self._table.is_plain:
                self._controls = RowControls([scheduled[place].request for place in self._drawing.tolist()], entries)
                self._scorers = np.flatnonzero(self._table.columns["wants_prompt_logprobs"][: len(scheduled)]).tolist()
        num_drawn = len(self._drawing)
        self._sample_rows[:num_drawn] = self._query_start[1:][self._drawing] - 1
        self._sampling.position[:num_drawn] = (ends - self._table.columns["num_prompt"][: len(scheduled)])[self._drawing]

    def _view(self, num_rows: int, num_requests: int, num_drawn: int) -> None:
        """Let the views have these lengths: only those are made anew that had another."""
        if num_rows != self._rows.number:
            self._rows = self._view_rows(num_rows)
        if num_requests != self._requests.number:
            self._requests = self._view_requests(num_requests)
        if num_drawn != self._draws.number:
            self._draws = self._view_draws(num_drawn)

    def _batch(
        self,
        scheduled: Sequence[ScheduledRequest],
        num_rows: int,
        max_query_len: int,
        max_context_len: int,
        token_adapter: npt.NDArray[np.int32],
    ) -> StepBatch:
        views, requests, draws = self._rows, self._requests, self._draws
        attention = AttentionBatch(
            requests.query_start, requests.context_len, requests.block_table, views.kv_slot, max_query_len, max_context_len
        )
        controls = None if not scheduled else self._controls
        num_scored: dict[int, int] = {}
        scored_rows = targets = None
        if controls is not None:
            num_scored = {place: count for place in self._scorers if (count := _num_scored(scheduled[place]))}
            if num_scored:
                scored_rows, targets = _scored_rows(scheduled, num_scored, self._query_start)
        wholes = NO_WHOLES
        if self._wholes:
            adapters, drawn_rows = self._table.columns["adapter"][: len(scheduled)], self._sample_rows[: draws.number]
            wholes = self._whole_rows.group(adapters, token_adapter, drawn_rows, scored_rows)
        forward = ForwardBatch(self._ops, views.positions, attention, views.adapters, self._memory, wholes.forward)
        common = (num_rows, views.token_ids, self._drawn, forward, draws.sample_rows, draws.sampling)
        if controls is None:
            return StepBatch(*common, None, None, {}, self._no_rows, self._no_rows, {}, wholes)
        upload = self._io.upload
        return StepBatch(
            *common,
            controls.logit_bias(upload),
            controls.penalties(upload),
            controls.num_top_logprobs,
            self._no_rows if scored_rows is None else upload(torch.from_numpy(scored_rows)),
            self._no_rows if targets is None else upload(torch.from_numpy(targets)),
            num_scored,
            wholes,
        )

    def _view_rows(self, num_rows: int) -> _RowViews:
        return _RowViews(
            num_rows,
            self._io.tensor(self._token_ids[:num_rows]),
            self._io.tensor(self._positions[:num_rows]),
            self._io.tensor(self._kv_slot[:num_rows]),
            self._groups.first(num_rows),
        )

    def _view_requests(self, num_requests: int) -> _RequestViews:
        return _RequestViews(
            num_requests,
            self._io.tensor(self._query_start[: num_requests + 1]),
            self._io.tensor(self._context_len[:num_requests]),
            self._io.tensor(self._table.block_table[:num_requests]),
        )

    def _view_draws(self, num_drawn: int) -> _DrawViews:
        return _DrawViews(num_drawn, self._io.tensor(self._sample_rows[:num_drawn]), self._sampling.first(num_drawn))


@dataclass(frozen=True, slots=True)
class _RowViews:
    """The tensors with an entry for each row of a step."""

    number: int
    token_ids: Tensor
    positions: Tensor
    kv_slot: Tensor
    adapters: AdapterBatch


@dataclass(frozen=True, slots=True)
class _RequestViews:
    """Those with an entry for each request."""

    number: int
    query_start: Tensor
    context_len: Tensor
    block_table: Tensor


@dataclass(frozen=True, slots=True)
class _DrawViews:
    """Those with an entry for each token that is drawn."""

    number: int
    sample_rows: Tensor
    sampling: SamplingBatch


def _token_ids(scheduled: Sequence[ScheduledRequest]) -> list[int]:
    token_ids: list[int] = []
    for s in scheduled:
        request = s.request
        if s.num_tokens == 1 and s.samples:  # the newest token: most of all
            token_ids.append((request.output_ids or request.prompt_ids)[-1])
        else:
            token_ids.extend(request.token_ids(s.start, s.start + s.num_tokens))
    return token_ids


def _num_scored(scheduled: ScheduledRequest) -> int:
    """Prompt tokens that this range scores: those that follow one of its tokens, while the client lacks their logprobs."""
    if not scheduled.request.needs_prompt_logprobs:
        return 0
    last = len(scheduled.request.prompt_ids) - 1
    return max(0, min(scheduled.start + scheduled.num_tokens, last) - scheduled.start)


def _scored_rows(
    scheduled: Sequence[ScheduledRequest], num_scored: dict[int, int], query_start: npt.NDArray[np.int32]
) -> tuple[Integers, Integers]:
    """Rows that score a prompt token, and which; int64 [P] each."""
    rows: list[int] = []
    targets: list[int] = []
    for place, count in num_scored.items():
        first_row, s = int(query_start[place]), scheduled[place]
        rows.extend(range(first_row, first_row + count))
        targets.extend(s.request.prompt_ids[s.start + 1 : s.start + 1 + count])
    return np.array(rows, dtype=np.int64), np.array(targets, dtype=np.int64)
