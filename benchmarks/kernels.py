"""Measures the operators one by one, beside the reference and beside torch, and the whole step beside its linears.

    kernels.py --base DIR [--only linear,adapters,attention,small,step] [--budget SECONDS] [--threads N] [--out FILE] [--json]

Each case states what it must read and compute; its floor is the time that takes at the machine's rates, measured in the same run.
The candidates of a case run in turn, round after round; a time is the best round's, a ratio the median over rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import machine
from graftwork_engine.errors import UnsupportedModel
from graftwork_engine.model.config import ModelConfig
from graftwork_kernels import reference
from graftwork_kernels.cpu.build import CompilerMissing, build_library
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.ops import Operators
from operator_cases import Shapes, adapter_cases, attention_cases, linear_cases, small_cases
from results import BenchmarkFailed, Claim, Report, show
from timing import Case, Timed, run_case
from whole_step import step_claims

GROUPS = ("linear", "adapters", "attention", "small", "step")


def implementations(cache_dir: Path) -> dict[str, Operators]:
    """All that this machine can run, by name; ours is "cpu"."""
    found = {"reference": Operators(reference)}
    try:
        found["cpu"] = Operators(CpuOperators(Immediate(Library(build_library(cache_dir)))))
    except CompilerMissing as missing:
        print(f"The reference alone is measured: {missing}", file=sys.stderr)
    return found


def measure(options: argparse.Namespace, report: Report) -> None:
    """Every chosen group into ``report``."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print("measuring the machine", file=sys.stderr)
    floors = machine.measure(options.threads)
    report.machine = {**floors.as_json(), "base": options.base.name}
    shapes = Shapes.of(ModelConfig.from_dir(options.base))
    with tempfile.TemporaryDirectory(prefix="graftwork-kernels-") as temporary, torch.inference_mode():
        ops = implementations(options.cache_dir or Path(temporary))
        makers = {"linear": linear_cases, "adapters": adapter_cases, "attention": attention_cases, "small": small_cases}
        for group, make in makers.items():
            if group in options.only:
                for case in make(shapes, ops):
                    add(report, case, run_case(case, options.budget), floors)
        if "step" in options.only:
            for claim in step_claims(options.base, shapes, ops, floors, max(1, int(options.budget // 3))):
                report.claims.append(claim)
                print(f"{claim.row}: {claim.value:.3g} {claim.unit}", file=sys.stderr)


def add(report: Report, case: Case, timed: dict[str, Timed], floors: machine.Machine) -> None:
    """A case's times as readings, its bars as claims."""
    floor_s = floors.floor_s(case.num_bytes, case.flops)
    for name, one in timed.items():
        share = floor_s / one.best_s
        reading = {"case": case.name, "candidate": name, "ms": one.best_s * 1e3, "floor_ms": floor_s * 1e3, "roofline": share}
        report.readings.append(reading)
        print(f"{case.name}: {name} {one.best_s * 1e3:.3f} ms, {share:.0%} of the roofline", file=sys.stderr)
    ours = timed.get("cpu") or timed["reference"]
    for name, one in timed.items():
        if one is not ours:
            report.claims.append(Claim.of(case.name, name, [b / a for a, b in zip(ours.rounds, one.rounds, strict=True)], "×"))
    if case.num_bytes or case.flops:
        shares = [floor_s / s for s in ours.rounds]
        report.claims.append(Claim.of(f"{case.name}: share of the roofline", "", [100 * share for share in shares], "%"))
    for bar in case.bars:
        report.claims.append(bar.claim(case.name, timed, floors))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the operators beside the reference, torch and the machine's floors.")
    parser.add_argument("--base", type=Path, required=True, help="the base model's folder, for shapes and for the whole step")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"comma list of {', '.join(GROUPS)}")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds that each candidate of a case may take")
    parser.add_argument("--threads", type=int, help="torch's number by default")
    parser.add_argument("--cache-dir", type=Path, help="where the compiled kernels are kept")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := sorted(set(options.only) - set(GROUPS)):
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(GROUPS)}")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads {options.threads}: give at least 1")
    if not options.budget > 0:
        parser.error(f"--budget {options.budget}: give more than 0")
    if not (options.base / "config.json").is_file():
        parser.error(f"--base {options.base} has no config.json; `make base` prepares one in .data/base")
    return options


def main(arguments: Sequence[str]) -> int:
    """Print a table or JSON; 1 if the measurement failed, 130 if it was interrupted."""
    options = parse(arguments)
    report, status = Report("kernels", {}), 0
    try:
        measure(options, report)
    except (BenchmarkFailed, UnsupportedModel) as error:
        print(f"Error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    show(report, as_json=options.json, out=options.out)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
