"""What an operator can choose, frozen. The only module that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sqlalchemy.engine import URL

from graftwork_adapters.keys import RowTypeName
from graftwork_adapters.publish_job import ServingMemory
from graftwork_adapters.store import StoreConfig

Dtype = Literal["bfloat16", "float32"]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
MIB = 1 << 20
_SPIN = "GOMP_SPINCOUNT"


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """What one upload may be. Sizes in bytes, times in seconds."""

    max_files: int = 64
    max_bytes: int = 4 << 30
    part_bytes: int = 8 * MIB
    expires_after: float = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class PublishLimits:
    """What one publishing subprocess may use and accept. ``memory`` is what the engine has for adapters; None: not known."""

    max_rank: int = 256
    require_base_name: bool = False
    timeout: float = 600.0  # seconds
    memory_bytes: int = 8 << 30
    concurrency: int = 2  # one slow upload leaves a place for the others
    max_attempts: int = 3  # starts of the same version, across restarts of the server
    memory: ServingMemory | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """One server. ``served_name`` is the base's name in ``model``; empty means the model folder's name."""

    data_dir: Path
    model_dir: Path
    served_name: str = ""
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    dtype: Dtype = "bfloat16"
    row_type: RowTypeName = "bfloat16"
    database_url: str = field(default="", repr=False)  # may hold a password; empty: a file of the data directory
    object_store: StoreConfig | None = None  # None: a folder of the data directory
    secrets_path: Path | None = None  # None: a folder of the data directory
    upload: UploadLimits = UploadLimits()
    publish: PublishLimits = PublishLimits()
    request_timeout: float = 600.0  # seconds a request may take from its arrival to its last token
    keep_alive: float = 15.0  # seconds of silence after which a stream says that it is alive
    shutdown_grace: float = 10.0  # seconds in which running streams may end
    api_nice: int = 5  # how much more willingly than the engine the API process leaves a core that both want

    @property
    def base_name(self) -> str:
        """The base's name as clients write it."""
        return self.served_name or self.model_dir.resolve().name

    @property
    def database(self) -> str:
        """SQLAlchemy URL of the database."""
        if self.database_url:
            return self.database_url
        url = URL.create("sqlite", database=str(self.data_dir.resolve() / "graftwork.db"))  # quotes what a path may hold
        return url.render_as_string(hide_password=False)

    @property
    def secrets_dir(self) -> Path:
        """Where the pepper and the cache-salt secret lie."""
        return self.secrets_path or self.data_dir / "secrets"

    @property
    def admin_key_file(self) -> Path:
        """Where the first start leaves the admin key."""
        return self.data_dir / "admin.key"

    @property
    def lock_file(self) -> Path:
        """Locked by the one server that may use this data directory."""
        return self.data_dir / "server.lock"

    @property
    def uploads_dir(self) -> Path:
        """Uploads on their way in; swept when published or expired."""
        return self.data_dir / "incoming"

    @property
    def scratch_dir(self) -> Path:
        """Half-written files of publications; empty while none runs."""
        return self.data_dir / "scratch"

    @property
    def cache_dir(self) -> Path:
        """What can be made again: packed adapters that were fetched, the base's id."""
        return self.data_dir / "cache"

    @property
    def store(self) -> StoreConfig:
        """The object store."""
        return self.object_store or StoreConfig(str(self.data_dir / "objects"))


@dataclass(frozen=True, slots=True)
class GivenSecrets:
    """The server's secrets as text in hex, where they are given and not files. None: from its file."""

    pepper: str | None = field(default=None, repr=False)
    cache_salt: str | None = field(default=None, repr=False)


def given_secrets(environ: Mapping[str, str] = os.environ) -> GivenSecrets:
    """From ``GRAFTWORK_PEPPER`` and ``GRAFTWORK_CACHE_SALT``."""
    return GivenSecrets(environ.get("GRAFTWORK_PEPPER") or None, environ.get("GRAFTWORK_CACHE_SALT") or None)


def engine_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the engine process's environment has beside this one's.

    OpenMP's own rule lets a thread that waits for its team burn a core for milliseconds, which it takes from the API process and,
    worse, from the teammate it waits for. A thousand turns are some tens of microseconds: longer than most waits between two
    operators, shorter than what the scheduler deals out. Whoever sets one of OpenMP's variables knows better.
    """
    return {} if _SPIN in environ or "OMP_WAIT_POLICY" in environ else {_SPIN: "1000"}


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Where the command line finds a server, and as whom it speaks."""

    url: str
    admin_key: str | None


def client_settings(
    *, url: str | None, admin_key: str | None, data_dir: Path | None, environ: Mapping[str, str] = os.environ
) -> ClientSettings:
    """Flags first, ``admin.key`` in ``data_dir`` being one, then ``GRAFTWORK_URL`` and ``GRAFTWORK_ADMIN_KEY``.

    Raises `OSError` if the key file is there and cannot be read.
    """
    key = admin_key
    if not key and data_dir is not None and (data_dir / "admin.key").exists():
        key = (data_dir / "admin.key").read_text(errors="replace").strip()
    key = key or environ.get("GRAFTWORK_ADMIN_KEY")
    where = url or environ.get("GRAFTWORK_URL") or f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
    return ClientSettings(url=where.rstrip("/"), admin_key=key or None)
