"""Answers that take long: noticing that the client has gone, and event streams that tell their end truthfully. Knows no models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graftwork_platform.errors import PlatformError, error_response

T = TypeVar("T")

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"


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
    the stream ends with ``[DONE]`` all the same: clients read both.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; returns early, with everything freed, when the client has gone."""
        try:
            await until_disconnect(receive, self._send(scope, receive, send))
        except ClientGone:
            _log.info("the client left before the end of its stream")

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: PlatformError | None = None
        async with aclosing(self._frames) as frames:
            try:
                first = await anext(frames)
            except PlatformError as error:
                await error_response(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            except PlatformError as error:
                failure = error
            except Exception:  # noqa: BLE001 — HTTP's boundary: the status is sent, and this is the one way left to tell the client
                _log.exception("unexpected error in a stream")
                failure = PlatformError("The server had an error while processing your request.", status=500)
            last = event(failure.to_body()) + DONE if failure else b""
            await send({"type": "http.response.body", "body": last, "more_body": False})
