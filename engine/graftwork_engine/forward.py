"""How a step's rows go through the model: operator by operator, or as one recorded program. Knows no requests and no sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from graftwork_engine.batch import BatchBuilder, StepBatch
from graftwork_engine.kv_memory import KvCache
from graftwork_engine.model.llama import Llama
from graftwork_kernels.cpu.capture import Recorder
from graftwork_kernels.ops import Operators

Forward = Callable[[StepBatch], Tensor]
"""A step's hidden states [T, H], normed for the head, which hold until the next step; keys and values go into the cache."""


class EagerForward:
    """Each operator is called from Python as the model reaches it."""

    def __init__(self, model: Llama, kv: KvCache) -> None:
        self._model, self._kv = model, kv

    def __call__(self, batch: StepBatch) -> Tensor:
        """See `Forward`."""
        return self._model.hidden_states(batch.token_ids, batch.forward, self._kv)


class SplitForward:
    """``large`` computes steps of ``from_rows`` rows and more, for which its operators have a faster way; ``small`` all others."""

    def __init__(self, small: Forward, large: Forward, from_rows: int) -> None:
        self._small, self._large, self._from_rows = small, large, from_rows

    def __call__(self, batch: StepBatch) -> Tensor:
        """See `Forward`."""
        return (self._large if len(batch.token_ids) >= self._from_rows else self._small)(batch)


class RecordedForward:
    """The pass is recorded once over the builder's whole memory, and a step is one call that replays it.

    What the model says in Python happens when it is recorded; a step costs what its operators cost.
    """

    def __init__(self, model: Llama, kv: KvCache, builder: BatchBuilder, recorder: Recorder, ops: Operators) -> None:
        with torch.inference_mode():
            hidden = model.hidden_states(builder.whole_token_ids, replace(builder.whole, ops=ops), kv)
        self._program = recorder.finish(hidden)
        (self._hidden,) = self._program.outputs

    def __call__(self, batch: StepBatch) -> Tensor:
        """See `Forward`; ``batch`` is the builder's latest."""
        num_rows = len(batch.token_ids)
        self._program.run(num_rows, len(batch.forward.attention.context_len))
        return self._hidden[:num_rows]
