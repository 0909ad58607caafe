"""CPU time of the real API process per streamed token: real HTTP, real wire, and an engine by script. Knows no model's arithmetic.

    python benchmarks/api.py .data/base/SmolLM2-135M-Instruct

Rounds of short and long answers alternate; what the longer ones cost more, over the tokens that they have more, is the cost of a
token, free of admission and start-up. CPU time is the process's own (user and system), so a busy machine changes it little.
``--profile`` runs the API process under cProfile, which makes everything dearer and Python functions most of all: it is for finding
out where time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pstats
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from graftwork_platform.admin.client import AdminClient, CallFailed
from graftwork_platform.serve.api_process import ApiConfig, encode_config
from graftwork_platform.settings import ClientSettings, Settings
from graftwork_platform.text.tokenizer import Tokenizer

ENGINE = Path(__file__).with_name("scripted_engine.py")
STORY = (
    "When the lighthouse keeper counted the ships that morning, there was one more than the day before: a small grey cutter "
    "without a name, at anchor where nobody anchors. He wrote it down (07:40, wind NW 4, visibility good), drank his coffee and, "
    "as the rules ask, hoisted “What is your ship's name?”. Nothing moved on deck. At noon the café's owner rowed out with bread, "
    "3 l of milk and a letter; she came back with none of it and said only: “They pay in advance.”\n\n"
)
PROFILED = """
import cProfile, sys
from graftwork_platform.serve.api_process import main
cProfile.run("main()", sys.argv.pop(1))
"""
SETTLE_S = 0.8
"""After the last stream's end usage goes to the database; a checkpoint and its write are awaited."""


@dataclass(frozen=True)
class Cpu:
    """Seconds of a process."""

    user: float
    system: float

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(self.user - other.user, self.system - other.system)

    @property
    def total(self) -> float:
        """Both."""
        return self.user + self.system


@dataclass(frozen=True)
class Report:
    """Microseconds per streamed token, and milliseconds per request for everything else."""

    streams: int
    tokens_per_s: float
    us_per_token: float
    us_per_token_user: float
    us_per_token_system: float
    ms_per_request: float
    frames_per_token: float
    rounds: list[float]


def cpu_of(pid: int) -> Cpu:
    """What a process has used so far, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return Cpu(int(fields[11]) / tick, int(fields[12]) / tick)


@contextmanager
def process(command: list[str], stdin: bytes, log: Path, fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A child that reads ``stdin``, logs to a file, and is told to end on the way out."""
    with log.open("wb") as stderr:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stderr, pass_fds=fds)
    try:
        if child.stdin is None:
            raise AssertionError("no pipe to the child")
        child.stdin.write(stdin)
        child.stdin.close()
        yield child
    finally:
        child.send_signal(signal.SIGINT)  # SIGTERM would end a profiled process before it has written its profile
        child.wait(30)


@dataclass(frozen=True)
class Target:
    """A running server."""

    port: int
    key: str
    pid: int
    model: str


@contextmanager
def serving(options: argparse.Namespace, folder: Path, profile: Path | None) -> Iterator[Target]:
    """A server whose engine is the script, on a fresh data directory, with one tenant."""
    settings = Settings(data_dir=folder / "data", model_dir=options.base.absolute())
    settings.data_dir.mkdir()
    migrate = [sys.executable, "-m", "graftwork_migrations", "upgrade", "--database-url", "-"]
    subprocess.run(migrate, input=settings.database.encode(), check=True, stdout=subprocess.DEVNULL)
    ids = Tokenizer.from_dir(options.base).encode(STORY, add_special_tokens=False)
    endpoint = f"ipc://{folder}/engine"
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
        engine = [sys.executable, str(ENGINE), endpoint, str(options.step_ms / 1000)]
        stack.enter_context(process(engine, json.dumps(ids).encode(), folder / "engine.log"))
        fd = listener.fileno()
        program = ["-m", "graftwork_platform.serve.api_process"] if profile is None else ["-c", PROFILED, str(profile)]
        command = [sys.executable, *program, "--fd", str(fd), "--parent", str(os.getpid())]
        api = stack.enter_context(process(command, encode_config(ApiConfig(settings, endpoint)), folder / "api.log", (fd,)))
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while not is_ready(url):
            if time.monotonic() > deadline or api.poll() is not None:
                raise SystemExit(f"the API process did not become ready: {(folder / 'api.log').read_text()}")
            time.sleep(0.2)
        with AdminClient(ClientSettings(url, settings.admin_key_file.read_text().strip())) as admin:
            tenant = admin.create_tenant("load")
            key = admin.create_key(str(tenant.id), None).key
        yield Target(port, key, api.pid, settings.base_name)


def is_ready(url: str) -> bool:
    """True once the API process answers and has an engine."""
    try:
        with AdminClient(ClientSettings(url, None)) as probe:
            return probe.is_ready()
    except CallFailed:
        return False


def request_of(target: Target, chat: bool, num_tokens: int, number: int) -> bytes:
    """A streaming request for ``num_tokens``, as bytes."""
    words = f"Story {number}, please."
    prompt = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    fixed = {"model": target.model, "max_tokens": num_tokens, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({**prompt, **fixed}).encode()
    head = (
        f"POST /v1/{'chat/' if chat else ''}completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {target.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


async def read_stream(target: Target, request: bytes, num_tokens: int) -> int:
    """Send a request and read its answer to the end; how many frames came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    if b" 200 " not in answer[:16] or b"[DONE]" not in answer or b'"completion_tokens":%d,' % num_tokens not in answer:
        raise SystemExit(f"an answer is not what was asked for: {answer[:300]!r} … {answer[-300:]!r}")
    return answer.count(b"data: {")


async def load(target: Target, chat: bool, streams: int, num_tokens: int) -> tuple[Cpu, int]:
    """That many streams at the same time: what they cost the API process, and how many frames came."""
    before = cpu_of(target.pid)
    requests = [request_of(target, chat, num_tokens, number) for number in range(streams)]
    frames = await asyncio.gather(*(read_stream(target, request, num_tokens) for request in requests))
    await asyncio.sleep(SETTLE_S)
    return cpu_of(target.pid) - before, sum(frames)


async def measure(options: argparse.Namespace, target: Target) -> Report:
    """Rounds of short and long answers, and the median of their differences."""
    await load(target, options.chat, options.streams, options.short)  # caches, imports, threads
    extra = options.streams * (options.long - options.short)
    tokens, requests, frames = [], [], 0
    for _ in range(options.rounds):
        short, few = await load(target, options.chat, options.streams, options.short)
        long, many = await load(target, options.chat, options.streams, options.long)
        spent = long - short
        tokens.append(Cpu(spent.user / extra, spent.system / extra))
        requests.append(short.total / options.streams - tokens[-1].total * options.short)
        frames += many - few
    middle = sorted(tokens, key=lambda cpu: cpu.total)[len(tokens) // 2]
    return Report(
        streams=options.streams,
        tokens_per_s=round(options.streams / options.step_ms * 1000, 1),
        us_per_token=round(middle.total * 1e6, 1),
        us_per_token_user=round(middle.user * 1e6, 1),
        us_per_token_system=round(middle.system * 1e6, 1),
        ms_per_request=round(statistics.median(requests) * 1e3, 2),
        frames_per_token=round(frames / (extra * options.rounds), 3),
        rounds=[round(cpu.total * 1e6, 1) for cpu in tokens],
    )


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="the base model's folder, for its tokenizer and template")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--short", type=int, default=32, help="tokens of a short answer")
    parser.add_argument("--long", type=int, default=160, help="tokens of a long answer")
    parser.add_argument("--step-ms", type=float, default=40.0, help="time between two tokens of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chat", action="store_true", help="chat completions; text completions by default")
    parser.add_argument("--profile", action="store_true", help="print the 40 functions that took longest, and no figures")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="graftwork-") as temporary:
        folder = Path(temporary)
        profile = folder / "profile" if options.profile else None
        with serving(options, folder, profile) as target:
            report = asyncio.run(measure(options, target))
        if profile is not None:
            pstats.Stats(str(profile)).sort_stats("tottime").print_stats(40)
            return
    if options.json:
        print(json.dumps(asdict(report)))
        return
    print(f"{report.us_per_token} µs of CPU time per token ({report.us_per_token_user} user, {report.us_per_token_system} system)")
    frames = f"{report.frames_per_token} frames per token"
    print(f"{report.streams} streams, {report.tokens_per_s} tokens/s, {frames}, rounds {report.rounds}")
    print(f"{report.ms_per_request} ms per request beside its tokens")


if __name__ == "__main__":
    main()
