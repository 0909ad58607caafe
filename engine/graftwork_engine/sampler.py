"""Rows of logits as what the requests asked for: a drawn token, its log probability, and those of the prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from graftwork_engine.messages import Sampling, TokenLogprob
from graftwork_kernels import ops
from graftwork_kernels.layout import SamplingBatch

SCORED_ROWS_AT_ONCE = 128
"""Bounds the memory of a long prompt's logits: 128 rows of a vocabulary of 150 000 are 77 MB."""


def draw_tokens(logits: Tensor, batch: SamplingBatch, wanted: Sequence[Sampling]) -> Iterator[tuple[int, TokenLogprob | None]]:
    """One token for each row of ``logits`` fp32 [S, V], with its logprob where the request wants it; ``wanted`` has S entries."""
    if not wanted:
        return iter(())
    tokens = ops.sample(logits, batch)
    with_logprobs = [row for row, sampling in enumerate(wanted) if sampling.logprobs is not None]
    logprobs: list[TokenLogprob | None] = [None] * len(wanted)
    if with_logprobs:
        rows = torch.tensor(with_logprobs, device=logits.device)
        tops = [wanted[row].logprobs or 0 for row in with_logprobs]
        for row, logprob in zip(with_logprobs, _logprobs(logits[rows], tokens[rows], tops), strict=True):
            logprobs[row] = logprob
    return iter(zip(tokens.tolist(), logprobs, strict=True))


def score_tokens(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, tops: Sequence[int]) -> Iterator[TokenLogprob]:
    """The logprob of ``targets`` int64 [P] under the logits that ``head`` makes of ``hidden`` [P, H]; ``tops`` has P entries."""
    for start in range(0, len(tops), SCORED_ROWS_AT_ONCE):
        part = slice(start, start + SCORED_ROWS_AT_ONCE)
        yield from _logprobs(head(hidden[part]), targets[part], tops[part])


def _logprobs(logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> list[TokenLogprob]:
    """Logprobs of ``tokens`` from raw ``logits``; row i reports its ``tops[i]`` best alternatives."""
    chosen, top_ids, top_logprobs = ops.token_logprobs(logits, tokens, max(tops))
    rows = zip(chosen.tolist(), top_ids.tolist(), top_logprobs.tolist(), tops, strict=True)
    return [TokenLogprob(logprob, tuple(ids[:top]), tuple(values[:top])) for logprob, ids, values, top in rows]
