"""Adapters that bring tensors whole, as the scheduler sees them: what their tokens cost, and which vocabulary they have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graftwork_adapters.wholes import WholeFacts
from graftwork_engine.loop import EngineLoop
from graftwork_engine.messages import Add, Sampling, decode_to_engine, encode
from graftwork_engine.request import Request, RequestStatus
from graftwork_engine.streams import GenerationRequest, Stream
from scripted_engine import VOCAB_SIZE, Bench, ScriptedGate, solo_output


@pytest.mark.parametrize(("num_bytes", "share"), [(0, 1.0), (1000, 2.0), (3000, 4.0)])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_flow_is_charged_for_what_its_adapter_brings_whole(num_bytes: int, share: float, is_ahead: bool) -> None:
    """Of two flows that always wait, the one whose adapter is read beside the base gets as much less as that costs more."""
    gate = ScriptedGate(facts={"q": WholeFacts(num_bytes, None)} if num_bytes else {})
    bench = Bench(num_blocks=64, budget=16, num_seqs=2, caching=False, gate=gate, is_ahead=is_ahead, base_bytes=1000)
    for _ in range(400):
        for flow, adapter in (("light", "p"), ("heavy", "q")):
            while sum(r.flow == flow and r.status is RequestStatus.WAITING for r in bench.requests.values()) < 3:
                bench.add(f"{flow}-{len(bench.requests)}", 2, 4, flow=flow, adapter=adapter)
        bench.step()
    tokens = dict.fromkeys(("light", "heavy"), 0)
    for request in bench.requests.values():
        tokens[request.flow] += request.num_output_tokens
    assert tokens["light"] / tokens["heavy"] == pytest.approx(share, rel=0.1)


def test_a_later_run_of_the_same_request_costs_what_its_adapter_costs_then() -> None:
    """After a preemption its adapter is asked again; a request on the base costs nothing more."""
    gate = ScriptedGate(facts={"q": WholeFacts(500, None)})
    bench = Bench(num_blocks=6, budget=16, num_seqs=3, gate=gate, base_bytes=1000)
    for number, adapter in enumerate(("q", None, "q")):
        bench.add(f"r{number}", 6, 8, adapter=adapter)
    bench.run()
    assert bench.core.stats()["preemptions_total"] > 0
    assert [request.extra_cost for request in bench.requests.values()] == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_another_vocabulary_than_was_admitted_fails_the_request_and_nobody_else(is_ahead: bool) -> None:
    gate = ScriptedGate(facts={"wide": WholeFacts(90, VOCAB_SIZE + 3), "norms": WholeFacts(90, None)})
    bench = Bench(num_blocks=64, gate=gate, is_ahead=is_ahead)
    for adapter, known in (("wide", VOCAB_SIZE + 4), ("wide", None), ("norms", VOCAB_SIZE + 3), ("plain", VOCAB_SIZE - 1)):
        bench.add(f"wrong-{adapter}-{known}", 4, 4, adapter=adapter, vocab_size=known)
    for adapter, known in (("wide", VOCAB_SIZE + 3), ("norms", None), ("norms", VOCAB_SIZE), ("plain", None)):
        bench.add(f"right-{adapter}-{known}", 4, 4, adapter=adapter, vocab_size=known)
    bench.run()
    for name, request in bench.requests.items():
        if name.startswith("right"):
            assert bench.output(name) == solo_output(request)
        else:
            error = bench.items[name][-1].error
            assert error is not None
            assert error.code == "internal_error"
            assert bench.output(name) == []
    last = bench.items[f"wrong-wide-{VOCAB_SIZE + 4}"][-1].error
    assert last is not None
    assert last.message == f"adapter wide knows {VOCAB_SIZE + 3} tokens, the request takes it to know {VOCAB_SIZE + 4}"


def test_where_an_adapter_starts_and_what_it_knows_reach_the_engine_and_a_resumption() -> None:
    """As a stream says it to each engine that it is added to, by way of the wire."""
    added: list[Request] = []
    core: Any = SimpleNamespace(add=added.append, on_running=None)
    server: Any = SimpleNamespace(send=None)
    loop = EngineLoop(SimpleNamespace(core=core, stats=dict), server, "epoch")
    request = GenerationRequest(
        "r", [1, 2, 3], Sampling(4, 1), b"salt", "flow", adapter_key="a", adapter_start=2, vocab_size=VOCAB_SIZE + 3
    )
    stream = Stream(request, None)
    for output in ([], [7, 8]):
        stream.output_ids = output
        message = decode_to_engine(encode(stream.as_add("epoch")))
        assert isinstance(message, Add)
        loop._add(message)
    assert [(r.adapter_start, r.vocab_size, r.output_ids) for r in added] == [(2, VOCAB_SIZE + 3, []), (2, VOCAB_SIZE + 3, [7, 8])]
    plain = GenerationRequest("r", [1], Sampling(4, 1), b"salt", "flow", adapter_key="a")
    loop._add(decode_to_engine(encode(Stream(plain, None).as_add("epoch"))))  # type: ignore[arg-type]
    assert (added[-1].adapter_start, added[-1].vocab_size) == (0, None)
