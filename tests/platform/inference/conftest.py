"""A whole API process on loopback: real services, real HTTP, and an engine that says what the test tells it to."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import httpx
import openai
import pytest
import tokenizers
import uvicorn
from fastapi import FastAPI
from sqlalchemy import create_engine, select, text
from sqlalchemy.orm import Session
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.stores import open_store
from graftwork_engine.messages import Orphans, OutItem, Ready
from graftwork_engine.streams import GenerationRequest
from graftwork_migrations.runner import upgrade
from graftwork_platform.app import create_app
from graftwork_platform.catalog.facts import VersionFacts, facts_to_json
from graftwork_platform.context import Services, build_services
from graftwork_platform.ids import parse, uuid7
from graftwork_platform.journal.records import Close, Reading
from graftwork_platform.models import Adapter, AdapterVersion, Usage, VersionState
from graftwork_platform.settings import Settings
from graftwork_platform.text.model_text import ModelText
from graftwork_platform.text.tokenizer import Tokenizer
from graftwork_platform.usage import UsageRow

BASE = "tiny-base"
MAX_MODEL_LEN = 256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{% if 'forbidden' in m.content %}{{ raise_exception('that word is forbidden') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Script = Callable[[GenerationRequest], AsyncIterator[OutItem]]


def build_model_dir(path: Path) -> Path:
    """A byte-level BPE tokenizer with BOS 1 and EOS 2, a ChatML template, and a config."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(["hello world assistant user system"] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    (path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": backend.get_vocab_size()}))
    return path


class ScriptedStreams:
    """Runs the scripts of a group's requests side by side. ``tasks``: those that have not ended."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.items: asyncio.Queue[tuple[str, OutItem | Exception]] = asyncio.Queue()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, request: GenerationRequest) -> None:
        self.engine.requests.append(request)
        script = self.engine.scripts.popleft() if self.engine.scripts else self.engine.say("hello world")
        self.tasks[request.request_id] = asyncio.create_task(self._run(request, script))

    async def _run(self, request: GenerationRequest, script: Script) -> None:
        try:
            async for item in script(request):
                self.items.put_nowait((request.request_id, item))
        except Exception as error:  # noqa: BLE001 — the reader is told
            self.items.put_nowait((request.request_id, error))

    def __aiter__(self) -> ScriptedStreams:
        return self

    async def __anext__(self) -> OutItem:
        while self.tasks:
            request_id, item = await self.items.get()
            if request_id not in self.tasks:
                continue
            if isinstance(item, Exception) or item.finish is not None:
                await self.end(request_id)
            if isinstance(item, Exception):
                raise item
            return item
        raise StopAsyncIteration

    async def stop(self, request_id: str, output_index: int) -> None:
        self.engine.stopped.append((request_id, output_index))
        await self.end(request_id)

    async def end(self, request_id: str) -> None:
        task = self.tasks.pop(request_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass
class ScriptedEngine:
    """Follows the next script for each request, or says "hello world"."""

    tokenizer: Tokenizer
    scripts: deque[Script] = field(default_factory=deque)
    requests: list[GenerationRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    stopped: list[tuple[str, int]] = field(default_factory=list)
    healthy: bool = True
    info: Ready | None = None
    stats: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.info = Ready(1, "e1", 1, "base-id", MAX_MODEL_LEN, 4096)

    async def __aenter__(self) -> ScriptedEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.healthy = False

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[ScriptedStreams]:
        group = ScriptedStreams(self)
        try:
            yield group
        finally:
            for request_id in list(group.tasks):
                await group.end(request_id)
                self.aborted.append(request_id)

    async def claim_orphans(self, request_ids: Sequence[str], *, wait_s: float) -> Orphans:
        return Orphans("e1", [], [])

    async def settle_orphans(self, request_ids: Sequence[str]) -> None:
        pass

    def say(self, words: str, *, then: Exception | None = None, pause: float = 0.0, cached: int = 0, stop: bool = True) -> Script:
        """One token an item, then EOS; or the first ``max_tokens`` of them; or an error."""

        async def script(request: GenerationRequest) -> AsyncIterator[OutItem]:
            ids = self.tokenizer.encode(words, add_special_tokens=False)
            last = len(ids)
            for place, token_id in enumerate([*ids, 2] if stop else ids):
                reason = "stop" if place == last else "length" if place + 1 == request.sampling.max_tokens else None
                if place == last and then is not None:
                    break
                yield OutItem(request.request_id, place, [token_id], finish=reason, cached_tokens=cached if place == 0 else 0)
                if reason is not None:
                    return
                await asyncio.sleep(pause)
            if then is not None:
                raise then

        return script


@dataclass
class Server:
    """The process under test, and what a test may see of it."""

    url: str
    database: str
    engine: ScriptedEngine
    services: Services
    tokenizer: Tokenizer
    loop: asyncio.AbstractEventLoop
    tenant_id: UUID
    key: str
    key_id: UUID
    other_key: str
    http: httpx.Client  # one for all: each new client builds a TLS context
    openai: openai.OpenAI
    app: FastAPI

    def client(self, key: str | None = None) -> openai.OpenAI:
        """The official client, strict about every answer's shape, without retries."""
        return self.openai.with_options(api_key=key or self.key)

    def headers(self, **more: str | bytes) -> dict[str, str | bytes]:
        """What every request needs."""
        return {"authorization": f"Bearer {self.key}", "content-type": "application/json", **more}

    def post(self, path: str, body: dict | bytes, **headers: str | bytes) -> httpx.Response:
        """A request below ``/v1``, its body as JSON or as it is."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(f"{self.url}/v1/{path}", content=content, headers=self.headers(**headers))

    def usage(self, request_id: str) -> Usage:
        """The one row of a request, which is in the database a moment after its end; read through a connection of its own."""
        key = parse("req", request_id)
        engine = create_engine(self.database)
        deadline = time.monotonic() + 60
        rows: list[Usage] = []
        while not rows and time.monotonic() < deadline:
            time.sleep(0.002)
            with Session(engine) as session:
                rows = list(session.scalars(select(Usage).where(Usage.request_id == key)))
        engine.dispose()
        [row] = rows
        return row

    def durable(self, request_id: str) -> list[UsageRow]:
        """The final rows of a request in the journal, as whoever comes after a crash would read them."""
        key = parse("req", request_id)
        segments = sorted((self.services.settings.data_dir / "journal").glob("*/*"))
        records = [record for path in segments if path.is_file() for record in Reading(path.read_bytes())]
        return [record.row for record in records if isinstance(record, Close) and record.row.request_id == key]

    def add_adapter(
        self, name: str, versions: int = 1, *, row_type: str | None = None, facts: VersionFacts = VersionFacts()
    ) -> list[AdapterVersion]:
        """Ready versions of an adapter of the first tenant, without any blob; all of one row type, and with the same facts."""
        engine = create_engine(self.database)
        with Session(engine, expire_on_commit=False) as session, session.begin():
            session.execute(text("PRAGMA busy_timeout=60000"))
            adapter = Adapter(id=uuid7(), tenant_id=self.tenant_id, name=name, next_version=versions + 1, created_at=1000)
            session.add(adapter)
            session.flush()
            rows = [_version(self.tenant_id, adapter.id, number, f"{name}{number}") for number in range(1, versions + 1)]
            for row in rows:
                row.row_type, row.facts = row_type, facts_to_json(facts)
            session.add_all(rows)
        engine.dispose()
        return rows


def _version(tenant_id: UUID, adapter_id: UUID, number: int, seed: str) -> AdapterVersion:
    return AdapterVersion(
        id=uuid7(),
        tenant_id=tenant_id,
        adapter_id=adapter_id,
        number=number,
        digest=seed.encode().hex().rjust(64, "0"),
        manifest_sha256="0" * 64,
        state=VersionState.READY,
        report=[],
        created_at=1000,
        ready_at=1000,
    )


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def model_text(model_dir: Path) -> ModelText:
    return ModelText.from_dir(model_dir)


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, model_text: ModelText) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("data")
    settings = Settings(data_dir=data, model_dir=model_dir, served_name=BASE, request_timeout=30.0)
    upgrade(settings.database)
    started, stop = threading.Event(), threading.Event()
    found: list[Server] = []

    async def main() -> None:
        spec = BaseSpec("base-id", BASE, "LlamaForCausalLM", 1, (), frozenset())
        services = build_services(settings, spec, open_store(settings.store))
        engine = ScriptedEngine(model_text.tokenizer)
        app = create_app(services, engine, model_text)
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        tenant, other = await services.tenants.create("acme"), await services.tenants.create("globex")
        row, key = await services.keys.create(tenant.id, adapter=None)
        _, other_key = await services.keys.create(other.id, adapter=None)
        port = server.servers[0].sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        url = f"http://127.0.0.1:{port}"
        http = httpx.Client(base_url=url, timeout=60)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key.text, max_retries=0, timeout=60, _strict_response_validation=True)
        tokenizer = model_text.tokenizer
        keys = (key.text, row.id, other_key.text)
        found.append(Server(url, settings.database, engine, services, tokenizer, loop, tenant.id, *keys, http, client, app))
        started.set()
        await asyncio.to_thread(stop.wait)
        server.should_exit = True
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="server")
    thread.start()
    while not started.wait(0.05):
        assert thread.is_alive(), "the server did not start"
    yield found[0]
    stop.set()
    thread.join()


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    """The module's server with a well-behaved engine."""
    engine = running_server.engine
    engine.scripts.clear()
    engine.requests.clear()
    engine.aborted.clear()
    engine.stopped.clear()
    engine.healthy = True
    yield running_server
    assert not engine.scripts, "a script was not used"
