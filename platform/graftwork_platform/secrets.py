"""The server's own secrets: the pepper of key hashes and the secret that tenants' cache salts are made from. Knows no keys."""

from __future__ import annotations

import hashlib
import hmac
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from graftwork_platform.settings import GivenSecrets

_BYTES = 32


class BadSecret(Exception):
    """A secret that is none, or that this database was not made with; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """Both secrets. Losing the pepper makes every key invalid; losing the other only empties prefix caches."""

    pepper: bytes = field(repr=False)
    cache_salt: bytes = field(repr=False)

    def tenant_salt(self, tenant_id: UUID) -> bytes:
        """The start of a tenant's prefix-cache chain; nobody outside can compute or choose it."""
        return hmac.digest(self.cache_salt, tenant_id.bytes, hashlib.sha256)

    @property
    def pepper_fingerprint(self) -> bytes:
        """Tells peppers apart and nothing else of them."""
        return hmac.digest(self.pepper, b"graftwork pepper fingerprint", hashlib.sha256)


def load_or_create(directory: Path, given: GivenSecrets = GivenSecrets()) -> Secrets:
    """The secrets that are ``given``, the others in ``directory``, made at first use (files 0600 in a folder 0700).

    Raises `BadSecret` for one that is cut short, `OSError` if a file cannot be read or made.
    """
    return Secrets(
        pepper=_secret(directory / "pepper") if given.pepper is None else _given(given.pepper, "GRAFTWORK_PEPPER"),
        cache_salt=_secret(directory / "cache-salt")
        if given.cache_salt is None
        else _given(given.cache_salt, "GRAFTWORK_CACHE_SALT"),
    )


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
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        made = path.with_name(f".{path.name}.{os.getpid()}")
        write_private(made, os.urandom(_BYTES).hex() + "\n")
        with suppress(FileExistsError):  # another server with this folder was faster, and its secret holds
            os.link(made, path)
        made.unlink()
        sync_directory(path.parent)
    return _bytes(path.read_text(errors="replace"), str(path), "restore it from a backup")


def _given(text: str, variable: str) -> bytes:
    return _bytes(
        text, variable, f"set it to what the other servers on this database have; for the first: openssl rand -hex {_BYTES}"
    )


def _bytes(text: str, where: str, next_step: str) -> bytes:
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        raise BadSecret(f"{where} does not hold {_BYTES} bytes in hex; {next_step}") from None
    if len(secret) < _BYTES:
        raise BadSecret(f"{where} holds {len(secret)} bytes, expected {_BYTES}; {next_step}")
    return secret
