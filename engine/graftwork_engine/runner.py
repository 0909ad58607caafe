"""Executes step plans: batch → model → head → sampler. Refuses to know queues, prefixes and where adapters come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from graftwork_engine.batch import BatchBuilder, StepBatch, StepCapacity
from graftwork_engine.forward import EagerForward, Forward, RecordedForward, SplitForward
from graftwork_engine.kv_memory import KvCache
from graftwork_engine.messages import EngineError, TokenLogprob
from graftwork_engine.model.llama import Llama
from graftwork_engine.sampler import NOT_FINITE, Draws, draw_tokens, score_tokens
from graftwork_engine.sched.plan import RequestResult, StepPlan
from graftwork_kernels.cpu.capture import Recorder
from graftwork_kernels.layout import AdapterMemory
from graftwork_kernels.ops import Operators

DEFAULT_ROWS, DEFAULT_REQUESTS = 16384, 4096
"""More than any step is expected to have; memory that no step reaches is never touched."""


class ModelRunner:
    """The engine's `graftwork_engine.sched.plan.Runner`: one model with its KV cache, and the adapters that are in memory.

    ``adapter_memory`` is written by others between steps, in place, and only where no adapter of the running step lies.
    ``capacity`` bounds the steps; None: large. ``recorded`` are a recorder and operators that record into it: the model's pass is
    then replayed instead of called, but for steps of ``called_from`` rows and more; None: for all.
    """

    def __init__(
        self,
        model: Llama,
        kv: KvCache,
        adapter_memory: AdapterMemory,
        ops: Operators,
        capacity: StepCapacity | None = None,
        recorded: tuple[Recorder, Operators] | None = None,
        called_from: int | None = None,
    ) -> None:
        self._model = model
        self._ops = ops
        longest = min(kv.num_blocks, -(-model.config.max_position_embeddings // kv.block_size))
        self._builder = BatchBuilder(
            ops, adapter_memory, kv.block_size, capacity or StepCapacity(DEFAULT_ROWS, DEFAULT_REQUESTS, longest)
        )
        self._forward: Forward = EagerForward(model, kv)
        if recorded is not None:
            replayed = RecordedForward(model, kv, self._builder, *recorded)
            self._forward = replayed if called_from is None else SplitForward(replayed, self._forward, called_from)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Sequence[RequestResult | int]:
        """See `graftwork_engine.sched.plan.Runner`."""
        if not plan.scheduled:
            return []
        batch = self._builder.build(plan)
        hidden = self._forward(batch)
        draws = self._draw(hidden, batch)
        scores = self._score_prompts(hidden, batch, plan) if batch.num_scored else {}
        failures = _failures(hidden, plan)
        if not (draws.logprobs or draws.failures or scores or failures) and len(draws.token_ids) == len(plan.scheduled):
            return draws.token_ids
        return _results(plan, draws, scores, failures)

    def _draw(self, hidden: Tensor, batch: StepBatch) -> Draws:
        """A token from the last row of each request that draws one."""
        rows = batch.sample_rows
        if not len(rows):
            return Draws([], {}, {})
        drawn_from = hidden if len(rows) == len(hidden) else hidden.index_select(0, rows)
        logits = self._model.logits(self._ops, drawn_from)
        return draw_tokens(self._ops, logits, batch.sampling, batch.logit_bias, batch.penalties, batch.num_top_logprobs)

    def _score_prompts(self, hidden: Tensor, batch: StepBatch, plan: StepPlan) -> dict[int, list[TokenLogprob | None]]:
        """A logprob, None where it is not finite, for each row to score of each request that has some, by place in the plan."""
        tops = {place: plan.scheduled[place].request.sampling.prompt_logprobs or 0 for place in batch.num_scored}
        top_of_row = [tops[place] for place, count in batch.num_scored.items() for _ in range(count)]
        head = partial(self._model.logits, self._ops)
        scored = score_tokens(self._ops, head, hidden[batch.prompt_rows], batch.prompt_targets, top_of_row)
        return {place: list(islice(scored, count)) for place, count in batch.num_scored.items()}


def _failures(hidden: Tensor, plan: StepPlan) -> dict[int, EngineError]:
    """The requests with a row that is not finite, by place in the plan. Asked of chunks that draw nothing too: their blocks are
    shared next.

    A normed row that is finite has a finite sum, so one sum over all rows tells of a step in which all is well.
    """
    if math.isfinite(hidden.sum().item()):
        return {}
    rows = hidden.sum(-1, dtype=torch.float32).isfinite().numpy(force=True)
    starts = np.cumsum([0] + [s.num_tokens for s in plan.scheduled[:-1]])
    finite = np.logical_and.reduceat(rows, starts)
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
