"""The process in which chat templates run: it may use so much processor time and memory and no more. Knows no requests.

A template is code that came with a model, and what it costs cannot be told from its text: a loop of 10^9 turns, ``'x' * 10**10``,
a macro that calls itself twice, ``|center(10**9)``. So nothing is forbidden to it one by one; it runs where the kernel can end it.
Before each piece of work a timer of the process's own processor time is set, whose signal ends the process in the middle of
whatever it does; memory is limited for good. The parent reads the end of the connection as the work's failure, and the next piece
of work finds a fresh process. When the parent dies the connection ends, and so does this.
"""

from __future__ import annotations

import datetime
import os
import resource
import signal
import socket
import time

import jinja2
import msgspec

from graftwork_platform.text.template_environment import TemplateRefusal, template_environment

MEMORY_BYTES = 256 << 20
"""What a process may take beside what it has when it starts."""
MAX_TEXT_CHARS = 16 << 20
MAX_ERROR_CHARS = 500

_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
_LENGTH_BYTES = 8


class Compile(msgspec.Struct, tag="compile"):
    """Keep a template under a number."""

    number: int
    source: str
    seconds: float


class Render(msgspec.Struct, tag="render"):
    """Render template ``number``; ``now`` is what it may know of the time, ISO 8601."""

    number: int
    variables: dict[str, object]
    now: str
    seconds: float


class Forget(msgspec.Struct, tag="forget"):
    """Template ``number`` is not rendered any more."""

    number: int


class Reply(msgspec.Struct):
    """The text, or why there is none, in the template's or jinja's words. ``refused``: the template itself did not want to.

    ``seconds``: processor time that it took.
    """

    text: str = ""
    error: str | None = None
    refused: bool = False
    seconds: float = 0.0


Work = Compile | Render | Forget


def send_frame(connection: socket.socket, message: Work | Reply) -> None:
    """One message, behind its length."""
    frame = msgspec.msgpack.encode(message)
    connection.sendall(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)


def receive_frame(connection: socket.socket) -> bytes:
    """One message's bytes; raises `EOFError` if the other end has gone."""
    return _receive(connection, int.from_bytes(_receive(connection, _LENGTH_BYTES), "little"))


def _receive(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = connection.recv(min(size - len(received), 1 << 20))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


class _NoText(Exception):
    """What a template wrote cannot be a prompt."""


def _text_of(error: Exception) -> str:
    words = error.message if isinstance(error, jinja2.TemplateError) else str(error)
    # What is no text, such as half a surrogate pair, cannot be sent.
    return (words or type(error).__name__)[:MAX_ERROR_CHARS].encode(errors="replace").decode()


class _Worker:
    def __init__(self) -> None:
        self._now = datetime.datetime.now()
        self._environment = template_environment(lambda: self._now)
        self._templates: dict[int, jinja2.Template] = {}

    def work(self, work: Work) -> Reply:
        if isinstance(work, Forget):
            self._templates.pop(work.number, None)
            return Reply()
        try:
            if isinstance(work, Compile):
                self._templates[work.number] = self._environment.from_string(work.source)
                return Reply()
            self._now = datetime.datetime.fromisoformat(work.now)
            return Reply(self._render(self._templates[work.number], work.variables))
        except TemplateRefusal as error:
            return Reply(error=_text_of(error), refused=True)
        except jinja2.TemplateSyntaxError as error:
            return Reply(error=f"line {error.lineno}: {_text_of(error)}"[:MAX_ERROR_CHARS])
        except MemoryError:
            return Reply(error="it needs more memory than a template may have")
        except _NoText as error:
            return Reply(error=str(error))
        except _TEMPLATE_FAILURES as error:
            return Reply(error=_text_of(error))

    def _render(self, template: jinja2.Template, variables: dict[str, object]) -> str:
        parts: list[str] = []
        size = 0
        for part in template.generate(variables):
            size += len(part)
            if size > MAX_TEXT_CHARS:
                raise _NoText(f"its text is longer than {MAX_TEXT_CHARS} characters")
            parts.append(part)
        text = "".join(parts)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _NoText("its text holds half a surrogate pair, which is no text") from None
        return text


def main() -> None:
    """Work for the parent at the other end of standard input until it goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal that the parent shares: it decides
    connection = socket.socket(fileno=0)
    decoder = msgspec.msgpack.Decoder(Work)
    worker = _Worker()
    _limit_memory()
    while True:
        try:
            work = decoder.decode(receive_frame(connection))
        except (EOFError, ConnectionError):
            return
        signal.setitimer(signal.ITIMER_PROF, 0 if isinstance(work, Forget) else work.seconds)
        started = time.process_time()
        reply = worker.work(work)
        reply.seconds = time.process_time() - started
        signal.setitimer(signal.ITIMER_PROF, 0)
        send_frame(connection, reply)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
