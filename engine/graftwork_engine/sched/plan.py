"""What one step will run, and what came of it: the seam between the scheduler and the model runner. Knows no tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from graftwork_adapters.load_failure import LoadFailure
from graftwork_adapters.wholes import WholeFacts
from graftwork_engine.messages import EngineError, TokenLogprob
from graftwork_engine.request import Request, RequestId

BASE = -1
"""The adapter index of tokens that run on the base model alone."""


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """Tokens ``start .. start + num_tokens`` of one request. A struct, like `RequestResult`: a step makes one for each request.

    ``block_ids`` covers every token up to the end of that range; it is the request's own list, which only grows while the request
    runs, and is another one when it runs again. ``adapter_index`` is the adapter's place in device memory, for the tokens at or
    after ``request.adapter_start``; it stays the same as long as the list does. ``samples`` is true when the range ends at the
    request's newest token, whose logits then give the next one. ``follows``: the range is one token, which the step before this
    one draws, so that nobody but the runner knows it yet.
    """

    request: Request
    start: int
    num_tokens: int
    block_ids: list[int]
    adapter_index: int
    samples: bool
    follows: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The requests of one step; their token counts add up to at most ``max_num_batched_tokens``.

    ``newly_running`` names those that take part in a step for the first time. ``num_tokens``: rows of the step.
    """

    scheduled: list[ScheduledRequest]
    newly_running: list[RequestId] = field(default_factory=list)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum([s.num_tokens for s in self.scheduled]))  # asked for by many


class RequestResult(msgspec.Struct, frozen=True, gc=False):
    """What the step made of one scheduled request, in the plan's order.

    ``token_id`` is None unless the request samples. ``prompt_logprobs`` holds one entry for each prompt token *following* a
    token of the range (so a range that starts at 0 begins with the logprob of prompt token 1), if the request asked for them.
    ``failure`` says why there is nothing of all this; only this request ends with it.
    """

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    failure: EngineError | None = None


Results = Sequence[RequestResult | int]
"""One result for each scheduled request, in the plan's order. A number stands for the `RequestResult` of a request that samples of
which there is only the token to tell: most of all."""


class Runner(Protocol):
    """Executes plans. The engine's model runner is one; tests use scripted ones."""

    def execute(self, plan: StepPlan) -> Results:
        """Run the plan's tokens through the model."""
        ...


class AheadRunner(Runner, Protocol):
    """Executes also plans that are made before the results of the plan before them are known."""

    def launch(self, plan: StepPlan) -> Callable[[], Results]:
        """Start on the plan's tokens, behind those of the plans before; what comes back waits until they are through."""
        ...


AdapterFailure = LoadFailure
"""Why an adapter cannot be used; ``code`` is an `graftwork_engine.errors.ErrorCode` value."""


class AdapterGate(Protocol):
    """The scheduler's only view of adapter memory. No call blocks, parses, or touches disk or network.

    Waiting and preempted requests hold the host reference of their adapter (`hold`), running ones the device reference
    (`acquire`). Each `hold` is paired with one `drop`, each successful `acquire` with one `release`.
    """

    def hold(self, key: str) -> None:
        """A request waits for this adapter: start fetching it to the host unless it is there, and keep it there."""
        ...

    def drop(self, key: str) -> None:
        """Undo one `hold`."""
        ...

    def acquire(self, key: str) -> int | None:
        """Take a device reference and return the adapter's index, or None while it is not on the device.

        None starts the copy to the device as soon as the host has the adapter and evicting unreferenced ones makes room.
        """
        ...

    def release(self, key: str) -> None:
        """Undo one successful `acquire`."""
        ...

    def wholes(self, index: int) -> WholeFacts | None:
        """What the adapter at this index, of which somebody has a device reference, brings whole; None if that is nothing."""
        ...

    def needs_room(self, key: str) -> bool:
        """True while only the device references of others keep this adapter from the device.

        False while it is still being fetched or copied. Asked after `acquire` returned None: the scheduler then lets running
        requests drain, should newer ones have passed too often.
        """
        ...

    def failure(self, key: str) -> AdapterFailure | None:
        """Why loading failed, if it did. Asked after `acquire` returned None; requests that hold the key then fail.

        A failure is forgotten when its last holder has dropped it, so that a later request tries again.
        """
        ...

    def poll(self) -> bool:
        """Take in what background loads have finished since the last call; true if anything changed. Once per step."""
        ...

    def discrepancies(self, holds: Mapping[str, int], references: Mapping[str, int]) -> list[str]:
        """Recount everything below the gate, given the host and device references by key; what is off, empty when all is well.

        The one call that may take long and touch the disk; never made in a step.
        """
        ...
