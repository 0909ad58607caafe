"""Which implementation of each operator runs: what was measured, what is pinned, what is kept for the next start. Knows no torch.

`graftwork_kernels.candidates` measures. This half is apart so that a process without torch can check pins and tell what was chosen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

REFERENCE = "reference"
CPU = "cpu"
ONEDNN = "onednn"
TRITON = "triton"
TRITON_FUSED = "triton_fused"
NAMES = (REFERENCE, CPU, ONEDNN, TRITON, TRITON_FUSED)
"""Implementations that exist; what a machine has of them is another matter."""

PARTIAL: Mapping[str, str] = {ONEDNN: "linear", TRITON_FUSED: "linear"}
"""Implementations that have something of their own for one operator alone."""

ON_GPU = frozenset({TRITON, TRITON_FUSED})
"""Those that a CUDA graph can hold: none of their operators waits for the device, or reads on the host what lies there."""

METHODS: Mapping[str, tuple[str, ...]] = {
    # Those of a linear share a prepared weight; what is planned is read by those that planned it.
    "linear": ("prepare_weight", "embedding", "linear", "adapter_linear", "plan_adapters"),
    "paged_attention": ("paged_attention", "plan_attention"),
    "rotary_and_write_kv": ("rotary_and_write_kv",),
    "rms_norm": ("rms_norm",),
    "add_rms_norm": ("add_rms_norm",),
    "silu_and_mul": ("silu_and_mul",),
    "gelu_and_mul": ("gelu_and_mul",),
    "finite_rows": ("finite_rows",),
    "apply_logit_bias": ("apply_logit_bias",),
    "apply_penalties": ("apply_penalties",),
    "sample": ("sample",),
    "philox_uniform": ("philox_uniform",),
    "token_logprobs": ("token_logprobs",),
}
"""Operators that are chosen, and the methods of `graftwork_kernels.implementation.Implementation` that each choice covers."""

FORWARD = ("linear", "paged_attention", "rotary_and_write_kv", "rms_norm", "add_rms_norm", "silu_and_mul", "gelu_and_mul")
"""Those of a forward pass."""

ALL = "all"
"""Pinned, it stands for every operator that is not pinned by its own name."""

RECORDED_HANDICAP = 1.25
"""A forward pass of native operators alone is recorded and replayed: no calls from Python, and threads are woken once. One operator
that is not native ends that for all. So all are native unless the fastest of each, taken together, is faster by more than this."""


class BadPin(Exception):
    """A pin that names nothing there is, or something that this machine does not have; the message lists what there is."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The name of an implementation for each operator of `METHODS`.

    ``onednn_rows``: steps of so many rows and more have linears in oneDNN, though `names` has those in C++; None: no step has.
    """

    names: Mapping[str, str]
    onednn_rows: int | None = None

    def is_native(self, operators: Collection[str]) -> bool:
        """Whether all of ``operators`` are of the compiled library, so that a pass of nothing else can be recorded and replayed."""
        return all(self.names[operator] == CPU for operator in operators)

    def is_capturable(self, operators: Collection[str]) -> bool:
        """Whether all of ``operators`` are kernels of a GPU, so that a CUDA graph can hold a pass of nothing else."""
        return all(self.names[operator] in ON_GPU for operator in operators)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What measuring one operator gave.

    ``seconds`` by implementation and shape; ``cost`` by implementation, relative to the reference; ``dropped`` says why an
    implementation may not be taken; ``rows`` by shape, of a whole step; those of ``failed`` raised something instead of computing
    anything.
    """

    seconds: Mapping[str, Mapping[str, float]]
    cost: Mapping[str, float]
    dropped: Mapping[str, str]
    rows: Mapping[str, int]
    failed: frozenset[str] = frozenset()

    def fastest(self) -> str:
        """The implementation with the lowest cost; of equals, the first by name. OneDNN is asked for by `onednn_rows`.

        On a GPU the reference is what is left where every kernel was dropped, and is never taken for its speed: it reads on the
        host, and one such operator ends the captured step for all.
        """
        names = self.cost.keys() - {ONEDNN}
        return min(names & ON_GPU or names, key=lambda name: (self.cost[name], name))

    def onednn_rows(self) -> int | None:
        """The fewest rows measured from which on oneDNN is so much faster than C++ that leaving the recorded pass is worth it; None
        where it is not even for the most.
        """
        if not {CPU, ONEDNN} <= self.cost.keys():
            return None
        cpu, onednn = self.seconds[CPU], self.seconds[ONEDNN]
        slower = max((rows for shape, rows in self.rows.items() if onednn[shape] * RECORDED_HANDICAP >= cpu[shape]), default=0)
        return min((rows for rows in self.rows.values() if rows > slower), default=None)


@dataclass(frozen=True, slots=True)
class Measured:
    """A verdict for each operator; ``is_provisional`` if others had the machine meanwhile: better than none, until it is quiet."""

    verdicts: Mapping[str, Verdict]
    is_provisional: bool = False


def check_pins(pins: Mapping[str, str], unavailable: Mapping[str, str]) -> None:
    """Raises `BadPin`. ``unavailable`` says of an implementation why it cannot be had on this machine's device."""
    for operator, name in pins.items():
        if operator != ALL and operator not in METHODS:
            raise BadPin(f"kernel {operator}={name}: there is no operator {operator}; there are {ALL}, {', '.join(METHODS)}")
        if name not in NAMES:
            raise BadPin(f"kernel {operator}={name}: there is no implementation {name}; there are {', '.join(NAMES)}")
        if PARTIAL.get(name, operator) != operator:
            raise BadPin(f"kernel {operator}={name}: {name} is for {PARTIAL[name]} alone")
        if name in unavailable:
            raise BadPin(f"kernel {operator}={name}: it cannot be had here: {unavailable[name]}")


def pinned(pins: Mapping[str, str]) -> dict[str, str]:
    """The operators that ``pins`` decide, each with its implementation."""
    everywhere = dict.fromkeys(METHODS, pins[ALL]) if ALL in pins else {}
    return everywhere | {operator: name for operator, name in pins.items() if operator != ALL}


def decide(verdicts: Mapping[str, Verdict], pins: Mapping[str, str]) -> Choice:
    """The pin where there is one, else the fastest, else the reference. Raises `BadPin` for a pin to what was dropped."""
    pins = pinned(pins)
    decided = {operator: verdict.fastest() for operator, verdict in verdicts.items()}
    forward = [operator for operator in FORWARD if operator in verdicts and CPU in verdicts[operator].cost]
    can_be_recorded = all(pins.get(operator, CPU) == CPU for operator in FORWARD)
    if can_be_recorded and _time_of(verdicts, dict.fromkeys(forward, CPU)) <= RECORDED_HANDICAP * _time_of(
        verdicts, {operator: decided[operator] for operator in forward}
    ):
        decided |= dict.fromkeys(forward, CPU)
    for operator, name in pins.items():
        reason = verdicts[operator].dropped.get(name) if operator in verdicts else None
        if reason is not None:
            raise BadPin(f"kernel {operator}={name}: it is not fit for use: {reason}")
        decided[operator] = name
    rows = verdicts["linear"].onednn_rows() if decided.get("linear") == CPU and "linear" not in pins else None
    if rows == 1:
        decided["linear"], rows = ONEDNN, None
    return Choice({operator: decided.get(operator, REFERENCE) for operator in METHODS}, rows)


def _time_of(verdicts: Mapping[str, Verdict], names: Mapping[str, str]) -> float:
    """How long these implementations of some operators take together, relative to the reference's, on average over the shapes that
    all of the operators have.
    """
    shapes = set[str].intersection(*(set(verdicts[operator].rows) for operator in names)) if names else set[str]()
    if not shapes:
        return 0.0

    def seconds(shape: str, of: Mapping[str, str]) -> float:
        return sum(verdicts[operator].seconds[name][shape] for operator, name in of.items())

    return sum(seconds(shape, names) / seconds(shape, dict.fromkeys(names, REFERENCE)) for shape in shapes) / len(shapes)


def table(verdicts: Mapping[str, Verdict], choice: Choice, pins: Mapping[str, str]) -> str:
    """Operators and implementations with their times, for a log."""
    shapes = list(dict.fromkeys(s for v in verdicts.values() for times in v.seconds.values() for s in times))
    rows = [["operator", "implementation", *shapes, "cost", ""]]
    decided = pinned(pins)
    for operator, name in choice.names.items():
        verdict = verdicts.get(operator, Verdict({name: {}}, {}, {}, {}))
        for candidate in dict.fromkeys((*verdict.seconds, *verdict.dropped)):
            times = verdict.seconds.get(candidate, {})
            cost = f"{verdict.cost[candidate]:.2f}" if candidate in verdict.cost else "-"
            remark = "dropped" if candidate in verdict.dropped else ""
            if candidate == name:
                remark = "pinned" if operator in decided else "chosen"
            elif candidate == ONEDNN and choice.onednn_rows is not None:
                remark = f"chosen from {choice.onednn_rows} rows on"
            cells = (f"{times[shape] * 1e6:.0f}" if shape in times else "-" for shape in shapes)
            rows.append([operator, candidate, *cells, cost, remark])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(_aligned(cells, widths)).rstrip() for cells in rows)


def _aligned(cells: list[str], widths: list[int]) -> list[str]:
    """Names to the left, numbers to the right."""
    num_names = 2
    names = [cell.ljust(width) for cell, width in zip(cells[:num_names], widths, strict=False)]
    return [*names, *(cell.rjust(width) for cell, width in zip(cells[num_names:], widths[num_names:], strict=True))]


# What a start measured is kept in a file beside the compiled kernels, one for each machine, version, model size and type.


def choice_file(folder: Path, conditions: Mapping[str, str]) -> Path:
    """Where what was measured under ``conditions`` is kept."""
    digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:32]
    return folder / f"choice-{digest}.json"


def read_measured(path: Path) -> Measured | None:
    """What `write_measured` wrote, or None where there is nothing of the kind."""
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content["provisional"], bool):
            raise TypeError(f"expected true or false, got {content['provisional']!r}")
        return Measured({operator: _verdict(content["operators"][operator]) for operator in METHODS}, content["provisional"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        logger.warning("%s cannot be used, kernels are measured again: %r", path, error)
        return None


def _verdict(fields: Mapping[str, Mapping[str, object]]) -> Verdict:
    """One operator's part of the file. Raises KeyError, TypeError, ValueError and AttributeError for anything else."""
    seconds = {str(name): _floats(times) for name, times in fields["seconds"].items()}
    dropped = {str(name): str(reason) for name, reason in fields["dropped"].items()}
    rows = {shape: int(number) for shape, number in _floats(fields["rows"]).items()}
    verdict = Verdict(seconds, _floats(fields["cost"]), dropped, rows)
    if REFERENCE not in verdict.cost or not set(verdict.cost) <= set(seconds) - set(verdict.dropped):
        raise ValueError("an implementation has a cost and no times, or was dropped")
    if any(seconds[name].keys() != rows.keys() for name in verdict.cost):
        raise ValueError("an implementation has a cost and lacks times")
    return verdict


def _floats(values: object) -> dict[str, float]:
    if not isinstance(values, dict):
        raise TypeError(f"expected an object, got {values!r}")
    numbers = {str(name): float(value) for name, value in values.items()}
    if not all(math.isfinite(number) and number > 0 for number in numbers.values()):
        raise ValueError(f"expected positive numbers, got {values!r}")
    return numbers


def write_measured(path: Path, conditions: Mapping[str, str], measured: Measured) -> None:
    """Keep ``measured`` whole or not at all; a folder that cannot be written to is no reason not to start."""
    content = {
        "conditions": dict(conditions),
        "provisional": measured.is_provisional,
        "operators": {
            operator: {"seconds": verdict.seconds, "cost": verdict.cost, "dropped": verdict.dropped, "rows": verdict.rows}
            for operator, verdict in measured.verdicts.items()
        },
    }
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=path.parent) as scratch:
            (whole := Path(scratch) / path.name).write_text(json.dumps(content, indent=1))
            os.replace(whole, path)
    except OSError as error:
        logger.warning("%s cannot be written, kernels are measured at every start: %s", path, error.strerror or error)


def last_measured(folder: Path) -> Measured | None:
    """What the latest measuring kept in ``folder``; None where there was none."""
    files: list[tuple[float, Path]] = []
    for path in folder.glob("choice-*.json"):
        with contextlib.suppress(OSError):
            files.append((path.stat().st_mtime, path))
    return read_measured(max(files)[1]) if files else None
