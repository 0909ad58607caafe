"""What scheduling is told at start. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The part of the engine's configuration that scheduling needs, with the model's own limits filled in.

    ``prefill_chunk_size`` caps the tokens of one request in one step below the step's budget (None: no cap). ``base_bytes``: of the
    base's weights, which adapters' wholes are weighed against (0: they weigh nothing).
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    prefill_chunk_size: int | None = None
    base_bytes: int = 0
