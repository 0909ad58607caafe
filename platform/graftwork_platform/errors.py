"""The platform's errors, and the one place where they become HTTP. Knows no routes.

PlatformError
├── BadRequest          400  a field is wrong; ``param`` names it
├── Unauthorized        401  no key, or none that is valid
├── Forbidden           403  a valid key that may not do this
├── NotFound            404
│   └── ModelNotFound        one text for unknown, foreign and deleted models
├── Conflict            409  clients must not retry it
├── PayloadTooLarge     413
├── RateLimited         429  with Retry-After
└── ServiceUnavailable  503  with Retry-After
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

_log = logging.getLogger(__name__)

ErrorBody = dict[str, dict[str, str | None]]
"""``{"error": {"message", "type", "param", "code"}}``, the shape every OpenAI client reads."""

_TYPES = {401: "authentication_error", 403: "permission_error", 409: "conflict_error", 429: "rate_limit_error"}


class PlatformError(Exception):
    """Root of the tree: an answer to the client that is not a success. ``message`` is read by the customer."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str | None = None,  # noqa: A002 — the wire's own word
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type or _error_type(status)
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def to_body(self) -> ErrorBody:
        """The JSON body of the answer; also the payload of an error event in a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(PlatformError):
    """A field of the request is wrong."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status=400, param=param, code=code)


class Unauthorized(PlatformError):
    """No key was sent, or none that is valid; which of the two is not told apart by ``code``."""

    def __init__(self, message: str = "Incorrect API key provided.", *, code: str = "invalid_api_key") -> None:
        super().__init__(message, status=401, code=code, headers={"www-authenticate": "Bearer"})


class Forbidden(PlatformError):
    """A valid key that may not do this."""

    def __init__(self, message: str, *, code: str = "scope_missing") -> None:
        super().__init__(message, status=403, code=code)


class NotFound(PlatformError):
    """No such thing, or not this caller's; the two are answered alike."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status=404, param=param, code=code)


class ModelNotFound(NotFound):
    """Unknown, foreign and deleted models: one text, so that nobody learns of another tenant's names."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model `{model}` does not exist or you do not have access to it.", param="model", code="model_not_found"
        )


class Conflict(PlatformError):
    """The request contradicts what is there. Clients retry 409 unless told otherwise, which would never help."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status=409, param=param, code=code, headers={"x-should-retry": "false"})


class PayloadTooLarge(PlatformError):
    """More bytes than the server takes."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, status=413, param=param, code="payload_too_large")


class RateLimited(PlatformError):
    """Too many requests or tokens; ``retry_after`` in seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message, status=429, code="rate_limit_exceeded", headers={"retry-after": str(retry_after)})


class ServiceUnavailable(PlatformError):
    """Something this request needs does not answer at the moment; ``retry_after`` in seconds."""

    def __init__(self, message: str, *, code: str | None = None, retry_after: int = 1) -> None:
        super().__init__(message, status=503, code=code, headers={"retry-after": str(retry_after)})


def install_error_handlers(app: FastAPI) -> None:
    """Make every answer of ``app`` that is not a success, whatever its origin, one in OpenAI's shape."""

    async def platform_error(_request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, PlatformError):
            raise error
        return error_response(error)

    async def validation_error(_request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, RequestValidationError):
            raise error
        return error_response(_from_validation(error.errors()))

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            raise error
        return error_response(_from_http(request, error))

    async def unexpected(request: Request, _error: Exception) -> JSONResponse:
        # Starlette raises the exception again after this answer, and the server then logs its traceback.
        _log.error("unexpected error in %s %s", request.method, request.url.path)
        return error_response(PlatformError("The server had an error while processing your request.", status=500))

    app.add_exception_handler(PlatformError, platform_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)


def error_response(error: PlatformError) -> JSONResponse:
    """The answer that ``error`` stands for."""
    return JSONResponse(error.to_body(), status_code=error.status, headers=error.headers)


def _error_type(status: int) -> str:
    return "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")


def _from_validation(errors: Sequence[Mapping[str, object]]) -> PlatformError:
    first = errors[0] if errors else {}
    location = first.get("loc")
    parts = [str(part) for part in location] if isinstance(location, (tuple, list)) else []
    if first.get("type") == "json_invalid":
        return BadRequest("The body of the request is not valid JSON.")
    param = ".".join(parts[1:]) or None  # the first part says body, query or path
    message = str(first.get("msg", "The request is malformed."))
    return BadRequest(f"{param}: {message}" if param else message, param=param)


def _from_http(request: Request, error: HTTPException) -> PlatformError:
    texts = {
        404: f"Unknown request URL: {request.method} {request.url.path}. Please check the URL for typos.",
        405: f"Not allowed to {request.method} on {request.url.path}.",
    }
    message = texts.get(error.status_code, str(error.detail))
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return PlatformError(message, status=error.status_code, code=code, headers=error.headers)
