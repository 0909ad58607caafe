"""Rows of logits as what the requests asked for: a drawn token, its log probability, and those of the prompt's tokens.

    logits ──▶ finite? ──▶ logprobs' rows kept ──▶ bias ──▶ penalties ──▶ temperature, top-k, top-p, min-p ──▶ token
    (raw)                  (copied, still raw)     (in place, from here on)

A row that no token can be drawn from fails its own request; the others never notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from graftwork_engine.errors import ErrorCode
from graftwork_engine.messages import EngineError, TokenLogprob
from graftwork_kernels.layout import LogitBias, Penalties, SamplingBatch
from graftwork_kernels.ops import Operators

SCORED_ROWS_AT_ONCE = 128
"""Bounds the memory of a long prompt's logits: 128 rows of a vocabulary of 150 000 are 77 MB."""

NOT_FINITE = EngineError(ErrorCode.NON_FINITE, "the model's output is not finite; the adapter's values may be too large")
NOTHING_TO_DRAW = EngineError(
    ErrorCode.NOTHING_TO_DRAW, "logit_bias, penalties and min_tokens leave no token that can be drawn; make them smaller"
)


@dataclass(frozen=True, slots=True)
class Draws:
    """What came of S rows: a token of each, with the logprobs of the rows that want them; and why a row gives none, if so.

    The token of a row with a failure means nothing.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob]
    failures: dict[int, EngineError]


def draw_tokens(
    ops: Operators,
    logits: Tensor,
    batch: SamplingBatch,
    bias: LogitBias | None,
    penalties: Penalties | None,
    num_top_logprobs: Mapping[int, int],
) -> Draws:
    """Draw from each row of ``logits`` fp32 [S, V], which bias and penalties overwrite.

    ``num_top_logprobs`` has the rows whose logprobs are wanted, with the number of alternatives beside the drawn token.
    """
    failures = dict.fromkeys(_undrawable(ops, logits), NOT_FINITE)
    with_logprobs = list(num_top_logprobs)
    raw = logits[with_logprobs] if with_logprobs else None
    if bias is not None:
        ops.apply_logit_bias(logits, bias)
    if penalties is not None:
        ops.apply_penalties(logits, penalties)
    if bias is not None or penalties is not None:
        failures = {**dict.fromkeys(_undrawable(ops, logits), NOTHING_TO_DRAW), **failures}
    tokens = ops.sample(logits, batch)
    logprobs: dict[int, TokenLogprob] = {}
    if raw is not None:
        found = _logprobs(ops, raw, tokens[with_logprobs], list(num_top_logprobs.values()))
        logprobs = dict(zip(with_logprobs, found, strict=True))
    return Draws(tokens.tolist(), logprobs, failures)


def _undrawable(ops: Operators, logits: Tensor) -> list[int]:
    """Rows that no token can be drawn from."""
    finite: npt.NDArray[np.bool_] = ops.finite_rows(logits).numpy(force=True)
    return [] if finite.all() else np.flatnonzero(~finite).tolist()


def score_tokens(
    ops: Operators, head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, tops: Sequence[int]
) -> Iterator[TokenLogprob | None]:
    """The logprob of ``targets`` int64 [P] under the logits that ``head`` makes of ``hidden`` [P, H]; ``tops`` has P entries.

    None where those logits are not finite.
    """
    for start in range(0, len(tops), SCORED_ROWS_AT_ONCE):
        part = slice(start, start + SCORED_ROWS_AT_ONCE)
        logits = head(hidden[part])
        finite = ops.finite_rows(logits).tolist()
        for logprob, is_finite in zip(_logprobs(ops, logits, targets[part], tops[part]), finite, strict=True):
            yield logprob if is_finite else None


def _logprobs(ops: Operators, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> list[TokenLogprob]:
    """Logprobs of ``tokens`` from raw ``logits``; row i reports its ``tops[i]`` best alternatives."""
    chosen, top_ids, top_logprobs = ops.token_logprobs(logits, tokens, max(tops))
    rows = zip(chosen.tolist(), top_ids.tolist(), top_logprobs.tolist(), tops, strict=True)
    return [TokenLogprob(logprob, tuple(ids[:top]), tuple(values[:top])) for logprob, ids, values, top in rows]
