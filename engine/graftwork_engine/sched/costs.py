"""What a flow is charged for a request's tokens. Knows no queue and no flow."""

from __future__ import annotations

from graftwork_adapters.wholes import WholeFacts
from graftwork_engine.errors import ErrorCode
from graftwork_engine.messages import EngineError
from graftwork_engine.request import Request
from graftwork_engine.sched.limits import SchedulerLimits

COST_OF_PROMPT_TOKEN = 1
COST_OF_OUTPUT_TOKEN = 2
"""An output token has a step of its own, prompt tokens share one."""


def weigh(request: Request, wholes: WholeFacts | None, limits: SchedulerLimits) -> EngineError | None:
    """Note what the tokens of a request cost whose adapter is on the device by now and brings ``wholes``; or why it cannot run with
    that adapter, which knows other tokens than the request was admitted for.

    A step reads the wholes of each of its adapters, as it reads the base's weights once for all.
    """
    vocab_size, base_bytes = limits.vocab_size, limits.base_bytes
    known = vocab_size if wholes is None or wholes.vocab_size is None else wholes.vocab_size
    if known != (expected := request.vocab_size or vocab_size):
        return EngineError(
            ErrorCode.INTERNAL, f"adapter {request.adapter_key} knows {known} tokens, the request takes it to know {expected}"
        )
    request.extra_cost = wholes.num_bytes / base_bytes if wholes is not None and base_bytes else 0.0
    return None
