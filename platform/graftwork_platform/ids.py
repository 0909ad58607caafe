"""Identities: UUIDv7 keys (RFC 9562) and the prefixed text in which people and clients see them. Knows no tables."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from typing import Literal
from uuid import UUID

Prefix = Literal["tn", "key", "ad", "av", "up", "req"]
"""Tenant, API key, adapter, adapter version, upload, request."""

_RANDOM_BITS = 74


def uuid7(now: Callable[[], float] = time.time, random_bytes: Callable[[int], bytes] = os.urandom) -> UUID:
    """A new UUIDv7: 48 bits of Unix milliseconds, then 74 random bits around the version and variant fields."""
    millis = int(now() * 1000) & (1 << 48) - 1
    noise = int.from_bytes(random_bytes(10)) >> (80 - _RANDOM_BITS)
    high, low = noise >> 62, noise & (1 << 62) - 1
    return UUID(int=millis << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low)


def show(prefix: Prefix, key: UUID) -> str:
    """The text in which ``key`` appears outside, for example ``tn_0192f0c1d1b87c3e8a4d5e6f708192a3``."""
    return f"{prefix}_{key.hex}"


def parse(prefix: Prefix, text: str) -> UUID | None:
    """The key that `show` made ``text`` of, or None for anything else; only the one spelling is taken."""
    head, _, digits = text.partition("_")
    if head != prefix or len(digits) != 32 or not set(digits) <= set("0123456789abcdef"):
        return None
    return UUID(hex=digits)


def unix_millis(key: UUID) -> int:
    """When ``key`` was made, in Unix milliseconds, as the key itself says."""
    return key.int >> 80


def day_of(key: UUID) -> datetime.date:
    """The UTC day on which ``key`` was made, as the key itself says."""
    return datetime.datetime.fromtimestamp(unix_millis(key) / 1000, tz=datetime.UTC).date()
