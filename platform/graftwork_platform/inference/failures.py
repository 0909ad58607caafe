"""Why a generation failed, in the client's terms: the one place where the engine's errors become HTTP."""

from __future__ import annotations

from graftwork_adapters.errors import AdapterError, AdapterTooLarge, BlobCorrupt, StoreUnavailable
from graftwork_engine.errors import EngineUnavailable, ErrorCode, GraftworkEngineError, RequestFailed, RequestRejected
from graftwork_platform.errors import BadRequest, PlatformError, ServiceUnavailable

GenerationFailure = GraftworkEngineError | AdapterError | TimeoutError
"""What running an admitted request can end with."""

_ADAPTER_CODES = {
    ErrorCode.ADAPTER_MISSING,
    ErrorCode.ADAPTER_CORRUPT,
    ErrorCode.ADAPTER_TOO_LARGE,
    ErrorCode.STORE_UNAVAILABLE,
}
_NEVER_RETRY = {"x-should-retry": "false"}
_ADAPTER_RETRY_AFTER = 5  # seconds; somebody has to repair or upload something
_ENGINE_RETRY_AFTER = 2  # seconds; an engine starts again by itself


def as_platform_error(failure: GenerationFailure, model: str) -> PlatformError:
    """The answer to a request for ``model`` that ended with ``failure``."""
    if isinstance(failure, RequestRejected):
        return BadRequest(str(failure), code=str(failure.code))
    if isinstance(failure, EngineUnavailable):
        return ServiceUnavailable(
            f"The model is not available at the moment: {failure}", code="engine_unavailable", retry_after=_ENGINE_RETRY_AFTER
        )
    if isinstance(failure, AdapterError):
        return _adapter_unavailable(model, str(failure), _code_of(failure))
    if isinstance(failure, TimeoutError):
        return _timed_out("")
    if isinstance(failure, RequestFailed):
        return _failed(failure, model)
    return PlatformError("The server had an error while processing your request.", status=500, code=ErrorCode.INTERNAL)


def _failed(failure: RequestFailed, model: str) -> PlatformError:
    if failure.code in _ADAPTER_CODES:
        return _adapter_unavailable(model, str(failure), failure.code)
    if failure.code == ErrorCode.TIMEOUT:
        return _timed_out(str(failure))
    if failure.code == ErrorCode.NOTHING_TO_DRAW:
        return BadRequest(str(failure), param="logit_bias", code=failure.code)
    if failure.code == ErrorCode.NON_FINITE:
        message = f"The model `{model}` cannot answer this request: {failure}"
        return PlatformError(message, status=500, code=failure.code, headers=_NEVER_RETRY)
    if failure.code == ErrorCode.POISONED:
        return PlatformError(f"The request could not be completed: {failure}", status=500, code=failure.code, headers=_NEVER_RETRY)
    return PlatformError("The server had an error while processing your request.", status=500, code=failure.code)


def _adapter_unavailable(model: str, reason: str, code: str) -> PlatformError:
    return ServiceUnavailable(
        f"The model `{model}` cannot be served at the moment: {reason}", code=code, retry_after=_ADAPTER_RETRY_AFTER
    )


def _code_of(failure: AdapterError) -> ErrorCode:
    match failure:
        case StoreUnavailable():
            return ErrorCode.STORE_UNAVAILABLE
        case BlobCorrupt():
            return ErrorCode.ADAPTER_CORRUPT
        case AdapterTooLarge():
            return ErrorCode.ADAPTER_TOO_LARGE
        case _:
            return ErrorCode.ADAPTER_MISSING


def _timed_out(reason: str) -> PlatformError:
    # The same request would take as long again: clients retry 504 unless told otherwise.
    message = "The request took longer than the server allows." + (f" {reason}" if reason else "")
    return PlatformError(message, status=504, code=ErrorCode.TIMEOUT, headers=_NEVER_RETRY)
