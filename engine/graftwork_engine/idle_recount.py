"""When the engine recounts its books, and what becomes of a finding. Refuses to know what is counted."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_SHARE = 0.05
"""Of an idle engine's time that recounts may take: a request that comes meanwhile waits for the rest of one."""


class IdleRecount:
    """Runs ``check`` once in each idle period: `touch` it when something happened, `run_if_due` when nothing has for a while.

    A finding is logged and counted once for as long as it lasts. Nothing is repaired, and nothing that the check does, raising
    included, ends the engine: whatever is off, its running requests are worth more.
    """

    def __init__(self, check: Callable[[], list[str]], clock: Callable[[], float]) -> None:
        self._check = check
        self._clock = clock
        self._is_due = True
        self._not_before = clock()
        self._lasting: set[str] = set()
        self._num_checks = self._num_faults = 0

    def touch(self) -> None:
        """Something happened: the next idle period has something to check."""
        self._is_due = True

    def run_if_due(self) -> None:
        """Check, unless nothing happened since the last time or that was too short ago for its cost."""
        started = self._clock()
        if not self._is_due or started < self._not_before:
            return
        self._is_due = False
        try:
            found = self._check()
        except Exception as error:  # what is recounted may be in any state
            logger.exception("the recount of an idle engine failed")
            found = [f"the recount failed with {type(error).__name__}"]
        for what in found:
            if what not in self._lasting:
                self._num_faults += 1
                logger.error("an idle engine's books are off: %s", what)
        self._lasting = set(found)
        self._num_checks += 1
        ended = self._clock()
        self._not_before = ended + (ended - started) / MAX_SHARE

    def stats(self) -> dict[str, float]:
        """How many checks were made, and what they found."""
        return {"integrity_checks_total": self._num_checks, "integrity_faults_total": self._num_faults}
