"""Drawing tokens and reporting their log probabilities in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from graftwork_kernels.layout import SamplingBatch
from graftwork_kernels.reference.philox import philox_uniform

_NUCLEUS_START = 256
"""Candidates looked at first for top-p; a few hundred tokens nearly always hold the mass, and sorting the vocabulary is slow."""


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See `graftwork_kernels.ops.Operators.sample`."""
    tokens = logits.argmax(-1)
    drawn = (batch.temperature > 0).nonzero().squeeze(1)
    if drawn.numel() == 0:
        return tokens
    # The maximum comes off before the division, so that a temperature near 0 cannot overflow.
    rows = logits[drawn]
    scaled = rows - rows.amax(-1, keepdim=True)
    scaled /= batch.temperature[drawn].unsqueeze(-1)
    weights = scaled.exp_()  # relative to the most probable token, whose weight is 1
    _filter(weights, rows, batch, drawn)

    uniform = philox_uniform(batch.seed[drawn], batch.choice[drawn], batch.position[drawn])
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # Held below the total, whatever the rounding, so that some id lies beyond the target.
    target = torch.minimum(uniform.unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    tokens[drawn] = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_max(logits.shape[-1] - 1)
    return tokens


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `graftwork_kernels.ops.Operators.token_logprobs`."""
    logits = logits.to(torch.float32)
    log_total = logits.logsumexp(-1, keepdim=True)
    logprobs = (logits.gather(-1, token_ids.unsqueeze(-1)) - log_total).squeeze(-1)
    top_logits, top_ids = _top(logits, num_top)
    return logprobs, top_ids, top_logits - log_total


def _filter(weights: Tensor, logits: Tensor, batch: SamplingBatch, drawn: Tensor) -> None:
    """Zero, in place, what top-k, top-p and min-p take away. A row at a time: few ask for it, and each stands alone."""
    options = zip(batch.top_k[drawn].tolist(), batch.top_p[drawn].tolist(), batch.min_p[drawn].tolist(), strict=True)
    for row, row_logits, (top_k, top_p, min_p) in zip(weights, logits, options, strict=True):
        limit = top_k if 0 < top_k < row.numel() else row.numel()
        if limit < row.numel() or top_p < 1.0:
            _keep_best(row, row_logits, limit, top_p)
        if min_p > 0.0:
            row.masked_fill_(row < min_p, 0.0)


def _keep_best(weights: Tensor, logits: Tensor, top_k: int, top_p: float) -> None:
    """Zero all of a row's weights but those of the first tokens by (logit descending, id ascending): what top-k and top-p keep."""
    num_tokens = logits.numel()
    has_top_k = top_k < num_tokens
    # Always one token beyond the cut, to see whether equals lie on both its sides.
    num_seen = top_k + 1 if has_top_k else min(_NUCLEUS_START, num_tokens)
    while True:
        best, ids = logits.topk(num_seen)
        count = top_k
        if top_p < 1.0:
            cumulative = weights[ids[:top_k]].cumsum(0)
            mass = float(cumulative[-1] if has_top_k else weights.sum())
            count = min(int((cumulative < top_p * mass).sum()) + 1, top_k)
        if count < num_seen or num_seen == num_tokens:
            break
        num_seen = min(num_seen * 16, num_tokens)

    kept = ids[:count]
    if count < num_seen and bool(best[count] == best[count - 1]):
        above, tied = (logits > best[count]).nonzero().squeeze(1), (logits == best[count]).nonzero().squeeze(1)
        kept = torch.cat((above, tied[: count - above.numel()]))
    kept_weights = weights[kept]
    weights.zero_()
    weights[kept] = kept_weights


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row and their ids, descending, of equals the lowest id first."""
    values, ids = logits.topk(count, dim=-1)
    if count == 0:
        return values, ids
    # topk orders equals as it likes, so rows that have any are ordered again among the candidates.
    # Of one with NaN, which comes first, nothing has a place to be in.
    has_ties = (values[:, 1:] == values[:, :-1]).any(-1) | ((logits >= values[:, -1:]).sum(-1) > count)
    has_ties &= ~values[:, 0].isnan()
    for row in has_ties.nonzero().squeeze(1).tolist():
        candidates = (logits[row] >= values[row, -1]).nonzero().squeeze(1)
        order = logits[row, candidates].argsort(descending=True, stable=True)[:count]
        ids[row] = candidates[order]
    return values, ids
