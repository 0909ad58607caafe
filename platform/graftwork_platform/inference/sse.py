"""Answers that take long: noticing that the client has gone, and event streams that tell their end truthfully. Knows no models."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from graftwork_platform.errors import PlatformError, error_response

T = TypeVar("T")

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_LINE_BREAKS = tuple((code.encode(), f"\\u{ord(code):04x}".encode()) for code in "\u0085\u2028\u2029")

PATIENCE_S = 30.0
"""How long a client may read nothing of what waits for it before it is taken to have gone."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def in_one_line(payload: msgspec.Struct | dict[str, dict[str, str | None]] | str) -> bytes:
    """JSON without anything that a reader of lines may take for the end of one.

    Event streams end lines at CR and LF alone, which JSON escapes by itself; many clients, httpx's ``iter_lines`` among them, end
    them at Unicode's other line breaks too, and would cut a text in two. Those below U+0020 JSON escapes as well.
    """
    encoded = _encoder.encode(payload)
    if encoded.isascii():
        return encoded
    for character, escape in _LINE_BREAKS:
        encoded = encoded.replace(character, escape)
    return encoded


def event(payload: msgspec.Struct | dict[str, dict[str, str | None]]) -> bytes:
    """One frame."""
    return b"data: " + in_one_line(payload) + b"\n\n"


async def until_disconnect(
    receive: Receive, work: Coroutine[None, None, T], stalled: Coroutine[None, None, None] | None = None
) -> T:
    """The result of ``work``, which is cancelled (and waited for) as soon as the client goes; then raises `ClientGone`.

    The client has gone if it disconnects, or if ``stalled`` returns. The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = [asyncio.ensure_future(sign) for sign in (_disconnected(receive), stalled) if sign is not None]
    try:
        await asyncio.wait((task, *gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for sign in gone:
            sign.cancel()
        if not task.done():
            task.cancel()
            # Waiting is what makes the clean-up happen before the connection's own; its outcome has nobody to hear of it.
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator of frames, which is closed in every case.

    Headers wait for the first frame, so a failure before it is an ordinary error answer. A later one becomes an error event, and
    the stream ends with ``[DONE]`` all the same: clients read both. After each ``keep_alive`` seconds of silence a comment is sent,
    with the headers if it is the first thing, so that nobody on the way takes the stream for dead. A client that reads nothing for
    ``patience`` seconds, or that a part still waits for after ``time_left``, has gone as if it had disconnected.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        keep_alive: float,
        time_left: float = math.inf,
        patience: float = PATIENCE_S,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._keep_alive = keep_alive
        self._time_left = time_left
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; returns early, with everything freed, when the client has gone."""
        try:
            body = _Body(send, self.status_code, self.raw_headers)
            stalled = body.stalled(self._patience, self._time_left)
            await until_disconnect(receive, self._send(scope, receive, send, body), stalled)
        except ClientGone:
            _log.info("the client left, or stopped reading, before the end of its stream")

    async def _send(self, scope: Scope, receive: Receive, send: Send, body: _Body) -> None:
        failure: PlatformError | None = None
        beat = asyncio.create_task(body.keep_alive(self._keep_alive), name="keep a stream alive")
        try:
            async with aclosing(self._frames) as frames:
                write = body.write
                async for frame in frames:
                    await write(frame)
        except PlatformError as error:
            failure = error
        except Exception:
            if not body.has_begun:
                raise
            # HTTP's boundary: the status is sent, and this is the one way left to tell the client.
            _log.exception("unexpected error in a stream")
            failure = PlatformError("The server had an error while processing your request.", status=500)
        finally:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
        if failure is not None and not body.has_begun:
            await error_response(failure)(scope, receive, send)
            return
        await body.write(event(failure.to_body()) + DONE if failure else b"", more=False)


class _Body:
    """A body that begins when there is something to send."""

    def __init__(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._now = asyncio.get_running_loop().time
        self._start: Message = {"type": "http.response.start", "status": status, "headers": headers}
        self._turn = asyncio.Lock()
        self._last_sent = self._now()
        self._sending_since: float | None = None
        self.has_begun = False

    async def write(self, part: bytes, *, more: bool = True) -> None:
        """Send the next part."""
        if self._turn.locked():
            async with self._turn:  # a comment is on its way
                pass
        await self._write(part, more)

    async def _write(self, part: bytes, more: bool) -> None:
        self._sending_since = self._now()
        if not self.has_begun:
            self.has_begun = True
            await self._send(self._start)
        await self._send({"type": "http.response.body", "body": part, "more_body": more})
        self._sending_since = None
        self._last_sent = self._now()

    async def stalled(self, patience: float, time_left: float) -> None:
        """Returns when a part has waited for its reader ``patience`` seconds, or waits when ``time_left`` has passed.

        It looks now and then, since a timer for each part would cost one for each token; it may be late by ``patience / 4``.
        """
        deadline = self._now() + time_left
        while True:
            now, since = self._now(), self._sending_since
            if since is not None and (now >= since + patience or now >= deadline):
                return
            pause = patience / 4
            await asyncio.sleep(min(pause, deadline - now) if now < deadline else pause)

    async def keep_alive(self, interval: float) -> None:
        """Send a comment, which clients pass over, after each ``interval`` of silence; runs until cancelled."""
        while True:
            rest = self._last_sent + interval - self._now()
            if rest > 0:
                await asyncio.sleep(rest)
            elif self._sending_since is not None:
                await asyncio.sleep(interval)  # a part waits for its reader: there is no silence to break
            else:
                async with self._turn:
                    await self._write(KEEP_ALIVE, more=True)
