"""How a step's rows go through the model: operator by operator, or as one recorded program. Knows no requests and no sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from graftwork_engine.batch import BatchBuilder, StepBatch
from graftwork_engine.kv_memory import KvCache
from graftwork_engine.model.llama import Llama
from graftwork_kernels.cpu.capture import Recorder
from graftwork_kernels.ops import Operators


class Forward(Protocol):
    """A step's way through the model."""

    def length(self, num_rows: int, num_requests: int) -> int:
        """How many rows the batch of such a step is to have."""
        ...

    def __call__(self, batch: StepBatch) -> Tensor:
        """Hidden states [T, H], normed for the head, which hold until the next step; keys and values go into the cache."""
        ...


MakeForward = Callable[[Llama, KvCache, BatchBuilder], Forward]
"""Makes the way through a model whose steps a builder builds."""


class EagerForward:
    """Each operator is called from Python as the model reaches it."""

    def __init__(self, model: Llama, kv: KvCache) -> None:
        self._model, self._kv = model, kv

    def length(self, num_rows: int, num_requests: int) -> int:  # noqa: ARG002 - the protocol's
        """Its own."""
        return num_rows

    def __call__(self, batch: StepBatch) -> Tensor:
        """See `Forward`."""
        token_ids = batch.token_ids if batch.drawn is None else _known(batch.token_ids, batch.drawn)
        return self._model.hidden_states(token_ids, batch.forward, self._kv)


def _known(token_ids: Tensor, drawn: Tensor) -> Tensor:
    """The ids that stand for tokens of the step before, exchanged for those."""
    return torch.where(token_ids < 0, drawn[(-1 - token_ids).clamp_(min=0)], token_ids)


class SplitForward:
    """``large`` computes steps of ``from_rows`` rows and more, for which its operators have a faster way; ``small`` all others."""

    def __init__(self, small: Forward, large: Forward, from_rows: int) -> None:
        self._small, self._large, self._from_rows = small, large, from_rows

    def length(self, num_rows: int, num_requests: int) -> int:  # noqa: ARG002 - the protocol's
        """Its own."""
        return num_rows

    def __call__(self, batch: StepBatch) -> Tensor:
        """See `Forward`."""
        return (self._large if len(batch.token_ids) >= self._from_rows else self._small)(batch)


class WholesApart:
    """``usual`` computes all steps but those with adapters that bring tensors whole, which ``called`` does: what is recorded or
    captured knows of none."""

    def __init__(self, usual: Forward, called: Forward) -> None:
        self._usual, self._called = usual, called

    def length(self, num_rows: int, num_requests: int) -> int:
        """As it usually is: it is asked before the rows are known."""
        return self._usual.length(num_rows, num_requests)

    def __call__(self, batch: StepBatch) -> Tensor:
        """See `Forward`."""
        return (self._called if batch.forward.wholes else self._usual)(batch)


class RecordedForward:
    """The pass is recorded once over the builder's whole memory, and a step is one call that replays it.

    What the model says in Python happens when it is recorded; a step costs what its operators cost.
    """

    def __init__(self, model: Llama, kv: KvCache, builder: BatchBuilder, recorder: Recorder, ops: Operators) -> None:
        with torch.inference_mode():
            hidden = model.hidden_states(builder.whole_token_ids, replace(builder.whole, ops=ops), kv)
        self._program = recorder.finish(hidden)
        (self._hidden,) = self._program.outputs

    def length(self, num_rows: int, num_requests: int) -> int:  # noqa: ARG002 - the protocol's
        """Its own."""
        return num_rows

    def __call__(self, batch: StepBatch) -> Tensor:
        """See `Forward`; ``batch`` is the builder's latest."""
        num_rows = len(batch.token_ids)
        self._program.run(num_rows, len(batch.forward.attention.context_len))
        return self._hidden[:num_rows]


def replaying(recorder: Recorder, ops: Operators, called_from: int | None = None) -> MakeForward:
    """Replays what ``ops`` record into ``recorder``; steps of ``called_from`` rows and more are called (None: no step is)."""

    def make(model: Llama, kv: KvCache, builder: BatchBuilder) -> Forward:
        replayed = RecordedForward(model, kv, builder, recorder, ops)
        return replayed if called_from is None else SplitForward(replayed, EagerForward(model, kv), called_from)

    return make
