"""Rows of logits as what the requests asked for: a drawn token, its log probability, and those of the prompt's tokens.

    logits ──▶ finite? ──▶ logprobs' rows kept ──▶ bias ──▶ penalties ──▶ temperature, top-k, top-p, min-p ──▶ token
    (raw)                  (copied, still raw)     (in place, from here on)

A row that no token can be drawn from fails its own request; the others never notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from graftwork_engine.errors import ErrorCode
from graftwork_engine.messages import EngineError, Sampling, TokenLogprob
from graftwork_kernels import ops
from graftwork_kernels.layout import LogitBias, Penalties, SamplingBatch

SCORED_ROWS_AT_ONCE = 128
"""Bounds the memory of a long prompt's logits: 128 rows of a vocabulary of 150 000 are 77 MB."""

NOT_FINITE = EngineError(ErrorCode.NON_FINITE, "the model's output is not finite; the adapter's values may be too large")
NOTHING_TO_DRAW = EngineError(
    ErrorCode.NOTHING_TO_DRAW, "logit_bias, penalties and min_tokens leave no token that can be drawn; make them smaller"
)


@dataclass(frozen=True, slots=True)
class Draw:
    """What came of one row: a token, with its logprob where the request wants it, or why there is none."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    failure: EngineError | None = None


def draw_tokens(
    logits: Tensor, batch: SamplingBatch, bias: LogitBias | None, penalties: Penalties | None, wanted: Sequence[Sampling]
) -> list[Draw]:
    """One draw for each row of ``logits`` fp32 [S, V], which bias and penalties overwrite; ``wanted`` has S entries."""
    if not wanted:
        return []
    failures: list[EngineError | None] = [None if finite else NOT_FINITE for finite in ops.finite_rows(logits).tolist()]
    with_logprobs = [row for row, sampling in enumerate(wanted) if sampling.logprobs is not None]
    raw = logits[with_logprobs] if with_logprobs else None
    if bias is not None:
        ops.apply_logit_bias(logits, bias)
    if penalties is not None:
        ops.apply_penalties(logits, penalties)
    if bias is not None or penalties is not None:
        drawable = ops.finite_rows(logits).tolist()
        failures = [failure or (None if can else NOTHING_TO_DRAW) for failure, can in zip(failures, drawable, strict=True)]
    tokens = ops.sample(logits, batch)

    logprobs: list[TokenLogprob | None] = [None] * len(wanted)
    if raw is not None:
        tops = [wanted[row].logprobs or 0 for row in with_logprobs]
        for row, logprob in zip(with_logprobs, _logprobs(raw, tokens[with_logprobs], tops), strict=True):
            logprobs[row] = logprob
    rows = zip(tokens.tolist(), logprobs, failures, strict=True)
    return [Draw(token_id, logprob) if failure is None else Draw(failure=failure) for token_id, logprob, failure in rows]


def score_tokens(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, tops: Sequence[int]
) -> Iterator[TokenLogprob | None]:
    """The logprob of ``targets`` int64 [P] under the logits that ``head`` makes of ``hidden`` [P, H]; ``tops`` has P entries.

    None where those logits are not finite.
    """
    for start in range(0, len(tops), SCORED_ROWS_AT_ONCE):
        part = slice(start, start + SCORED_ROWS_AT_ONCE)
        logits = head(hidden[part])
        finite = ops.finite_rows(logits).tolist()
        for logprob, is_finite in zip(_logprobs(logits, targets[part], tops[part]), finite, strict=True):
            yield logprob if is_finite else None


def _logprobs(logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> list[TokenLogprob]:
    """Logprobs of ``tokens`` from raw ``logits``; row i reports its ``tops[i]`` best alternatives."""
    chosen, top_ids, top_logprobs = ops.token_logprobs(logits, tokens, max(tops))
    rows = zip(chosen.tolist(), top_ids.tolist(), top_logprobs.tolist(), tops, strict=True)
    return [TokenLogprob(logprob, tuple(ids[:top]), tuple(values[:top])) for logprob, ids, values, top in rows]
