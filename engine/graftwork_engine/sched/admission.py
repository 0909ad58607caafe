"""What a request must be for the engine to take it: after this no value in it can make a step fail. Knows no queues.

The API process has checked the same and told its client in its own words; this is the engine's own wall.
"""

from __future__ import annotations

from collections.abc import Collection

from graftwork_engine.errors import ErrorCode, RequestRejected
from graftwork_engine.messages import Sampling
from graftwork_engine.request import Request

MAX_FLOAT = 3.4028234663852886e38
"""The largest fp32: what a number may be whose step is computed in that type."""

MAX_INT = 2**31 - 1


def check_request(request: Request, vocab_size: int, max_model_len: int, max_request_tokens: int) -> None:
    """Raise `RequestRejected`, naming the field, if the request can never run.

    ``vocab_size`` is the base's. ``max_request_tokens`` is what prompt and output may have together: ``max_model_len``, or less if
    KV memory holds less.
    """
    sampling, num_prompt = request.sampling, len(request.prompt_ids)
    if not num_prompt:
        raise RequestRejected(ErrorCode.BAD_REQUEST, "the prompt is empty: send at least one token")
    if sampling.max_tokens < 0:
        raise RequestRejected(ErrorCode.BAD_REQUEST, f"max_tokens is {sampling.max_tokens}: it must not be negative")
    own_vocab_size = _check_adapter(request, vocab_size)
    _check_ids("", request.prompt_ids, own_vocab_size)
    _check_ids("", request.output_ids, own_vocab_size)
    _check_sampling(sampling, own_vocab_size)
    asked = num_prompt + max(sampling.max_tokens, request.num_output_tokens)
    if asked > max_request_tokens:
        limit = "the model's context" if max_request_tokens == max_model_len else "KV memory"
        raise RequestRejected(
            ErrorCode.CONTEXT_LENGTH,
            f"{asked} tokens were asked for ({num_prompt} of the prompt, {asked - num_prompt} of output), "
            f"but {limit} holds {max_request_tokens}: shorten the prompt or lower max_tokens",
        )


def _check_adapter(request: Request, vocab_size: int) -> int:
    """Tokens that the request may name: the base's, unless its adapter brings others."""
    start, num_prompt = request.adapter_start, len(request.prompt_ids)
    if not 0 <= start <= num_prompt:
        raise RequestRejected(ErrorCode.BAD_REQUEST, f"adapter_start is {start}: it must be in 0..{num_prompt}, within the prompt")
    if request.vocab_size is None:
        return vocab_size
    if request.adapter_key is None:
        raise RequestRejected(ErrorCode.BAD_REQUEST, "vocab_size is that of an adapter, and the request names none")
    if request.vocab_size < 1:
        raise RequestRejected(ErrorCode.BAD_REQUEST, f"vocab_size is {request.vocab_size}: it must be above 0")
    # Before its start an adapter's tokens are unknown: there the base looks them up.
    _check_ids("before the adapter applies: ", request.prompt_ids[:start], vocab_size)
    return request.vocab_size


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    for name, integer, largest in (
        ("seed", sampling.seed, 2**64 - 1),
        ("choice", sampling.choice, MAX_INT),
        ("top_k", sampling.top_k, MAX_INT),
        ("logprobs", sampling.logprobs or 0, vocab_size),
        ("prompt_logprobs", sampling.prompt_logprobs or 0, vocab_size),
        ("min_tokens", sampling.min_tokens, sampling.max_tokens),
    ):
        if not 0 <= integer <= largest:
            raise RequestRejected(ErrorCode.BAD_REQUEST, f"{name} is {integer}: it must be in 0..{largest}")
    for name, number, least, most in (
        ("temperature", sampling.temperature, 0.0, MAX_FLOAT),
        ("top_p", sampling.top_p, 0.0, MAX_FLOAT),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -MAX_FLOAT, MAX_FLOAT),
        ("frequency_penalty", sampling.frequency_penalty, -MAX_FLOAT, MAX_FLOAT),
        ("repetition_penalty", sampling.repetition_penalty, 0.0, MAX_FLOAT),
        *((f"logit_bias of token {token_id}", value, -MAX_FLOAT, MAX_FLOAT) for token_id, value in sampling.logit_bias.items()),
    ):
        if not least <= number <= most:  # false for NaN as well
            raise RequestRejected(ErrorCode.BAD_REQUEST, f"{name} is {number}: it must be a number from {least:g} to {most:g}")
    if sampling.repetition_penalty == 0.0:
        raise RequestRejected(ErrorCode.BAD_REQUEST, "repetition_penalty is 0: it must be above 0")
    _check_ids("logit_bias: ", sampling.logit_bias, vocab_size)
    if sampling.min_tokens:  # they are held back by their logits, so they must have one
        _check_ids("stop_token_ids: ", sampling.stop_token_ids, vocab_size)


def _check_ids(prefix: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Looks at the extremes only: prompts are long, and the engine's loop stands still meanwhile."""
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < vocab_size:
            raise RequestRejected(ErrorCode.BAD_REQUEST, f"{prefix}token id {token_id} is not in 0..{vocab_size - 1}")
