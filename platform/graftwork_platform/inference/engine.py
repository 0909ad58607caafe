"""What the API process needs of an engine; `graftwork_engine.client.EngineClient` is one. Knows no requests' meaning."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from graftwork_engine.messages import OutItem, Ready
from graftwork_engine.streams import GenerationRequest


class Streams(Protocol):
    """Requests that are read as one stream: the items of all, each request's in order, until none is left.

    A request's last item has ``finish``. Reading raises `RequestRejected` or `RequestFailed` for a request that ends so; a restart
    of the engine is a pause.
    """

    def __aiter__(self) -> AsyncIterator[OutItem]:
        """Itself."""
        ...

    async def __anext__(self) -> OutItem:
        """The next item of any request."""
        ...

    async def add(self, request: GenerationRequest) -> None:
        """Start a request."""
        ...

    async def stop(self, request_id: str, output_index: int) -> None:
        """End one, of which no token from ``output_index`` on is wanted and no item follows."""
        ...


class Engine(AbstractAsyncContextManager["Engine"], Protocol):
    """Runs requests. Entered at start, left at shutdown."""

    @property
    def info(self) -> Ready | None:
        """What the engine said of itself; None until one has answered."""
        ...

    @property
    def healthy(self) -> bool:
        """True while an engine answers."""
        ...

    @property
    def stats(self) -> Mapping[str, float]:
        """The engine's last reading of itself; names of counters end in ``_total``."""
        ...

    def streams(self) -> AbstractAsyncContextManager[Streams]:
        """A group of requests; those unfinished at the end of its context are aborted. Entering raises `EngineUnavailable`."""
        ...
