"""Executes step plans: batch → model → head → sampler. Refuses to know queues, prefixes and where adapters come from."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch
from torch import Tensor

from graftwork_engine.batch import build_batch, num_scored
from graftwork_engine.kv_memory import KvCache
from graftwork_engine.model.llama import Llama
from graftwork_engine.sampler import NOT_FINITE, Draw, draw_tokens, score_tokens
from graftwork_engine.sched.plan import RequestResult, StepPlan
from graftwork_kernels.layout import AdapterMemory


class ModelRunner:
    """The engine's `graftwork_engine.sched.plan.Runner`: one model with its KV cache, and the adapters that are in memory.

    ``adapter_memory`` is written by others between steps, in place, and only where no adapter of the running step lies.
    """

    def __init__(self, model: Llama, kv: KvCache, adapter_memory: AdapterMemory) -> None:
        self._model = model
        self._kv = kv
        self._adapter_memory = adapter_memory

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[RequestResult]:
        """Run the plan's tokens through the model; one result for each scheduled request, in order."""
        if not plan.scheduled:
            return []
        batch = build_batch(plan, self._kv.block_size, self._adapter_memory, self._model.place.device)
        hidden = self._model.hidden_states(batch.token_ids, batch.forward, self._kv)
        sampled = [s.request.sampling for s in plan.scheduled if s.samples]
        logits = self._model.logits(hidden[batch.sample_rows])
        draws = iter(draw_tokens(logits, batch.sampling, batch.logit_bias, batch.penalties, sampled))
        counts = [num_scored(s) for s in plan.scheduled]
        tops = [s.request.sampling.prompt_logprobs or 0 for s, n in zip(plan.scheduled, counts, strict=True) for _ in range(n)]
        scored = score_tokens(self._model.logits, hidden[batch.prompt_rows], batch.prompt_targets, tops)
        results = []
        for s, count, is_finite in zip(plan.scheduled, counts, _are_finite(hidden, plan), strict=True):
            draw = next(draws) if s.samples else Draw()
            scores = list(islice(scored, count))
            known = [score for score in scores if score is not None]
            if not is_finite or len(known) < count:
                results.append(RequestResult(failure=NOT_FINITE))
            elif draw.failure is not None:
                results.append(RequestResult(failure=draw.failure))
            else:
                prompt_logprobs = known if s.request.needs_prompt_logprobs else None
                results.append(RequestResult(draw.token_id, draw.logprob, prompt_logprobs))
        return results


def _are_finite(hidden: Tensor, plan: StepPlan) -> list[bool]:
    """For each scheduled request, whether all its rows are. Asked of chunks that draw nothing too: their blocks are shared next."""
    rows = hidden.sum(-1, dtype=torch.float32).isfinite().numpy(force=True)  # a normed row that is finite has a finite sum
    starts = np.cumsum([0] + [s.num_tokens for s in plan.scheduled[:-1]])
    finite: list[bool] = np.logical_and.reduceat(rows, starts).tolist()
    return finite
