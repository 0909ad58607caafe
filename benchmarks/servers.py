"""Servers that a benchmark starts and ends: processes in sessions of their own, with a log that is shown when they fail.

Refuses to know what they serve: see `graftwork_server` and `peers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import httpx2

from load import Felt, Load, Target, run
from results import BenchmarkFailed

START_LIMIT_S = 900.0
STOP_LIMIT_S = 20.0
LAST_LINES = 15
TICKS = os.sysconf("SC_CLK_TCK")


class Contender(Protocol):
    """Whoever can be given a load. A model is named as in the load: ``base``, or an adapter."""

    @property
    def name(self) -> str:
        """For tables."""
        ...

    def measure(self, load: Load, on_done: Callable[[], None]) -> Felt:
        """Run a load to its end, calling ``on_done`` after each request."""
        ...

    def cpu_seconds(self) -> float:
        """Processor time that it has used so far."""
        ...


@dataclass(frozen=True)
class HttpContender:
    """A server that is asked through HTTP."""

    name: str
    target: Target
    session: int

    def measure(self, load: Load, on_done: Callable[[], None]) -> Felt:
        """See `Contender`."""
        return asyncio.run(run(self.target, load, on_done))

    def cpu_seconds(self) -> float:
        """Of all processes of the server."""
        return sum(_cpu_ticks(fields) for _, fields in _of_session(self.session)) / TICKS


@contextlib.contextmanager
def process(
    name: str, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None, *, pipe: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run a server in a session of its own; at the end the whole session is ended.

    Its output goes to ``log``; with ``pipe`` only its errors do, and its output is the caller's.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors:
        try:
            child = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else errors,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise BenchmarkFailed(f"{name} cannot be started: {error}; check its folder") from error
        try:
            yield child
        finally:
            end_session(child)


def end_session(child: subprocess.Popen[str]) -> None:
    """Ask the first process to end, then end whoever of its session is left: servers put their children in groups of their own."""
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_LIMIT_S)
    finally:  # who is interrupted a second time waits no longer, and still leaves nobody behind
        _kill_session(child)


def _kill_session(child: subprocess.Popen[str]) -> None:
    give_up = time.monotonic() + STOP_LIMIT_S
    while (left := [number for number, fields in _of_session(child.pid) if fields[0] != "Z"]) and time.monotonic() < give_up:
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)
    child.kill()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def wait_until_up(name: str, child: subprocess.Popen[str], url: str, log: Path, path: str = "/health") -> None:
    """Return when GET ``path`` is answered with success; raises `BenchmarkFailed` with the log's last lines if it never is."""
    give_up = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up:
        if child.poll() is not None:
            raise failed_to_start(name, log, f"ended with {child.returncode}")
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(url + path, timeout=5).is_success:
                return
        time.sleep(0.5)
    raise failed_to_start(name, log, f"gave no answer at {url}{path} in {START_LIMIT_S:.0f} s")


def failed_to_start(name: str, log: Path, what: str) -> BenchmarkFailed:
    """An error that shows the end of the log and says where the rest is."""
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
    return BenchmarkFailed(f"{name} {what}. The end of its log, {log}:\n  " + "\n  ".join(lines))


def read_line(stream: IO[str] | None) -> str:
    """The next line of a server that was started with ``pipe``."""
    return "" if stream is None else stream.readline()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _of_session(session: int) -> Iterator[tuple[int, list[str]]]:
    """Id and statistics (see proc(5), from ``state`` on) of each living process of a session; none where there is no /proc."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                yield int(stat.parent.name), fields


def _cpu_ticks(fields: list[str]) -> int:
    """Of a process and of its children that have ended, in user and system mode."""
    return sum(int(ticks) for ticks in fields[11:15])
