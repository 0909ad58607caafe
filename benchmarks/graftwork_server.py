"""Our own server as a benchmark needs it: real, in a data directory of its own, with adapters of one tenant.

Refuses to know the load, and asks the server through its two APIs alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from graftwork_platform.admin.client import AdminClient, CallFailed
from graftwork_platform.admin.push import push
from graftwork_platform.settings import ClientSettings
from load import Target
from results import BenchmarkFailed
from servers import HttpContender, failed_to_start, process, read_line

TENANT = "benchmark"
BASE_NAME = "base"
PUSHES_AT_ONCE = 4
PUSH_LIMIT_S = 900.0

SERVE_OPTIONS = ("--adapter-memory", str(1 << 30))
"""Room for 32 adapters of rank 16 on all projections of a base of 135 M parameters, which are larger than the base itself."""


@dataclass(frozen=True)
class OurServer:
    """A server that is up. ``start_s`` is the time from its start until it said that it is ready."""

    contender: HttpContender
    admin: ClientSettings
    start_s: float
    log: Path

    @property
    def target(self) -> Target:
        """Where loads go, with the tenant's key."""
        return self.contender.target


@contextlib.contextmanager
def our_server(base: Path, data_dir: Path, options: Sequence[str] = SERVE_OPTIONS) -> Iterator[OurServer]:
    """`graftwork serve` over ``data_dir``, which may be one that it has had before. Raises `BenchmarkFailed`."""
    log = data_dir.with_name(f"{data_dir.name}.log")
    command: list[str | Path] = [
        *(sys.executable, "-m", "graftwork_platform.cli", "serve", "--json", "--port", "0", "--served-name", BASE_NAME),
        *("--model", str(base), "--data-dir", str(data_dir), "--request-timeout", "3600", *options),
    ]
    began = time.perf_counter()
    with process("graftwork serve", command, log, pipe=True) as child:
        facts = json.loads(read_line(child.stdout) or "{}")
        start_s = time.perf_counter() - began
        if "url" not in facts:
            message = facts.get("error", {}).get("message", "it ended before it was ready")
            raise failed_to_start("graftwork serve", log, f"did not start: {message}")
        admin = ClientSettings(facts["url"], Path(facts["admin_key_file"]).read_text().strip())
        target = Target(facts["url"], _tenant_key(admin, data_dir))
        yield OurServer(HttpContender("graftwork", target, child.pid), admin, start_s, log)


def _tenant_key(admin: ClientSettings, data_dir: Path) -> str:
    """A key of the benchmark's tenant, made at the first start over a data directory and kept beside it."""
    kept = data_dir / "benchmark.key"
    if not kept.exists():
        with _admin(admin) as client:
            client.create_tenant(TENANT)
            kept.touch(mode=0o600)
            kept.write_text(client.create_key(TENANT, None).key)
    return kept.read_text()


def publish(server: OurServer, folders: Mapping[str, Path], on_done: Callable[[], None] = lambda: None) -> None:
    """Push each folder under its name unless the tenant has that name, and wait until all are ready. Raises `BenchmarkFailed`."""
    with _admin(server.admin) as client:
        present = {adapter.name for adapter in client.list_adapters(TENANT)}

    def one(name: str) -> None:
        if name not in present:
            with _admin(server.admin) as client:
                limit = PUSH_LIMIT_S
                version = push(client, folders[name], tenant=TENANT, name=name, timeout=limit, sent=lambda _done, _total: None)
            if version.state != "ready":
                reasons = [f"{f['field']} {f['message']}" for f in version.report if f["result"] == "fail"][:3]
                raise BenchmarkFailed(f"the server refused adapter {name}: {'; '.join(reasons)}; was it made for this base?")
        on_done()

    with ThreadPoolExecutor(PUSHES_AT_ONCE) as pool:
        try:
            list(pool.map(one, folders))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def _admin(settings: ClientSettings) -> Iterator[AdminClient]:
    """The admin API, whose failures are the benchmark's."""
    try:
        with AdminClient(settings) as client:
            yield client
    except CallFailed as failed:
        raise BenchmarkFailed(f"{failed.message} {failed.next_step or ''}".strip()) from failed
