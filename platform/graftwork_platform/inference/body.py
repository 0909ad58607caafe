"""Reading a request's body with a limit, and parsing it out of other clients' way. Knows nothing of what is in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from graftwork_platform.errors import PayloadTooLarge

T = TypeVar("T")

_LARGE_BODY = 128 << 10
"""Bytes from which on parsing, which may look at each of a million entries, is left to a thread."""


async def parse_body(parse: Callable[[bytes], T], body: bytes) -> T:
    """``parse(body)``; other clients' streams go on meanwhile, however large the body."""
    return parse(body) if len(body) < _LARGE_BODY else await asyncio.to_thread(parse, body)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most ``limit`` bytes; raises `PayloadTooLarge`, as early as the client's own word allows."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body of the request is larger than {limit} bytes.")
