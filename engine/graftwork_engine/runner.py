"""Executes step plans: batch → model → head → sampler. Refuses to know queues, prefixes and where adapters come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from graftwork_adapters.whole_memory import DeviceWholes
from graftwork_engine.batch import BatchBuilder, StepBatch, StepCapacity
from graftwork_engine.forward import EagerForward, Forward, WholesApart
from graftwork_engine.kv_memory import KvCache
from graftwork_engine.messages import EngineError, TokenLogprob
from graftwork_engine.model.llama import Llama
from graftwork_engine.model.wholes import within_vocabulary
from graftwork_engine.sampler import NOT_FINITE, DrawnRows, Draws, ScoredRows, draw_tokens, score_tokens
from graftwork_engine.sched.plan import RequestResult, Results, StepPlan
from graftwork_engine.step_io import HostIo, StepIo
from graftwork_kernels.layout import AdapterMemory
from graftwork_kernels.ops import Operators

DEFAULT_ROWS, DEFAULT_REQUESTS = 16384, 4096
"""More than any step is expected to have; memory that no step reaches is never touched."""


class ModelRunner:
    """The engine's `graftwork_engine.sched.plan.AheadRunner`: one model with its KV cache, and the adapters that are in memory.

    ``adapter_memory`` is written by others while steps run, in place, and only where no adapter of a launched step lies; ``wholes``
    has by index what adapters there bring whole.
    ``capacity`` bounds the steps; None: large. ``io`` is the way to where the operators run; ``is_ahead``: steps may be launched
    before the results of the step before them are known. ``make_forward`` gives the way through the model, by default operator by
    operator.
    """

    def __init__(
        self,
        model: Llama,
        kv: KvCache,
        adapter_memory: AdapterMemory,
        ops: Operators,
        capacity: StepCapacity | None = None,
        *,
        io: StepIo | None = None,
        is_ahead: bool = False,
        make_forward: Callable[[Llama, KvCache, BatchBuilder], Forward] | None = None,
        wholes: Mapping[int, DeviceWholes] = MappingProxyType({}),
    ) -> None:
        self._model = model
        self._ops = ops
        self._io = io or HostIo()
        longest = min(kv.num_blocks, -(-model.config.max_position_embeddings // kv.block_size))
        capacity = capacity or StepCapacity(DEFAULT_ROWS, DEFAULT_REQUESTS, longest)
        self._drawn = self._io.upload(torch.zeros(capacity.num_requests, dtype=torch.int64)) if is_ahead else None
        self._builder = BatchBuilder(ops, adapter_memory, kv.block_size, capacity, self._io, self._drawn, wholes)
        self._forward: Forward = EagerForward(model, kv)
        if make_forward is not None:
            self._forward = WholesApart(make_forward(model, kv, self._builder), self._forward)

    def execute(self, plan: StepPlan) -> Results:
        """See `graftwork_engine.sched.plan.Runner`."""
        return self.launch(plan)() if plan.scheduled else []

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], Results]:
        """See `graftwork_engine.sched.plan.AheadRunner`; the plan is not empty."""
        batch = self._builder.build(plan, self._forward.length(plan.num_tokens, len(plan.scheduled)))
        hidden = self._forward(batch)[: batch.num_rows]
        drawn = self._draw(hidden, batch)
        scored = self._score_prompts(hidden, batch, plan) if batch.num_scored else None
        # A normed row that is finite has a finite sum. One sum over all rows costs less, and tells of a step in which all is well;
        # but then the rows must still be there when it does not.
        tensors = [_row_sums(hidden) if self._io.is_late else hidden.sum()]
        tensors += [] if drawn is None else drawn.tensors
        tensors += [] if scored is None else scored.tensors
        return partial(_read, plan, hidden, self._io.fetch(tensors), drawn, scored, batch.num_scored)

    def _draw(self, hidden: Tensor, batch: StepBatch) -> DrawnRows | None:
        """A token from the last row of each request that draws one."""
        rows = batch.sample_rows
        if not len(rows):
            return None
        drawn_from = hidden if len(rows) == len(hidden) else hidden.index_select(0, rows)
        groups, num_logits = batch.wholes.drawn, batch.wholes.num_logits
        logits = self._model.logits(self._ops, drawn_from, groups, num_logits)
        wanted = (batch.sampling, batch.logit_bias, batch.penalties, batch.num_top_logprobs)
        drawn = draw_tokens(self._ops, logits, *wanted, self._io.upload)
        if groups or num_logits:
            drawn = replace(drawn, tokens=within_vocabulary(drawn.tokens, self._model.config.vocab_size, groups))
        if self._drawn is not None:
            self._drawn[: len(rows)] = drawn.tokens
        return drawn

    def _score_prompts(self, hidden: Tensor, batch: StepBatch, plan: StepPlan) -> ScoredRows:
        """Logprobs for the rows to score of all requests that have some, in the plan's order."""
        tops = {place: plan.scheduled[place].request.sampling.prompt_logprobs or 0 for place in batch.num_scored}
        top_of_row = [tops[place] for place, count in batch.num_scored.items() for _ in range(count)]
        wholes = batch.wholes

        def head(rows: Tensor, part: int) -> Tensor:
            return self._model.logits(self._ops, rows, wholes.scored[part] if wholes.scored else (), wholes.num_logits)

        return score_tokens(self._ops, head, hidden[batch.prompt_rows], batch.prompt_targets, top_of_row)


def _read(
    plan: StepPlan,
    hidden: Tensor,
    fetched: Callable[[], Sequence[Tensor]],
    drawn: DrawnRows | None,
    scored: ScoredRows | None,
    num_scored: Mapping[int, int],
) -> Results:
    """What a step brought, once it is on the host."""
    tensors = iter(fetched())
    failures = _failures(next(tensors), hidden, plan)
    draws = Draws([], {}, {}) if drawn is None else drawn.read(tensors)
    scores: dict[int, list[TokenLogprob | None]] = {}
    if scored is not None:
        found = scored.read(tensors)
        scores = {place: list(islice(found, count)) for place, count in num_scored.items()}
    if not (draws.logprobs or draws.failures or scores or failures) and len(draws.token_ids) == len(plan.scheduled):
        return draws.token_ids
    return _results(plan, draws, scores, failures)


def _row_sums(hidden: Tensor) -> Tensor:
    """fp32 [T]."""
    return hidden.sum(-1, dtype=torch.float32)


def _failures(sums: Tensor, hidden: Tensor, plan: StepPlan) -> dict[int, EngineError]:
    """The requests with a row that is not finite, by place in the plan. Asked of chunks that draw nothing too: their blocks are
    shared next. ``sums``: of each row, or one of all of ``hidden``.
    """
    if not sums.dim():
        if math.isfinite(sums.item()):
            return {}
        sums = _row_sums(hidden)
    is_finite = np.isfinite(sums.numpy())
    if is_finite.all():
        return {}
    starts = np.cumsum([0] + [s.num_tokens for s in plan.scheduled[:-1]])
    finite = np.logical_and.reduceat(is_finite, starts)
    return dict.fromkeys(np.flatnonzero(~finite).tolist(), NOT_FINITE)


def _results(
    plan: StepPlan, draws: Draws, scores: dict[int, list[TokenLogprob | None]], failures: dict[int, EngineError]
) -> list[RequestResult]:
    """What the step made of each request; ``scores`` and ``failures`` by place in the plan, ``draws`` for those that draw."""
    results = []
    num_drawn = 0
    for place, s in enumerate(plan.scheduled):
        failure, token_id, logprob = failures.get(place), None, None
        if s.samples:
            token_id, logprob = draws.token_ids[num_drawn], draws.logprobs.get(num_drawn)
            failure = failure or draws.failures.get(num_drawn)
            num_drawn += 1
        known = [score for score in scores.get(place, ()) if score is not None]
        if len(known) < len(scores.get(place, ())):
            failure = NOT_FINITE
        if failure is not None:
            results.append(RequestResult(failure=failure))
        else:
            results.append(RequestResult(token_id, logprob, known if s.request.needs_prompt_logprobs else None))
    return results
