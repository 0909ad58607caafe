"""How long one call of the S3 store may take and how often its requests are tried. Knows no bucket.

Delays double and are drawn between half and all of their length, so that many callers do not come back at the same moment.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from graftwork_adapters.errors import BlobNotFound, StoreUnavailable
from graftwork_adapters.s3_client import S3Limits
from graftwork_adapters.s3_failures import S3_ERRORS, failure_of

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Budget:
    """The time of one call of the store, shared by all of its requests and threads.

    ``clock`` gives seconds, ``jitter`` numbers from 0 to 1.
    """

    def __init__(
        self,
        limits: S3Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._cut = threading.Event()
        self._sleep = sleep or self._cut.wait
        self._jitter = jitter
        self._end = clock() + limits.deadline

    def extend(self, num_bytes: int) -> None:
        """Allow the time that so many bytes may take."""
        self._end += num_bytes / self._limits.slowest_rate

    def cut(self) -> None:
        """End it now: other threads send no new request, and those under way break off at their next piece."""
        self._cut.set()

    def check(self) -> None:
        """Raises `StoreUnavailable` when the time is over."""
        if self._cut.is_set() or self._clock() >= self._end:
            raise StoreUnavailable(
                "the object store is too slow", fix="look at its log and at the network between this machine and it"
            )

    def run(self, what: str, key: str, request: Callable[[], T]) -> T:
        """Send a request until it succeeds, fails for good, or there is no time for another answer.

        Raises the `StoreError` of its last failure. What is refused or not there is not asked for again.
        """
        for attempt in range(1, self._limits.max_attempts + 1):
            self.check()
            try:
                return request()
            except S3_ERRORS as error:
                failure = failure_of(error, key)
                if not (failure.is_transient and self._pause(attempt)):
                    if not isinstance(failure.error, BlobNotFound):
                        _log.warning("S3 %s of %s failed, attempt %d: %r", what, key, attempt, error)
                    raise failure.error from error
                _log.info("S3 %s of %s, attempt %d, will be tried again: %r", what, key, attempt, error)
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, attempt: int) -> bool:
        """Wait before the next attempt; false, without a wait, if there is none or its answer could come too late."""
        delay = min(self._limits.longest_delay, self._limits.first_delay * 2 ** (attempt - 1)) * (0.5 + self._jitter() / 2)
        if attempt == self._limits.max_attempts or self._cut.is_set():
            return False
        if self._clock() + delay + self._limits.read_timeout > self._end:
            return False
        self._sleep(delay)
        return True
