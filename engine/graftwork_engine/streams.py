"""Requests as an API process holds them while they run, and their output read as one stream. Knows no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType

import msgspec

from graftwork_engine.errors import ErrorCode, RequestFailed, RequestRejected
from graftwork_engine.messages import Add, EngineError, OutItem, Sampling


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate. ``timeout_s`` counts from the call; ``flow`` is an opaque key that the engine's queue is fair between."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    cache_salt: bytes
    flow: str
    adapter_key: str | None = None
    timeout_s: float | None = None


@dataclass(slots=True, eq=False)
class Stream:
    """One request, and the tokens its reader has or will have. Several may share one queue of ``items``."""

    request: GenerationRequest
    deadline: float | None  # Unix time
    items: asyncio.Queue[OutItem] = field(default_factory=asyncio.Queue)
    output_ids: list[int] = field(default_factory=list)
    running_in: str | None = None  # the epoch in which it was last seen running
    crashes: int = 0

    def as_add(self, epoch: str) -> Add:
        """The request as it is sent to the engine of ``epoch``, to go on where it is."""
        request = self.request
        return Add(
            epoch=epoch,
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            flow=request.flow,
            output_ids=list(self.output_ids),
            adapter_key=request.adapter_key,
            deadline=self.deadline,
        )

    def push(self, item: OutItem) -> bool:
        """Queue the new part of an item; True once the stream has ended. Tokens the reader has are dropped."""
        known = len(self.output_ids) - item.first_output_index
        if known < 0:
            error = EngineError(ErrorCode.INTERNAL, f"tokens {len(self.output_ids)}..{item.first_output_index} were lost")
            item = OutItem(item.request_id, len(self.output_ids), finish="error", error=error)
        elif known > 0:
            item = msgspec.structs.replace(
                item,
                first_output_index=len(self.output_ids),
                token_ids=item.token_ids[known:],
                logprobs=None if item.logprobs is None else item.logprobs[known:],
            )
        self.output_ids.extend(item.token_ids)
        self.items.put_nowait(item)
        return item.finish is not None

    def end(self, finish: str, error: EngineError | None = None) -> None:
        """Queue the last word, where no engine says it."""
        self.push(OutItem(self.request.request_id, len(self.output_ids), finish=finish, error=error))


class StreamGroup:
    """Requests whose output is read as one: an async iterator over the items of all, each request's in order.

    It ends when no request of it is left, and goes on if another one is added. On the way out of the context, what still runs is
    aborted.
    """

    def __init__(
        self,
        begin: Callable[[GenerationRequest, asyncio.Queue[OutItem]], Awaitable[None]],
        abort: Callable[[str, int | None], Awaitable[None]],
    ) -> None:
        """``begin`` starts a request whose items go to the queue; ``abort`` ends one at an output index (None: where it is)."""
        self._begin = begin
        self._abort = abort
        self._items: asyncio.Queue[OutItem] = asyncio.Queue()
        self._open: set[str] = set()

    async def __aenter__(self) -> StreamGroup:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open:
            await asyncio.shield(self._abort_all())

    def __aiter__(self) -> StreamGroup:
        return self

    async def __anext__(self) -> OutItem:
        """The next item of any request; raises `RequestRejected` or `RequestFailed` for one that ended so."""
        while self._open:
            item = await self._items.get()
            if item.request_id not in self._open:
                continue  # it was stopped while this item waited
            if item.finish is not None:
                self._open.discard(item.request_id)
            if item.error is not None:
                raise _as_exception(item.error)
            return item
        raise StopAsyncIteration

    async def add(self, request: GenerationRequest) -> None:
        """Start a request; its id must be no other's."""
        self._open.add(request.request_id)
        await self._begin(request, self._items)

    async def stop(self, request_id: str, output_index: int) -> None:
        """No more is wanted of a request: tokens from ``output_index`` on are not, and none of its items follows."""
        self._open.discard(request_id)
        await asyncio.shield(self._abort(request_id, output_index))

    async def _abort_all(self) -> None:
        ended, self._open = self._open, set()
        for request_id in ended:
            await self._abort(request_id, None)


def _as_exception(error: EngineError) -> Exception:
    if error.code in (ErrorCode.CONTEXT_LENGTH, ErrorCode.BAD_REQUEST):
        return RequestRejected(ErrorCode(error.code), error.message)
    return RequestFailed(error.code, error.message)
