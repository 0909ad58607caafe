"""The serving benchmark on scripted servers: loads, pairing, claims, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import script

import arena
import load
import machine
import serving_rows
from eta import Eta, Planned
from load import Felt, Load, Target
from results import BenchmarkFailed, Part
from servers import free_port

serving = script("serving")
SMALL = serving_rows.Size(1, 4, 8)
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
            events: list[Any] = [{"choices": [{"text": "x\u2028\x85"}]} for _ in range(count)]
            events.append({"choices": [], "usage": {"completion_tokens": count}})
            if script.error is not None:
                events = [{"error": {"message": script.error}}]
            for event in events:
                self.wfile.write(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode())
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
    assert len(felt.ttft_ms) == len(felt.per_token_ms) == len(felt.between_chunks_ms) == 2
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
        pause = self.pause_ms * (2 if asked.models != ("base",) else 1)
        return Felt(asked.requests, self.errors, 1.0, rate, [1.0, 1.0], [pause, pause], [1.0, 1.0])

    def cpu_seconds(self) -> float:
        return 0.0


def test_time_of_a_token_is_of_requests_and_not_of_chunks() -> None:
    bursts = load.Outcome(0.0, [1.0, 1.9], output_tokens=10)  # nine tokens in two chunks, 0.9 s
    steady = load.Outcome(0.0, [1.0 + 0.2 * i for i in range(10)], output_tokens=10)
    slow = load.Outcome(0.0, [1.0, 5.5], output_tokens=10)
    one, failed = load.Outcome(0.0, [1.0], output_tokens=1), load.Outcome(0.0, [1.0, 90.0], 10, error="no")
    felt = load.summary([bursts, steady, slow, one, failed], 10.0)
    assert felt.per_token_ms == [200.0, 500.0]
    assert load.summary([one], 1.0).per_token_ms == []


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


def measured(
    row: str, *peers: tuple[str, float], effort: Any = None, pause_ms: float = 10.0
) -> tuple[Part, list[tuple[str, Load]], Any]:
    log: list[tuple[str, Load]] = []
    fakes = [(kind, Fake(kind, rate, log)) for kind, rate in peers]
    stage: Any = FakeArena(Ours(Fake("graftwork", 100.0, log, pause_ms)), fakes)
    (chosen,) = serving_rows.choose_rows(row)
    effort = effort or serving.Effort(SMALL, 2)
    eta = Eta(effort.plan([chosen], [kind for kind, _ in peers]))
    part, done = Part(row), []
    run = serving.Measuring(stage, FLOORS, 10e6, effort, 7, eta, lambda _text: None)
    run.row(chosen, 0, part, lambda: done.append(1))
    planned = sum(cell.readings * cell.tokens // SMALL.output for cell in eta.plan.values())
    assert len(done) == planned, "what the progress bar counts to"
    assert eta.left_s == 0
    return part, log, effort


def test_repetitions_alternate_with_a_seed_of_their_own() -> None:
    _, log, _ = measured("base-8", ("vllm", 50.0), ("peft", 80.0))
    readings = log[3:]  # each is warmed up first
    assert [name for name, _ in readings] == ["graftwork", "vllm", "peft"] * 2
    seeds = [asked.seed for _, asked in readings]
    assert seeds[0] == seeds[1] == seeds[2] != seeds[3] == seeds[4]
    assert not {asked.seed for _, asked in log[:3]} & set(seeds)


def test_best_peer_is_the_one_that_comes_nearest() -> None:
    part, _, _ = measured("base-8", ("vllm", 50.0), ("peft", 80.0))
    claims = {claim.against: claim for claim in part.claims}
    assert claims["vllm"].value == 2.0
    assert claims["vllm"].bar is None
    best = claims["the best of vLLM, PEFT: peft"]
    assert (best.value, best.bar, best.holds) == (1.25, 1.5, False)
    assert "llama.cpp did not take part" in best.remarks
    assert len(part.readings) == 6


def test_adapters_are_held_beside_our_own_base_and_each_peer() -> None:
    part, log, _ = measured("32x32", ("vllm", 5.0), ("llamacpp", 40.0), pause_ms=60.0)
    claims = {claim.against: claim for claim in part.claims}
    own = claims["our own, base"]
    assert own.value == 0.5
    assert own.alternative is not None
    assert (own.alternative.value, own.alternative.bar) == (60.0, pytest.approx(1.6e3 * 32 * 10e6 / 10e9 + 2))
    assert own.holds is False
    assert claims["vllm"].holds is True
    assert claims["the best of llama.cpp: llamacpp"].holds is False
    assert len(part.claims) == 4, "the verdict of two bars is one line"
    seeds = {asked.models == ("base",): asked.seed for _, asked in log[4:]}
    assert seeds[True] != seeds[False], "equal prompts would be found in the prefix cache"


def test_added_time_is_enough_where_the_share_is_not() -> None:
    part, _, _ = measured("32x32", pause_ms=50.0)
    (own,) = part.claims
    assert (own.value >= 0.75, own.holds) == (False, True)
    part, _, _ = measured("1x1")
    share, added = part.claims
    assert (share.bar, share.holds, share.alternative) == (0.88, False, None), "one stream has one bar"
    assert (added.value, added.bar) == (10.0, None)


def test_slow_peers_get_less_and_the_result_says_so() -> None:
    size = serving_rows.Size(4, 4, 8)
    effort = serving.Effort(size, None, {"vllm": 1}, {"vllm": 2})
    part, log, _ = measured("base-8", ("vllm", 50.0), ("llamacpp", 80.0), effort=effort)
    readings = log[3:]
    assert [name for name, _ in readings].count("vllm") == 2
    assert [name for name, _ in readings] == ["graftwork", "vllm", "llamacpp"] * 2 + ["graftwork", "llamacpp"] * 3
    assert {name: asked.requests for name, asked in readings} == {"graftwork": 32, "vllm": 8, "llamacpp": 32}
    ours, theirs = (next(asked for name, asked in readings if name == who) for who in ("graftwork", "vllm"))
    assert load.prompts(ours)[:8] == load.prompts(theirs), "the same requests, and fewer of them"
    claims = {claim.against: claim for claim in part.claims}
    assert (claims["vllm"].readings, claims["llamacpp"].readings) == (2, 5)
    assert "vllm got 1 requests a stream, we 4" in claims["vllm"].remarks
    assert "requests a stream" not in claims["llamacpp"].remarks
    assert [reading["requests_per_stream"] for reading in part.readings[:2]] == [4, 1]


def test_short_repetitions_of_a_peer_that_has_a_bar_are_marked() -> None:
    effort = serving.Effort(SMALL, None, {}, {"vllm": 2})
    part, _, _ = measured("32x32", ("vllm", 50.0), effort=effort)
    claims = {claim.against: claim for claim in part.claims}
    assert "short: 2 of 5 repetitions" in claims["vllm"].remarks
    assert "short" not in claims["our own, base"].remarks
    assert "4 tokens in, 8 out; 1 of 4 requests a stream" in claims["our own, base"].remarks


def test_every_row_with_a_bar_is_measured_as_often_as_it_needs() -> None:
    rows = {row.name: row for row in serving_rows.ROWS}
    assert rows["32x1"].repeats == 7
    assert {row.repeats for name, row in rows.items() if name != "32x1"} == {5}
    assert {row.name for row in serving_rows.choose_rows("bars")} == set(rows) - {"8x8"}
    assert serving.Effort(SMALL, 3).repeats_for(rows["32x1"], "") == 3


def test_time_to_go_is_of_the_kind_and_the_row() -> None:
    plan = {("a", ""): Planned(2, 100), ("a", "vllm"): Planned(1, 100), ("b", ""): Planned(2, 1000)}
    eta = Eta(plan)
    assert eta.left_s is None
    assert "unknown" in str(eta)
    eta.done(("a", ""), 10.0)
    assert eta.left_s == pytest.approx(10 + 10 + 200)
    eta.done(("a", "vllm"), 5000.0)
    assert eta.left_s == pytest.approx(10 + 200)
    eta.done(("b", ""), 7200.0)
    assert eta.left_s == pytest.approx(10 + 7200)
    assert str(eta) == "3 of 5 readings, about 2 h 00 min to go"


def test_two_loads_of_one_server_share_no_prompt() -> None:
    for row in serving_rows.ROWS:
        if row.own is not None:
            loads = [serving_rows.load_of(row, mix, serving_rows.Size(1, 8, 1), 3) for mix in (row.mix, row.own)]
            first, second = ({tuple(p.token_ids) for p in load.prompts(one)} for one in loads)
            assert not first & second


def test_a_failed_request_fails_the_run() -> None:
    log: list[tuple[str, Load]] = []
    stage: Any = FakeArena(Ours(Fake("graftwork", 100.0, log, errors=["broken"])), [])
    run = serving.Measuring(stage, FLOORS, 10e6, serving.Effort(SMALL, 1), 7, Eta({}), lambda _text: None)
    with pytest.raises(BenchmarkFailed, match=r"requests to graftwork failed.*broken"):
        run.row(serving_rows.ROWS[0], 0, Part("base-1"))


def test_variants_of_a_peer() -> None:
    vllm = arena.Peer.parse("vllm=/opt/venv", "8,32")
    both = arena.element_types(FLOORS)
    assert [str(one) for one in arena.variants(vllm, True, both)] == ["vLLM, bfloat16, 8 slots", "vLLM, bfloat16, 32 slots"]
    assert [str(one) for one in arena.variants(vllm, False, both)] == ["vLLM, bfloat16"]
    assert len(arena.variants(arena.Peer.parse("peft", "8"), True, both)) == 2


def test_peers_are_not_held_to_bf16_where_the_processor_has_no_instructions_for_it() -> None:
    old = machine.Machine("", (), 2, 2, "", 10e9, 2.0, 1e9, 70e9)
    assert arena.element_types(old) == ("float32",)
    vllm, peft = arena.Peer.parse("vllm=/opt/venv", "8"), arena.Peer.parse("peft", "8")
    assert [str(one) for one in arena.variants(vllm, True, ("float32",))] == ["vLLM, float32, 8 slots"]
    assert [str(one) for one in arena.variants(peft, True, ("float32",))] == ["PEFT, float32"]


def test_variants_are_compared_after_every_adapter_was_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log: list[tuple[str, Load]] = []
    rates = {8: 10.0, 16: 30.0, 32: 20.0}
    peer = arena.Peer.parse("vllm=/opt/venv", "8,16,32")
    ours: Any = Ours(Fake("graftwork", 100.0, log))
    stage = arena.Arena(ours, tmp_path, tmp_path, {}, [peer], ("bfloat16",), contextlib.ExitStack())
    monkeypatch.setattr(stage, "_contender", lambda variant, _stack: Fake(str(variant), rates[variant.slots], log))
    (row,) = serving_rows.choose_rows("32x32")
    ((kind, chosen),) = stage.peers_for(row, serving_rows.Size(4, 128, 64), lambda _text: None)
    assert (kind, chosen.name) == ("vllm", "vLLM, bfloat16, 16 slots")
    assert [(asked.requests, asked.output) for _, asked in log] == [(32, 2), (32, 16)] * 3
    assert all(len(set(asked.models)) == 32 for _, asked in log)
