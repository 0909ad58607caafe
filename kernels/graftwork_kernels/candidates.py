"""Chooses by measurement: times every implementation of each operator, and takes the fastest that agrees with the reference.

What an implementation costs is, over the kinds of step, the sum of its time relative to the reference's, weighted with the share of
an engine's time that the kind takes. So it tells how long an hour of the reference's would last, and no kind outvotes another by
being longer. Refuses to know models; `graftwork_kernels.probes` says what is run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from graftwork_kernels import reference
from graftwork_kernels.choice import (
    CPU,
    FORWARD,
    METHODS,
    ON_GPU,
    ONEDNN,
    PARTIAL,
    REFERENCE,
    TRITON,
    TRITON_FUSED,
    Choice,
    Measured,
    Verdict,
    check_pins,
    choice_file,
    decide,
    pinned,
    read_measured,
    table,
    write_measured,
)
from graftwork_kernels.cpu.build import machine
from graftwork_kernels.cpu.capture import Recorder
from graftwork_kernels.cpu.issue import Issuer
from graftwork_kernels.cpu.onednn import OneDnnOperators
from graftwork_kernels.cpu.onednn import unavailable as onednn_unavailable
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.implementation import Implementation
from graftwork_kernels.probes import Outputs, Probes, Shape, Start, StepSizes
from graftwork_kernels.timing import ClockTimer, Timer, machine_is_busy, one_thread
from graftwork_kernels.triton import device as gpu

logger = logging.getLogger(__name__)

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""How far a result may lie from the reference's, as a part of its own magnitude and of the tensor's root mean square together: sums
in another order, and up to two roundings to the type. Integers and booleans agree when they are equal."""

LIBRARY_PRODUCTS = frozenset({ONEDNN, TRITON, TRITON_FUSED})
"""Whose products are a library's, which may round them, or parts of their sums, to the model's type."""

REPLAYED_CALLS = 8
"""Of a native operator of the forward pass, measured together: an engine wakes its threads once for hundreds of them."""


class ChosenOperators:
    """An `Implementation` put together of several: ``of`` gives the one that runs an operator of `METHODS`."""

    def __init__(self, of: Callable[[str], Implementation]) -> None:
        linear = of("linear")
        self.prepare_weight = linear.prepare_weight
        self.embedding = linear.embedding
        self.linear = linear.linear
        self.adapter_linear = linear.adapter_linear
        self.plan_adapters = linear.plan_adapters
        attention = of("paged_attention")
        self.paged_attention = attention.paged_attention
        self.plan_attention = attention.plan_attention
        self.rotary_and_write_kv = of("rotary_and_write_kv").rotary_and_write_kv
        self.rms_norm = of("rms_norm").rms_norm
        self.add_rms_norm = of("add_rms_norm").add_rms_norm
        self.silu_and_mul = of("silu_and_mul").silu_and_mul
        self.gelu_and_mul = of("gelu_and_mul").gelu_and_mul
        self.finite_rows = of("finite_rows").finite_rows
        self.apply_logit_bias = of("apply_logit_bias").apply_logit_bias
        self.apply_penalties = of("apply_penalties").apply_penalties
        self.sample = of("sample").sample
        self.philox_uniform = of("philox_uniform").philox_uniform
        self.token_logprobs = of("token_logprobs").token_logprobs


def implementations(issuer: Issuer | None, dtype: torch.dtype, device: torch.device, max_rank: int) -> dict[str, Implementation]:
    """Every implementation that may be chosen on ``device`` for a model of ``dtype``, by name.

    Those in C++ go through ``issuer``, None where there is no compiler, or no use for one; a GPU's are for adapters of up to
    ``max_rank``. Interpreted kernels are never among them: they can be pinned, which `implementation` then makes.
    """
    found: dict[str, Implementation] = {REFERENCE: reference}
    if device.type == "cuda":
        if gpu.unavailable(device) is None:
            found |= {name: gpu.operators(name, device, max_rank) for name in (TRITON, TRITON_FUSED)}
    elif issuer is not None:
        found[CPU] = CpuOperators(issuer)
        if onednn_unavailable(dtype) is None:
            found[ONEDNN] = OneDnnOperators(issuer)
    return found


def implementation(choice: Choice, issuer: Issuer | None, device: torch.device, max_rank: int) -> Implementation:
    """The operators of ``choice`` on ``device``; see `implementations`."""
    found: dict[str, Implementation] = {REFERENCE: reference}
    if issuer is not None:
        found |= {CPU: CpuOperators(issuer), ONEDNN: OneDnnOperators(issuer)}
    found |= {name: gpu.operators(name, device, max_rank) for name in ON_GPU.intersection(choice.names.values())}
    chosen = {operator: found[name] for operator, name in choice.names.items()}
    if issuer is not None and choice.onednn_rows is not None:
        chosen["linear"] = OneDnnOperators(issuer, choice.onednn_rows)
    return ChosenOperators(chosen.__getitem__)


def conditions(sizes: StepSizes, found: Mapping[str, Implementation], fingerprint: str, device: torch.device) -> dict[str, str]:
    """All that what is measured on ``device`` depends on. ``fingerprint`` is that of the compiled library, "" without one."""
    return {
        **(gpu.facts(device) if device.type == "cuda" else _facts_of_cpu()),
        "torch": torch.__version__,
        "graftwork": version("graftwork"),
        "library": fingerprint,
        "implementations": ", ".join(found),
        "python": _python_digest(),
        **{name: str(value) for name, value in asdict(sizes).items()},
    }


def _facts_of_cpu() -> dict[str, str]:
    return {
        "machine": machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
    }


def _python_digest() -> str:
    """Of everything in Python that decides what is measured, and how."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def choose(
    sizes: StepSizes,
    found: Mapping[str, Implementation],
    *,
    device: torch.device,
    folder: Path,
    fingerprint: str = "",
    pins: Mapping[str, str] | None = None,
    unavailable: Mapping[str, str] | None = None,
    timer: Timer | None = None,
    clock: Callable[[], float] = time.perf_counter,
    thread_clock: Callable[[], float] = time.thread_time,
    is_busy: Callable[[], bool] | None = None,
) -> Choice:
    """Which implementation of ``found`` each operator is to have; one of them is the reference.

    What is measured is kept in ``folder`` and not measured again under the same `conditions`. A CPU that is busy is measured by the
    processor time of one thread, which others cannot take; that is kept as provisional, used by later starts on a busy machine, and
    replaced by the first on a quiet one. A GPU has a ``timer`` of its own, and nobody asks what the CPU does meanwhile.
    ``pins`` maps operators (or "all") to implementations; ``unavailable`` says why one cannot be had here. Raises
    `graftwork_kernels.choice.BadPin`.
    """
    pins = pins or {}
    check_pins(pins, unavailable or {})
    if len(found) == 1 or len(pinned(pins)) == len(METHODS):
        return decide({}, pins)
    where = conditions(sizes, found, fingerprint, device)
    file = choice_file(folder, where)
    kept = read_measured(file)
    if kept is not None and any(not set(verdict.cost) <= set(found) for verdict in kept.verdicts.values()):
        kept = None
    source = f"as {file.name} has it"
    if kept is None or kept.is_provisional:
        if timer is None and device.type == "cuda":
            timer = gpu.GraphTimer(device)
        if timer is not None or not (is_busy or machine_is_busy)():
            kept, source = _measure_quiet(sizes, found, timer or ClockTimer(clock), device)
            _keep(file, where, kept)
        elif kept is None:
            with one_thread():
                kept = Measured(measure(sizes, found, ClockTimer(thread_clock), device), is_provisional=True)
            source = "provisional: measured on one thread, since the machine is busy, until a start finds it quiet"
            _keep(file, where, kept)
        else:
            source = f"provisional: as {file.name} has it from a busy machine, which it is still"
    choice = decide(kept.verdicts, pins)
    logger.info("kernels, %s; times in µs:\n%s", source, table(kept.verdicts, choice, pins))
    return choice


def _measure_quiet(
    sizes: StepSizes, found: Mapping[str, Implementation], timer: Timer, device: torch.device
) -> tuple[Measured, str]:
    started = time.monotonic()
    measured = Measured(measure(sizes, found, timer, device))
    if device.type == "cuda":
        gpu.release(device)
    return measured, f"measured in {time.monotonic() - started:.1f} s"


def _keep(file: Path, where: Mapping[str, str], measured: Measured) -> None:
    """But not where something could not run: it may at the next start."""
    if not any(verdict.failed for verdict in measured.verdicts.values()):
        write_measured(file, where, measured)


@torch.inference_mode()
def measure(sizes: StepSizes, found: Mapping[str, Implementation], timer: Timer, device: torch.device) -> dict[str, Verdict]:
    """Time every implementation of every operator on every kind of step, on ``device``."""
    failures: tuple[type[Exception], ...] = (RuntimeError, ValueError, IndexError, TypeError, *gpu.compile_errors(device))
    verdicts = {}
    for operator, start in Probes(sizes, device, splits_linear=ONEDNN in found):
        candidates = {name: one for name, one in found.items() if PARTIAL.get(name, operator) == operator}
        verdicts[operator] = _judge(operator, start, candidates, sizes.dtype, timer, failures)
    return verdicts


def _judge(
    operator: str,
    start: Start,
    found: Mapping[str, Implementation],
    dtype: torch.dtype,
    timer: Timer,
    failures: tuple[type[Exception], ...],
) -> Verdict:
    seconds: dict[str, dict[str, float]] = {}
    dropped: dict[str, str] = {}
    failed: set[str] = set()
    truth = start(found[REFERENCE])
    expected: dict[Shape, Outputs] = {}
    for name in (REFERENCE, *(name for name in found if name != REFERENCE)):
        rounded = dtype if operator == "linear" and name in LIBRARY_PRODUCTS else torch.float32
        times: dict[str, float] = {}
        try:
            runs = truth if name == REFERENCE else start(found[name])
            for shape, run in runs.items():
                times[shape.name], outputs = timer.time(run)
                if name == REFERENCE:
                    expected[shape] = outputs
                elif (reason := difference(outputs, expected[shape], rounded)) is not None:
                    dropped[name] = f"{shape.name}: {reason}"
                    break
                if operator in FORWARD and (replay := _replay(start, found[name], shape)) is not None:
                    times[shape.name] = timer.time(replay)[0] / REPLAYED_CALLS
        except failures as error:
            if name == REFERENCE:
                raise
            dropped[name] = f"it fails: {error}"
            failed.add(name)
        if name in dropped:
            logger.error("kernel %s=%s is not used, since it does not agree with the reference; %s", operator, name, dropped[name])
        seconds[name] = times
    shares = {shape.name: shape.share for shape in expected}
    cost = {name: _cost(seconds, name, shares) for name in found if name not in dropped}
    return Verdict(seconds, cost, dropped, {shape.name: shape.num_rows for shape in expected}, frozenset(failed))


def _replay(start: Start, implementation: Implementation, shape: Shape) -> Callable[[], Outputs] | None:
    """`REPLAYED_CALLS` calls as a recorded pass makes them: one from Python, and one waking of threads, for all of them.

    None for what is never recorded, and where not all has the same rows, as in a prompt's linears, whose head has one: they take so
    long that a call more is nothing.
    """
    if type(implementation) is not CpuOperators:
        return None
    recorder = Recorder(implementation.issuer.library, implementation.issuer.num_threads)
    once = start(CpuOperators(recorder))[shape]
    try:
        for _ in range(REPLAYED_CALLS):
            once()
    except ValueError:  # it computes something in another way, and so could not be recorded in a pass either
        return None
    program = recorder.finish()
    if program.max_rows is not None and program.max_rows < shape.num_rows:
        return None

    def replay() -> Outputs:
        program.run(shape.num_rows, shape.num_requests)
        return ()

    return replay


def _cost(seconds: Mapping[str, Mapping[str, float]], name: str, shares: Mapping[str, float]) -> float:
    base = seconds[REFERENCE]
    return sum(share * seconds[name][shape] / base[shape] for shape, share in shares.items()) / sum(shares.values())


def difference(outputs: Outputs, expected: Outputs, rounded: torch.dtype = torch.float32) -> str | None:
    """What is wrong with ``outputs``, or None if they agree with the reference's as `TOLERANCE` says of their type, or of that to
    which they were ``rounded`` on the way.
    """
    if len(outputs) != len(expected):
        return f"{len(outputs)} results for {len(expected)}"
    for number, (output, truth) in enumerate(zip(outputs, expected, strict=True)):
        if output.dtype != truth.dtype or output.shape != truth.shape:
            return f"result {number} is {output.dtype} {tuple(output.shape)} for {truth.dtype} {tuple(truth.shape)}"
        if (reason := _numbers_differ(output, truth, rounded)) is not None:
            return f"result {number} {reason}"
    return None


def _numbers_differ(output: Tensor, truth: Tensor, rounded: torch.dtype) -> str | None:
    if not truth.is_floating_point():
        num_wrong = int((output != truth).sum())
        return f"differs in {num_wrong} of {truth.numel()} places" if num_wrong else None
    tolerance = max(TOLERANCE[truth.dtype], TOLERANCE[rounded])
    output, truth = output.to(torch.float32), truth.to(torch.float32)
    magnitude = float(truth.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
    if torch.allclose(output, truth, tolerance, tolerance * magnitude, equal_nan=True):
        return None
    wrong = ~torch.isclose(output, truth, tolerance, tolerance * magnitude, equal_nan=True)
    error = ((output - truth).abs() / (truth.abs() + magnitude))[wrong].nan_to_num(torch.inf, torch.inf)
    return (
        f"is off by {float(error.max()):.2g} of its magnitude in {int(wrong.sum())} of {wrong.numel()} places, "
        f"where {tolerance:g} is allowed"
    )
