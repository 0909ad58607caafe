"""Whose turn it is where one piece of work runs at a time: that of the group which has used the least. Knows no templates.

A group is an adapter. Its work waits behind its own, and behind one piece of each other group at most: the next turn has what would
end first on a clock of used processor time, if it took as long as the group's last piece did; a group that comes begins where
the one at work began (fair queueing). Groups whose work is slow have few places, and those whose work ran out of time again and
again have none for a while.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

SLOW_SECONDS = 0.1
"""Of processor time, from which on work is slow: hundreds of times what a template takes that only writes messages."""
SLOW_PLACES = 2
"""Pieces of work that a group may have here whose last one was slow."""
MAX_WAITING = 1024
"""Of all groups."""
MAX_STRIKES = 3
COLD_SECONDS = 60.0
MAX_GROUPS = 4096
"""Beyond so many, idle ones are forgotten."""

Work = Callable[[], str | None]


class TemplatesBusy(Exception):
    """A text is not rendered now; the message says why. ``retry_after`` in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(slots=True)
class Turn:
    """A piece of work and where its result is awaited."""

    group: str
    work: Work
    future: Future[str | None] = field(default_factory=Future)


@dataclass(slots=True)
class _Group:
    waiting: deque[Turn] = field(default_factory=deque)
    places: int = 0  # of what waits or is under way
    starts: float = 0.0  # its next piece, on the clock of used time
    last: float = 0.0  # seconds that its last piece used
    strikes: int = 0  # pieces in a row that ran out of time
    cold_until: float = 0.0


class TemplateQueue:
    """Safe to use from several threads."""

    def __init__(self, max_places: int, *, is_forgiving: bool, now: Callable[[], float] = time.monotonic) -> None:
        """``max_places``: of one group. ``is_forgiving``: whatever runs out of time, no group is left out."""
        self._max_places = max_places
        self._is_forgiving = is_forgiving
        self._now = now
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._clock = 0.0
        self._num_waiting = 0

    def put(self, turn: Turn, *, is_bounded: bool = True) -> None:
        """Let it wait for its turn. Raises `TemplatesBusy` if there is no place; one that is not ``is_bounded`` always has one."""
        with self._lock:
            group = self._groups.setdefault(turn.group, _Group(starts=self._clock))
            if is_bounded:
                self._check_place(group)
            if not group.waiting:
                group.starts = max(group.starts, self._clock)
            group.waiting.append(turn)
            group.places += 1
            self._num_waiting += 1
        turn.future.add_done_callback(lambda _: self._leave(turn.group))  # also of work that nobody waits for any more

    def take(self) -> Turn:
        """The next one's turn; there is one."""
        with self._lock:
            group = min((each for each in self._groups.values() if each.waiting), key=lambda each: each.starts + each.last)
            self._clock = max(self._clock, group.starts)
            self._num_waiting -= 1
            return group.waiting.popleft()

    def check_cold(self, name: str) -> None:
        """Raises `TemplatesBusy` for a group that is left out for now."""
        with self._lock:
            if (group := self._groups.get(name)) is not None:
                self._check_cold(group)

    def note(self, name: str, seconds: float, *, ran_out: bool) -> None:
        """What a piece of a group's work used, which has ended."""
        with self._lock:
            group = self._groups.setdefault(name, _Group(starts=self._clock))
            group.starts += seconds
            group.last = seconds
            group.strikes = group.strikes + 1 if ran_out else 0
            if group.strikes >= MAX_STRIKES and not self._is_forgiving:
                group.cold_until = self._now() + COLD_SECONDS

    def _check_place(self, group: _Group) -> None:
        self._check_cold(group)
        places = self._max_places if self._is_forgiving or group.last < SLOW_SECONDS else SLOW_PLACES
        if group.places >= places or self._num_waiting >= MAX_WAITING:
            raise TemplatesBusy("Too many chats wait for their prompts to be written.", 2)

    def _check_cold(self, group: _Group) -> None:
        if (left := group.cold_until - self._now()) > 0:
            message = f"The model's chat template ran out of time {group.strikes} times in a row, and is not run for a while."
            raise TemplatesBusy(message, int(left) + 1)

    def _leave(self, name: str) -> None:
        with self._lock:
            group = self._groups[name]
            group.places -= 1
            is_plain = not group.strikes and group.last < SLOW_SECONDS and group.starts <= self._clock
            if is_plain and not group.places and not group.waiting:  # what was cancelled has left its place and still waits
                del self._groups[name]
            if len(self._groups) > MAX_GROUPS:
                kept = self._groups.items()
                self._groups = {name: each for name, each in kept if each.places or each.waiting or each.cold_until > self._now()}
