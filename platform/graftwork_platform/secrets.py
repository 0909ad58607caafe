"""The server's own secrets: the pepper of key hashes and the secret that tenants' cache salts are made from. Knows no keys."""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

_BYTES = 32


class BadSecret(Exception):
    """A secret file that does not hold a secret; the message names it."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """Both secrets. Losing the pepper makes every key invalid; losing the other only empties prefix caches."""

    pepper: bytes = field(repr=False)
    cache_salt: bytes = field(repr=False)

    def tenant_salt(self, tenant_id: UUID) -> bytes:
        """The start of a tenant's prefix-cache chain; nobody outside can compute or choose it."""
        return hmac.digest(self.cache_salt, tenant_id.bytes, hashlib.sha256)


def load_or_create(directory: Path) -> Secrets:
    """The secrets in ``directory``, made at first use (files 0600 in a folder 0700).

    Raises `BadSecret` for a file that is cut short, `OSError` if it cannot be read or made.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Secrets(pepper=_secret(directory / "pepper"), cache_salt=_secret(directory / "cache-salt"))


def write_private(path: Path, text: str) -> None:
    """Put ``text`` at ``path``, readable by its owner alone, durably and never half-written."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames inside ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _secret(path: Path) -> bytes:
    if not path.exists():
        write_private(path, os.urandom(_BYTES).hex() + "\n")
    try:
        secret = bytes.fromhex(path.read_text().strip())
    except ValueError as error:
        raise BadSecret(f"{path} does not hold {_BYTES} bytes in hex; restore it from a backup") from error
    if len(secret) < _BYTES:
        raise BadSecret(f"{path} holds {len(secret)} bytes, expected {_BYTES}; restore it from a backup")
    return secret
