"""The fastest implementation that agrees with the reference is taken, kept for the next start, and may be pinned.

Operators are real and small; time is a clock that implementations set forward themselves.

This file is long because one clock and one pair of implementations serve all its tests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graftwork_kernels import reference
from graftwork_kernels.candidates import choose, measure
from graftwork_kernels.choice import (
    FORWARD,
    METHODS,
    RECORDED_HANDICAP,
    BadPin,
    Choice,
    decide,
    last_measured,
    read_measured,
)
from graftwork_kernels.implementation import Implementation
from graftwork_kernels.probes import DECODE_ROWS, StepSizes, shapes_of
from graftwork_kernels.timing import RUNS, ClockTimer

SIZES = StepSizes(
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=64,
    block_size=4,
    max_rows=40,
    max_requests=8,
    dtype=torch.float32,
)


CPU = torch.device("cpu")


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """The reference, each method taking as long as ``seconds`` of its number of rows says; ``spoil`` makes some results wrong."""

    def __init__(self, clock: Clock, seconds: Callable[[str, int], float], spoil: Mapping[str, Callable[..., object]] = {}) -> None:
        self._clock, self._seconds, self._spoil = clock, seconds, spoil
        self.calls: dict[str, int] = {}

    def __getattr__(self, method: str) -> Callable[..., object]:
        function = self._spoil.get(method) or getattr(reference, method)

        def timed(*arguments: torch.Tensor) -> object:
            self.calls[method] = self.calls.get(method, 0) + 1
            result = function(*arguments)
            if method not in ("prepare_weight", "plan_adapters", "plan_attention"):
                self._clock.now += self._seconds(method, arguments[0].shape[0])
            return result

        return timed


Chooser = Callable[..., Choice]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def base(clock: Clock) -> Timed:
    return Timed(clock, lambda _, rows: 0.001 * rows)


@pytest.fixture
def run(clock: Clock, base: Timed, tmp_path: Path) -> Chooser:
    """Choose between the reference and what is given as ``cpu``."""

    def choosing(cpu: Timed | None, **more: object) -> Choice:
        found = {"reference": base} | ({} if cpu is None else {"cpu": cpu})
        return choose(SIZES, found, **{"device": CPU, "folder": tmp_path, "clock": clock, "is_busy": lambda: False, **more})  # type: ignore[arg-type]

    return choosing


def chosen_in(folder: Path) -> Choice | None:
    measured = last_measured(folder)
    return None if measured is None else decide(measured.verdicts, {})


def faster(clock: Clock, *operators: str, spoil: Mapping[str, Callable[..., object]] = {}) -> Timed:
    """Twice as fast as the reference at these, four times slower at all else."""
    methods = {method for operator in operators for method in METHODS[operator]}
    return Timed(clock, lambda method, rows: 0.001 * rows * (0.5 if method in methods else 4), spoil)


def names(choice: Choice, name: str) -> set[str]:
    return {operator for operator, chosen in choice.names.items() if chosen == name}


# What is chosen


@pytest.mark.parametrize("operators", [(), ("linear",), ("sample", "rms_norm", "paged_attention"), tuple(METHODS)], ids=len)
def test_the_fastest_of_each_operator_is_chosen(run: Chooser, clock: Clock, operators: tuple[str, ...]) -> None:
    choice = run(faster(clock, *operators))
    assert names(choice, "cpu") == set(operators)
    assert names(choice, "reference") == set(METHODS) - set(operators)
    assert choice.is_native(FORWARD) == (set(operators) >= set(FORWARD))


def test_many_streams_and_few_count_as_their_share_of_time(run: Chooser, clock: Clock) -> None:
    """Decoding twice as fast outweighs chunks of a prompt that take twice as long, though one chunk takes longer than all of it."""

    def seconds(_: str, rows: int) -> float:
        return 0.001 * rows * (2 if rows > max(DECODE_ROWS) else 0.5)

    choice = run(Timed(clock, seconds))
    assert names(choice, "reference") == set()


@pytest.mark.parametrize("slower", [0.9, 1.1])
def test_a_native_operator_of_the_forward_pass_may_be_a_little_slower(run: Chooser, clock: Clock, slower: float) -> None:
    factor = RECORDED_HANDICAP * slower
    choice = run(Timed(clock, lambda _, rows: 0.001 * rows * factor))
    assert names(choice, "cpu") == (set(FORWARD) if slower < 1 else set())


def small_and_slow(clock: Clock) -> Timed:
    """Twice as fast at linears and attention, which take nearly all of a pass, and slower by half at a norm."""

    def seconds(method: str, rows: int) -> float:
        large = method in METHODS["linear"] or method == "paged_attention"
        return 0.001 * rows * (0.5 if large else 1.5 if method == "add_rms_norm" else 1)

    return Timed(clock, seconds)


def test_a_small_operator_does_not_end_the_recording_of_all(run: Chooser, clock: Clock) -> None:
    """What waking threads for a call costs must not decide over a pass that wakes them once."""
    assert run(small_and_slow(clock)).is_native(FORWARD)


def test_where_a_pin_ends_the_recording_the_fastest_is_taken(run: Chooser, clock: Clock) -> None:
    choice = run(small_and_slow(clock), pins={"linear": "reference"})
    assert choice.names["add_rms_norm"] == "reference"
    assert choice.names["paged_attention"] == "cpu"


def off_by(method: str, by: float) -> Callable[..., object]:
    """The reference's method with one element of its first result wrong."""

    def wrong(*arguments: torch.Tensor) -> object:
        result = getattr(reference, method)(*arguments)
        first = result[0] if isinstance(result, tuple) else result
        if first.dtype.is_floating_point:
            first.view(-1)[-1] += by
        else:
            first.view(-1)[-1:] = first.view(-1)[-1:] == 0
        return result

    return wrong


@pytest.mark.parametrize(
    ("operator", "method"),
    [
        *((name, name) for name in METHODS if name not in ("linear", "apply_logit_bias", "apply_penalties")),
        *(("linear", method) for method in ("embedding", "linear", "adapter_linear")),
    ],
)
def test_what_disagrees_is_not_chosen_however_fast(
    run: Chooser, clock: Clock, operator: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = faster(clock, *METHODS, spoil={method: off_by(method, 0.5)})
    assert names(run(wrong), "reference") == {operator}
    (error,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert f"kernel {operator}=cpu is not used" in error
    assert "decode 1: result " in error


@pytest.mark.parametrize("operator", ["apply_logit_bias", "apply_penalties"])
def test_what_leaves_undone_its_work_in_place_is_not_chosen(run: Chooser, clock: Clock, operator: str) -> None:
    assert names(run(faster(clock, *METHODS, spoil={operator: lambda *_: None})), "reference") == {operator}


def test_keys_that_do_not_reach_the_cache_are_seen(run: Chooser, clock: Clock) -> None:
    def forgets(*arguments: torch.Tensor) -> torch.Tensor:
        *first, keys, values, slots = arguments
        return reference.rotary_and_write_kv(*first, keys.clone(), values.clone(), slots)  # type: ignore[arg-type]

    choice = run(faster(clock, *METHODS, spoil={"rotary_and_write_kv": forgets}))
    assert names(choice, "reference") == {"rotary_and_write_kv"}


def test_what_fails_is_not_chosen(run: Chooser, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of luck")

    choice = run(faster(clock, *METHODS, spoil={"paged_attention": fails, "prepare_weight": fails}))
    assert names(choice, "reference") == {"paged_attention", "linear"}
    assert "it fails: out of luck" in caplog.text


def test_the_log_has_one_table_with_every_time(run: Chooser, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "graftwork_kernels")
    run(faster(clock, "sample"), pins={"rms_norm": "cpu"})
    (record,) = [r.getMessage() for r in caplog.records if "times in µs" in r.getMessage()]
    rows = [line.split() for line in record.splitlines()[1:]]
    assert rows[0] == ["operator", "implementation", "decode", "1", "decode", "8", "prefill", "40", "cost"]
    assert ["sample", "cpu", "500", "4000", "-", "0.50", "chosen"] in rows
    assert ["sample", "reference", "1000", "8000", "-", "1.00"] in rows
    assert ["rms_norm", "cpu", "4000", "32000", "160000", "4.00", "pinned"] in rows
    assert len(rows) == 1 + 2 * len(METHODS)


def test_little_is_repeated_of_what_takes_long(clock: Clock) -> None:
    quick, slow = Timed(clock, lambda *_: 1e-6), Timed(clock, lambda *_: 1.0)
    measure(SIZES, {"reference": quick, "cpu": slow}, ClockTimer(clock), CPU)  # type: ignore[dict-item]
    shapes = len(shapes_of(SIZES))
    assert quick.calls["rms_norm"] == RUNS.stop * shapes
    assert slow.calls["rms_norm"] == 2 * shapes, "once is no measurement"


def test_the_shortest_run_counts(clock: Clock) -> None:
    """All but one run of each shape are held up."""
    calls = []

    def seconds(method: str, rows: int) -> float:
        calls.append(method)
        return 1e-4 if calls.count(method) % RUNS.stop == 3 else 2e-3

    found = {"reference": Timed(clock, lambda *_: 1e-4), "cpu": Timed(clock, seconds)}
    assert measure(SIZES, found, ClockTimer(clock), CPU)["rms_norm"].cost["cpu"] == pytest.approx(1)  # type: ignore[arg-type]


# What is kept


def busy(thread_clock: Clock) -> dict[str, object]:
    return {
        "is_busy": lambda: True,
        "clock": lambda: pytest.fail("the clock on the wall"),
        "thread_clock": thread_clock,
    }


def test_a_busy_machine_is_measured_by_one_threads_time(run: Chooser, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert names(run(faster(clock, "sample"), **busy(clock)), "cpu") == {"sample"}
    assert threads == [1, 2]


def test_what_a_busy_machine_gave_serves_until_it_is_quiet(
    run: Chooser, clock: Clock, base: Timed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A start on a machine that is still busy measures nothing; the first quiet one does, and every later one has that."""
    caplog.set_level(logging.INFO, "graftwork_kernels")

    def start(fast: str, **more: object) -> tuple[set[str], bool, str]:
        caplog.clear()
        calls = dict(base.calls)
        chosen = names(run(faster(clock, fast), **more), "cpu")
        (line,) = [r.getMessage().partition(";")[0] for r in caplog.records if "times in µs" in r.getMessage()]
        return chosen, base.calls != calls, line

    chosen, measured, line = start("sample", **busy(clock))
    assert (chosen, measured) == ({"sample"}, True)
    assert line.startswith("kernels, provisional: measured on one thread, since the machine is busy")
    (file,) = tmp_path.glob("choice-*.json")
    kept = read_measured(file)
    assert kept is not None
    assert kept.is_provisional
    assert names(chosen_in(tmp_path) or Choice({}), "cpu") == {"sample"}

    chosen, measured, line = start("linear", **busy(clock))
    assert (chosen, measured) == ({"sample"}, False)
    assert line.startswith(f"kernels, provisional: as {file.name} has it from a busy machine")

    chosen, measured, line = start("linear")
    assert (chosen, measured) == ({"linear"}, True)
    assert line.startswith("kernels, measured in ")
    assert list(tmp_path.glob("choice-*.json")) == [file]

    for more in (busy(clock) | {"is_busy": lambda: pytest.fail("nobody asks")}, {}):
        chosen, measured, line = start("sample", **more)
        assert (chosen, measured) == ({"linear"}, False)
        assert line == f"kernels, as {file.name} has it"


def test_what_could_not_run_on_a_busy_machine_is_not_kept(run: Chooser, clock: Clock, tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of luck")

    run(faster(clock, *METHODS, spoil={"paged_attention": fails}), **busy(clock))
    assert list(tmp_path.glob("choice-*.json")) == []


def test_a_second_start_measures_nothing(run: Chooser, clock: Clock, base: Timed, tmp_path: Path) -> None:
    first = run(faster(clock, "sample"))
    calls, now = dict(base.calls), clock.now
    assert run(faster(clock, *METHODS)) == first
    assert (base.calls, clock.now) == (calls, now)
    assert chosen_in(tmp_path) == first


def test_what_could_not_run_is_measured_again_at_the_next_start(run: Chooser, clock: Clock, tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of luck")

    assert "paged_attention" not in names(run(faster(clock, *METHODS, spoil={"paged_attention": fails})), "cpu")
    assert list(tmp_path.glob("choice-*.json")) == []
    assert "paged_attention" in names(run(faster(clock, *METHODS)), "cpu")


@pytest.mark.parametrize("change", ["library", "sizes", "dtype", "threads", "implementations"])
def test_other_conditions_are_measured_anew(
    change: str, clock: Clock, base: Timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(sizes: StepSizes = SIZES, fingerprint: str = "a", name: str = "cpu") -> int:
        found: dict[str, Implementation] = {"reference": base, name: faster(clock)}  # type: ignore[dict-item]
        choose(sizes, found, device=CPU, folder=tmp_path, fingerprint=fingerprint, clock=clock, is_busy=lambda: False)
        return base.calls["rms_norm"]

    before = start()
    assert start() == before
    match change:
        case "library":
            after = start(fingerprint="b")
        case "sizes":
            after = start(replace(SIZES, vocab_size=65))
        case "dtype":
            after = start(replace(SIZES, dtype=torch.bfloat16))
        case "threads":
            monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
            after = start()
        case _:
            after = start(name="triton")
    assert after > before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"provisional": true, "operators": {}}',
        b'{"provisional": true, "operators": {"linear": []}}',
        b"\xff\xfe",
        b'{"provisional": 0, "operators": {"linear": {"seconds": {"reference": {}}, "cost": {"reference": 1}, "dropped": {}}}}',
        b'{"provisional": false, "operators": {"linear": {"seconds": {}, "cost": {"gone": 0.1}, "dropped": {}, "rows": {}}}}',
        b"[" * 100_000,
        b'{"provisional": true, "operators": {"linear": {"seconds": {"reference": {"decode 1": 1%s}}, "cost": {}}}}' % (b"0" * 400),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_file_that_makes_no_sense_is_measured_again(run: Chooser, clock: Clock, content: bytes, tmp_path: Path) -> None:
    first = run(faster(clock, "sample"))
    (file,) = tmp_path.glob("choice-*.json")
    file.write_bytes(content)
    assert run(faster(clock, "sample")) == first
    assert chosen_in(tmp_path) == first


def test_an_implementation_that_is_there_no_more_is_not_chosen(run: Chooser, clock: Clock, tmp_path: Path) -> None:
    run(faster(clock, "sample"))
    (file,) = tmp_path.glob("choice-*.json")
    file.write_text(file.read_text().replace('"cpu"', '"gone"'))
    assert names(run(faster(clock, "linear")), "cpu") == {"linear"}


def test_a_folder_that_cannot_be_written_to_does_not_keep_it_from_choosing(
    run: Chooser, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file := tmp_path / "file").write_text("")
    assert names(run(faster(clock, "sample"), folder=file / "kernels"), "cpu") == {"sample"}
    assert "measured at every start" in caplog.text


# Pins


def test_pins_stand_above_times(run: Chooser, clock: Clock) -> None:
    choice = run(faster(clock, "sample", "linear"), pins={"sample": "reference", "paged_attention": "cpu"})
    assert names(choice, "cpu") == {"linear", "paged_attention"}


def test_all_is_every_operator_that_has_no_pin_of_its_own(run: Chooser, clock: Clock, base: Timed) -> None:
    choice = run(faster(clock), pins={"sample": "cpu", "all": "reference"})
    assert names(choice, "cpu") == {"sample"}
    assert run(faster(clock), pins={"all": "cpu"}).is_native(FORWARD)
    assert base.calls == {}


def test_a_pin_to_what_disagrees_is_refused_then_and_later(run: Chooser, clock: Clock) -> None:
    wrong = faster(clock, spoil={"rms_norm": off_by("rms_norm", 0.5)})
    for _ in range(2):
        with pytest.raises(BadPin, match="kernel rms_norm=cpu: it is not fit for use: decode 1: result 0 is off by"):
            run(wrong, pins={"rms_norm": "cpu"})


def test_alone_the_reference_is_taken_unmeasured(run: Chooser, base: Timed) -> None:
    choice = run(None)
    assert names(choice, "reference") == set(METHODS)
    assert not choice.is_native(FORWARD)
    assert base.calls == {}
