"""CPU time of the real API process per streamed token: real HTTP, real wire, and an engine by script. Knows no model's arithmetic.

    python benchmarks/api.py --base .data/base/SmolLM2-135M-Instruct

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from graftwork_platform.admin.client import AdminClient, CallFailed
from graftwork_platform.serve.api_process import ApiConfig, encode_config
from graftwork_platform.settings import ClientSettings, Settings
from graftwork_platform.text.tokenizer import Tokenizer
from results import BenchmarkFailed, Claim, Part, Results
from runs import add_base, add_output, check_base, conclude

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
ROUNDS = 3
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
        try:
            child.wait(30)
        finally:
            child.kill()


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
                raise BenchmarkFailed(f"the API process did not become ready: {(folder / 'api.log').read_text()}")
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
        raise BenchmarkFailed(f"an answer is not what was asked for: {answer[:300]!r} … {answer[-300:]!r}")
    return answer.count(b"data: {")


async def load(target: Target, chat: bool, streams: int, num_tokens: int) -> tuple[Cpu, int]:
    """That many streams at the same time: what they cost the API process, and how many frames came."""
    before = cpu_of(target.pid)
    requests = [request_of(target, chat, num_tokens, number) for number in range(streams)]
    frames = await asyncio.gather(*(read_stream(target, request, num_tokens) for request in requests))
    await asyncio.sleep(SETTLE_S)
    return cpu_of(target.pid) - before, sum(frames)


async def measure(options: argparse.Namespace, target: Target) -> Part:
    """Rounds of short and long answers, and the medians of what they cost."""
    kind, extra = "chat" if options.chat else "text", options.streams * (options.long - options.short)
    names = ("streams", "short", "long", "step_ms", "rounds")
    part = Part(kind, {}, {name: getattr(options, name) for name in names})
    await load(target, options.chat, options.streams, options.short)  # caches, imports, threads
    for number in range(options.rounds):
        short, few = await load(target, options.chat, options.streams, options.short)
        long, many = await load(target, options.chat, options.streams, options.long)
        spent = long - short
        reading = {
            "us_per_token": 1e6 * spent.total / extra,
            "us_per_token_user": 1e6 * spent.user / extra,
            "us_per_token_system": 1e6 * spent.system / extra,
            "ms_per_request": 1e3 * (short.total - spent.total / extra * options.short * options.streams) / options.streams,
            "frames_per_token": (many - few) / extra,
        }
        part.readings.append({name: round(value, 3) for name, value in reading.items()})
        print(f"round {number + 1} of {options.rounds}: {part.readings[-1]['us_per_token']:.1f} µs a token", file=sys.stderr)
    load_of = f"{options.streams} streams, {options.streams / options.step_ms * 1000:,.0f} tokens/s, {kind} completions"
    figures = {"us_per_token": ("CPU time of a streamed token", "µs"), "ms_per_request": ("CPU time of a request", "ms")}
    for name, (title, unit) in figures.items():
        row = f"API process, {load_of}: {title}"
        part.claims.append(Claim.of(row, "", [reading[name] for reading in part.readings], unit, needed=ROUNDS))
    return part


def run(options: argparse.Namespace, results: Results) -> None:
    """The load into ``results``; with ``--profile`` where time went is printed instead."""
    with tempfile.TemporaryDirectory(prefix="graftwork-") as temporary:
        folder = Path(temporary)
        profile = folder / "profile" if options.profile else None
        with serving(options, folder, profile) as target:
            part = asyncio.run(measure(options, target))
        if profile is None:
            results.put(part)
        else:
            pstats.Stats(str(profile)).sort_stats("tottime").print_stats(40)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_base(parser, ", for its tokenizer and template")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--short", type=int, default=32, help="tokens of a short answer")
    parser.add_argument("--long", type=int, default=160, help="tokens of a long answer")
    parser.add_argument("--step-ms", type=float, default=40.0, help="time between two tokens of a stream")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--chat", action="store_true", help="chat completions; text completions by default")
    parser.add_argument("--profile", action="store_true", help="print the 40 functions that took longest, and no figures")
    add_output(parser)
    options = parser.parse_args(arguments)
    check_base(parser, options)
    if not (options.base / "tokenizer.json").is_file():
        parser.error(f"--base {options.base} has no tokenizer.json; `make base` prepares one in .data/base")
    for name in ("streams", "short", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: give at least 1")
    if options.long <= options.short:
        parser.error(f"--long {options.long}: give more than --short {options.short}")
    if not options.step_ms > 0:
        parser.error(f"--step-ms {options.step_ms}: give more than 0")
    return options


def main(arguments: Sequence[str]) -> int:
    """Print a table or JSON; 1 if the measurement failed, 130 if it was interrupted."""
    options = parse(arguments)
    return conclude("api", options.base.name, options, lambda results: run(options, results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
