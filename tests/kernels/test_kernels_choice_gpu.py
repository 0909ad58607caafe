"""What a GPU is to run: measured by its own timer, its kernels before the reference, kept for that GPU; here with a device that a
CPU plays, and in tests marked so on a real one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graftwork_kernels import candidates, reference
from graftwork_kernels.candidates import choose, implementation, implementations, measure
from graftwork_kernels.choice import FORWARD, METHODS, ON_GPU, BadPin, Choice, last_measured
from graftwork_kernels.implementation import Implementation
from graftwork_kernels.probes import Outputs, Probes, StepSizes
from graftwork_kernels.triton import device as gpu

SIZES = StepSizes(
    hidden_size=32,
    intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=32,
    block_size=4,
    max_rows=3,
    max_requests=2,
    dtype=torch.float32,
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MAX_RANK = 16


class Recorded:
    """The reference, which notes on which devices the tensors lie that it is given."""

    def __init__(self) -> None:
        self.devices: dict[str, set[str]] = {}

    def __getattr__(self, method: str) -> Callable[..., object]:
        def recorded(*arguments: object) -> object:
            self.devices.setdefault(method, set()).update(tensor.device.type for tensor in _tensors(arguments))
            if method in ("plan_adapters", "plan_attention", "prepare_weight"):
                return getattr(reference, method)(*arguments)
            first = arguments[0]
            return (first, first) if method == "add_rms_norm" else (first,) * 3 if method == "token_logprobs" else first

        return recorded


def _tensors(values: object) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return [tensor for name in getattr(values, "__slots__", ()) for tensor in _tensors(getattr(values, name))]


def test_all_inputs_lie_on_the_device() -> None:
    """On one that computes nothing, and so accepts nothing of another."""
    used = Recorded()
    for _, start in Probes(SIZES, torch.device("meta")):
        for run in start(used).values():  # type: ignore[arg-type]
            run()
    assert set(used.devices) == {method for methods in METHODS.values() for method in methods}
    assert set.union(*used.devices.values()) == {"meta"}


class Clock:
    """Seconds that pass when an implementation says so; also a timer that goes by them."""

    now = 0.0

    def time(self, run: Callable[[], Outputs]) -> tuple[float, Outputs]:
        started = self.now
        outputs = run()
        return max(self.now - started, 1e-9), tuple(output.clone() for output in outputs)


class Timed:
    """The reference, each method of ``seconds`` taking so long, any other 1; ``spoil`` stands in for some."""

    def __init__(self, clock: Clock, seconds: Mapping[str, float], spoil: Mapping[str, Callable[..., object]] = {}) -> None:
        self._clock, self._seconds, self._spoil = clock, seconds, spoil
        self.num_calls = 0

    def __getattr__(self, method: str) -> Callable[..., object]:
        function = self._spoil.get(method) or getattr(reference, method)

        def timed(*arguments: object) -> object:
            self.num_calls += 1
            self._clock.now += self._seconds.get(method, 1.0)
            return function(*arguments)

        return timed


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A CPU plays the GPU: inputs lie on it, and these are the GPU's facts."""
    facts = {"machine": "NVIDIA H200", "capability": "9.0"}
    monkeypatch.setattr(candidates, "Probes", lambda sizes, _, **more: Probes(sizes, CPU, **more))
    monkeypatch.setattr(gpu, "facts", lambda _: facts)
    monkeypatch.setattr(gpu, "release", lambda _: None)
    return facts


@pytest.fixture
def start(facts: dict[str, str], tmp_path: Path) -> Callable[..., Choice]:
    """Choose for the GPU between these."""
    clock = Clock()

    def starting(
        triton: Mapping[str, float] = {}, fused: Mapping[str, float] = {}, base: Timed | None = None, **more: object
    ) -> Choice:
        spoil = {name: more.pop(name, {}) for name in ("spoil", "spoil_fused")}
        found = {
            "reference": base or Timed(clock, dict.fromkeys(dir(reference), 0.001)),
            "triton": Timed(clock, triton, spoil["spoil"]),  # type: ignore[arg-type]
            "triton_fused": Timed(clock, fused, spoil["spoil_fused"]),  # type: ignore[arg-type]
        }
        settings = {"device": CUDA, "folder": tmp_path, "timer": clock, "is_busy": lambda: pytest.fail("nobody asks the CPU")}
        return choose(SIZES, found, **{**settings, **more})  # type: ignore[arg-type]

    return starting


def test_the_reference_is_never_faster(start: Callable[..., Choice]) -> None:
    """Though it takes a thousandth of the time: a captured step cannot hold it."""
    choice = start(fused={"adapter_linear": 2.0})
    assert set(choice.names.values()) == {"triton"}
    assert choice.is_capturable(METHODS)
    assert not choice.is_native(FORWARD)


def test_of_the_two_forms_the_faster_is_taken_for_linears_alone(start: Callable[..., Choice]) -> None:
    choice = start(fused={"adapter_linear": 0.5})
    assert {operator for operator, name in choice.names.items() if name == "triton_fused"} == {"linear"}
    assert choice.is_capturable(METHODS)


def test_what_disagrees_leaves_its_operator_to_the_reference(
    start: Callable[..., Choice], caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*arguments: Tensor) -> Tensor:
        return reference.silu_and_mul(*arguments) + 0.5  # type: ignore[arg-type]

    choice = start(spoil={"silu_and_mul": wrong})
    assert {operator for operator, name in choice.names.items() if name == "reference"} == {"silu_and_mul"}
    assert not choice.is_capturable(FORWARD)
    assert "kernel silu_and_mul=triton is not used" in caplog.text


def test_one_form_stands_in_for_the_other(start: Callable[..., Choice]) -> None:
    def fails(*_: object) -> Tensor:
        raise RuntimeError("out of luck")

    assert start({"adapter_linear": 9.0}, spoil_fused={"adapter_linear": fails}).names["linear"] == "triton"
    assert start(spoil={"adapter_linear": fails}, fused={"adapter_linear": 9.0}).names["linear"] == "triton_fused"


def test_what_triton_cannot_compile_is_dropped(start: Callable[..., Choice], tmp_path: Path) -> None:
    """Where a step's tasks are made, and where it is computed. It may compile at the next start, so nothing is kept."""
    from triton.errors import TritonError

    def fails(*_: object) -> Tensor:
        raise TritonError("no such instruction")

    choice = start(spoil={"plan_attention": fails, "rms_norm": fails})
    assert {operator for operator, name in choice.names.items() if name == "reference"} == {"paged_attention", "rms_norm"}
    assert list(tmp_path.glob("choice-*.json")) == []


def test_a_choice_is_kept_for_its_gpu(
    start: Callable[..., Choice], facts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Timed(Clock(), {})
    first = start(base=base)
    measured = base.num_calls
    assert start(fused={"adapter_linear": 0.5}, base=base) == first
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert start(base=base) == first
    assert base.num_calls == measured, "threads of the CPU are nothing to a GPU"
    kept = last_measured(tmp_path)
    assert kept is not None
    assert not kept.is_provisional
    facts["machine"] = "NVIDIA L4"
    start(base=base)
    assert base.num_calls > measured


def test_pins_to_the_cpus_kernels_are_refused(start: Callable[..., Choice]) -> None:
    unavailable = {"cpu": "it runs on the CPU, and the engine's device is cuda"}
    with pytest.raises(BadPin, match="kernel sample=cpu: it cannot be had here: it runs on the CPU, and the engine's device is"):
        start(pins={"sample": "cpu"}, unavailable=unavailable)
    with pytest.raises(BadPin, match="triton_fused is for linear alone"):
        start(pins={"sample": "triton_fused"})
    assert start(pins={"linear": "triton_fused", "sample": "reference"}).names["linear"] == "triton_fused"


def test_the_kernels_agree_on_every_probe() -> None:
    """Interpreted, with the tasks that each start plans."""
    found: dict[str, Implementation] = {"reference": reference}
    found |= {name: gpu.operators(name, CPU, MAX_RANK) for name in ON_GPU}
    verdicts = measure(SIZES, found, Once(), CPU)
    assert {operator: dict(verdict.dropped) for operator, verdict in verdicts.items() if verdict.dropped} == {}
    assert {operator for operator, verdict in verdicts.items() if "triton" in verdict.cost} == set(METHODS)
    assert {operator for operator, verdict in verdicts.items() if "triton_fused" in verdict.cost} == {"linear"}


class Once:
    """A timer that looks at no clock."""

    def time(self, run: Callable[[], Outputs]) -> tuple[float, Outputs]:
        return 1.0, tuple(output.clone() for output in run())


# Where there are which


@pytest.mark.parametrize(
    ("device", "interpret", "says"),
    [
        (CPU, "1", None),
        (CPU, "0", "on a CPU they are interpreted, slowly and for proofs alone, where TRITON_INTERPRET=1 is set"),
        (CPU, None, "its kernels are a GPU's"),
        (CUDA, None, None),
        (CUDA, "0", None),
        (CUDA, "1", "TRITON_INTERPRET is set, under which no kernel is compiled for the GPU; unset it"),
    ],
)
def test_a_cpu_only_interprets_and_a_gpu_never_does(
    device: torch.device, interpret: str | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interpret is None:
        monkeypatch.delenv("TRITON_INTERPRET")
    else:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    reason = gpu.unavailable(device)
    assert reason is None if says is None else says in str(reason)


def test_without_triton_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda _: None)
    assert gpu.unavailable(CUDA) == "triton is not installed; pip install triton"


def test_interpreted_kernels_are_no_candidates() -> None:
    assert set(implementations(None, torch.float32, CPU, MAX_RANK)) == {"reference"}


def test_a_gpus_candidates_are_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "operators", lambda name, device, max_rank: (name, device, max_rank))
    monkeypatch.setattr(gpu, "unavailable", lambda _: None)
    found = implementations(None, torch.bfloat16, CUDA, 32)
    assert list(found) == ["reference", "triton", "triton_fused"]
    assert found["triton_fused"] == ("triton_fused", CUDA, 32)
    monkeypatch.setattr(gpu, "unavailable", lambda _: "not here")
    assert list(implementations(None, torch.bfloat16, CUDA, 32)) == ["reference"]


# What is compiled is kept


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> object:
    """Triton's own, as they were afterwards."""
    from triton import knobs

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", "/home/of/triton")
    yield knobs
    del knobs.cache.dir
    os.environ.pop("TRITON_CACHE_DIR", None)


def test_compiled_kernels_are_kept_where_the_engine_says(knobs: object, tmp_path: Path) -> None:
    gpu.keep_compiled_in(tmp_path / "kernels" / "triton")
    assert knobs.cache.dir == str((tmp_path / "kernels" / "triton").resolve())  # type: ignore[attr-defined]
    assert (tmp_path / "kernels" / "triton").stat().st_mode & 0o777 == 0o700


def test_compiled_kernels_are_kept_where_the_user_says(knobs: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/users/own")
    gpu.keep_compiled_in(tmp_path / "triton")
    assert knobs.cache.dir == "/users/own"  # type: ignore[attr-defined]
    assert not (tmp_path / "triton").exists()


def test_compiled_kernels_are_not_kept_where_others_write(knobs: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder := tmp_path / "triton").mkdir()
    folder.chmod(0o777)
    gpu.keep_compiled_in(folder)
    assert knobs.cache.dir == "/home/of/triton/.triton/cache"  # type: ignore[attr-defined]
    assert "others can write to" in caplog.text


# On a real one: pytest -m gpu, with TRITON_INTERPRET=0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_real_gpu_runs_its_kernels(dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "graftwork_kernels")
    sizes = StepSizes(512, 1024, 8, 2, 64, 2048, 16, 256, 64, dtype)
    found = implementations(None, dtype, CUDA, 64)
    choice = choose(sizes, found, device=CUDA, folder=tmp_path)
    assert choice.is_capturable(METHODS), caplog.text
    kept = last_measured(tmp_path)
    assert kept is not None
    assert {operator: dict(verdict.dropped) for operator, verdict in kept.verdicts.items() if verdict.dropped} == {}
    caplog.clear()
    assert choose(sizes, found, device=CUDA, folder=tmp_path) == choice
    assert "measured in" not in caplog.text
    assert implementation(choice, None, CUDA, 64).plan_attention is not None


@pytest.mark.gpu
def test_a_real_gpu_times_what_a_graph_holds_and_what_it_cannot() -> None:
    timer = gpu.GraphTimer(CUDA)
    x = torch.ones(1 << 24, device=CUDA)

    def adds() -> Outputs:
        x.add_(1)
        return (x,)

    seconds, (first,) = timer.time(adds)
    assert bool((first == 2).all()), "what the first run gave, though later ones went on"
    assert 2 * x.nbytes / 20e12 < seconds < 2 * x.nbytes / 100e9

    def reads() -> Outputs:
        return (x.new_tensor([float(x.sum())]),)

    called, (total,) = timer.time(reads)
    assert called > 0
    assert float(total) == pytest.approx(float(x.double().sum()), rel=1e-3)
    with pytest.raises(ValueError, match="no luck"):
        timer.time(lambda: (_ for _ in ()).throw(ValueError("no luck")))  # type: ignore[arg-type,return-value]
    assert timer.time(adds)[0] > 0, "a run that raised leaves nothing behind"
