"""A process of its own for chat templates, ended and started again when one of them takes too much. Knows no templates."""

from __future__ import annotations

import asyncio
import datetime
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from graftwork_platform.text.template_worker import Compile, Render, Reply, receive_frame, send_frame

_WORKER = "graftwork_platform.text.template_worker"
MAX_RENDERS = 64
_STUCK_S = 30.0
"""Processor time is what counts; a worker that does not even get that in so long is given up."""


class TemplateFailure(Exception):
    """A template did not give a text: what it said itself, or which limit it met."""


class TemplatesBusy(Exception):
    """Too many texts wait to be rendered."""


class TemplateSandbox:
    """Renders in another process, one text at a time, so that nothing a template does holds up this one.

    The process starts with the first piece of work, and again with the first one after `close` or after an end of its own.
    """

    def __init__(self, *, cpu_seconds: float = 2.0, max_renders: int = MAX_RENDERS) -> None:
        """``cpu_seconds``: processor time that one text may take; ``max_renders``: texts that may wait or be under way."""
        self._cpu_seconds = cpu_seconds
        self._room = threading.Semaphore(max_renders)
        self._sources: list[str] = []
        self._compiled: set[int] = set()  # in the process of the moment
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self._decoder = msgspec.msgpack.Decoder(Reply)

    def compile(self, source: str) -> int:
        """Take in a template; its number for `render`. Raises `TemplateFailure` if it is none. Blocks."""
        self._sources.append(source)
        number = len(self._sources) - 1
        self._thread.submit(self._compile, number).result()
        return number

    async def render(self, number: int, variables: Mapping[str, object], now: datetime.datetime) -> str:
        """The text that a template makes of ``variables``, which are plain values. Raises `TemplateFailure`, or `TemplatesBusy`."""
        if not self._room.acquire(blocking=False):
            raise TemplatesBusy
        work = Render(number, dict(variables), now.isoformat(), self._cpu_seconds)
        rendering = self._thread.submit(self._render, work)
        rendering.add_done_callback(lambda _: self._room.release())  # also of work that nobody waits for any more
        return await asyncio.wrap_future(rendering)

    def close(self) -> None:
        """End the process. Blocks until work that is under way has ended."""
        self._thread.submit(self._end).result()

    # In the thread

    def _compile(self, number: int) -> None:
        if number not in self._compiled:
            self._ask(Compile(number, self._sources[number], self._cpu_seconds))
            self._compiled.add(number)

    def _render(self, work: Render) -> str:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # killed by somebody between two texts: no fault of the next one's
        self._compile(work.number)
        return self._ask(work)

    def _ask(self, work: Compile | Render) -> str:
        try:
            connection = self._connected()
            send_frame(connection, work)
            reply = self._decoder.decode(receive_frame(connection))
        except UnicodeEncodeError as error:
            raise TemplateFailure(f"it was given what is no text: {error}") from error
        except TimeoutError as error:
            self._end()
            raise TemplateFailure("it did not end") from error
        except (EOFError, OSError) as error:
            raise TemplateFailure(self._why(self._end())) from error
        if reply.error is not None:
            raise TemplateFailure(reply.error)
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
