"""What the API process needs of an engine; `graftwork_engine.client.EngineClient` is one. Knows no requests' meaning."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from graftwork_engine.client import GenerationRequest
from graftwork_engine.messages import OutItem, Ready


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

    def generate(self, request: GenerationRequest) -> AsyncGenerator[OutItem, None]:
        """A request's output as it is made; the last item has ``finish``. Closing the generator aborts the request.

        Raises `RequestRejected`, `RequestFailed` or `EngineUnavailable`. A restart of the engine is a pause.
        """
        ...
