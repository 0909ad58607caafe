"""What agrees with the reference and what does not; that the compiled operators do; and what a choice becomes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graftwork_kernels import reference
from graftwork_kernels.candidates import TOLERANCE, ChosenOperators, difference, implementation, implementations, measure
from graftwork_kernels.choice import FORWARD, METHODS, Choice
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.implementation import Implementation
from graftwork_kernels.probes import Probes, StepSizes, shapes_of
from graftwork_kernels.timing import ClockTimer

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


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tolerance_is_that_of_the_type(dtype: torch.dtype) -> None:
    truth = torch.linspace(-4, 4, 50).to(dtype)
    near, far = (truth.to(torch.float32) * (1 + TOLERANCE[dtype] * factor) for factor in (0.3, 8))
    assert difference((near.to(dtype),), (truth,)) is None
    assert "is off by" in str(difference((far.to(dtype),), (truth,)))


def test_results_of_another_kind_disagree() -> None:
    truth = torch.zeros(2, 3)
    assert difference((), (truth,)) == "0 results for 1"
    assert difference((truth.to(torch.bfloat16),), (truth,)) == "result 0 is torch.bfloat16 (2, 3) for torch.float32 (2, 3)"
    assert "(3, 2)" in str(difference((truth.T,), (truth,)))
    assert difference((torch.tensor([1, 2]),), (torch.tensor([1, 3]),)) == "result 0 differs in 1 of 2 places"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_agrees_with_its_like_alone(value: float) -> None:
    truth, same = torch.tensor([1.0, value]), torch.tensor([1.0, value])
    assert difference((same,), (truth,)) is None
    for other in (
        torch.tensor([1.0, 2.0]),
        torch.tensor([value, value]),
        torch.tensor([1.0, -torch.inf if value > 0 else torch.inf]),
    ):
        assert "is off by inf" in str(difference((other,), (truth,)))


def test_choice_becomes_operators(cpu_library: Library) -> None:
    choice = Choice({operator: "cpu" if operator in ("linear", "sample") else "reference" for operator in METHODS})
    issuer = Immediate(cpu_library)
    made, parts = implementation(choice, issuer, CPU, 64), implementations(issuer, torch.float32, CPU, 64)
    assert isinstance(made, ChosenOperators)
    for operator, methods in METHODS.items():
        for method in methods:
            expected = getattr(type(parts["cpu"]), method) if choice.names[operator] == "cpu" else getattr(reference, method)
            chosen = getattr(made, method)
            assert getattr(chosen, "__func__", chosen) is expected
    assert {m for methods in METHODS.values() for m in methods} == {m for m in vars(Implementation) if not m.startswith("_")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limits", [{}, {"max_rows": 1, "max_requests": 1}, {"vocab_size": 3}, {"num_kv_heads": 4, "head_dim": 16}])
def test_the_compiled_operators_agree_on_every_probe(
    cpu_library: Library, dtype: torch.dtype, limits: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    sizes = replace(SIZES, dtype=dtype, **limits)
    verdicts = measure(sizes, implementations(Immediate(cpu_library), dtype, CPU, 64), ClockTimer(), CPU)
    assert set(verdicts) == set(METHODS)
    assert {operator: dict(v.dropped) for operator, v in verdicts.items() if v.dropped} == {}


def test_every_operator_is_probed_on_every_kind_of_step() -> None:
    shapes = [(shape.num_requests, shape.query_len) for shape in shapes_of(SIZES)]
    assert shapes == [(1, 1), (8, 1), (1, 40)]
    assert sum(shape.share for shape in shapes_of(SIZES)) == pytest.approx(1)
    for operator, start in Probes(SIZES, CPU):
        runs = start(reference)
        assert len(runs) == (3 if operator in FORWARD else 2)
        assert all(output.numel() for run in runs.values() for output in run())


class SlowToWake(Immediate):
    """Every call waits for its threads, as it does on many cores and on a busy machine; ``waited`` counts that and nothing else."""

    WAIT_S = 0.003
    waited = 0.0

    def issue(self, *arguments: object, **named: object) -> None:
        self.waited += self.WAIT_S
        super().issue(*arguments, **named)  # type: ignore[arg-type]


def test_a_forward_pass_is_judged_by_what_it_costs_recorded(cpu_library: Library) -> None:
    """Called one by one its small operators would lose to torch, and the recording with them."""
    issuer = SlowToWake(cpu_library)
    found = {"reference": reference, "cpu": CpuOperators(issuer)}
    verdicts = measure(SIZES, found, ClockTimer(lambda: issuer.waited), CPU)
    called = {
        (operator, shape)
        for operator, verdict in verdicts.items()
        for shape, seconds in verdict.seconds["cpu"].items()
        if seconds > SlowToWake.WAIT_S / 2
    }
    others = {(operator, shape) for operator in set(METHODS) - set(FORWARD) for shape in verdicts[operator].rows}
    assert called == others | {("linear", f"prefill {SIZES.max_rows}")}


def test_what_cannot_be_recorded_is_measured_as_it_is_called(cpu_library: Library) -> None:
    sizes = replace(SIZES, dtype=torch.float16)
    verdict = measure(sizes, {"reference": reference, "cpu": CpuOperators(Immediate(cpu_library))}, ClockTimer(), CPU)["linear"]
    assert verdict.seconds["cpu"].keys() == verdict.rows.keys()
