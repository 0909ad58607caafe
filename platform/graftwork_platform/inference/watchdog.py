"""A deadline over many waits for one timer, where `asyncio.timeout` around each would cost one per token. Knows no requests."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Watchdog:
    """Ends the block it surrounds with `TimeoutError` once ``seconds`` have passed, except while it is told to look away.

    A context manager. What comes out of the block while it looks away is not its business: the code between `look_away` and `watch`
    may be another task's, as that of whoever reads a generator is.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._watched: asyncio.Task[object] | None = None
        self._has_expired = False

    def __enter__(self) -> Watchdog:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)
        self._watched = asyncio.current_task()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        watched = self._watched
        self._watched = None
        if self._timer is not None:
            self._timer.cancel()
        # Somebody else's cancellation, at the same moment or alone, goes on as it is.
        if watched is not None and self._has_expired and isinstance(error, asyncio.CancelledError) and watched.uncancel() == 0:
            raise TimeoutError from None

    def look_away(self) -> None:
        """Nothing is ended until `watch`."""
        self._watched = None

    def watch(self) -> None:
        """Go on; raises `TimeoutError` if the time has passed in the meantime."""
        if self._has_expired:
            raise TimeoutError
        self._watched = asyncio.current_task()

    def _expire(self) -> None:
        self._has_expired = True
        if self._watched is not None:
            self._watched.cancel()
