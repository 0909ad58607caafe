"""Tenants, adapters and keys that a new server starts with, from a JSON file. Done again at each start, it changes nothing.

    {"tenants": [{"name", "adapters": [{"name", "path"}], "keys": [{"name", "adapter"}]}],
     "example": {"tenant", "key", "model", "messages"}}

Paths are relative to the file. A key's text goes to ``keys_dir/TENANT.key`` (0600), or ``TENANT-KEY.key`` for further keys.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec

from graftwork_platform.admin.client import AdminClient, CallFailed
from graftwork_platform.admin.push import push
from graftwork_platform.models import VersionState
from graftwork_platform.secrets import write_private


class SeedFailed(Exception):
    """The seed cannot be read, or the server refused a part of it; the message names the part."""


class SeedAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A PEFT folder to publish under ``name``."""

    name: str
    path: str


class SeedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key, and the adapter that it means by ``default``."""

    name: str
    adapter: str | None = None


class SeedTenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant with all it owns."""

    name: str
    adapters: list[SeedAdapter] = []
    keys: list[SeedKey] = []


class SeedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of the example chat."""

    role: str
    content: str


class SeedExample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chat that shows what the server can do, printed as a curl command."""

    tenant: str
    key: str
    model: str
    messages: list[SeedMessage]
    max_tokens: int = 64


class Seed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    tenants: list[SeedTenant]
    example: SeedExample | None = None


def read_seed(path: Path) -> Seed:
    """Read a seed file; raises `SeedFailed`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Seed)
    except (OSError, msgspec.MsgspecError) as error:
        raise SeedFailed(f"{path}: {error}") from error


def key_file(seed: Seed, keys_dir: Path, tenant: str, key: str) -> Path:
    """Where the text of a seeded key lies."""
    keys = next((t.keys for t in seed.tenants if t.name == tenant), [])
    first = not keys or keys[0].name == key
    return keys_dir / (f"{tenant}.key" if first else f"{tenant}-{key}.key")


def plant(seed: Seed, folder: Path, client: AdminClient, keys_dir: Path, say: Callable[[str], None]) -> None:
    """Make what is missing of ``seed``, whose paths are relative to ``folder``. Raises `SeedFailed`."""
    keys_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        present = {tenant.name for tenant in client.list_tenants()}
        for tenant in seed.tenants:
            if tenant.name not in present:
                client.create_tenant(tenant.name)
            for adapter in tenant.adapters:
                version = push(client, folder / adapter.path, tenant=tenant.name, name=adapter.name, timeout=600, sent=_unheard)
                if version.state != VersionState.READY:
                    problems = "; ".join(str(f["message"]) for f in version.report if f["result"] == "fail")
                    raise SeedFailed(f"adapter {adapter.name} of {tenant.name} was refused: {problems}")
                say(f"{tenant.name}: {adapter.name}@{version.version} is ready")
            for key in tenant.keys:
                path = key_file(seed, keys_dir, tenant.name, key.name)
                if not path.exists():
                    write_private(path, client.create_key(tenant.name, key.adapter).key + "\n")
    except CallFailed as failed:
        raise SeedFailed(f"{failed.message} {failed.next_step or ''}".strip()) from failed


def example_curl(seed: Seed, url: str, keys_dir: Path) -> str | None:
    """A command that works when pasted; the key is read from its file, never shown."""
    example = seed.example
    if example is None:
        return None
    path = key_file(seed, keys_dir.resolve(), example.tenant, example.key)
    body = {
        "model": example.model,
        "messages": [{"role": m.role, "content": m.content} for m in example.messages],
        "temperature": 0,
        "max_tokens": example.max_tokens,
    }
    lines = [
        f"curl {url}/v1/chat/completions",
        f'  -H "Authorization: Bearer $(cat {shlex.quote(str(path))})"',
        "  -H 'Content-Type: application/json'",
        f"  -d {shlex.quote(json.dumps(body))}",
    ]
    return " \\\n".join(lines)


def _unheard(_done: int, _total: int) -> None:
    """The progress of small uploads interests nobody."""
