"""A clock for limits of time in tests: it stands still while the machine does, and goes slower where others take the processor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

TICK_S = 0.005
LONGEST_S = 10 * TICK_S
"""What a tick counts for at most, however late it comes."""


@pytest.fixture(scope="session")
def steady_clock() -> Iterator[Callable[[], float]]:
    """Seconds. Of the clock's seconds it counts those in which this process could run; code that holds the GIL stops it too."""
    now, ended = [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not ended.wait(TICK_S):
            at = time.monotonic()
            now[0] += min(at - last, LONGEST_S)
            last = at

    thread = threading.Thread(target=tick, name="steady clock", daemon=True)
    thread.start()
    yield lambda: now[0]
    ended.set()
    thread.join()
