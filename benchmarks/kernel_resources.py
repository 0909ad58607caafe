"""Compile every Triton kernel for GPUs that this machine does not have, and read from the machine code what each would take.

    python benchmarks/kernel_resources.py                        a table
    python benchmarks/kernel_resources.py --update FILE          keep it, for this version of triton, in a JSON file
    python benchmarks/kernel_resources.py --check FILE           exit 1 where it is no longer what is kept there

The operators run on tensors that have shapes and no values, of the sizes of Llama 3.1 8B; each launch is compiled instead of run.
Registers and stack come from cuobjdump, instructions from nvdisasm, both of which triton brings along.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import (
    NUM_SITE_FIELDS,
    AdapterMemory,
    AttentionBatch,
    LinearSite,
    LogitBias,
    Penalties,
    SamplingBatch,
    Weight,
)
from graftwork_kernels.triton.linear import E4M3_SINCE, Form
from graftwork_kernels.triton.operators import TritonOperators

ARCHITECTURES = (80, 90, 100)
META = torch.device("meta")
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 4096, 32, 8, 128, 14336, 128_256
SMALL_HEADS, SMALL_KV_HEADS, SMALL_HEAD_DIM = 9, 3, 64
"""Of SmolLM2 135M: half as wide, and a group that is no power of two."""

ROWS, ADAPTERS, MAX_RANK, NUM_SITES, BLOCK_SIZE = 64, 64, 64, 224, 16
MAX_CONTEXT = 8192


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes: of each thread and each program, and how it reads and multiplies."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    spills: int  # instructions that move registers to and from local memory
    loads: dict[str, int]  # instructions that read global memory, by bits
    tensor_cores: dict[str, int]  # by instruction
    from_e4m3: int  # instructions that convert elements of that type, a pair each


class OfflineDriver:
    """Stands where triton looks for a GPU, and says that there is one of an architecture."""

    def __init__(self) -> None:
        self.architecture = ARCHITECTURES[0]

    def get_current_device(self) -> int:
        """A number of its own for each architecture, since kernels are kept by device."""
        return self.architecture

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - triton's
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


@contextmanager
def compiled_instead_of_run(driver: OfflineDriver) -> Iterator[list[CompiledKernel]]:
    """Every launch within is compiled for the driver's architecture, and listed."""
    compiled: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:  # noqa: ARG001 - triton's
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    triton.runtime.driver.set_active(driver)
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def cases(architecture: int) -> dict[str, Callable[[], object]]:
    """Calls that between them launch every variant of every kernel that a GPU of this architecture is given."""
    has_e4m3 = divmod(architecture, 10) >= E4M3_SINCE
    two, fused = (TritonOperators(528, MAX_RANK, has_e4m3=has_e4m3, form=form) for form in Form)
    memory = AdapterMemory(
        empty(1 << 20, dtype=torch.uint8),
        empty(4096, dtype=torch.int64),
        empty(ADAPTERS, NUM_SITES, NUM_SITE_FIELDS, dtype=torch.int64),
    )
    batch = build_adapter_batch([-1] * ROWS, META)
    qkv = (LinearSite(0, 0, HIDDEN), LinearSite(1, HIDDEN, 1024), LinearSite(2, HIDDEN + 1024, 1024))
    down = (LinearSite(6, 0, HIDDEN),)

    def adapter_linear(ops: TritonOperators, num_in: int, sites: tuple[LinearSite, ...], dtype: torch.dtype, bias: bool) -> None:
        num_out = sum(site.size for site in sites)
        weight, shift = Weight.plain(empty(num_out, num_in, dtype=dtype)), empty(num_out, dtype=dtype) if bias else None
        ops.adapter_linear(empty(ROWS, num_in, dtype=dtype), weight, shift, memory, batch, sites, dtype)

    requests = AttentionBatch(
        query_start=empty(ROWS + 1, dtype=torch.int32),
        context_len=empty(ROWS, dtype=torch.int32),
        block_table=empty(ROWS, MAX_CONTEXT // BLOCK_SIZE, dtype=torch.int32),
        kv_slot=empty(ROWS, dtype=torch.int64),
        max_query_len=2,
        max_context_len=MAX_CONTEXT,
    )
    cache = empty(256, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    q, k = empty(ROWS, HEADS, HEAD_DIM), empty(ROWS, KV_HEADS, HEAD_DIM)
    small_q, small_cache = empty(ROWS, SMALL_HEADS, SMALL_HEAD_DIM), empty(256, SMALL_KV_HEADS, BLOCK_SIZE, SMALL_HEAD_DIM)
    cos_sin, wide = empty(MAX_CONTEXT, HEAD_DIM, dtype=torch.float32), empty(ROWS, HIDDEN, dtype=torch.float32)
    logits, entries = empty(ROWS, VOCABULARY, dtype=torch.float32), empty(ROWS + 1, dtype=torch.int32)
    fp32, int32, int64 = (empty(ROWS, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int64))
    return {
        "qkv": lambda: adapter_linear(two, HIDDEN, qkv, torch.bfloat16, False),
        "qkv with bias": lambda: adapter_linear(two, HIDDEN, qkv, torch.bfloat16, True),
        "down": lambda: adapter_linear(two, INTERMEDIATE, down, torch.bfloat16, False),
        "down in fp32": lambda: adapter_linear(two, INTERMEDIATE, down, torch.float32, False),
        "qkv fused": lambda: adapter_linear(fused, HIDDEN, qkv, torch.bfloat16, True),
        "down fused": lambda: adapter_linear(fused, INTERMEDIATE, down, torch.bfloat16, False),
        "attention": lambda: two.paged_attention(q, cache, cache, requests, 1.0),
        "attention in fp32": lambda: two.paged_attention(q.float(), cache.float(), cache.float(), requests, 1.0),
        "attention of small heads": lambda: two.paged_attention(small_q, small_cache, small_cache, requests, 1.0),
        "norm": lambda: two.rms_norm(q, empty(HEAD_DIM), 1e-5),
        "residual and norm": lambda: two.add_rms_norm(empty(ROWS, HIDDEN), wide, empty(HIDDEN), 1e-5),
        "rotary": lambda: two.rotary_and_write_kv(q, k, k, int64, cos_sin, cache, cache, int64),
        "silu": lambda: two.silu_and_mul(empty(ROWS, 2 * INTERMEDIATE), torch.bfloat16),
        "gelu": lambda: two.gelu_and_mul(empty(ROWS, 2 * INTERMEDIATE), torch.bfloat16),
        "finite": lambda: two.finite_rows(logits),
        "bias": lambda: two.apply_logit_bias(logits, LogitBias(entries, int32, fp32)),
        "penalties": lambda: two.apply_penalties(logits, Penalties(entries, int32, int32, fp32, fp32, fp32)),
        "sample": lambda: two.sample(logits, SamplingBatch(fp32, int32, fp32, fp32, int64, int32, int32)),
        "noise": lambda: two.philox_uniform(int64, int32, int32),
        "logprobs": lambda: two.token_logprobs(logits, int64, 20),
    }


def measure() -> dict[str, dict[str, Resources]]:
    """By architecture ("sm_90") and by case and kernel ("qkv: shrink")."""
    # Fresh processes: triton's compiler is not made for forks of a process that has used it.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        measured = zip(ARCHITECTURES, pool.map(measure_architecture, ARCHITECTURES), strict=True)
        return {f"sm_{architecture}": kernels for architecture, kernels in measured}


def measure_architecture(architecture: int) -> dict[str, Resources]:
    """By case and kernel."""
    driver = OfflineDriver()
    driver.architecture = architecture
    measured = {}
    for name, call in cases(architecture).items():
        print(f"sm_{architecture}: {name}", file=sys.stderr, flush=True)
        with compiled_instead_of_run(driver) as kernels:
            call()
        for kernel in kernels:
            measured[f"{name}: {kernel.name.lstrip('_')}"] = resources(kernel)
    return measured


def resources(kernel: CompiledKernel) -> Resources:
    """Read from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
        code = _tool(triton.knobs.nvidia.nvdisasm.path, "-c", file.name)
    instructions = Counter(re.findall(r"^\s+(?:/\*[0-9a-f]+\*/)?\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", code, re.MULTILINE))
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Resources(
        registers=used["REG"],
        stack_bytes=used["STACK"],
        shared_bytes=kernel.metadata.shared,
        spills=sum(number for name, number in instructions.items() if name.startswith(("STL", "LDL"))),
        loads=_sorted_counts(instructions, _load_bits),
        tensor_cores=_sorted_counts(instructions, _tensor_core),
        from_e4m3=sum(number for name, number in instructions.items() if ".E4M3" in name),
    )


def _load_bits(instruction: str) -> str | None:
    """Of an instruction that reads global memory, into registers or (LDGSTS) straight to shared memory."""
    if not instruction.startswith(("LDG.", "LDGSTS.")):
        return None
    width = re.search(r"\.(128|64|U16|S16|U8|S8)\b", instruction)
    return width[1].lstrip("US") if width else "32"


def _tensor_core(instruction: str) -> str | None:
    found = re.match(r"(HMMA|HGMMA|UTCHMMA)", instruction)
    return found[1] if found else None


def _sorted_counts(instructions: Mapping[str, int], of: Callable[[str], str | None]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, number in instructions.items():
        if (kind := of(name)) is not None:
            counts[kind] += number
    return dict(sorted(counts.items()))


def _tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def table(measured: Mapping[str, Mapping[str, Resources]]) -> str:
    """For people."""
    lines = [f"{'':8}{'kernel':38}{'registers':>10}{'stack':>7}{'shared':>8}{'spills':>8}  loads by bits / tensor cores"]
    for architecture, kernels in measured.items():
        for name, taken in kernels.items():
            reads = ", ".join(f"{bits}: {number}" for bits, number in (taken.loads | taken.tensor_cores).items())
            lines.append(
                f"{architecture:8}{name:38}{taken.registers:>10}{taken.stack_bytes:>7}{taken.shared_bytes:>8}"
                f"{taken.spills:>8}  {reads}"
            )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, and keep or compare."""
    options = argparse.ArgumentParser(description="Compile every Triton kernel and read what it takes.")
    options.add_argument("--update", type=Path, metavar="FILE", help="keep the result for this version of triton")
    options.add_argument("--check", type=Path, metavar="FILE", help="compare with what is kept")
    options.add_argument("--json", action="store_true", help="print JSON")
    given = options.parse_args()
    if triton.knobs.runtime.interpret:
        options.error("TRITON_INTERPRET is set, and what is interpreted is not compiled; unset it")
    measured = measure()
    content = {architecture: {name: asdict(taken) for name, taken in kernels.items()} for architecture, kernels in measured.items()}
    print(json.dumps(content, indent=1) if given.json else table(measured))
    if given.update:
        kept = json.loads(given.update.read_text()) if given.update.exists() else {}
        given.update.write_text(json.dumps(kept | {triton.__version__: content}, indent=1) + "\n")
    if given.check:
        return _compare(content, json.loads(given.check.read_text()), given.check)
    return 0


def _compare(
    content: Mapping[str, Mapping[str, object]], kept: Mapping[str, Mapping[str, Mapping[str, object]]], file: Path
) -> int:
    if triton.__version__ not in kept:
        print(f"{file} has nothing of triton {triton.__version__}, but of {', '.join(kept)}; run with --update", file=sys.stderr)
        return 1
    before = kept[triton.__version__]
    changed = [
        f"{architecture} {name}: {before.get(architecture, {}).get(name)} is now {content.get(architecture, {}).get(name)}"
        for architecture in sorted(before.keys() | content.keys())
        for name in sorted(before.get(architecture, {}).keys() | content.get(architecture, {}).keys())
        if before.get(architecture, {}).get(name) != content.get(architecture, {}).get(name)
    ]
    print("\n".join(changed) or "as kept", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
