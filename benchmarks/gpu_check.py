"""Is every Triton kernel right on this GPU, and how near does it come to what the memory allows? Five minutes, from the sources.

    python benchmarks/gpu_check.py --out results.json            on a machine with a GPU
    python benchmarks/gpu_check.py --dry                         anywhere: the same code, interpreted, on tiny sizes

Needs torch, triton and what the engine's model imports; no network and nothing of the web. Parts run in the order of their worth,
each to a deadline of its own; what a part has no time for is named. The JSON is written after every part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOMS = ("kernels", "adapters", "engine")

SHARES = {
    "copy_rate": 0.02,
    "adapters_are_right": 0.2,
    "attention_is_right": 0.1,
    "graphs_follow_the_mix": 0.08,
    "adapter_bandwidth": 0.22,
    "decode_step": 0.23,
    "attention_bandwidth": 0.1,
    "adapter_load": 0.05,
}
"""Parts, and how much of the time each may take; what one leaves is the others'."""


def main() -> int:
    """Run all parts; 1 if a kernel is wrong or a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="no GPU: interpreted, tiny sizes, times that mean nothing")
    parser.add_argument("--budget-s", type=float, default=270.0, help="seconds for all parts together")
    parser.add_argument("--out", type=Path, help="write the figures as JSON here, after every part")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before any kernel is
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / room) for room in ROOMS]
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    import torch
    import triton

    import gpu_sections
    from gpu_loads import LLAMA_8B, TINY

    if not options.dry and not torch.cuda.is_available():
        print("there is no CUDA device here; --dry runs the same code on a CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.dry else "cuda")
    bench = gpu_sections.Bench(device, TINY if options.dry else LLAMA_8B, options.dry, max_rank=64)
    where = "CPU, interpreted" if options.dry else torch.cuda.get_device_name(device)
    result: dict[str, object] = {"device": where, "torch": torch.__version__, "triton": triton.__version__, "parts": {}}
    parts: dict[str, dict[str, float | str]] = {}
    failed = False
    left, shares = options.budget_s, sum(SHARES.values())
    for name, share in SHARES.items():
        started = time.monotonic()
        bench.deadline, bench.cut = started + left * share / shares, []
        try:
            with torch.inference_mode():
                parts[name] = getattr(gpu_sections, name)(bench)
        except (gpu_sections.Wrong, RuntimeError, ValueError, torch.OutOfMemoryError, triton.CompilationError) as error:
            failed = True
            parts[name] = {"failed": f"{type(error).__name__}: {error}"}
        if bench.cut:
            parts[name]["not done in time"] = "; ".join(bench.cut)
        parts[name]["seconds"] = time.monotonic() - started
        left, shares = left - (time.monotonic() - started), shares - share
        result["parts"] = parts
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        if not options.json:
            print(_table(name, parts[name]), flush=True)
        if not options.dry:
            torch.cuda.empty_cache()
    if options.json:
        print(json.dumps(result, indent=1))
    return 1 if failed else 0


def _table(name: str, figures: dict[str, float | str]) -> str:
    lines = [name.replace("_", " ")]
    for figure, value in figures.items():
        lines.append(f"  {figure:56} {value:.4g}" if isinstance(value, float) else f"  {figure:56} {value}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
