"""The text of an API key, ``gw-<public id>-<secret>``, and what of it is kept. Knows no database."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass, field

_PREFIX = "gw"
_PUBLIC_BYTES = 10  # 16 base32 letters, an index and nothing secret
_MAX_PUBLIC_CHARS = 32  # as many as the database keeps
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key at the only moment its text is known."""

    public_id: str
    text: str = field(repr=False)


def generate(random_bytes: Callable[[int], bytes] = os.urandom) -> NewKey:
    """A new key with 256 bits of secret."""
    public_id = base64.b32encode(random_bytes(_PUBLIC_BYTES)).decode().lower()
    secret = base64.urlsafe_b64encode(random_bytes(_SECRET_BYTES)).decode().rstrip("=")
    return NewKey(public_id, f"{_PREFIX}-{public_id}-{secret}")


def public_id_of(text: str) -> str | None:
    """The public half of a key's text, or None for text that is no key."""
    parts = text.split("-", 2)  # the secret may hold dashes
    if len(parts) != 3 or parts[0] != _PREFIX or not parts[1] or not parts[2]:
        return None
    if not (parts[1].isascii() and parts[1].isalnum() and len(parts[1]) <= _MAX_PUBLIC_CHARS):
        return None
    return parts[1]


def key_hmac(pepper: bytes, text: str) -> bytes:
    """HMAC-SHA256 of a key's whole text: what is kept at rest."""
    return hmac.digest(pepper, text.encode(), hashlib.sha256)


def redact(public_id: str) -> str:
    """How a key is shown once its text is gone."""
    return f"{_PREFIX}-{public_id}-…"
