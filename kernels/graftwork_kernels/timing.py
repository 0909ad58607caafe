"""How long a run takes: a timer for each kind of device, and the CPU's, which goes by a clock. Knows no operators."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from graftwork_kernels.probes import Outputs

RUNS = range(3, 7)
"""How often an operator is run on one shape; the shortest counts, since the others were held up."""

ENOUGH_S = 0.015
"""No more runs than the fewest once they have taken this long together, so that a start is not held up by what is slow."""

TOO_LONG_S = 1.0
"""What takes this long is run twice and not three times. Never once: a single reading may be another process's."""

QUIET_S = 0.1
"""For so long a thread must have nearly all of a processor for itself, if times by the clock are to mean anything."""


class Timer(Protocol):
    """Takes times on one device."""

    def time(self, run: Callable[[], Outputs]) -> tuple[float, Outputs]:
        """Seconds of one ``run``, above 0, and what the first run gave, in memory of its own; operators that work in place change
        it afterwards. Raises what ``run`` raises.
        """
        ...


class ClockTimer:
    """A `Timer` of runs that are over when they return, by any ``clock`` that counts in seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def time(self, run: Callable[[], Outputs]) -> tuple[float, Outputs]:
        """See `Timer`: the shortest of a few runs."""
        started = self._clock()
        outputs = run()
        times = [self._clock() - started]
        outputs = tuple(output.clone() for output in outputs)
        while len(times) < 2 or (len(times) < RUNS.stop and sum(times) < (TOO_LONG_S if len(times) < RUNS.start else ENOUGH_S)):
            started = self._clock()
            run()
            times.append(self._clock() - started)
        return max(min(times), 1e-9), outputs


def machine_is_busy() -> bool:
    """Whether other processes take this thread's processor away. Threads that wait for each other are then slow at anything."""
    started, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() - started < QUIET_S:
        pass
    return time.thread_time() - used < 0.9 * (time.perf_counter() - started)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on this thread alone for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
