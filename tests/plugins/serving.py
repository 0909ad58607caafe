"""A tiny random base with a tokenizer, PEFT adapters for it, and a real `graftwork serve` on loopback.

A server stands on one of two backends: ``local`` (SQLite and a folder) or ``shared`` (PostgreSQL and S3). Torch and its friends are
imported where they are used, since every test run loads this file.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import openai
import pytest
from compiled_kernels import KERNEL_DIR

from graftwork_adapters.store import ObjectStore, StoreConfig
from graftwork_adapters.stores import open_store
from graftwork_platform.admin.client import AdminClient
from graftwork_platform.admin.push import push
from graftwork_platform.admin.schemas import VersionOut
from graftwork_platform.settings import ClientSettings

BACKENDS = ("local", "shared")

START_S = 300.0
EXACT = {"ignore_eos": True, "return_token_ids": True}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: one token a byte, and the chat's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, **{c: i + 3 for i, c in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>", additional_special_tokens=["<|endoftext|>"]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base") / "tiny-base"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def make_adapter(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("adapters")

    def make(name: str, seed: int, **config: Any) -> Path:
        folder = root / name
        if not folder.exists():
            torch.manual_seed(1000 + seed)
            settings = {"r": 8, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
            base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
            get_peft_model(base, LoraConfig(**settings, init_lora_weights=False)).save_pretrained(folder)
        return folder

    return make


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """One `graftwork serve` process, its admin API and its command line."""

    model: Path
    data_dir: Path
    log: Path
    arguments: list[str] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    store_config: StoreConfig | None = None
    admin_server: Server | None = None  # which made the admin key, where it was another one

    @property
    def store(self) -> ObjectStore:
        """Its object store."""
        return open_store(self.store_config or StoreConfig(str(self.data_dir / "objects")))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, on another port if the chosen one has been taken since: a free one is only free at the moment of asking."""
        try:
            self._start()
        except AssertionError:
            if "cannot listen on" not in self.log.read_text():
                raise
            self.port = free_port()
            self._start()

    def _start(self) -> None:
        command = [
            *(sys.executable, "-m", "graftwork_platform.cli", "serve", "--model", str(self.model)),
            *("--data-dir", str(self.data_dir), "--port", str(self.port), "--kv-memory", str(64 << 20)),
            *("--adapter-page", str(64 << 10), "--kernel-dir", str(KERNEL_DIR), *self.arguments),
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (min(1024, hard), hard))  # what users have, not test runners
        self.wait_ready()

    def wait_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"{self.url}/readyz", timeout=5).status_code == 200:
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def stop(self, number: int = signal.SIGINT) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(120)
        self.process = None
        return code

    @property
    def admin_key(self) -> str:
        return ((self.admin_server or self).data_dir / "admin.key").read_text().strip()

    def cli(self, *arguments: str, check: bool = True) -> Any:
        command = [sys.executable, "-m", "graftwork_platform.cli", *arguments, "--json"]
        environment = {**os.environ, "GRAFTWORK_URL": self.url, "GRAFTWORK_ADMIN_KEY": self.admin_key}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
        if check and done.returncode != 0:
            raise AssertionError(f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        return json.loads(done.stdout)

    def tenant_with(self, tenant: str, adapters: dict[str, Path], default: str | None = None) -> str:
        """Make a tenant, push its adapters, and return a key of it; through the admin API, as the command line does."""
        with AdminClient(ClientSettings(self.url, self.admin_key)) as client:
            client.create_tenant(tenant)
            for name, folder in adapters.items():
                version = push(client, folder, tenant=tenant, name=name, timeout=120, sent=lambda _done, _total: None)
                assert version.state == "ready", version.report
            return client.create_key(tenant, default).key

    def push(self, folder: Path, *, tenant: str, name: str) -> VersionOut:
        """Publish a folder and return the verdict, as the command line does in a process of its own."""
        with AdminClient(ClientSettings(self.url, self.admin_key)) as client:
            return push(client, folder, tenant=tenant, name=name, timeout=120, sent=lambda _done, _total: None)

    def client(self, key: str, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120, _strict_response_validation=True, **options
        )

    def lenient(self, client: openai.OpenAI) -> openai.OpenAI:
        """The strict client refuses every streamed text completion, OpenAI's own too: its type has no null ``finish_reason``."""
        return openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0, timeout=120)

    def complete(self, client: openai.OpenAI, model: str, prompt: list[int], count: int) -> list[int]:
        """``count`` greedy tokens in one answer."""
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=count, temperature=0, extra_body=EXACT)
        return list((answer.choices[0].model_extra or {})["token_ids"])

    def stream_tokens(self, client: openai.OpenAI, model: str, prompt: list[int], count: int) -> list[int]:
        """The same as a stream."""
        return [token for tokens in self.streamed(client, model, prompt, count) for token in tokens]

    def streamed(self, client: openai.OpenAI, model: str, prompt: list[int], count: int) -> Iterator[list[int]]:
        """The same as they come."""
        chunks = self.lenient(client).completions.create(
            model=model, prompt=prompt, max_tokens=count, temperature=0, stream=True, extra_body=EXACT
        )
        yield from ((chunk.choices[0].model_extra or {}).get("token_ids") or [] for chunk in chunks)

    def usage_rows(self, tenant: str) -> list[dict[str, Any]]:
        """All usage rows of a tenant."""
        rows: list[dict[str, Any]] = []
        query, headers = {"tenant": tenant, "limit": "100"}, {"Authorization": f"Bearer {self.admin_key}"}
        while True:
            page = httpx2.get(f"{self.url}/admin/v1/usage", params=query, headers=headers, timeout=60).json()
            rows += page["data"]
            if not page["has_more"]:
                return rows
            query["after"] = page["last_id"]

    def wait_usage(self, tenant: str, count: int, timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """All usage rows of a tenant, once there are ``count``: a row follows its stream's end within moments."""
        deadline = time.monotonic() + timeout_s
        while len(rows := self.usage_rows(tenant)) < count:
            assert time.monotonic() < deadline, f"{len(rows)} usage rows of {count}"
            time.sleep(0.05)
        assert len(rows) == count
        return rows

    def wait_until_idle(self, timeout_s: float = 120.0) -> dict[str, float]:
        """The metrics, once no request runs or waits, and younger than the call: the engine tells them once a second."""
        time.sleep(1.2)
        deadline = time.monotonic() + timeout_s
        while True:
            metrics = self.metrics()
            if metrics.get("graftwork_engine_requests_running") == 0 == metrics["graftwork_engine_requests_waiting"]:
                return metrics
            assert time.monotonic() < deadline, metrics
            time.sleep(0.2)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its full name."""
        lines = httpx2.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line and not line.startswith("#")}

    def process_ids(self, module: str) -> list[int]:
        """Ids of this server's children that run ``module``."""
        assert self.process is not None
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if module.encode() in command and parent == self.process.pid:
                    found.append(int(folder.name))
        return found


@dataclass(frozen=True)
class SharedBackend:
    """What several servers may share."""

    database_url: str
    store: StoreConfig

    @property
    def arguments(self) -> list[str]:
        """For `graftwork serve`."""
        endpoint = self.store.s3_endpoint
        assert endpoint is not None
        return ["--database-url", self.database_url, "--object-store", self.store.url, "--s3-endpoint", endpoint]


@pytest.fixture(scope="session")
def started_servers() -> list[Server]:
    """All servers of this run."""
    return []


@pytest.fixture(scope="session")
def stopped_before_backends(postgres_server: Any, s3_server: Any, started_servers: list[Server]) -> Iterator[None]:
    """Made after the servers that others stand on, and so ended before them."""
    yield
    stop_all(started_servers)


def stop_all(servers: list[Server]) -> None:
    """Stop those that run, all at the same time."""
    running = [server for server in servers if server.process is not None]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(running))) as pool:
        list(pool.map(Server.stop, running))


@pytest.fixture(scope="session")
def new_shared_backend(request: pytest.FixtureRequest) -> Callable[[], SharedBackend]:
    """A fresh database on PostgreSQL and an empty store on S3; the servers behind them are started at the first use."""

    def make() -> SharedBackend:
        request.getfixturevalue("stopped_before_backends")
        postgres, s3 = request.getfixturevalue("postgres_server"), request.getfixturevalue("s3_server")
        return SharedBackend(postgres.new_database(), StoreConfig(f"s3://{s3.bucket}/{uuid4().hex}", s3_endpoint=s3.endpoint))

    return make


@pytest.fixture(scope="session")
def start_server(
    tiny_base: Path,
    tmp_path_factory: pytest.TempPathFactory,
    new_shared_backend: Callable[[], SharedBackend],
    started_servers: list[Server],
) -> Iterator[Callable[..., Server]]:
    """``start_server(*arguments, on=…)``: ``on`` is a backend's name, or a `SharedBackend` that another server has too."""

    def start(
        *arguments: str, data_dir: Path | None = None, model: Path | None = None, on: str | SharedBackend = "local"
    ) -> Server:
        folder = tmp_path_factory.mktemp("server")
        server = Server(model or tiny_base, data_dir or folder / "data", folder / "log.txt", list(arguments))
        backend = new_shared_backend() if on == "shared" else on
        if isinstance(backend, SharedBackend):
            server.arguments += backend.arguments
            server.store_config = backend.store
        started_servers.append(server)
        server.start()
        return server

    yield start
    stop_all(started_servers)


def reference_tokens(base: Path, adapter: Path | None, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by transformers and PEFT in fp32, end-of-sequence ignored."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return [int(token) for token in ids[0, len(prompt) :]]


@pytest.fixture(scope="session")
def reference(tiny_base: Path) -> Callable[[Path | None, list[int], int], list[int]]:
    """Greedy tokens by PEFT itself, remembered."""
    known: dict[tuple[Path | None, tuple[int, ...], int], list[int]] = {}

    def tokens(adapter: Path | None, prompt: list[int], count: int) -> list[int]:
        key = (adapter, tuple(prompt), count)
        if key not in known:
            known[key] = reference_tokens(tiny_base, adapter, prompt, count)
        return known[key]

    return tokens


@pytest.fixture(scope="module")
def adapters(make_adapter: Callable[..., Path]) -> dict[str, Path]:
    return {
        "plain": make_adapter("plain", 1, r=4, lora_alpha=16),
        "stable": make_adapter("stable", 2, r=8, use_rslora=True),
        "keys-only": make_adapter("keys-only", 3, r=5, lora_alpha=60, target_modules=["k_proj", "v_proj"]),
    }


@pytest.fixture(scope="module", params=BACKENDS)
def server(request: pytest.FixtureRequest, start_server: Callable[..., Server]) -> Server:
    """One for the tests of a module, on each backend."""
    return start_server("--dtype", "float32", on=request.param)


@pytest.fixture(scope="module")
def key(server: Server, adapters: dict[str, Path]) -> str:
    return server.tenant_with("acme", adapters, default="plain")
