"""Measures the operators one by one, beside the reference and beside torch, and the whole step beside its linears.

    kernels.py --base DIR [--only linear,adapters,rows,dora,attention,small,step] [--budget SECONDS] [--threads N] [--out FILE]
        [--json]

Each case states what it must read and compute; its floor is the time that takes at the machine's rates, measured in the same run.
The candidates of a case run in turn, round after round; a time is the best round's, a ratio the median over rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

import machine
from graftwork_engine.errors import UnsupportedModel
from graftwork_engine.model.config import ModelConfig
from graftwork_kernels import reference
from graftwork_kernels.cpu.build import KernelsUnavailable, default_cache_dir
from graftwork_kernels.cpu.issue import Immediate, Issuer
from graftwork_kernels.cpu.library import open_library
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.ops import Operators
from operator_cases import Shapes, adapter_cases, attention_cases, linear_cases, small_cases
from results import BenchmarkFailed, Claim, Part, Results
from row_cases import row_cases, scale_cases
from runs import add_base, add_output, check_base, conclude
from timing import Case, Timed, run_case
from whole_step import step_claims

GROUPS = ("linear", "adapters", "rows", "dora", "attention", "small", "step")
MOST_THREADS = 1024


def implementations(issuer: Issuer) -> dict[str, Operators]:
    """Both of this machine, by name; ours is "cpu"."""
    return {"reference": Operators(reference), "cpu": Operators(CpuOperators(issuer))}


def measure(options: argparse.Namespace, results: Results) -> None:
    """Every chosen group into ``results``."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        shapes = Shapes.of(ModelConfig.from_dir(options.base))
        issuer = Immediate(open_library(options.cache_dir))
        ops = implementations(issuer)
    except (KernelsUnavailable, UnsupportedModel) as error:
        raise BenchmarkFailed(str(error)) from error
    print("measuring the machine", file=sys.stderr)
    floors = machine.measure(options.threads)
    makers: dict[str, Callable[[Shapes, Mapping[str, Operators]], Iterator[Case]]] = {
        "linear": linear_cases,
        "adapters": adapter_cases,
        "rows": partial(row_cases, issuer=issuer),
        "dora": scale_cases,
        "attention": attention_cases,
        "small": small_cases,
    }
    with torch.inference_mode():
        for group in options.only:
            part = Part(group, floors.as_json(), {"budget": options.budget, "threads": torch.get_num_threads()})
            if group == "step":
                for claim in step_claims(options.base, shapes, ops, floors, options.cache_dir):
                    part.claims.append(claim)
                    print(f"{claim.row}: {claim.value:.3g} {claim.unit}", file=sys.stderr)
            else:
                for case in makers[group](shapes, ops):
                    add(part, case, run_case(case, options.budget), floors)
            results.put(part)


def add(part: Part, case: Case, timed: dict[str, Timed], floors: machine.Machine) -> None:
    """A case's times as readings, its bars as claims."""
    floor_s = floors.floor_s(case.num_bytes, case.flops)
    for name, one in timed.items():
        share = floor_s / one.best_s
        reading = {"case": case.name, "candidate": name, "ms": one.best_s * 1e3, "floor_ms": floor_s * 1e3, "roofline": share}
        part.readings.append({**reading, "median_ms": one.median_s * 1e3, "rounds": len(one.rounds)})
        print(f"{case.name}: {name} {one.best_s * 1e3:.3f} ms, {share:.0%} of the roofline", file=sys.stderr)
    ours = timed["cpu"]
    for name, one in timed.items():
        if one is not ours:
            part.claims.append(Claim.of(case.name, name, [b / a for a, b in zip(ours.rounds, one.rounds, strict=True)], "×"))
    if case.num_bytes or case.flops:
        shares = [floor_s / s for s in ours.rounds]
        part.claims.append(Claim.of(f"{case.name}: share of the roofline", "", [100 * share for share in shares], "%"))
    for bar in case.bars:
        part.claims.append(bar.claim(case.name, timed, floors))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the operators beside the reference, torch and the machine's floors.")
    add_base(parser, ", for shapes and for the whole step")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"comma list of {', '.join(GROUPS)}")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds that each candidate of a case may take")
    parser.add_argument("--threads", type=int, help="torch's number by default")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where the compiled kernels are kept")
    add_output(parser)
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := sorted(set(wanted) - set(GROUPS)):
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(GROUPS)}")
    options.only = [group for group in GROUPS if group in wanted]
    if options.threads is not None and not 1 <= options.threads <= MOST_THREADS:
        parser.error(f"--threads {options.threads}: give 1 to {MOST_THREADS}")
    if not options.budget > 0:
        parser.error(f"--budget {options.budget}: give more than 0")
    check_base(parser, options)
    return options


def main(arguments: Sequence[str]) -> int:
    """Print a table or JSON; 1 if the measurement failed, 130 if it was interrupted."""
    options = parse(arguments)
    return conclude("kernels", options.base.name, options, lambda results: measure(options, results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
