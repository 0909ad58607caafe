"""From how many rows on a step's linears are oneDNN's: what was measured decides, a pin stands above it, a file keeps it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graftwork_kernels import candidates, reference
from graftwork_kernels.candidates import choose, difference, implementation, implementations, measure
from graftwork_kernels.choice import (
    METHODS,
    RECORDED_HANDICAP,
    BadPin,
    Choice,
    Verdict,
    decide,
    last_measured,
    table,
)
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.layout import WeightLayout
from graftwork_kernels.probes import Probes, StepSizes, between, shapes_of
from graftwork_kernels.timing import ClockTimer

SIZES = StepSizes(
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=32,
    block_size=4,
    max_rows=64,
    max_requests=8,
    dtype=torch.float32,
)

CPU = torch.device("cpu")
ROWS = {"decode 1": 1, "decode 8": 8, "decode 32": 32, "prefill 128": 128, "prefill 512": 512}
WINS, LOSES = 0.9 / RECORDED_HANDICAP, 1.1 / RECORDED_HANDICAP
"""OneDNN's time in C++'s: better, and not better, by more than what is recorded gains."""


def verdict(*times: float, rows: dict[str, int] = ROWS, **more: dict[str, str]) -> Verdict:
    """OneDNN takes ``times`` of what C++ takes, shape by shape."""
    ones = dict.fromkeys(rows, 1.0)
    seconds = {"reference": dict.fromkeys(rows, 2.0), "cpu": ones, "onednn": dict(zip(rows, times, strict=True))}
    cost = {"reference": 1.0, "cpu": 0.5, "onednn": sum(times) / 2 / len(times)}
    dropped = more.get("dropped", {})
    return Verdict(seconds, {name: value for name, value in cost.items() if name not in dropped}, dropped, rows)


def of_linear(found: Verdict) -> dict[str, Verdict]:
    """``found`` for the linears; everything else is C++'s."""
    times = {"reference": dict.fromkeys(found.rows, 2.0), "cpu": dict.fromkeys(found.rows, 1.0)}
    plain = Verdict(times, {"reference": 1.0, "cpu": 0.5}, {}, found.rows)
    return {operator: found if operator == "linear" else plain for operator in METHODS}


@pytest.mark.parametrize(
    ("times", "from_rows"),
    [
        ((LOSES, LOSES, LOSES, LOSES, LOSES), None),
        ((LOSES, LOSES, LOSES, LOSES, WINS), 512),
        ((LOSES, LOSES, LOSES, WINS, WINS), 128),
        ((WINS, WINS, LOSES, WINS, WINS), 128),
        ((WINS, WINS, WINS, WINS, LOSES), None),
        ((LOSES, WINS, WINS, WINS, WINS), 8),
    ],
)
def test_large_steps_are_onednns_where_it_wins_at_every_larger_one(times: tuple[float, ...], from_rows: int | None) -> None:
    choice = decide(of_linear(verdict(*times)), {})
    assert choice.onednn_rows == from_rows
    assert set(choice.names.values()) == {"cpu"}, "smaller steps are recorded as ever"
    assert choice.is_native(METHODS)


def test_faster_at_any_number_it_is_taken_for_all() -> None:
    choice = decide(of_linear(verdict(*[WINS] * 5)), {})
    assert (choice.names["linear"], choice.onednn_rows) == ("onednn", None)
    assert not choice.is_native(METHODS)


def test_two_kinds_of_step_with_as_many_rows_must_both_win() -> None:
    rows = {"decode 1": 1, "decode 32": 32, "prefill 32": 32}
    assert verdict(LOSES, WINS, LOSES, rows=rows).onednn_rows() is None
    assert verdict(LOSES, LOSES, WINS, rows=rows).onednn_rows() is None
    assert verdict(LOSES, WINS, WINS, rows=rows).onednn_rows() == 32


@pytest.mark.parametrize("dropped", ["onednn", "cpu"])
def test_what_disagrees_takes_no_large_step(dropped: str) -> None:
    choice = decide(of_linear(verdict(*[WINS] * 5, dropped={dropped: "wrong"})), {})
    assert choice.onednn_rows is None
    assert choice.names["linear"] == ("cpu" if dropped == "onednn" else "reference")


def test_pins_stand_above_what_was_measured() -> None:
    verdicts = of_linear(verdict(LOSES, LOSES, LOSES, WINS, WINS))
    for pins in ({"linear": "cpu"}, {"all": "cpu"}, {"linear": "reference"}):
        assert decide(verdicts, pins).onednn_rows is None
    assert decide(verdicts, {"sample": "reference"}).onednn_rows == 128
    pinned = decide(verdicts, {"linear": "onednn"})
    assert (pinned.names["linear"], pinned.onednn_rows) == ("onednn", None)
    wrong = of_linear(verdict(*[WINS] * 5, dropped={"onednn": "off by 3"}))
    with pytest.raises(BadPin, match="kernel linear=onednn: it is not fit for use: off by 3"):
        decide(wrong, {"linear": "onednn"})


def test_the_table_says_from_where_on() -> None:
    verdicts = of_linear(verdict(LOSES, LOSES, LOSES, WINS, WINS))
    lines = {tuple(line.split()[:2]): line for line in table(verdicts, decide(verdicts, {}), {}).splitlines()}
    assert lines["linear", "cpu"].endswith("chosen")
    assert lines["linear", "onednn"].endswith("chosen from 128 rows on")
    lines = {
        tuple(line.split()[:2]): line
        for line in table(verdicts, decide(verdicts, {"linear": "cpu"}), {"linear": "cpu"}).splitlines()
    }
    assert "chosen" not in lines["linear", "onednn"]


def test_one_kind_of_step_lies_between_streams_and_a_chunk() -> None:
    def rows(**changes: int) -> list[int]:
        return [shape.num_rows for shape in between(shapes_of(replace(SIZES, **changes)))]

    assert rows(max_rows=512, max_requests=64) == [128]
    assert rows(max_rows=2048, max_requests=64) == [256]
    assert rows(max_rows=64) == [22]
    assert rows(max_rows=8) == rows(max_rows=1, max_requests=1) == rows(max_rows=33, max_requests=32) == []
    for operator, start in Probes(SIZES, CPU, splits_linear=True):
        if operator in ("linear", "rms_norm"):
            assert [shape.num_rows for shape in start(reference)] == [1, 8, *([22] if operator == "linear" else []), 64]


class Clock:
    """Seconds that pass when somebody says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """The reference, each linear taking as long as ``seconds`` of its number of rows says."""

    def __init__(self, clock: Clock, seconds: Callable[[int], float]) -> None:
        self._clock, self._seconds = clock, seconds

    def __getattr__(self, method: str) -> Callable[..., object]:
        def timed(*arguments: torch.Tensor) -> object:
            if method == "adapter_linear":
                self._clock.now += self._seconds(arguments[0].shape[0])
            return getattr(reference, method)(*arguments)

        return timed


def test_it_is_measured_for_linears_alone_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "graftwork_kernels")
    clock = Clock()
    found = {
        "reference": Timed(clock, lambda rows: 1.0 * rows),
        "cpu": Timed(clock, lambda rows: 0.1 * rows),
        "onednn": Timed(clock, lambda rows: 0.1 * rows * (WINS if rows >= 22 else LOSES)),
    }

    def start(**more: object) -> Choice:
        return choose(SIZES, found, device=CPU, folder=tmp_path, clock=clock, is_busy=lambda: False, **more)  # type: ignore[arg-type]

    choice = start()
    assert (choice.names["linear"], choice.onednn_rows) == ("cpu", 22)
    assert "chosen from 22 rows on" in caplog.text
    before = clock.now
    assert start() == choice
    assert start(pins={"linear": "onednn"}).names["linear"] == "onednn"
    assert clock.now == before, "what is kept is not measured again"
    kept = last_measured(tmp_path)
    assert kept is not None
    assert {operator for operator, v in kept.verdicts.items() if "onednn" in v.seconds} == {"linear"}
    assert kept.verdicts["linear"].rows == {"decode 1": 1, "decode 8": 8, "prefill 64": 64, "prefill 22": 22}
    assert decide(kept.verdicts, {}) == choice


def test_a_file_without_numbers_of_rows_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As one was that an earlier version wrote."""
    clock = Clock()
    found = {"reference": Timed(clock, lambda rows: 1.0 * rows), "cpu": Timed(clock, lambda rows: 0.1 * rows)}

    def start() -> Choice:
        return choose(SIZES, found, device=CPU, folder=tmp_path, clock=clock, is_busy=lambda: False)  # type: ignore[arg-type]

    choice, before = start(), clock.now
    (file,) = tmp_path.glob("choice-*.json")
    file.write_text(file.read_text().replace('"rows"', '"other"'))
    assert last_measured(tmp_path) is None
    assert "cannot be used, kernels are measured again" in caplog.text
    assert start() == choice
    assert clock.now > before


def test_bf16_is_allowed_for_where_the_product_was_rounded_to_it() -> None:
    exact = torch.linspace(-4, 4, 50)
    rounded = exact.bfloat16().float()
    assert "is off by" in str(difference((rounded,), (exact,)))
    assert difference((rounded,), (exact,), torch.bfloat16) is None
    assert "is off by" in str(difference((exact * 1.2,), (exact,), torch.bfloat16))


def test_the_linears_that_this_machine_has_agree_on_every_probe(cpu_library: Library) -> None:
    found = implementations(Immediate(cpu_library), torch.float32, CPU, 64)
    assert set(found) == {"reference", "cpu", "onednn"}
    clock = Clock()
    verdicts = measure(SIZES, found, ClockTimer(clock), CPU)
    assert verdicts["linear"].dropped == {}
    assert set(verdicts["linear"].cost) == set(found)
    assert set(verdicts["rms_norm"].cost) == {"reference", "cpu"}


def test_without_instructions_or_a_compiler_it_is_no_candidate(cpu_library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(implementations(None, torch.float32, CPU, 64)) == {"reference"}
    monkeypatch.setattr(candidates, "onednn_unavailable", lambda _: "no bf16")
    assert set(implementations(Immediate(cpu_library), torch.bfloat16, CPU, 64)) == {"reference", "cpu"}


@pytest.mark.parametrize(("name", "from_rows", "packs"), [("cpu", None, False), ("cpu", 8, True), ("onednn", None, True)])
def test_only_what_needs_them_has_weights_twice(cpu_library: Library, name: str, from_rows: int | None, packs: bool) -> None:
    choice = Choice({operator: name if operator == "linear" else "cpu" for operator in METHODS}, from_rows)
    weight = implementation(choice, Immediate(cpu_library), CPU, 64).prepare_weight(torch.randn(6, 5))
    assert weight.layout is WeightLayout.PANELS
    assert (weight.large is not None) == packs
