"""Breaks the Triton kernels, one fault after the other, and fails if the tests stay green: a test that cannot fail proves nothing.

    make break-kernels

Each fault runs the one test that is to notice it, up to the first failure; two at a time. The sources are copied; nothing in the
checkout is changed. Each fault is one that kernels of this kind have had: rows without an adapter taken for adapter 0, what lies
beyond a rank, a last chunk left out or read too far, another page, a mask that is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "kernels/graftwork_kernels"
ROOMS = "platform adapters engine admin_ui migrations deploy tests/plugins"
"""All but the kernels, of which the copy is to be found."""

ADAPTERS = "tests/kernels/test_kernels_triton_adapters.py"
STEPS = f"{ADAPTERS}::test_every_pair_of_what_a_step_may_be"
ATTENTION = "tests/kernels/test_kernels_triton_attention.py::test_any_mix_of_prompts_and_decode_rows"
AT_ONCE = 2


@dataclass(frozen=True)
class Fault:
    """``sound``, which occurs ``times`` times in ``file``, becomes ``broken``; ``test`` is to notice."""

    name: str
    file: str
    sound: str
    broken: str
    test: str
    times: int = 1


FAULTS = (
    Fault(
        "a row of the base has adapter 0",
        "adapter_linear.py",
        "    has = adapter >= 0\n",
        "    has = adapter >= -1\n    adapter = tl.maximum(adapter, 0)\n",
        STEPS,
    ),
    Fault(
        "a tail of ranks is not masked in the first half",
        "adapter_linear.py",
        "        known = ranks < rank\n        offset = row_offsets(row_offset, tl.load(record",
        "        known = ranks < (rank + 15) // 16 * 16\n        offset = row_offsets(row_offset, tl.load(record",
        STEPS,
    ),
    Fault(
        "a tail of ranks is left out in the second half",
        "adapter_linear.py",
        "range(0, rank, TILE_RANKS, num",
        "range(0, rank // TILE_RANKS * TILE_RANKS, TILE_RANKS, num",
        STEPS,
    ),
    Fault(
        "the last chunk of K is left out",
        "linear.py",
        "num_chunks = triton.cdiv(num_in, K_CHUNK)",
        "num_chunks = max(1, num_in // K_CHUNK)",
        STEPS,
    ),
    Fault(
        "chunks behind the last whole round are left out",
        "adapter_linear.py",
        "tl.static_range(num_even, NUM_CHUNKS)",
        "tl.static_range(num_even, num_even)",
        f"{ADAPTERS}::test_many_chunks_of_k_are_added_in_rounds",
    ),
    Fault(
        "an E4M3 subnormal is decoded as a normal number",
        "adapter_rows.py",
        "tl.where(magnitude < 8, ",
        "tl.where(magnitude < 1, ",
        f"{ADAPTERS}::test_both_ways_to_decode_e4m3_are_torchs",
    ),
    Fault(
        "the last chunk of K is read too far",
        "adapter_linear.py",
        "last = tl.minimum(first + K_CHUNK, num_in)",
        "last = first + K_CHUNK",
        STEPS,
    ),
    Fault(
        "rows are taken for one run of memory",
        "adapter_rows.py",
        "tl.load(row_offset + first_row + number, mask=known, other=0)",
        "tl.load(row_offset + first_row) + number * 192",
        STEPS,
    ),
    Fault(
        "rows of a tile are not masked", "adapter_linear.py", "in_rows = member < count", "in_rows = member < 16", STEPS, times=2
    ),
    Fault(
        "columns of a site are not masked",
        "adapter_linear.py",
        "in_columns = column < tl.multiple_of(tl.load(site_table + site * 3 + 2), ALIGN)",
        "in_columns = column < 64",
        STEPS,
    ),
    Fault("a context's tail is not masked", "attention.py", "there = token < last\n", "there = token < last + 1\n", ATTENTION),
    Fault(
        "a row sees what comes after it",
        "attention.py",
        "there[None, :] & (token[None, :] <= position[:, None])",
        "there[None, :]",
        ATTENTION,
    ),
    Fault(
        "the last part of a context is not joined",
        "attention.py",
        "exists = number * chunk < context",
        "exists = (number + 1) * chunk < context",
        ATTENTION,
    ),
)


def main() -> int:
    """Break, test, tell."""
    stayed_green = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for fault, noticed in zip(FAULTS, pool.map(_is_noticed, FAULTS), strict=True):
            print(f"{'noticed' if noticed else 'NOT NOTICED':12} {fault.name}", flush=True)
            if not noticed:
                stayed_green.append(fault.name)
    if stayed_green:
        print(f"tests stayed green with: {'; '.join(stayed_green)}", file=sys.stderr)
    return 1 if stayed_green else 0


def _is_noticed(fault: Fault) -> bool:
    with tempfile.TemporaryDirectory(prefix="broken-") as folder:
        copy = Path(folder) / "graftwork_kernels"
        shutil.copytree(ROOT / PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        source = copy / "triton" / fault.file
        text = source.read_text()
        if text.count(fault.sound) != fault.times:
            raise SystemExit(f"{fault.name}: {fault.sound!r} is {text.count(fault.sound)} times in {fault.file}, not {fault.times}")
        source.write_text(text.replace(fault.sound, fault.broken))
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-o",
                f"pythonpath={folder} {ROOMS}",
                fault.test,
            ],
            cwd=ROOT,
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        # 1: tests ran and failed. Any other failure, as of a broken import, proves nothing; a crash is a read outside memory.
        if run.returncode not in {0, 1} and run.returncode >= 0:
            raise SystemExit(f"{fault.name}: the tests did not run\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        return run.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
