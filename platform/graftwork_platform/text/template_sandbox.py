"""A process of its own for chat templates, ended and started again when one of them takes too much. Knows no templates."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from graftwork_platform.text.template_queue import TemplateQueue, TemplatesBusy, Turn
from graftwork_platform.text.template_worker import Compile, Forget, Render, Reply, Work, receive_frame, send_frame

_WORKER = "graftwork_platform.text.template_worker"
MAX_RENDERS = 64
_STUCK_S = 30.0
"""Processor time is what counts; a worker that does not even get that in so long is given up."""


class TemplateFailure(Exception):
    """A template did not give a text: what it said itself, or which limit it met.

    ``is_refusal``: it is a template that works, and did not want what it was given. ``ran_out``: it used up the time it had.
    """

    def __init__(self, message: str, *, is_refusal: bool = False, ran_out: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal
        self.ran_out = ran_out


class TemplateSandbox:
    """Renders in another process, one text at a time, so that nothing a template does holds up this one.

    The process starts with the first piece of work, and again with the first one after `close` or after an end of its own.
    """

    def __init__(self, *, cpu_seconds: float = 2.0, max_renders: int = MAX_RENDERS, is_forgiving: bool = True) -> None:
        """``cpu_seconds``: processor time that one text may take; ``max_renders``: texts of one group that may wait.

        ``is_forgiving``: templates that are slow, or run out of time again and again, keep their places; where everyone uses the
        same one, it must be.
        """
        self._cpu_seconds = cpu_seconds
        self._queue = TemplateQueue(max_renders, is_forgiving=is_forgiving)
        self._used = 0.0  # seconds, by the piece of work under way
        self._sources: dict[int, str] = {}
        self._groups: dict[int, str] = {}
        self._numbers = itertools.count()
        self._forgotten: deque[int] = deque()
        self._compiled: set[int] = set()  # in the process of the moment
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self._decoder = msgspec.msgpack.Decoder(Reply)

    def compile(self, source: str, group: str = "") -> int:
        """Take in a template; its number for `render`. ``group``: whose it is. Raises `TemplateFailure` if it is none. Blocks."""
        number = next(self._numbers)
        self._sources[number], self._groups[number] = source, group
        turn = Turn(group, lambda: self._compile(number))
        self._queue.put(turn, is_bounded=False)
        self._thread.submit(self._work)
        try:
            turn.future.result()
        except (TemplateFailure, TemplatesBusy) as error:
            del self._sources[number], self._groups[number]
            if isinstance(error, TemplatesBusy):
                raise TemplateFailure(str(error)) from error
            raise
        return number

    def forget(self, number: int) -> None:
        """Let a template go that is not rendered any more. Takes no lock: the collector may call this in the middle of anything."""
        self._forgotten.append(number)

    async def render(self, number: int, variables: Mapping[str, object], now: datetime.datetime) -> str:
        """The text that a template makes of ``variables``, which are plain values. Raises `TemplateFailure`, or `TemplatesBusy`."""
        work = Render(number, dict(variables), now.isoformat(), self._cpu_seconds)
        turn = Turn(self._groups[number], lambda: self._render(work))
        self._queue.put(turn)
        self._thread.submit(self._work)
        return await asyncio.wrap_future(turn.future) or ""

    def close(self) -> None:
        """End the process. Blocks until work that is under way has ended."""
        self._thread.submit(self._end).result()

    # In the thread

    def _work(self) -> None:
        """One piece of work, whosever turn it is."""
        turn = self._queue.take()
        if not turn.future.set_running_or_notify_cancel():
            return
        self._used = 0.0
        text, failure = None, None
        try:
            self._queue.check_cold(turn.group)
            text = turn.work()
        except Exception as error:  # noqa: BLE001 — whoever waits for it is told, whatever it is
            failure = error
        if not isinstance(failure, TemplatesBusy):
            self._queue.note(turn.group, self._used, ran_out=isinstance(failure, TemplateFailure) and failure.ran_out)
        if failure is None:
            turn.future.set_result(text)
        else:
            turn.future.set_exception(failure)

    def _compile(self, number: int) -> None:
        self._forget()
        if number not in self._compiled:
            self._ask(Compile(number, self._sources[number], self._cpu_seconds))
            self._compiled.add(number)

    def _forget(self) -> None:
        while self._forgotten:
            number = self._forgotten.popleft()
            self._sources.pop(number, None)
            self._groups.pop(number, None)
            if number in self._compiled:
                self._compiled.discard(number)
                with suppress(TemplateFailure):  # a process that has ended has forgotten it
                    self._ask(Forget(number))

    def _render(self, work: Render) -> str:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # killed by somebody between two texts: no fault of the next one's
        self._compile(work.number)
        return self._ask(work)

    def _ask(self, work: Work) -> str:
        try:
            connection = self._connected()
            send_frame(connection, work)
            reply = self._decoder.decode(receive_frame(connection))
        except UnicodeEncodeError as error:
            raise TemplateFailure(f"it was given what is no text: {error}") from error
        except TimeoutError as error:
            self._end()
            self._used += _STUCK_S
            raise TemplateFailure("it did not end", ran_out=True) from error
        except (EOFError, OSError) as error:
            status = self._end()
            self._used += self._cpu_seconds
            raise TemplateFailure(self._why(status), ran_out=status == -signal.SIGPROF) from error
        self._used += reply.seconds
        if reply.error is not None:
            raise TemplateFailure(reply.error, is_refusal=reply.refused)
        return reply.text

    def _connected(self) -> socket.socket:
        if self._connection is None:
            ours, theirs = socket.socketpair()
            ours.settimeout(_STUCK_S)
            with theirs:
                self._process = subprocess.Popen([sys.executable, "-m", _WORKER], stdin=theirs.fileno())
            self._connection = ours
        return self._connection

    def _end(self) -> int | None:
        """End the process; how it had ended by itself, if it had."""
        connection, process = self._connection, self._process
        self._connection = self._process = None
        self._compiled.clear()
        if connection is not None:
            connection.close()
        if process is None:
            return None
        try:
            return process.wait(timeout=1.0)  # it ends by itself when the connection does, unless it works
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None

    def _why(self, status: int | None) -> str:
        if status == -signal.SIGPROF:
            return f"it needs more than {self._cpu_seconds:g} s of processor time"
        return f"the process it ran in ended ({status})"
