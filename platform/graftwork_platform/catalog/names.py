"""What adapters, versions and tenants may be called. Knows no database."""

from __future__ import annotations

import re
from dataclasses import dataclass

from graftwork_platform.errors import BadRequest

DEFAULT = "default"
"""In ``model``: the key's default adapter, or the base."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_VERSION = re.compile(r"v([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class ModelName:
    """``adapter`` or ``adapter@vN``; ``version`` None means the newest."""

    adapter: str
    version: int | None


def check_adapter_name(name: str, base_name: str) -> None:
    """Raises `BadRequest` for a name that no adapter may have."""
    _check(name, "An adapter's name")
    if name in (DEFAULT, base_name.lower()):
        raise BadRequest(f"`{name}` is reserved; choose another name.", param="name", code="reserved_name")


def is_adapter_name(text: str) -> bool:
    """True if an adapter could be called so."""
    return _NAME.fullmatch(text) is not None


def check_tenant_name(name: str) -> None:
    """Raises `BadRequest` for a name that no tenant may have."""
    _check(name, "A tenant's name")
    if name.startswith("tn_"):
        raise BadRequest("Names that begin with `tn_` are reserved for ids.", param="name", code="reserved_name")


def parse_model_name(text: str) -> ModelName | None:
    """The adapter and version that ``text`` names, or None for text that can name none."""
    adapter, at, version = text.partition("@")
    if not _NAME.fullmatch(adapter):
        return None
    if not at:
        return ModelName(adapter, None)
    number = parse_version(version)
    return None if number is None else ModelName(adapter, number)


def parse_version(text: str) -> int | None:
    """The number in ``vN``, or None."""
    match = _VERSION.fullmatch(text)
    return int(match[1]) if match else None


def show_version(number: int | None) -> str | None:
    """``vN``, or None for a version that has no number (it is not ready, or was refused)."""
    return None if number is None else f"v{number}"


def _check(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{what} is 1 to 64 of a-z, 0-9, '.', '_' and '-', and begins with a letter or digit.",
            param="name",
            code="invalid_name",
        )
