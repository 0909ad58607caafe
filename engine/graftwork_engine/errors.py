"""The engine's errors.

GraftworkEngineError
├── UnsupportedModel      the base cannot be served; raised at start, names the field
├── ConfigError           settings that contradict each other or the machine
├── RequestRejected       a request that can never run (too long, malformed)
├── RequestFailed         a request that was running and ended with an ErrorCode
└── EngineUnavailable     no engine answers at the moment
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request failed, as sent to the client in `messages.EngineError.code`."""

    CONTEXT_LENGTH = "context_length_exceeded"  # prompt and output can never fit
    BAD_REQUEST = "invalid_request"
    ADAPTER_MISSING = "adapter_missing"  # the packed form is not in the store
    ADAPTER_CORRUPT = "adapter_corrupt"  # it is there, but its bytes are not what its key says
    ADAPTER_TOO_LARGE = "adapter_too_large"  # larger than adapter memory can ever be, or of too high a rank
    STORE_UNAVAILABLE = "store_unavailable"
    NON_FINITE = "non_finite_output"  # the model gave NaN or infinity; the adapter's values may be too large
    NOTHING_TO_DRAW = "nothing_to_draw"  # the request's own bias, penalties and bans leave no token with a finite logit
    TIMEOUT = "timeout"  # the request's deadline passed
    POISONED = "poisoned"  # it was running in two crashes of the engine
    INTERNAL = "internal_error"


class GraftworkEngineError(Exception):
    """Root of the tree."""


class UnsupportedModel(GraftworkEngineError):
    """The base model has a feature that this engine does not serve; the message names it."""


class ConfigError(GraftworkEngineError):
    """Engine settings that contradict each other or the machine."""


class RequestRejected(GraftworkEngineError):
    """A request that can never run. ``code`` says which kind."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class RequestFailed(GraftworkEngineError):
    """A request that had been accepted and ended with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineUnavailable(GraftworkEngineError):
    """No engine answers; it is starting or being restarted."""
