"""What an API process and an engine process say to each other.

Every message is a tagged msgspec struct in one msgpack frame. This module imports no torch, so that an API process may use it.
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 3
"""Raised with every change of a message; a Hello of another version is refused by name."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request's tokens are drawn; every value is concrete, defaults are the API's business.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch that filter off. ``stop_token_ids`` holds the
    end-of-sequence ids unless the caller ignores them; a stop token is part of the output and is counted. ``logprobs`` is the
    number of alternatives to report beside each drawn token (0: the drawn token alone; None: nothing).

    ``presence_penalty`` is taken off the logits of tokens that the output holds, ``frequency_penalty`` times how often it does;
    ``repetition_penalty`` divides the positive and multiplies the negative logits of tokens that prompt or output hold.
    ``logit_bias`` is added first. Until there are ``min_tokens`` of output no stop token is drawn.
    """

    max_tokens: int
    seed: int  # unsigned 64 bit; with `choice` and the output position it keys the noise
    choice: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one token, from the raw logits, and of the ``top`` most probable ones (best first)."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class EngineError(msgspec.Struct, frozen=True):
    """Why a request failed. ``code`` is one of the names in `graftwork_engine.errors.ErrorCode`."""

    code: str
    message: str


# API process → engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Opens a session. ``pid`` lets an engine on the same machine notice the client's death at once."""

    version: int
    client_id: str
    pid: int


class Add(msgspec.Struct, frozen=True, omit_defaults=True, tag="add"):
    """Run one request. ``output_ids`` are tokens the client already has: a fixed prefix that is not sent again.

    ``flow`` is an opaque key that the queue is fair between. ``deadline`` is Unix time in seconds. The adapter applies to the
    tokens from ``adapter_start`` on, a place in the prompt or its end; ``vocab_size`` is how many tokens it knows, where it brings
    a vocabulary of its own (None: the base's).
    """

    epoch: str
    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    cache_salt: bytes
    flow: str
    output_ids: list[int] = []
    adapter_key: str | None = None
    deadline: float | None = None
    adapter_start: int = 0
    vocab_size: int | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request; tokens from ``output_index`` on are no longer wanted."""

    request_id: str
    output_index: int


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent both ways, several times a second."""

    epoch: str


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """Ask for the final counts of these requests, whose client died."""

    epoch: str
    request_ids: list[str]


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """The final counts of these orphans are durable elsewhere: the engine may forget them."""

    epoch: str
    request_ids: list[str]


# Engine → API process


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Answers Hello. Another ``epoch`` than before means a new engine: unfinished requests must be added again."""

    version: int
    epoch: str
    pid: int
    base_id: str
    max_model_len: int
    max_prompt_and_output: int  # what KV memory can ever hold, in tokens


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The session cannot go on: another protocol version, or a client this engine does not know (say Hello again)."""

    reason: str
    message: str


class Running(msgspec.Struct, frozen=True, tag="running"):
    """Sent before the first step these requests take part in, so that a crash can be laid at the right door."""

    epoch: str
    request_ids: list[str]


class OutItem(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one step made of one request. ``finish``: stop, length, abort or error; the last item of a request has it."""

    request_id: str
    first_output_index: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one per prompt token, the first is None; once, when complete
    finish: str | None = None
    error: EngineError | None = None
    cached_tokens: int = 0


class Out(msgspec.Struct, frozen=True, tag="out"):
    """All that one step made."""

    epoch: str
    items: list[OutItem]


class Orphan(msgspec.Struct, frozen=True):
    """A request whose client died, and how many tokens it had made when it stopped."""

    request_id: str
    output_count: int


class Orphans(msgspec.Struct, frozen=True, tag="orphans"):
    """Answers Claim: the requests that stopped, and those still ``stopping``, which may be claimed again in a moment.

    A claimed request that is in neither list is not known to this engine. Orphans are kept until Settled.
    """

    epoch: str
    items: list[Orphan]
    stopping: list[str]


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """A reading of the engine, each second. Names end in their unit; counters end in ``_total``."""

    epoch: str
    values: dict[str, float]


ToEngine = Hello | Add | Abort | Heartbeat | Claim | Settled
ToClient = Ready | Refused | Running | Out | Orphans | Stats | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_client = msgspec.msgpack.Decoder(ToClient)


def encode(message: ToEngine | ToClient) -> bytes:
    """One message as one frame."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """A frame from an API process; raises `msgspec.ValidationError` for anything else."""
    return _to_engine.decode(frame)


def decode_to_client(frame: bytes) -> ToClient:
    """A frame from an engine; raises `msgspec.ValidationError` for anything else."""
    return _to_client.decode(frame)
