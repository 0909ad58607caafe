"""A deadline over many waits for one timer, where `asyncio.timeout` around each would cost one per token. Knows no requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Watchdog:
    """Ends whatever `next_of` waits for, with `TimeoutError`, once ``seconds`` have passed. A context manager, for one task."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[object] | None = None
        self._has_expired = False

    def __enter__(self) -> Watchdog:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def next_of(self, items: AsyncIterator[T]) -> T | None:
        """The next of ``items``, or None at their end."""
        if self._has_expired:
            raise TimeoutError
        task = self._waiting = asyncio.current_task()
        try:
            return await anext(items, None)
        except asyncio.CancelledError:
            # Somebody else's cancellation, at the same moment or alone, goes on as it is.
            if self._has_expired and task is not None and task.uncancel() == 0:
                raise TimeoutError from None
            raise
        finally:
            self._waiting = None

    def _expire(self) -> None:
        self._has_expired = True
        if self._waiting is not None:
            self._waiting.cancel()
