"""When a request has all it asked for, and what its first item brings of its prompt. Books nothing but the request's own."""

from __future__ import annotations

from graftwork_engine.messages import TokenLogprob
from graftwork_engine.request import FinishReason, Request
from graftwork_engine.sched.plan import RequestResult


def keep_prompt_logprobs(request: Request, result: RequestResult) -> None:
    """Collect them from the steps that compute the prompt."""
    if request.needs_prompt_logprobs:
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)  # nothing comes before the first token
        request.prompt_logprobs.extend(result.prompt_logprobs or ())


def due_prompt_logprobs(request: Request) -> list[TokenLogprob | None] | None:
    """All of them, once, with the first item."""
    if not request.needs_prompt_logprobs:
        return None
    prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
    if len(prompt_logprobs) != len(request.prompt_ids):
        raise AssertionError(f"{len(prompt_logprobs)} logprobs for a prompt of {len(request.prompt_ids)} tokens")
    return prompt_logprobs


def finish_reason(request: Request) -> FinishReason | None:
    """Why the request's newest token is its last one, if it is. The model's context cannot be passed: `add` saw to that."""
    output_ids, sampling = request.output_ids, request.sampling
    if output_ids and output_ids[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    if len(output_ids) >= sampling.max_tokens and not request.needs_prompt_logprobs:
        return FinishReason.LENGTH
    return None
