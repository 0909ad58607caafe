"""Requests as an API process holds them while they run, and their output read as one stream. Knows no sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType

import msgspec

from graftwork_engine.errors import ErrorCode, RequestFailed, RequestRejected
from graftwork_engine.messages import Add, EngineError, OutItem, Sampling, TokenLogprob

MERGED_TOKENS = 64
"""A reader that is behind gets its tokens in items of about this many at most, so that none takes it long."""

_ORDINARY_ENDS = (None, "stop", "length")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate. ``timeout_s`` counts from the call; ``flow`` is an opaque key that the engine's queue is fair between;
    ``adapter_start`` and ``vocab_size`` as in `graftwork_engine.messages.Add`.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    cache_salt: bytes
    flow: str
    adapter_key: str | None = None
    timeout_s: float | None = None
    adapter_start: int = 0
    vocab_size: int | None = None


class Inbox:
    """Items of one request or several on their way to one reader, in order; neighbours of one request that wait come as one."""

    def __init__(self) -> None:
        self._items: deque[OutItem] = deque()
        self._arrival: asyncio.Future[None] | None = None

    def put(self, item: OutItem) -> None:
        """Leave an item; wakes the reader once, however many come before it runs."""
        self._items.append(item)
        arrival, self._arrival = self._arrival, None
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    @property
    def is_empty(self) -> bool:
        """True if nothing waits."""
        return not self._items

    def arrival(self) -> asyncio.Future[None]:
        """What the reader of an empty inbox awaits. A future and no coroutine, for there is one for each token."""
        self._arrival = asyncio.get_running_loop().create_future()
        return self._arrival

    def take(self) -> OutItem:
        """The next item; raises `IndexError` if nothing waits."""
        items = self._items
        item = items.popleft()
        if not items or not _goes_on(item, items[0]):
            return item
        parts, num_tokens = [item], len(item.token_ids)
        while items and num_tokens < MERGED_TOKENS and _goes_on(parts[-1], items[0]):
            parts.append(items.popleft())
            num_tokens += len(parts[-1].token_ids)
        return _merged(parts)


def _goes_on(item: OutItem, following: OutItem) -> bool:
    """True if a reader may have both as one: what ends a request in another way than by its tokens stands alone."""
    return following.request_id == item.request_id and item.finish is None and following.finish in _ORDINARY_ENDS


def _merged(parts: list[OutItem]) -> OutItem:
    logprobs: list[TokenLogprob] | None = None
    if parts[0].logprobs is not None:
        logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return msgspec.structs.replace(
        parts[0],
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=logprobs,
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
        finish=parts[-1].finish,
        cached_tokens=max(part.cached_tokens for part in parts),
    )


@dataclass(slots=True, eq=False)
class Stream:
    """One request, and the tokens its reader has or will have. Several may share one inbox."""

    request: GenerationRequest
    deadline: float | None  # Unix time
    inbox: Inbox = field(default_factory=Inbox)
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
            adapter_start=request.adapter_start,
            vocab_size=request.vocab_size,
        )

    def push(self, item: OutItem) -> bool:
        """Leave the new part of an item for the reader; True once the stream has ended. Tokens the reader has are dropped."""
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
        self.inbox.put(item)
        return item.finish is not None

    def end(self, finish: str, error: EngineError | None = None) -> None:
        """Leave the last word, where no engine says it."""
        self.push(OutItem(self.request.request_id, len(self.output_ids), finish=finish, error=error))


class StreamGroup:
    """Requests whose output is read as one: an async iterator over the items of all, each request's in order.

    It ends when no request of it is left, and goes on if another one is added. On the way out of the context, what still runs is
    aborted.
    """

    def __init__(
        self,
        begin: Callable[[GenerationRequest, Inbox], Awaitable[None]],
        abort: Callable[[str, int | None], Awaitable[None]],
    ) -> None:
        """``begin`` starts a request whose items go to the inbox; ``abort`` ends one at an output index (None: where it is)."""
        self._begin = begin
        self._abort = abort
        self._inbox = Inbox()
        self._open: set[str] = set()

    async def __aenter__(self) -> StreamGroup:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open:
            await asyncio.shield(self._abort_all())

    def __aiter__(self) -> StreamGroup:
        return self

    async def __anext__(self) -> OutItem:
        """The next item of any request; raises `RequestRejected` or `RequestFailed` for one that ended so.

        A reader that is behind gets what waits of a request as one item.
        """
        inbox = self._inbox
        while self._open:
            while inbox.is_empty:
                await inbox.arrival()
            item = inbox.take()
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
        await self._begin(request, self._inbox)

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
