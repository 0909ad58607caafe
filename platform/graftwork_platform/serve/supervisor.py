"""Starts the engine and the API process, restarts whichever dies, and stops both. Knows nothing of what they do.

    supervisor ─┬─ engine process   (crash: a new one after a pause; the API process resumes its streams)
                └─ API process      (crash: a new one on the same listening socket)

Children are killed by the kernel when the supervisor ends (`graftwork_engine.lifeline`).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

EXIT_CONFIG = 78
"""A child ends with this code when starting it again cannot help."""

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 15.0
STEADY_S = 60.0
"""A child that has lived this long is forgiven its earlier crashes."""

POLL_S = 0.05


class ChildFailed(Exception):
    """A child that starting again cannot help."""


@dataclass(slots=True)
class Child:
    """One supervised process. ``stdin`` is its standard input at each start; it is killed ``stop_within`` seconds after SIGTERM."""

    name: str
    module: str
    arguments: Sequence[str]
    stdin: bytes
    stop_within: float
    pass_fds: Sequence[int] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # beside the supervisor's own
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    crashes: int = 0
    start_at: float | None = field(default=0.0)  # when to start it next; None while it runs

    def start(self, now: float) -> None:
        """Start the process, in its own group so that a Ctrl-C in the terminal reaches the supervisor alone."""
        command = [sys.executable, "-m", self.module, *self.arguments, "--parent", str(os.getpid())]
        environment = {**os.environ, **self.environment}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=self.pass_fds, env=environment, process_group=0)
        if self.process.stdin is None:
            raise AssertionError("no pipe to the child")
        try:
            self.process.stdin.write(self.stdin)
            self.process.stdin.close()
        except BrokenPipeError:
            logger.error("%s ended before it read its configuration", self.name)
        self.started_at, self.start_at = now, None

    def look_after(self, now: float) -> None:
        """Start the process if it is due, and note its death; raises `ChildFailed` if it says that it cannot be helped."""
        if self.start_at is not None:
            if now >= self.start_at:
                self.start(now)
            return
        if self.process is None or (code := self.process.poll()) is None:
            return
        if code == EXIT_CONFIG:
            raise ChildFailed(f"the {self.name} cannot run with this configuration; its message is above")
        self.crashes = 1 if now - self.started_at > STEADY_S else self.crashes + 1
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self.crashes - 1))
        ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        logger.error("the %s ended (%s); starting it again in %.1f s", self.name, ending, pause)
        self.process, self.start_at = None, now + pause

    def stop(self) -> None:
        """SIGTERM, patience, SIGKILL."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(self.stop_within)
        except subprocess.TimeoutExpired:
            logger.warning("the %s did not stop within %.0f s and is killed", self.name, self.stop_within)
            self.process.kill()
            self.process.wait()


class Supervisor:
    """Runs children until it is told to stop. ``children`` are started in order and stopped in reverse."""

    def __init__(self, children: Sequence[Child], clock: Callable[[], float] = time.monotonic) -> None:
        self._children, self._clock = list(children), clock
        self._stopping = False  # no Event: a signal handler that sets one waits for ever if it interrupts the Event's own code

    def request_stop(self) -> None:
        """Ask `run` to end; may be called from a signal handler or another thread."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """True once a stop was asked for."""
        return self._stopping

    def run(self) -> None:
        """Look after the children until `request_stop`; raises `ChildFailed`. The children have ended when it returns or raises."""
        try:
            while not self._stopping:
                for child in self._children:
                    child.look_after(self._clock())
                time.sleep(POLL_S)
        finally:
            self._stopping = True
            for child in reversed(self._children):
                child.stop()
