"""Reading a request's body with a limit. Knows nothing of what is in it."""

from __future__ import annotations

from starlette.requests import Request

from graftwork_platform.errors import PayloadTooLarge


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
