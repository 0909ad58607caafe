"""The engine's vocabulary: a request and the states it passes through. Read this first. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from graftwork_engine.kv.hashing import BlockKey
from graftwork_engine.messages import Sampling, TokenLogprob
from graftwork_engine.token_controls import TokenBias, TokenCounts

RequestId = NewType("RequestId", str)
AdapterKey = NewType("AdapterKey", str)


class RequestStatus(Enum):
    """WAITING → RUNNING ⇄ PREEMPTED; each of them → FINISHED."""

    WAITING = "waiting"  # holds no blocks; holds its adapter on the host
    RUNNING = "running"  # holds blocks; holds its adapter on the device
    PREEMPTED = "preempted"  # was running, gave its blocks back, will compute them again
    FINISHED = "finished"  # holds nothing


ALLOWED_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


class FinishReason(Enum):
    """Why a request ended, as it goes over the wire."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated.

    There is no prefill and no decode phase: `num_computed_tokens` chases `num_tokens`, and whenever it has caught up a token is
    drawn. ``output_ids`` begins with the ``num_resumed_tokens`` that the client already had when the request was added.
    """

    request_id: RequestId
    prompt_ids: list[int]
    sampling: Sampling
    cache_salt: bytes
    flow: str
    arrival: float  # on the engine's monotonic clock
    adapter_key: AdapterKey | None = None
    adapter_start: int = 0  # the adapter applies to the tokens from here on
    deadline: float | None = None  # on the same clock as `arrival`
    output_ids: list[int] = field(default_factory=list)
    num_resumed_tokens: int = 0
    vocab_size: int | None = None  # tokens that the adapter knows, if it brings a vocabulary of its own
    num_computed_tokens: int = 0
    num_ahead: int = 0  # tokens of steps that were launched and whose results are not known yet
    num_drawing: int = 0  # output tokens that such steps draw
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when first scheduled
    status: RequestStatus = RequestStatus.WAITING
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[BlockKey] = field(default_factory=list)  # of its full blocks, as far as they have been needed
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    order: int = -1  # its number in the order of arrival, given by the scheduler
    adapter_index: int = -1  # its adapter's place on the device while it runs
    extra_cost: float = 0.0  # what its adapter's wholes add to the cost of each of its tokens, as a part of that
    _token_counts: TokenCounts | None = None
    _token_bias: tuple[bool, TokenBias] | None = None  # with whether stop tokens are banned in it

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output so far, tokens from before a resumption included."""
        return len(self.output_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True until the client has them: they are sent with the first output token at the latest."""
        return self.sampling.prompt_logprobs is not None and not self.output_ids

    @property
    def needs_history(self) -> bool:
        """Its next token cannot be drawn before the newest one is known: penalties are reckoned from what the output holds."""
        sampling = self.sampling
        return sampling.repetition_penalty != 1.0 or bool(sampling.frequency_penalty) or bool(sampling.presence_penalty)

    def token_counts(self) -> TokenCounts | None:
        """The tokens that penalties are about, with their counts up to the newest token; None if the request has no penalty."""
        counts = self._token_counts
        if counts is None:
            sampling = self.sampling
            if sampling.repetition_penalty == 1.0 and not sampling.frequency_penalty and not sampling.presence_penalty:
                return None
            counts = self._token_counts = TokenCounts(() if sampling.repetition_penalty == 1.0 else self.prompt_ids)
        counts.catch_up(self.output_ids)
        return counts

    def token_bias(self) -> TokenBias | None:
        """What is added to single logits of the next token: ``logit_bias``, and the ban on stop tokens up to ``min_tokens``."""
        num_output = self.num_output_tokens + self.num_drawing  # of which the last need not be known
        bans_stops = num_output < self.sampling.min_tokens and bool(self.sampling.stop_token_ids)
        if not bans_stops and not self.sampling.logit_bias:
            return None
        if self._token_bias is None or self._token_bias[0] != bans_stops:
            banned = self.sampling.stop_token_ids if bans_stops else ()
            self._token_bias = (bans_stops, TokenBias(self.sampling.logit_bias, banned))
        return self._token_bias[1]

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens ``start..end`` of prompt and output laid end to end."""
        split = len(self.prompt_ids)
        if end <= split:
            return self.prompt_ids[start:end]
        if start >= split:
            return self.output_ids[start - split : end - split]
        return self.prompt_ids[start:] + self.output_ids[: end - split]

    def move_to(self, status: RequestStatus) -> None:
        """Change state; a transition that the table does not allow is a bug."""
        if status not in ALLOWED_TRANSITIONS[self.status]:
            raise AssertionError(f"request {self.request_id}: {self.status.value} → {status.value}")
        self.status = status
