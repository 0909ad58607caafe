"""An upload's own regular expressions, run within a budget of processor time. Knows no configs.

Matching may take time exponential in the text (``((a+)+)+b``), and Python's `re` has no limit of its own.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from graftwork_adapters.errors import PatternTooSlow


class Pattern(NamedTuple):
    """A regular expression, and the config field it comes from."""

    field: str
    regex: str


class PatternBudget:
    """Compiles and matches one upload's patterns in ``seconds`` of processor time, all of them together.

    In a process's main thread a timer interrupts the match that uses the budget up. Elsewhere Python delivers no signals: there
    the budget is looked at between patterns only, and whoever calls bounds the thread.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left = seconds
        self._field = ""
        self._compiled: dict[str, re.Pattern[str]] = {}  # `re` keeps only its last few hundred

    def compile(self, pattern: Pattern) -> re.Pattern[str]:
        """The compiled pattern. Raises what `re.compile` raises, or `PatternTooSlow`."""
        with self._spending():
            return self._compile(pattern)

    def first_match(self, patterns: Sequence[Pattern], text: str, *, full: bool = False) -> tuple[int, re.Match[str]] | None:
        """The place of the first pattern that matches at the start of ``text`` (``full``: all of it), and its match.

        Raises `PatternTooSlow`, naming the field whose pattern was running when the budget ended.
        """
        with self._spending():
            for place, pattern in enumerate(patterns):
                compiled = self._compile(pattern)
                match = compiled.fullmatch(text) if full else compiled.match(text)
                if match is not None:
                    return place, match
        return None

    def _compile(self, pattern: Pattern) -> re.Pattern[str]:
        self._field = pattern.field
        if self._left <= 0:
            raise self._too_slow()
        compiled = self._compiled.get(pattern.regex)
        if compiled is None:
            compiled = self._compiled[pattern.regex] = re.compile(pattern.regex)
        return compiled

    @contextmanager
    def _spending(self) -> Iterator[None]:
        began = time.thread_time()
        try:
            if self._left > 0 and threading.current_thread() is threading.main_thread():
                with self._timer():
                    yield
            else:
                yield
        finally:
            self._left -= time.thread_time() - began

    @contextmanager
    def _timer(self) -> Iterator[None]:
        handler = signal.signal(signal.SIGVTALRM, self._interrupt)
        try:
            timer = signal.setitimer(signal.ITIMER_VIRTUAL, self._left)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        finally:
            signal.signal(signal.SIGVTALRM, handler)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        self._left = 0.0  # the timer counts the whole process: this thread alone may have used less
        raise self._too_slow()

    def _too_slow(self) -> PatternTooSlow:
        return PatternTooSlow(self._field, self._seconds)
