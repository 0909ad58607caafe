"""Is every Triton kernel right on this GPU, and how near does it come to what the memory allows? Five minutes, from the sources.

    python benchmarks/gpu_check.py --out FOLDER                  on a machine with a GPU
    python benchmarks/gpu_check.py --dry                         anywhere: the same code, interpreted, on tiny sizes

Needs torch, triton and what the engine's model imports; no network and nothing of the web. Parts run in the order of their worth,
each in a process of its own and to a deadline of its own: it leaves out what it has no time for, and says so, and is ended where it
does not look. What it has measured until then is kept. FOLDER/gpu_check.json is written after every part.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

ROOMS = ("kernels", "adapters", "engine")
FILE = "gpu_check.json"
FAILED, LATE, SECONDS = "failed", "not done in time", "seconds"
"""Names of figures that every part may have."""

COPY = "copy, GB/s"  # as the part that measures it has it
NO_DEVICE = "NoDevice"
MOST_PROCESSES = 12
DRY_GRACE_S = 60.0  # of a machine that may be busy with other things


@dataclass(frozen=True)
class Section:
    """A part: the function of its name in a module, and which share of all the time is its. ``is_shared``: its work is divided
    among as many processes as there are cores.
    """

    name: str
    module: str
    share: float
    is_shared: bool = False


SECTIONS = (
    Section("machine", "gpu_sections_start", 0.02),
    Section("copy_rate", "gpu_sections_speed", 0.02),
    Section("warm_cache", "gpu_sections_start", 0.2, is_shared=True),
    Section("adapters_are_right", "gpu_sections_right", 0.12),
    Section("attention_is_right", "gpu_sections_right", 0.06),
    Section("layers_are_right", "gpu_sections_right", 0.03),
    Section("sampling_is_right", "gpu_sections_logits", 0.04),
    Section("logits_are_right", "gpu_sections_logits", 0.03),
    Section("graphs_follow_the_mix", "gpu_sections_graphs", 0.1),
    Section("decode_step", "gpu_sections_steps", 0.12),
    Section("adapter_bandwidth", "gpu_sections_speed", 0.1),
    Section("attention_bandwidth", "gpu_sections_speed", 0.05),
    Section("compiles", "gpu_sections_start", 0.05),
    Section("host_overhead", "gpu_sections_steps", 0.04),
    Section("adapter_load", "gpu_sections_speed", 0.02),
)
"""What one leaves of its share is the others'."""


@dataclass(frozen=True)
class Task:
    """What a process is told: which part, and how; see `gpu_bench.Bench`."""

    section: Section
    is_dry: bool
    seed: int
    deadline: float
    copy_gbps: float
    part: int
    parts: int
    paths: tuple[str, ...]


Processes = dict[Connection, multiprocessing.process.BaseProcess]
"""By the end of a pipe on which each says what it finds."""


@dataclass
class Ended:
    """What came of a part."""

    figures: dict[str, float | str] = field(default_factory=dict)

    def fail(self, why: str) -> None:
        """Keep the first reason, which is mostly the others' cause."""
        self.figures.setdefault(FAILED, why)


def run_section(section: Section, options: argparse.Namespace, seconds: float, seed: int, copy_gbps: float) -> Ended:
    """Run a part in processes of its own, until it ends or its time is over."""
    started = time.monotonic()
    ended = Ended()
    # Time to end what it has begun, and to start: a GPU's context takes a second or two.
    grace = DRY_GRACE_S if options.dry else max(10.0, 0.06 * options.budget_s)
    cores = 1 if options.dry or not section.is_shared else min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("forkserver")
    processes: Processes = {}
    try:
        for part in range(cores):
            task = Task(section, options.dry, seed, started + seconds, copy_gbps, part, cores, tuple(sys.path))
            reader, writer = context.Pipe(duplex=False)
            processes[reader] = context.Process(target=work, args=(task, writer), name=section.name)
            processes[reader].start()
            writer.close()
        _listen(processes, ended, started + seconds + grace)
    except Exception as error:  # noqa: BLE001 - a part that cannot be started leaves the others
        ended.fail(f"{type(error).__name__}: {error}")
    finally:
        for reader, process in processes.items():
            process.join(0 if FAILED in ended.figures else 5)
            process.kill()
            process.join()
            reader.close()
    ended.figures[SECONDS] = time.monotonic() - started
    return ended


def _listen(processes: Processes, ended: Ended, until: float) -> None:
    """Take what the processes have to say, until all have ended or it is time to end them."""
    talking = set(processes)
    while talking:
        ready = wait(talking, max(0.0, until - time.monotonic()))
        if not ready or time.monotonic() > until:
            ended.fail("ended by force: it went on beyond its deadline")
            return
        for reader in [reader for reader in talking if reader in ready]:
            try:
                name, value = reader.recv()
            except (EOFError, OSError):
                name, value = FAILED, _death(processes[reader])
                talking.discard(reader)
            if name is None:
                talking.discard(reader)
            elif name == FAILED:
                ended.fail(value)
            else:
                ended.figures[name] = value


def _death(process: multiprocessing.process.BaseProcess) -> str:
    """Of one that has closed its end without a word."""
    process.join(10)
    code = process.exitcode
    return f"its process was ended by signal {-code}" if code is not None and code < 0 else f"its process ended with {code}"


def work(task: Task, writer: Connection) -> None:
    """The whole life of a part's process: each figure is sent as soon as it is known, and a failure as one more. An end with
    neither is one that nobody could tell of.
    """
    try:
        sys.path[:] = task.paths
        _measure(task, writer)
    except Exception as error:  # noqa: BLE001 - whatever it was, it belongs into the result
        writer.send((FAILED, f"{type(error).__name__}: {error}"))
    writer.send((None, None))


def _measure(task: Task, writer: Connection) -> None:
    import torch

    from gpu_bench import Bench, SentFigures, noted_compiles
    from gpu_loads import LLAMA_8B, TINY

    if not task.is_dry and not torch.cuda.is_available():
        raise NoDevice("there is no CUDA device here; --dry runs the same code on a CPU")
    torch.manual_seed(task.seed + task.part)
    shape, device = (TINY, "cpu") if task.is_dry else (LLAMA_8B, "cuda")
    bench = Bench(
        torch.device(device), shape, task.is_dry, max_rank=64, deadline=task.deadline, copy_gbps=task.copy_gbps,
        part=task.part, parts=task.parts,
    )  # fmt: skip
    section = getattr(importlib.import_module(task.section.module), task.section.name)
    figures = SentFigures(lambda name, value: writer.send((name, value)))
    with torch.inference_mode(), noted_compiles() as found:
        section(bench, figures)
    if bench.cut:
        figures[LATE] = "; ".join(bench.cut[:4]) + (f"; and {len(bench.cut) - 4} more" if len(bench.cut) > 4 else "")
    compiled = sum(not was_on_disk for _, was_on_disk in found)
    if compiled:
        figures["kernels compiled" if task.parts == 1 else f"process {task.part + 1}, kernels compiled"] = float(compiled)


class NoDevice(Exception):
    """There is nothing to measure."""


def main() -> int:
    """Run all parts; 1 if a kernel is wrong or a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="no GPU: interpreted, tiny sizes, times that mean nothing")
    parser.add_argument("--budget-s", type=float, default=240.0, help="seconds for all parts together")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"write the figures to FOLDER/{FILE}, after every part")
    parser.add_argument("--section", action="append", metavar="NAME", help="only this part; may be given several times")
    parser.add_argument("--seed", type=int, help="of the random data; a new one each time if not given, 0 for --dry")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    unknown = set(options.section or ()) - {section.name for section in SECTIONS}
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(section.name for section in SECTIONS)}")
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which only the processes of parts do
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / room) for room in ROOMS]
    return run([section for section in SECTIONS if not options.section or section.name in options.section], options)


def run(sections: Sequence[Section], options: argparse.Namespace) -> int:
    """Run ``sections``, print and write what they find."""
    # Imported once and forked from there; neither looks for a GPU before it is asked to.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "triton"])
    seed = options.seed if options.seed is not None else 0 if options.dry else random.randrange(1 << 32)
    parts: dict[str, dict[str, float | str]] = {}
    result: dict[str, object] = {"seed": seed, "budget_s": options.budget_s, "parts": parts}
    left, shares, copy_gbps = options.budget_s, sum(section.share for section in sections), 0.0
    for section in sections:
        figures = run_section(section, options, max(0.0, left) * section.share / shares, seed, copy_gbps).figures
        if str(figures.get(FAILED, "")).startswith(NO_DEVICE):
            print(figures[FAILED], file=sys.stderr)
            return 2
        parts[section.name] = figures
        left, shares = left - float(figures[SECONDS]), shares - section.share
        if section.name == "machine":
            result |= {name: figures[name] for name in ("device", "torch", "triton") if name in figures}
        with suppress(TypeError, ValueError):
            copy_gbps = float(figures.get(COPY, copy_gbps))
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / FILE).write_text(json.dumps(result, indent=1) + "\n")
        if not options.json:
            print(_table(section.name, figures), flush=True)
    print(json.dumps(result, indent=1) if options.json else _summary(parts))
    return 1 if any(FAILED in figures for figures in parts.values()) else 0


def _table(name: str, figures: Mapping[str, float | str]) -> str:
    lines = [name.replace("_", " ")]
    for figure, value in figures.items():
        lines.append(f"  {figure:56} {value:.4g}" if isinstance(value, float) else f"  {figure:56} {value}")
    return "\n".join(lines)


def _summary(parts: Mapping[str, Mapping[str, float | str]]) -> str:
    """One line for each part."""
    lines = [""]
    for name, figures in parts.items():
        what = f"{FAILED}: {figures[FAILED]}" if FAILED in figures else LATE if LATE in figures else "done"
        lines.append(f"{name.replace('_', ' '):24} {figures[SECONDS]:7.1f} s  {what}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
