"""An API process's parts on a fresh data directory, with a publishing step that a test can steer, and the admin API over them."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from dev_servers.postgres import PostgresServer
from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.keys import AdapterDigest, packed_key
from graftwork_adapters.packed import PackedIndex, write_packed
from graftwork_adapters.publish_job import AdapterTraits, PublishJob, PublishResult
from graftwork_adapters.report import Report
from graftwork_adapters.stores import open_store
from graftwork_migrations import runner
from graftwork_platform.admin.routes import admin_router
from graftwork_platform.catalog.facts import OwnText
from graftwork_platform.context import Services, build_services, running
from graftwork_platform.errors import install_error_handlers
from graftwork_platform.settings import PublishLimits, Settings, UploadLimits
from graftwork_platform.text.upload_text import TextJob, TextVerdict

BASE_NAME = "tiny-base"


@dataclass
class SteeredPublish:
    """Stands in for the publishing subprocess: an upload's digest is the hash of its weights, and ``fail`` refuses it."""

    fail: str | None = None
    error: Exception | None = None
    blocked: bool = False
    traits: AdapterTraits = field(default_factory=AdapterTraits)
    jobs: list[PublishJob] = field(default_factory=list)

    async def __call__(self, job: PublishJob, *, timeout_s: float, memory_bytes: int) -> PublishResult:
        self.jobs.append(job)
        while self.blocked:
            await asyncio.sleep(0.005)
        if self.error is not None:
            raise self.error
        report = Report()
        if self.fail is not None:
            report.fail("config", "r", self.fail, "train it again")
            return PublishResult(ok=False, report=report)
        digest = AdapterDigest(hashlib.sha256((job.upload_dir / "adapter_model.safetensors").read_bytes()).hexdigest())
        if job.expected_digest not in (None, digest):
            report.fail("digest", None, "the content is another one")
            return PublishResult(ok=False, report=report)
        key = packed_key(digest, job.spec.base_id, job.row_type)
        index = PackedIndex(key, digest, job.spec.base_id, job.row_type, (), ())
        write_packed(job.out_path, index, np.empty(0, np.uint8))
        report.passed("tensors", "applied 2 of 2 tensors")
        files = tuple(sorted(p.relative_to(job.upload_dir).as_posix() for p in job.upload_dir.rglob("*") if p.is_file()))
        return PublishResult(ok=True, report=report, digest=digest, packed_key=key, files=files, traits=self.traits)


@dataclass
class SteeredTextCheck:
    """Stands in for the process that looks at text files: ``fail`` refuses them, else ``text`` is in force."""

    text: OwnText = field(default_factory=OwnText)
    prompts: list[list[int]] | None = None
    fail: str | None = None
    jobs: list[TextJob] = field(default_factory=list)

    async def __call__(self, job: TextJob) -> TextVerdict:
        self.jobs.append(job)
        report = Report()
        if self.fail is not None:
            report.fail("tokenizer", "tokenizer.json", self.fail, "save it again")
            return TextVerdict(report, OwnText())
        report.passed("tokenizer", "is in force", "tokenizer.json")
        return TextVerdict(report, self.text, self.prompts)


@dataclass
class Admin:
    """A running admin API. ``call`` sends the admin key unless told otherwise."""

    client: TestClient
    services: Services
    publish: SteeredPublish
    check: SteeredTextCheck
    key: str

    def call(self, method: str, path: str, *, key: str | None = "", **options: Any) -> Any:
        headers = {} if key is None else {"authorization": f"Bearer {key or self.key}"}
        return self.client.request(method, f"/admin/v1{path}", headers=headers, **options)

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Await ``work(*arguments)`` in the server's own loop."""
        assert self.client.portal is not None
        return self.client.portal.call(work, *arguments)

    def tenant(self, name: str = "acme") -> str:
        return str(self.call("POST", "/tenants", json={"name": name}).json()["id"])

    def start_upload(self, tenant: str, files: dict[str, bytes], name: str = "support", **extra: Any) -> Any:
        promised = [{"path": p, "size": len(b), "sha256": hashlib.sha256(b).hexdigest()} for p, b in files.items()]
        return self.call("POST", f"/tenants/{tenant}/uploads", json={"name": name, "files": promised, **extra})

    def send_parts(self, tenant: str, upload: Any, files: dict[str, bytes]) -> None:
        for part in upload["parts"]:
            body = files[part["path"]][part["offset"] : part["offset"] + part["size"]]
            path = f"/tenants/{tenant}/uploads/{upload['id']}/files/{part['path']}"
            answer = self.call("PUT", path, params={"part": part["part"]}, content=body)
            assert answer.status_code == 204, answer.text

    def push(self, tenant: str, weights: bytes = b"weights", name: str = "support", **files: bytes) -> Any:
        """Upload, complete and wait; the upload with its version."""
        content = {"adapter_config.json": b"{}", "adapter_model.safetensors": weights, **files}
        upload = self.start_upload(tenant, content, name).json()
        self.send_parts(tenant, upload, content)
        completed = self.call("POST", f"/tenants/{tenant}/uploads/{upload['id']}/complete")
        assert completed.status_code in (200, 202), completed.text
        return self.wait(tenant, upload["id"])

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for background work to make ``holds`` true."""
        give_up = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < give_up, "it never held"
            self.run(asyncio.sleep, 0.005)

    def wait(self, tenant: str, upload_id: str) -> Any:
        give_up = time.monotonic() + 60
        while (upload := self.call("GET", f"/tenants/{tenant}/uploads/{upload_id}").json())["state"] == "validating":
            assert time.monotonic() < give_up, "no verdict"
            self.run(asyncio.sleep, 0.005)
        return upload


DatabaseKind = Literal["sqlite", "postgresql"]


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database file, to be copied."""
    path = tmp_path_factory.mktemp("database") / "graftwork.db"
    runner.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server: PostgresServer) -> str:
    """The name of a migrated database, to be copied."""
    url = postgres_server.new_database()
    runner.upgrade(url)
    return url.rpartition("/")[2]


@pytest.fixture(scope="session")
def fresh_database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[DatabaseKind], AbstractContextManager[str]]:
    """``with fresh_database("sqlite" | "postgresql") as url``: a migrated database without rows; servers start when asked for."""

    @contextmanager
    def fresh(kind: DatabaseKind) -> Iterator[str]:
        if kind == "sqlite":
            file = shutil.copy(request.getfixturevalue("migrated_sqlite"), tmp_path_factory.mktemp("database") / "graftwork.db")
            yield f"sqlite:///{file}"
        else:
            server = request.getfixturevalue("postgres_server")
            url = server.new_database(request.getfixturevalue("migrated_postgres"))
            yield url
            server.drop_database(url)

    return fresh


@pytest.fixture(params=["sqlite", "postgresql"])
def database_kind(request: pytest.FixtureRequest) -> DatabaseKind:
    """A test that asks for a database runs on both; ``parametrize("database_kind", ["sqlite"], indirect=True)`` picks one."""
    return cast("DatabaseKind", request.param)


@pytest.fixture
def database_url(
    database_kind: DatabaseKind, fresh_database: Callable[[DatabaseKind], AbstractContextManager[str]]
) -> Iterator[str]:
    """A migrated database without rows."""
    with fresh_database(database_kind) as url:
        yield url


@pytest.fixture
def postgres_url(fresh_database: Callable[[DatabaseKind], AbstractContextManager[str]]) -> Iterator[str]:
    """A migrated PostgreSQL database without rows, for what SQLite has not."""
    with fresh_database("postgresql") as url:
        yield url


class Line:
    """The way to a server on loopback, which a test can hold or cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._flowing = threading.Event()
        self._flowing.set()
        self._is_cut = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Nothing passes, and nobody is told."""
        self._flowing.clear()

    def cut(self) -> None:
        """Connections end, new ones at once."""
        self._is_cut = True
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """All passes again, what was held too."""
        self._is_cut = False
        self._flowing.set()

    def close(self) -> None:
        self.mend()
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                if self._is_cut:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, drain: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                drain.sendall(data)
        with suppress(OSError):
            drain.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def line(postgres_server: PostgresServer) -> Iterator[Line]:
    """A way to PostgreSQL; ``line.port`` in place of its own."""
    made = Line(postgres_server.port)
    yield made
    made.close()


@pytest.fixture(scope="session")
def bare_spec() -> BaseSpec:
    """A base that has a name and nothing else."""
    return BaseSpec(
        base_id="b" * 64, name=BASE_NAME, architecture="LlamaForCausalLM", num_layers=0, sites=(), module_names=frozenset()
    )


@pytest.fixture
def data_settings(tmp_path: Path, database_kind: DatabaseKind, database_url: str) -> Settings:
    """Settings on a fresh data directory with a migrated database; SQLite's lies in it."""
    data = tmp_path / "data"
    data.mkdir()
    if database_kind == "sqlite":
        shutil.move(database_url.removeprefix("sqlite:///"), data / "graftwork.db")
        database_url = ""
    limits = UploadLimits(part_bytes=1024, max_bytes=1 << 20)
    return Settings(
        data_dir=data,
        model_dir=tmp_path / BASE_NAME,
        upload=limits,
        publish=PublishLimits(timeout=60.0),
        database_url=database_url,
    )


@pytest.fixture
def start_admin(data_settings: Settings, bare_spec: BaseSpec) -> Callable[..., AbstractContextManager[Admin]]:
    """``start_admin(steer=…, spec=…, now=…, **settings)``: a running admin API on the test's data directory."""

    @contextmanager
    def start(
        steer: Any = None,
        spec: BaseSpec = bare_spec,
        now: Callable[[], float] | None = None,
        measure: Any = None,
        **changes: Any,
    ) -> Iterator[Admin]:
        steer, check = steer or SteeredPublish(), SteeredTextCheck()
        settings = replace(data_settings, **changes)
        clock = {"now": now} if now else {}
        services = build_services(settings, spec, open_store(settings.store), run=steer, check=check, measure=measure, **clock)

        @asynccontextmanager
        async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
            async with running(services):
                yield

        app = FastAPI(lifespan=lifespan)
        install_error_handlers(app)
        app.include_router(admin_router(services))
        with TestClient(app, raise_server_exceptions=False) as client:
            yield Admin(client, services, steer, check, settings.admin_key_file.read_text().strip())

    return start


@pytest.fixture
def admin(start_admin: Callable[..., AbstractContextManager[Admin]]) -> Iterator[Admin]:
    """A running admin API."""
    with start_admin() as started:
        yield started
