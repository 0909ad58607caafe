"""The serving benchmark on scripted servers: loads, pairing, claims, and what is refused."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import arena
import cold_start
import kernels
import load
import machine
import operator_cases
import serving_rows
from load import Felt, Load, Target
from results import BenchmarkFailed, Report
from servers import HttpContender, free_port, process


def script(name: str) -> Any:
    """A benchmark by its file: another module may have the name."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


serving = script("serving")
FLOORS = machine.Machine("", (), 2, 2, "", 10e9, 2.0, 1e9, 1e9)


@dataclass
class Scripted:
    """An OpenAI-like server that streams as many tokens as it is asked for, or fewer, or an error."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    missing_tokens: int = 0
    status: int = 200
    error: str | None = None
    url: str = ""


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    script = Scripted()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.bodies.append(body)
            self.send_response(script.status)
            self.end_headers()
            count = body["max_tokens"] - script.missing_tokens
            events: list[Any] = [{"choices": [{"text": "x"}]} for _ in range(count)]
            events.append({"choices": [], "usage": {"completion_tokens": count}})
            if script.error is not None:
                events = [{"error": {"message": script.error}}]
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_port}"
    yield script
    server.shutdown()
    thread.join()
    server.server_close()


def test_load_asks_for_what_it_says(scripted: Scripted) -> None:
    asked = Load(("base", "a0"), requests=6, streams=3, seed=5, input=8, output=4, shared_prefix=2, vocab=300)
    felt = asyncio.run(load.run(Target(scripted.url, "secret"), asked))
    assert (felt.requests, felt.errors) == (6, [])
    assert felt.output_tokens_per_s == pytest.approx(24 / felt.seconds, rel=0.05)
    assert len(felt.ttft_ms) == len(felt.inter_token_ms) == 2
    assert sorted(body["model"] for body in scripted.bodies) == ["a0"] * 3 + ["base"] * 3
    assert len({tuple(body["prompt"][:2]) for body in scripted.bodies}) == 1
    assert len({tuple(body["prompt"]) for body in scripted.bodies}) == 6
    for body in scripted.bodies:
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"], len(body["prompt"])) == (4, True, 0, 8)
        assert all(load.FIRST_TOKEN_ID <= token < 300 for token in body["prompt"])


def test_fields_of_a_target_replace_the_model(scripted: Scripted) -> None:
    target = Target(scripted.url, fields=lambda model: {"lora": [model]}, keep_alive=False)
    asyncio.run(load.run(target, Load(("a3",), 1, 1, seed=1, input=2, output=1)))
    assert scripted.bodies[0]["lora"] == ["a3"]
    assert "model" not in scripted.bodies[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"missing_tokens": 1}, "3 tokens came, 4 were"), ({"status": 503}, "503"), ({"error": "no room"}, "no room")],
)
def test_a_request_that_fails_is_an_error_and_no_reading(scripted: Scripted, change: dict[str, Any], message: str) -> None:
    for name, value in change.items():
        setattr(scripted, name, value)
    felt = asyncio.run(load.run(Target(scripted.url), Load(("base",), 2, 2, seed=1, input=2, output=4)))
    assert felt.requests == 0
    assert len(felt.errors) == 2
    assert message in felt.errors[0]


def test_a_server_that_is_not_there_is_an_error() -> None:
    target = Target(f"http://127.0.0.1:{free_port()}")
    felt = asyncio.run(load.run(target, Load(("base",), 1, 1, seed=1, input=2, output=4)))
    assert "ConnectError" in felt.errors[0]


def test_popular_adapters_are_drawn_more_often() -> None:
    drawn = [prompt.model for prompt in load.prompts(Load(tuple("abcd"), 400, 1, seed=3, input=1, zipf=1.0))]
    assert drawn.count("a") > drawn.count("b") > drawn.count("d") > 0


@pytest.mark.parametrize(("text", "names"), [("base", ["base"]), ("a,b", ["a", "b"]), ("a8..a10", ["a8", "a9", "a10"])])
def test_names(text: str, names: list[str]) -> None:
    assert load.model_names(text) == names


@pytest.mark.parametrize("text", ["a3..a1", "a..b", "..", "a1.."])
def test_names_that_are_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="no range"):
        load.model_names(text)


@dataclass
class Fake:
    """A contender of a given speed, that remembers its loads; ``log`` is shared, so that turns can be seen."""

    name: str
    rate: float
    log: list[tuple[str, Load]]
    pause_ms: float = 10.0
    errors: list[str] = field(default_factory=list)
    target: Target = field(default_factory=lambda: Target("http://127.0.0.1:1"))

    def measure(self, asked: Load, on_done: Callable[[], None]) -> Felt:
        self.log.append((self.name, asked))
        for _ in range(asked.requests):
            on_done()
        rate = self.rate / 2 if asked.models != ("base",) else self.rate
        return Felt(asked.requests, self.errors, 1.0, rate, [1.0, 1.0], [self.pause_ms, self.pause_ms])

    def cpu_seconds(self) -> float:
        return 0.0


@dataclass
class FakeArena:
    ours: Any
    peers: list[tuple[str, Fake]]

    def peers_for(self, row: Any, size: Any, say: Any) -> list[tuple[str, Fake]]:
        return self.peers

    def contenders(self) -> list[Any]:
        return [self.ours.contender, *(fake for _, fake in self.peers)]


@dataclass
class Ours:
    contender: Fake


def measured(row: str, *peers: tuple[str, float], repeats: int = 2) -> tuple[Report, list[tuple[str, Load]], int]:
    log: list[tuple[str, Load]] = []
    fakes = [(kind, Fake(kind, rate, log)) for kind, rate in peers]
    stage: Any = FakeArena(Ours(Fake("graftwork", 100.0, log)), fakes)
    report, done = Report("serving", {}), []
    size = serving_rows.Size(1, 4, 8)
    run = serving.Measuring(stage, report, FLOORS, size, repeats, 7, lambda _text: None)
    (chosen,) = serving_rows.choose_rows(row)
    run.row(chosen, 0, 10e6, lambda: done.append(1))
    return report, log, len(done)


def test_repetitions_alternate_with_a_seed_of_their_own() -> None:
    _, log, done = measured("base-8", ("vllm", 50.0), ("peft", 80.0))
    readings = log[3:]  # each is warmed up first
    assert [name for name, _ in readings] == ["graftwork", "vllm", "peft"] * 2
    seeds = [asked.seed for _, asked in readings]
    assert seeds[0] == seeds[1] == seeds[2] != seeds[3] == seeds[4]
    assert not {asked.seed for _, asked in log[:3]} & set(seeds)
    assert done == 2 * 3 * 8


def test_best_peer_is_the_one_that_comes_nearest() -> None:
    report, _, _ = measured("base-8", ("vllm", 50.0), ("peft", 80.0))
    claims = {claim.against: claim for claim in report.claims}
    assert claims["vllm"].value == 2.0
    assert claims["the best peer"].value == 1.25
    assert claims["the best peer"].holds is False
    assert len(report.readings) == 6


def test_adapters_are_held_beside_our_own_base_and_each_peer() -> None:
    report, log, _ = measured("32x32", ("vllm", 5.0), ("llamacpp", 40.0))
    claims = {(claim.row, claim.against): claim for claim in report.claims}
    own = claims["32 streams, 32 adapters", "our own, base"]
    assert (own.value, own.holds) == (0.5, False)
    added = claims["32 streams, 32 adapters: added time a step", "our own, base"]
    assert added.bar == pytest.approx(1.6e3 * 32 * 10e6 / 10e9 + 2)
    assert claims["32 streams, 32 adapters", "vllm"].holds is True
    assert claims["32 streams, 32 adapters", "llamacpp"].holds is False
    seeds = {asked.models == ("base",): asked.seed for _, asked in log[4:]}
    assert seeds[True] != seeds[False], "equal prompts would be found in the prefix cache"


def test_two_loads_of_one_server_share_no_prompt() -> None:
    for row in serving_rows.ROWS:
        if row.own is not None:
            loads = [serving_rows.load_of(row, mix, serving_rows.Size(1, 8, 1), 3) for mix in (row.mix, row.own)]
            first, second = ({tuple(p.token_ids) for p in load.prompts(one)} for one in loads)
            assert not first & second


def test_a_failed_request_fails_the_run() -> None:
    log: list[tuple[str, Load]] = []
    stage: Any = FakeArena(Ours(Fake("graftwork", 100.0, log, errors=["broken"])), [])
    run = serving.Measuring(stage, Report("serving", {}), FLOORS, serving_rows.Size(1, 4, 8), 1, 7, lambda _text: None)
    with pytest.raises(BenchmarkFailed, match=r"requests to graftwork failed.*broken"):
        run.row(serving_rows.ROWS[0], 0, 10e6, lambda: None)


def test_variants_of_a_peer() -> None:
    vllm = arena.Peer.parse("vllm=/opt/venv", "8,32")
    assert [variant.setting for variant in arena.variants(vllm, adapters=True)] == ["8", "32"]
    assert [variant.setting for variant in arena.variants(vllm, adapters=False)] == [""]
    assert len(arena.variants(arena.Peer.parse("peft", "8"), adapters=True)) == 2


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--rows", "33x33"], "32x32"),
        (["--peer", "vllm"], "vllm=VENV"),
        (["--peer", "other=x"], "llamacpp=FOLDER"),
        (["--peer", "peft", "--vllm-slots", "8,x"], "8,16,32"),
        (["--repeats", "0"], "at least 1"),
        (["--base", "/nowhere"], "make base"),
    ],
)
def test_serving_arguments(base: Path, arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving.parse(["--base", str(base), *arguments])
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parse", "arguments", "hint"),
    [
        (kernels.parse, ["--only", "linear,other"], "attention"),
        (kernels.parse, ["--budget", "0"], "more than 0"),
        (kernels.parse, ["--threads", "0"], "at least 1"),
        (cold_start.parse, ["--streams", "0"], "at least 1"),
        (cold_start.parse, ["--registered", "1"], "at least 2"),
    ],
)
def test_other_arguments(base: Path, parse: Any, arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--base", str(base), *arguments])
    assert hint in capsys.readouterr().err


def test_pauses_of_others_are_those_that_overlap() -> None:
    others = cold_start.Background(Target("http://127.0.0.1:1"), 1, 300, load.random.Random(0))
    others.times = [[0.0, 1.0, 5.0, 6.0]]
    assert others.longest_pause(1.5, 2.0) == 4.0
    assert others.longest_pause(5.2, 5.5) == 1.0
    assert others.usual_pause() == 1.0
    claims = cold_start.load_claims([cold_start.Loaded(0.03, 0.02, 0.4, 0.2)], 0.1)
    assert [round(claim.value, 6) for claim in claims] == [10.0, 2.0, 100.0]
    assert [claim.holds for claim in claims] == [True, False, None]


def test_adapter_memory_of_mixed_ranks_has_the_bytes_of_one_rank() -> None:
    packed = (operator_cases.Packed(64, (64, 32, 32)), operator_cases.Packed(64, (64,)))
    shapes = operator_cases.Shapes(2, 64, 300, 4, 2, 16, 64, packed)
    mixed = operator_cases.adapter_memory(shapes, list(operator_cases.MIXED_RANKS))
    even = operator_cases.adapter_memory(shapes, [operator_cases.EVEN_RANK] * 4)
    assert mixed.pool.numel() == even.pool.numel() == 4 * operator_cases.EVEN_RANK * shapes.adapter_width * 2
    assert mixed.row_offset.numel() == even.row_offset.numel()


def test_a_servers_children_end_with_it(tmp_path: Path) -> None:
    spawn = "subprocess.Popen(['sleep', '60'], process_group=0)"
    script = f"import subprocess, time; print({spawn}.pid, flush=True); time.sleep(60)"
    with process("server", [sys.executable, "-c", script], tmp_path / "log", pipe=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert HttpContender("x", Target(""), child.pid).cpu_seconds() > 0
    stat = Path(f"/proc/{grandchild}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
