"""Why an adapter could not be loaded, in the words of the engine's error codes. Knows no tensors and no HTTP."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from graftwork_adapters.errors import AdapterTooLarge, BlobCorrupt, BlobNotFound, StoreError

_log = logging.getLogger(__name__)

_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (BlobNotFound, "adapter_missing"),
    (BlobCorrupt, "adapter_corrupt"),
    (AdapterTooLarge, "adapter_too_large"),
    (StoreError, "store_unavailable"),
)


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why loading failed. ``code`` is one of the engine's error codes; ``message`` holds no paths and may reach a client."""

    code: str
    message: str


def failure_of(key: str, error: BaseException) -> LoadFailure:
    """The failure that ``error`` is to those who wait for ``key``. One outside the room's tree is a fault of ours, and logged."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return LoadFailure(code, str(error))
    _log.error("loading adapter %s failed", key, exc_info=error)
    return LoadFailure("internal_error", f"adapter {key} could not be loaded: {type(error).__name__}")
