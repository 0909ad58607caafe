"""Answers that take long: noticing that the client has gone, and event streams that tell their end truthfully. Knows no models."""

from __future__ import annotations

import asyncio
import logging
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

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def event(payload: msgspec.Struct | dict[str, dict[str, str | None]]) -> bytes:
    """One frame."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of ``work``, which is cancelled (and waited for) as soon as the client goes; then raises `ClientGone`.

    The request's body must have been read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
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
    with the headers if it is the first thing, so that nobody on the way takes the stream for dead.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], *, keep_alive: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; returns early, with everything freed, when the client has gone."""
        try:
            await until_disconnect(receive, self._send(scope, receive, send))
        except ClientGone:
            _log.info("the client left before the end of its stream")

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(send, self.status_code, self.raw_headers)
        failure: PlatformError | None = None
        beat = asyncio.create_task(body.keep_alive(self._keep_alive), name="keep a stream alive")
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await body.write(frame)
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
        self._start: Message = {"type": "http.response.start", "status": status, "headers": headers}
        self._turn = asyncio.Lock()
        self._last_sent = asyncio.get_running_loop().time()
        self.has_begun = False

    async def write(self, part: bytes, *, more: bool = True) -> None:
        """Send the next part."""
        async with self._turn:
            if not self.has_begun:
                self.has_begun = True
                await self._send(self._start)
            await self._send({"type": "http.response.body", "body": part, "more_body": more})
            self._last_sent = asyncio.get_running_loop().time()

    async def keep_alive(self, interval: float) -> None:
        """Send a comment, which clients pass over, after each ``interval`` of silence; runs until cancelled."""
        while True:
            rest = self._last_sent + interval - asyncio.get_running_loop().time()
            if rest > 0:
                await asyncio.sleep(rest)
            else:
                await self.write(KEEP_ALIVE)
