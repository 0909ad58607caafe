"""``graftwork serve``: check, migrate, start, seed, and say where everything is. The composition of one machine's server."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from graftwork_adapters.base_spec import load_base_spec
from graftwork_adapters.errors import StoreError, StoreUnavailable, UnsupportedBase
from graftwork_adapters.store import StoreConfig
from graftwork_adapters.stores import open_store, prepare_store
from graftwork_engine.config import EngineConfig
from graftwork_engine.errors import ConfigError
from graftwork_platform.admin.client import AdminClient, CallFailed
from graftwork_platform.db import Database, DatabaseUnavailable
from graftwork_platform.db_url import UnsupportedDatabase, check_url, sqlite_path
from graftwork_platform.keys.claim import OtherServing, claim, claim_serving
from graftwork_platform.publishing.owner import claim_store, deployment_id
from graftwork_platform.secrets import BadSecret, load_or_create
from graftwork_platform.serve import options
from graftwork_platform.serve.api_process import LAST_WORDS_S, ApiConfig, encode_config
from graftwork_platform.serve.data_dir import DataDirBusy, locked
from graftwork_platform.serve.engine_settings import engine_config, publishing_for
from graftwork_platform.serve.file_limit import raise_file_limit
from graftwork_platform.serve.seed import Seed, SeedFailed, example_curl, plant, read_seed
from graftwork_platform.serve.supervisor import Child, ChildFailed, Supervisor
from graftwork_platform.settings import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    ClientSettings,
    PublishLimits,
    Settings,
    client_settings,
    engine_environment,
    given_secrets,
)

logger = logging.getLogger(__name__)

START_LIMIT_S = 600.0
ENGINE_STOP_S = 10.0

_LONGEST_SOCKET_FOLDER = 90
"""Bytes; the kernel bounds a socket's whole path to 107."""

_KEY_ELSEWHERE = "another server on this database made it: take its DATA_DIR/admin.key, or set GRAFTWORK_ADMIN_KEY"


class CannotServe(Exception):
    """The server cannot start; the message says what to do."""


_REASONS_NOT_TO_SERVE = (
    CannotServe,
    ChildFailed,
    ConfigError,
    DataDirBusy,
    OSError,
    SeedFailed,
    UnsupportedBase,
    UnsupportedDatabase,
    options.UselessOption,
)


@dataclass(frozen=True, slots=True)
class ServePlan:
    """All that `run` needs. ``seed_file`` is None for a server that starts with what it has."""

    settings: Settings
    engine: EngineConfig
    seed_file: Path | None
    as_json: bool


def serve(
    model: Annotated[Path | None, typer.Option(help="The base model, a Hugging Face folder.")] = None,
    data_dir: Annotated[Path, typer.Option(help="Where everything is kept.")] = Path(".data"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = DEFAULT_PORT,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of weights, activations and KV cache.")] = "bfloat16",
    device: options.Device = "auto",
    graphs: options.Graphs = True,
    adapter_memory: Annotated[int | None, typer.Option(metavar="BYTES", help="Device pool for adapters.")] = None,
    adapter_host_memory: Annotated[int | None, typer.Option(metavar="BYTES", help="Host cache for adapters.")] = None,
    adapter_whole_memory: options.AdapterWholeMemory = None,
    adapter_dtype: options.AdapterDtype = "auto",
    adapter_page: Annotated[int | None, typer.Option(metavar="BYTES", help="Page of the device pool.")] = None,
    kv_memory: Annotated[int | None, typer.Option(metavar="BYTES", help="KV cache; overrides the fraction.")] = None,
    kv_memory_fraction: Annotated[float | None, typer.Option(help="Of free memory, for the KV cache.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a KV block.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and output of a request, in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at the same time.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of one step.")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Share the KV blocks of equal prefixes.")] = True,
    threads: Annotated[int | None, typer.Option(help="CPU threads of one operator.")] = None,
    kernel: options.KernelPins = None,
    kernel_dir: options.KernelDir = None,
    max_lora_rank: Annotated[int | None, typer.Option(help="Largest rank that an upload may have.")] = None,
    require_base_name: Annotated[bool, typer.Option(help="Refuse adapters that name another base.")] = False,
    served_name: Annotated[str, typer.Option(help="The base's name for clients; the folder's name by default.")] = "",
    request_timeout: Annotated[float, typer.Option(help="Seconds a request may take.")] = 600.0,
    database_url: options.DatabaseUrl = "",
    object_store: options.ObjectStoreUrl = None,
    s3_endpoint: options.S3Endpoint = None,
    s3_region: options.S3Region = None,
    s3_path_style: options.S3PathStyle = None,
    s3_ca_bundle: options.S3CaBundle = None,
    secrets_dir: options.SecretsDir = None,
    api_nice: Annotated[int, typer.Option(min=0, max=19, help="Niceness of the API process; the engine's is 0.")] = 5,
    shutdown_grace: Annotated[float, typer.Option(help="Seconds that running streams may take to end at a stop.")] = 10.0,
    seed: Annotated[Path | None, typer.Option(metavar="FILE", help="Tenants and adapters to start with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Serve a base model and its tenants' adapters on this machine. Ctrl-C stops it."""
    publish = PublishLimits(require_base_name=require_base_name)
    if max_lora_rank is not None:
        publish = PublishLimits(require_base_name=require_base_name, max_rank=max_lora_rank)
    try:
        settings = Settings(
            data_dir=data_dir.absolute(),
            model_dir=(model or _only_base(data_dir)).absolute(),
            served_name=served_name,
            host=host,
            port=port,
            dtype=dtype,
            row_type=dtype if adapter_dtype == "auto" else adapter_dtype,
            publish=publish,
            request_timeout=request_timeout,
            shutdown_grace=shutdown_grace,
            api_nice=api_nice,
            secrets_path=None if secrets_dir is None else secrets_dir.absolute(),
            database_url=database_url,
            object_store=options.store_config(object_store, s3_endpoint, s3_region, s3_path_style, s3_ca_bundle),
        )
        chosen: dict[str, object] = {
            "device": device,
            "use_graphs": graphs,
            **options.adapter_memory(adapter_memory, adapter_host_memory, adapter_whole_memory, adapter_page),
            "kv_memory_bytes": kv_memory,
            "kv_memory_fraction": kv_memory_fraction,
            "block_size": block_size,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "num_threads": threads,
            "kernels": options.kernel_pins(kernel or []),
            "kernel_dir": None if kernel_dir is None else str(kernel_dir.absolute()),
        }
        engine = engine_config(settings, chosen, prefix_caching=prefix_caching)
        run(ServePlan(publishing_for(engine, settings), engine, seed, as_json))
    except _REASONS_NOT_TO_SERVE as error:
        typer.echo(json.dumps({"error": {"message": str(error)}}) if as_json else f"Error: {error}", err=not as_json)
        raise typer.Exit(1) from error


def _only_base(data_dir: Path) -> Path:
    folders = [path.parent for path in sorted((data_dir / "base").glob("*/config.json"))]
    if len(folders) != 1:
        raise CannotServe(f"say which base model to serve with --model DIR ({data_dir / 'base'} holds {len(folders)})")
    return folders[0]


def run(plan: ServePlan) -> None:
    """Serve until SIGINT or SIGTERM. Raises what `serve` turns into a message."""
    settings = plan.settings
    logging.basicConfig(level=logging.INFO, format="%(asctime)s serve %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    seed = None if plan.seed_file is None else read_seed(plan.seed_file)
    logger.info("at most %d files and connections can be open in one process", raise_file_limit())
    os.umask(0o077)  # whatever this server and its children write is their owner's alone
    with ExitStack() as stack:
        stack.enter_context(locked(settings.lock_file))
        _prepare_store(settings.store)
        spec = load_base_spec(settings.model_dir, settings.cache_dir)  # refuses a base by name, leaves its id for the children
        _lock_file_of_database(stack, settings.database)
        _migrate(settings.database)
        _claim_database(settings)
        _claim_serving(settings, spec.base_id)
        _claim_store(settings)
        listener = stack.enter_context(_listen(settings.host, settings.port))
        address, port = listener.getsockname()[:2]
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
        sockets = stack.enter_context(_socket_folder(settings.data_dir))
        supervisor = Supervisor(_children(plan, f"ipc://{sockets}/engine", listener))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: supervisor.request_stop())
        greeter = _Greeter(plan, seed, url, supervisor)
        greeter.start()
        supervisor.run()
        if greeter.failure is not None:
            raise greeter.failure
        if not plan.as_json:
            typer.echo("Stopped.")


@contextmanager
def _socket_folder(data_dir: Path) -> Iterator[Path]:
    """Where the engine's socket lies: beside the data, or in a temporary folder if that path is too long for a socket's."""
    folder = data_dir / "run"
    if len(os.fsencode(folder)) <= _LONGEST_SOCKET_FOLDER:
        folder.mkdir(exist_ok=True, mode=0o700)
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="graftwork-") as temporary:
            yield Path(temporary)


def _prepare_store(config: StoreConfig) -> None:
    """Refuses a store that is not there, or not ours, before a model is loaded for it."""
    try:
        prepare_store(config)
    except StoreUnavailable as error:
        next_step = f"; {error.fix}" if error.fix else ""
        raise CannotServe(f"the object store at {config.url} cannot be used: {error}{next_step}") from error
    except StoreError as error:
        raise CannotServe(str(error)) from error


def _migrate(database_url: str) -> None:
    """In a process of its own, since this room may not import the migrations; the URL with its password is told, not shown."""
    command = [sys.executable, "-m", "graftwork_migrations", "upgrade", "--database-url", "-"]
    done = subprocess.run(command, input=f"{database_url}\n", capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip()
        if "\n" in said:  # no message, then, but a fault of ours
            logger.error("%s", said)
        raise CannotServe(f"the database cannot be brought up to date: {said.rpartition(chr(10))[2] or 'its process ended'}")


def _lock_file_of_database(stack: ExitStack, database_url: str) -> None:
    """A SQLite file has one server, whatever data directories others have; PostgreSQL has many."""
    path = sqlite_path(check_url(database_url))
    if path is None:
        return
    path = path.resolve()
    try:
        stack.enter_context(locked(path.with_name(f"{path.name}.lock")))
    except DataDirBusy:
        raise CannotServe(f"{path} is in use by another server, and SQLite has one: stop it, or give both PostgreSQL") from None


def _claim_serving(settings: Settings, base_id: str) -> None:
    """Refuses a database that several servers may use if the others serve another base or row type."""
    try:
        with closing(Database(settings.database)) as database:
            if database.is_shared:
                database.write_now(lambda session: claim_serving(session, base_id, settings.row_type))
    except (DatabaseUnavailable, OtherServing) as error:
        raise CannotServe(str(error)) from error


def _claim_database(settings: Settings) -> None:
    """Refuses a database whose keys were made with other secrets, before a model is loaded for it."""
    try:
        secrets = load_or_create(settings.secrets_dir, given_secrets())
        with closing(Database(settings.database)) as database:
            database.write_now(lambda session: claim(session, secrets))
    except (BadSecret, DatabaseUnavailable) as error:
        raise CannotServe(str(error)) from error


def _claim_store(settings: Settings) -> None:
    """Refuses a store that belongs to another database."""
    try:
        with closing(Database(settings.database)) as database:
            deployment = database.write_now(deployment_id)
        claim_store(open_store(settings.store), deployment)
    except (DatabaseUnavailable, StoreError) as error:
        raise CannotServe(f"the object store at {settings.store.url} cannot be used: {error}") from error


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise CannotServe(f"cannot listen on {host}:{port}: {error}; choose another with --host and --port") from error
    listener.set_inheritable(True)
    return listener


def _children(plan: ServePlan, endpoint: str, listener: socket.socket) -> list[Child]:
    api = ApiConfig(plan.settings, endpoint)
    return [
        Child(
            "engine",
            "graftwork_engine.process",
            ["--endpoint", endpoint],
            msgspec.json.encode(plan.engine),
            ENGINE_STOP_S,
            environment=engine_environment(),
        ),
        Child(
            "API process",
            "graftwork_platform.serve.api_process",
            ["--fd", str(listener.fileno())],
            encode_config(api),
            plan.settings.shutdown_grace + 3 * LAST_WORDS_S,
            pass_fds=[listener.fileno()],
        ),
    ]


def _own_command() -> str:
    """How the user calls this program again from where it was started."""
    called = Path(sys.argv[0]).absolute()
    if called.name != "graftwork":
        return f"{sys.executable} -m graftwork_platform.cli"
    return str(called.relative_to(Path.cwd())) if called.is_relative_to(Path.cwd()) else str(called)


class _Greeter(threading.Thread):
    """Waits until the server is ready, plants the seed, and tells the user where everything is."""

    def __init__(self, plan: ServePlan, seed: Seed | None, url: str, supervisor: Supervisor) -> None:
        super().__init__(name="greeter", daemon=True)
        self._plan, self._seed, self._url, self._supervisor = plan, seed, url, supervisor
        self.failure: Exception | None = None

    def run(self) -> None:
        """The thread's body; a failure ends the server."""
        try:
            self._greet()
        except (SeedFailed, CannotServe) as error:
            self.failure = error
            self._supervisor.request_stop()

    def _greet(self) -> None:
        say: Callable[[str], None] = logger.info
        began = time.monotonic()
        while not self._ready():
            if self._supervisor.stopping:
                return
            if time.monotonic() - began > START_LIMIT_S:
                raise CannotServe(f"the server was not ready after {START_LIMIT_S:.0f} s; the log above says how far it came")
            time.sleep(0.1)
        settings = self._plan.settings
        keys_dir = settings.data_dir / "demo"
        curl = None
        if self._seed is not None and self._plan.seed_file is not None:
            speaker = client_settings(url=self._url, admin_key=None, data_dir=settings.data_dir)
            if speaker.admin_key is None:
                raise CannotServe(f"planting the seed needs the admin key: {_KEY_ELSEWHERE}")
            with AdminClient(speaker) as client:
                plant(self._seed, self._plan.seed_file.parent, client, keys_dir, say)
            curl = example_curl(self._seed, self._url, keys_dir)
        self._show(keys_dir if self._seed is not None else None, curl)

    def _ready(self) -> bool:
        try:
            with AdminClient(ClientSettings(self._url, None)) as client:
                return client.is_ready()
        except CallFailed:
            return False

    def _show(self, keys_dir: Path | None, curl: str | None) -> None:
        settings = self._plan.settings
        key_file = settings.admin_key_file if settings.admin_key_file.exists() else None
        if self._plan.as_json:
            shown = None if key_file is None else str(key_file)
            facts = {"url": self._url, "pid": os.getpid(), "admin_key_file": shown, "curl": curl}
            typer.echo(json.dumps(facts))
            return
        lines = [
            "",
            f"Graftwork serves {settings.base_name} at {self._url}",
            f"  admin key     {key_file or _KEY_ELSEWHERE}",
            *([f"  tenants' keys {keys_dir}/"] if keys_dir is not None else []),
            f"  administer    {_own_command()} tenants list --url {self._url} --data-dir {shlex.quote(str(settings.data_dir))}",
            "  stop          Ctrl-C",
            *(["", "Try it:", "", curl] if curl else []),
            "",
        ]
        typer.echo("\n".join(lines))
