"""Rows of logits as what the requests asked for: a drawn token, its log probability, and those of the prompt's tokens.

    logits ──▶ finite? ──▶ logprobs' rows kept ──▶ bias ──▶ penalties ──▶ temperature, top-k, top-p, min-p ──▶ token
    (raw)                  (copied, still raw)     (in place, from here on)

A row that no token can be drawn from fails its own request; the others never notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
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


class Scores(NamedTuple):
    """Log probabilities of one token and of the best ones for each of some rows; see `Operators.token_logprobs`."""

    chosen: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The same where the operators run. ``tokens`` int64 [S]; ``is_finite`` bool [S], of raw logits, and ``is_drawable``, of those
    that bias and penalties left, None where there are none; ``scores`` of the rows in ``num_top_logprobs``, None where it is empty.
    """

    tokens: Tensor
    is_finite: Tensor
    is_drawable: Tensor | None
    scores: Scores | None
    num_top_logprobs: Mapping[int, int]

    @property
    def tensors(self) -> list[Tensor]:
        """What is to be brought to the host."""
        drawable = [] if self.is_drawable is None else [self.is_drawable]
        return [self.tokens, self.is_finite, *drawable, *(() if self.scores is None else self.scores)]

    def read(self, tensors: Iterator[Tensor]) -> Draws:
        """Of its `tensors`, on the host by now."""
        token_ids = next(tensors).tolist()
        failures = _failing(next(tensors), NOT_FINITE)
        if self.is_drawable is not None:
            failures = {**_failing(next(tensors), NOTHING_TO_DRAW), **failures}
        if self.scores is None:
            return Draws(token_ids, {}, failures)
        found = _logprobs(Scores(next(tensors), next(tensors), next(tensors)), self.num_top_logprobs.values())
        return Draws(token_ids, dict(zip(self.num_top_logprobs, found, strict=True)), failures)


def draw_tokens(
    ops: Operators,
    logits: Tensor,
    batch: SamplingBatch,
    bias: LogitBias | None,
    penalties: Penalties | None,
    num_top_logprobs: Mapping[int, int],
    upload: Callable[[Tensor], Tensor],
) -> DrawnRows:
    """Draw from each row of ``logits`` fp32 [S, V], which bias and penalties overwrite.

    ``num_top_logprobs`` has the rows whose logprobs are wanted, with the number of alternatives beside the drawn token; ``upload``
    brings their numbers to the logits.
    """
    is_finite = ops.finite_rows(logits)
    rows = raw = is_drawable = scores = None
    if num_top_logprobs:
        rows = upload(torch.tensor(list(num_top_logprobs)))
        raw = logits.index_select(0, rows)
    if bias is not None:
        ops.apply_logit_bias(logits, bias)
    if penalties is not None:
        ops.apply_penalties(logits, penalties)
    if bias is not None or penalties is not None:
        is_drawable = ops.finite_rows(logits)
    tokens = ops.sample(logits, batch)
    if raw is not None and rows is not None:
        scores = Scores(*ops.token_logprobs(raw, tokens.index_select(0, rows), max(num_top_logprobs.values())))
    return DrawnRows(tokens, is_finite, is_drawable, scores, num_top_logprobs)


def _failing(are_well: Tensor, error: EngineError) -> dict[int, EngineError]:
    well: npt.NDArray[np.bool_] = are_well.numpy()
    return {} if well.all() else dict.fromkeys(np.flatnonzero(~well).tolist(), error)


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """What P tokens score, where the operators run: for some rows at a time their `Scores` and, bool, whether those mean anything.

    ``tops`` has P entries, how many of the best alternatives to tell.
    """

    parts: Sequence[tuple[Scores, Tensor]]
    tops: Sequence[int]

    @property
    def tensors(self) -> list[Tensor]:
        """What is to be brought to the host."""
        return [tensor for scores, is_finite in self.parts for tensor in (*scores, is_finite)]

    def read(self, tensors: Iterator[Tensor]) -> Iterator[TokenLogprob | None]:
        """Of its `tensors`, on the host by now: a logprob for each token, None where the logits are not finite."""
        for number in range(len(self.parts)):
            scores, is_finite = Scores(next(tensors), next(tensors), next(tensors)), next(tensors).tolist()
            tops = self.tops[number * SCORED_ROWS_AT_ONCE : (number + 1) * SCORED_ROWS_AT_ONCE]
            for logprob, is_known in zip(_logprobs(scores, tops), is_finite, strict=True):
                yield logprob if is_known else None


def score_tokens(
    ops: Operators, head: Callable[[Tensor, int], Tensor], hidden: Tensor, targets: Tensor, tops: Sequence[int]
) -> ScoredRows:
    """The logprob of ``targets`` int64 [P] under the logits that ``head`` makes of ``hidden`` [P, H], called with a part of those
    and the part's number; ``tops`` has P entries.
    """
    parts: list[tuple[Scores, Tensor]] = []
    for start in range(0, len(tops), SCORED_ROWS_AT_ONCE):
        part = slice(start, start + SCORED_ROWS_AT_ONCE)
        logits = head(hidden[part], len(parts))
        parts.append((Scores(*ops.token_logprobs(logits, targets[part], max(tops[part]))), ops.finite_rows(logits)))
    return ScoredRows(parts, tops)


def _logprobs(scores: Scores, tops: Iterable[int]) -> list[TokenLogprob]:
    """Logprobs as the client gets them; row i reports its ``tops[i]`` best alternatives."""
    rows = zip(*(tensor.tolist() for tensor in scores), tops, strict=True)
    return [TokenLogprob(logprob, tuple(ids[:top]), tuple(values[:top])) for logprob, ids, values, top in rows]
