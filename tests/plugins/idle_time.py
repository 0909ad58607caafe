"""An event loop whose time passes only while nothing is left to do, and then at once: timers go off in their order on any machine.

For what runs in the loop alone: it waits for no thread, no process and no socket.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWait(selectors.DefaultSelector):
    """Waits in no time, and counts the seconds for which it would have waited."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "all that is left to do waits for something that no timer brings"
        self.now += max(0.0, timeout)
        return super().select(0)


class _IdleTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._no_wait = _NoWait()
        super().__init__(self._no_wait)

    def time(self) -> float:
        return self._no_wait.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=_IdleTimeLoop) as runner:
        return runner.run(work)
