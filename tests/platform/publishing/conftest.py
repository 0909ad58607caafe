"""Several servers on one database and one object store, in one event loop, with publishing steps and a store that a test steers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.keys import AdapterDigest, packed_key, packed_path, upload_prefix
from graftwork_adapters.packed import PackedIndex, write_packed
from graftwork_adapters.publish_job import PublishJob, PublishResult
from graftwork_adapters.report import Report
from graftwork_adapters.store import ObjectStore
from graftwork_adapters.stores import open_store
from graftwork_platform.context import Services, build_services, running
from graftwork_platform.models import AdapterVersion, Upload
from graftwork_platform.publishing.leases import PublishTiming
from graftwork_platform.publishing.manifest import FileEntry
from graftwork_platform.settings import Settings

QUICK = PublishTiming(lease=1500.0, poll=0.01, retry_pause=0.01, outage_pause=0.01, outage=0.0, sweep=1000.0)
"""A lease is renewed whenever a third of it has passed, by the machine's clock: here never, however long the machine stalls."""


@dataclass
class Steer:
    """Stands in for the publishing subprocess: the digest is the hash of the weights; a cleared ``go`` holds it up."""

    errors: list[Exception] = field(default_factory=list)
    refuse: bool = False
    go: asyncio.Event = field(default_factory=asyncio.Event)
    began: int = 0
    delay: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        self.go.set()

    async def __call__(self, job: PublishJob, *, timeout_s: float, memory_bytes: int) -> PublishResult:
        self.began += 1
        await asyncio.sleep(self.delay())
        await self.go.wait()
        if self.errors:
            raise self.errors.pop(0)
        report = Report()
        if self.refuse:
            report.fail("config", "r", "rank 512 is over 256", "train it again")
            return PublishResult(ok=False, report=report)
        digest = AdapterDigest(hashlib.sha256((job.upload_dir / "adapter_model.safetensors").read_bytes()).hexdigest())
        key = packed_key(digest, job.spec.base_id, job.row_type)
        index = PackedIndex(key, digest, job.spec.base_id, job.row_type, (), ())
        write_packed(job.out_path, index, np.empty(0, np.uint8))
        report.passed("tensors", "applied 2 of 2 tensors")
        files = tuple(sorted(p.relative_to(job.upload_dir).as_posix() for p in job.upload_dir.rglob("*") if p.is_file()))
        return PublishResult(ok=True, report=report, digest=digest, packed_key=key, files=files)


class SteeredStore:
    """An object store that calls ``before(operation, key)``, which may wait or raise, before each operation on published blobs."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.before: Callable[[str, str], None] = lambda _operation, _key: None

    def put_if_absent(self, key: str, source: Path) -> bool:
        self.before("put", key)
        return self._store.put_if_absent(key, source)

    def fetch(self, key: str, dest: Path) -> None:
        self.before("fetch", key)
        self._store.fetch(key, dest)

    def exists(self, key: str) -> bool:
        return self._store.exists(key)

    def list_keys(self, prefix: str) -> Iterator[str]:
        self.before("list", prefix)
        return self._store.list_keys(prefix)

    def delete(self, key: str) -> None:
        self.before("delete", key)
        self._store.delete(key)


async def body_of(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), 100):
        yield content[start : start + 100]


@dataclass
class Server:
    """One server. Its uploads are ``adapter_config.json`` and weights."""

    services: Services
    publish: Steer
    store: SteeredStore

    async def begin(self, tenant: UUID, weights: bytes = b"weights", name: str = "support") -> UUID:
        """Promise an upload; nothing is sent yet."""
        entries = [FileEntry(p, len(b), hashlib.sha256(b).hexdigest()) for p, b in files_of(weights).items()]
        return (await self.services.uploads.create(tenant, name, entries)).upload.id

    async def send(self, tenant: UUID, upload: UUID, weights: bytes = b"weights") -> None:
        """Send whatever is missing."""
        view = await self.services.uploads.get(tenant, upload)
        for part in view.missing:
            content = files_of(weights)[part.path][part.offset : part.offset + part.size]
            await self.services.uploads.put_part(tenant, upload, part.path, part.number, body_of(content))

    async def submit(self, tenant: UUID, weights: bytes = b"weights", name: str = "support") -> UUID:
        """A completed upload."""
        upload = await self.begin(tenant, weights, name)
        await self.send(tenant, upload, weights)
        await self.services.uploads.complete(tenant, upload)
        return upload

    async def ended(self, tenant: UUID, upload: UUID) -> AdapterVersion:
        """The version that an upload became, once there is a verdict."""
        while True:
            view = await self.services.uploads.get(tenant, upload)
            if view.upload.state != "validating" and view.version is not None:
                return view.version
            await asyncio.sleep(0.005)

    async def push(self, tenant: UUID, weights: bytes = b"weights", name: str = "support") -> AdapterVersion:
        return await self.ended(tenant, await self.submit(tenant, weights, name))

    async def row(self, upload: UUID) -> Upload:
        return await self.services.database.run_read(lambda session: session.get_one(Upload, upload))

    def kill(self) -> None:
        """Stop all work where it is, as SIGKILL would: nothing is given back and nothing swept."""
        for task in list(self.services.publisher._tasks):
            task.cancel()

    def blobs(self, digest: str | None) -> int:
        """How many of a digest's three blobs are in the store."""
        content = AdapterDigest(digest or "")
        uploads = list(self.store._store.list_keys(upload_prefix(content)))
        return len(uploads) + self.store.exists(packed_path(packed_key(content, "b" * 64, "bfloat16")))


def files_of(weights: bytes) -> dict[str, bytes]:
    return {"adapter_config.json": b"{}", "adapter_model.safetensors": weights}


@dataclass
class Cluster:
    """Servers on one database and one store."""

    settings: Settings
    spec: BaseSpec
    stack: AsyncExitStack
    clock: Callable[[], float]
    timing: PublishTiming
    servers: list[Server] = field(default_factory=list)

    async def add(self) -> Server:
        """One more server."""
        settings = replace(
            self.settings,
            data_dir=self.settings.data_dir.parent / f"server-{len(self.servers)}",
            database_url=self.settings.database,
            object_store=self.settings.store,
            secrets_path=self.settings.secrets_dir,
        )
        settings.data_dir.mkdir()
        store, steer = SteeredStore(open_store(settings.store)), Steer()
        services = build_services(settings, self.spec, store, run=steer, now=self.clock, timing=self.timing)
        await self.stack.enter_async_context(running(services))
        self.servers.append(Server(services, steer, store))
        return self.servers[-1]


@asynccontextmanager
async def started(settings: Settings, spec: BaseSpec, **options: Any) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(settings, spec, stack, **options)


@pytest.fixture
def play(data_settings: Settings, bare_spec: BaseSpec) -> Callable[..., None]:
    """``play(scene, servers=2, now=…, timing=…, **settings)``: await ``scene(tenant, *servers)`` with that many servers running."""

    def play(
        scene: Callable[..., Coroutine[Any, Any, None]],
        servers: int = 2,
        now: Callable[[], float] = time.time,
        timing: PublishTiming = QUICK,
        **settings: Any,
    ) -> None:
        async def all_of_it() -> None:
            async with started(replace(data_settings, **settings), bare_spec, clock=now, timing=timing) as cluster:
                running_servers = [await cluster.add() for _ in range(servers)]
                tenant = await running_servers[0].services.tenants.create("acme")
                async with asyncio.timeout(120):  # for what would never end; a machine that stalls takes seconds more
                    await scene(tenant.id, *running_servers)

        asyncio.run(all_of_it())

    return play
