"""How long work may wait for a PostgreSQL server to answer. Knows no SQL and no sessions.

A server that is frozen, or whose packets are lost, sends no error: its kernel goes on acknowledging, and its own limits of time
stand still with it. So the limit is kept at this end, and the thread that waits finds it by itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen

T = TypeVar("T")


class Patience:
    """Until when each thread waits; without a limit of its own, for ever. `end` limits all of them. ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf
        self._of_thread = threading.local()

    def left(self, within: float) -> float:
        """Seconds that work which begins now and may take ``within`` has."""
        return min(within, self._end - self._clock())

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """Inside, this thread waits no longer than ``seconds`` from now in all, nor longer than it would outside."""
        outside = self._deadline
        self._of_thread.deadline = min(outside, self._clock() + seconds)
        try:
            yield
        finally:
            self._of_thread.deadline = outside

    def end(self, within: float) -> None:
        """Let no thread wait longer than ``within`` seconds from now."""
        self._end = min(self._end, self._clock() + within)

    def connect(self, *args: Any, **options: Any) -> psycopg.Connection[Any]:
        """As `psycopg.connect`. Waits that take too long end with `psycopg.OperationalError`, and the connection is closed."""
        self.check()
        connection: _Connection = _Connection.connect(*args, **options)
        connection.patience = self
        return connection

    def check(self) -> None:
        """Raises `psycopg.OperationalError` in a thread that may wait no longer."""
        if self._clock() > min(self._end, self._deadline):
            raise psycopg.OperationalError("there was no answer in time")

    @property
    def _deadline(self) -> float:
        deadline: float = getattr(self._of_thread, "deadline", math.inf)
        return deadline


class _Connection(psycopg.Connection[Any]):
    patience: Patience

    def wait(self, gen: PQGen[T], *args: Any, **options: Any) -> T:
        try:
            self.patience.check()  # nothing begins after the end, a commit above all
            return super().wait(self._watched(gen), *args, **options)
        except psycopg.OperationalError:
            if self.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                self.close()  # an answer may still come, to nobody
            raise

    def _watched(self, gen: PQGen[T]) -> PQGen[T]:
        """``gen``, and an end to it when nothing has come for too long: it is asked every tenth of a second."""
        try:
            state = next(gen)
            while True:
                ready = yield state
                if not ready:
                    self.patience.check()
                state = gen.send(ready)
        except StopIteration as ended:
            value: T = ended.value
            return value
