"""What loading the compiled library does to its process: nothing to the arithmetic, and no second pool of threads."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graftwork_kernels.cpu.build import FLAGS, SOURCES, build_library, find_compiler
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.ops import Operators

PROBE = """
#include "step.h"
using namespace graftwork;
struct ProbeArguments { int64_t* sizes; };
static void run(const ProbeArguments& arguments, Step&, Team& team) {
    arguments.sizes[team.rank] = team.size;
    team.share(1, [](int64_t) {});
}
GRAFTWORK_OPERATOR(graftwork_probe, ProbeArguments)
"""

LOAD = """
import ctypes, sys

environment = ctypes.create_string_buffer(256)  # fenv_t

def mode():
    "x86-64 keeps MXCSR in bytes 28 to 31; its last 6 bits say what happened, not what will."
    ctypes.CDLL(None).fegetenv(environment)
    return int.from_bytes(environment.raw[28:32], "little") & ~0x3F if sys.argv[2] == "x86_64" else 0

smallest, one = 5e-324, float(len(sys.argv) > 0)
before = mode()
assert smallest * one > 0
ctypes.CDLL(sys.argv[1])
sys.exit(f"MXCSR {before:x}, then {mode():x}" if mode() != before or smallest * one == 0 else 0)
"""


def load_alone(library: Path) -> subprocess.CompletedProcess[str]:
    """Load it in a new process, which fails if that changes how the processor treats small numbers."""
    command = [sys.executable, "-c", LOAD, str(library), platform.machine()]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def library_path(shared_kernels: Path) -> Path:
    """Where the operators' library lies."""
    return build_library(shared_kernels)


@pytest.fixture(scope="module")
def probe_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The entry, and an operator that tells how many threads run it."""
    folder = tmp_path_factory.mktemp("probe")
    (sources := folder / "src").mkdir()
    for name in ("run.cpp", "step.h"):
        shutil.copy(SOURCES / name, sources)
    (sources / "probe.cpp").write_text(PROBE)
    return build_library(folder / "kernels", sources)


@pytest.mark.parametrize("function", ["_Znwm", "_Znam", "malloc", "calloc", "realloc", "aligned_alloc", "posix_memalign"])
def test_no_operator_allocates_memory(library_path: Path, function: str) -> None:
    """A thread of a team cannot report that there is none left: the process would end. Not even its name is in the library."""
    assert function.encode() + b"\0" not in library_path.read_bytes()


def test_loading_leaves_the_arithmetic_of_the_process_alone(library_path: Path) -> None:
    done = load_alone(library_path)
    assert done.returncode == 0, done.stderr


def test_a_library_that_turns_denormals_off_would_be_seen(tmp_path: Path) -> None:
    """One linked with -ffast-math is such where the compiler adds crtfastmath.o to it (GCC before 13), as is done by hand here."""
    (source := tmp_path / "fast.cpp").write_text('extern "C" int answer() { return 42; }\n')
    compiler, library = find_compiler().path, tmp_path / "fast.so"
    command = [compiler, *FLAGS, "-ffast-math", "-shared", str(source), "-o", str(library)]
    start = subprocess.run([compiler, "-print-file-name=crtfastmath.o"], capture_output=True, text=True, check=True).stdout.strip()
    if "/" in start:
        command.append(start)
    subprocess.run(command, check=True)
    assert load_alone(library).returncode != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_nan_and_stays_in_its_row(cpu_library: Library, dtype: torch.dtype) -> None:
    ops = Operators(CpuOperators(Immediate(cpu_library)))
    x = torch.randn(3, 64).to(dtype)
    x[1, 5] = torch.nan
    is_row = torch.tensor([False, True, False]).unsqueeze(1)
    weight = ops.prepare_weight(torch.randn(48, 64).to(dtype))
    normed, total = ops.add_rms_norm(x, torch.zeros(3, 64), torch.ones(64, dtype=dtype), 1e-6)
    for result in (ops.linear(x, weight), ops.rms_norm(x, torch.ones(64, dtype=dtype), 1e-6), normed):
        assert torch.equal(result.isnan(), is_row.expand(result.shape))
    assert torch.equal(total.isnan(), x.isnan())
    assert torch.equal(ops.silu_and_mul(x).isnan(), x.isnan()[:, :32])
    assert torch.equal(ops.gelu_and_mul(x).isnan(), x.isnan()[:, :32])


THREADS = """
import ctypes, json, os, sys
from pathlib import Path

def num_threads():
    return len(os.listdir("/proc/self/task"))

def use_torch():
    torch.randn(1 << 20).exp_()

class Arguments(ctypes.Structure):
    _fields_ = (("sizes", ctypes.c_void_p),)

def use_library():
    sizes = (ctypes.c_int64 * 2)()
    arguments = Arguments(ctypes.addressof(sizes))
    command = Command(library.address("graftwork_probe", Arguments), ctypes.addressof(arguments))
    library.run((Command * 1)(command), Step(1, 0), 2)
    return list(sizes)

if sys.argv[2] == "torch first":
    import torch
from graftwork_kernels.cpu.library import Command, Library, Step
library = Library(Path(sys.argv[1]))
import torch

torch.set_num_threads(2)
counts, sizes = [], []
for _ in range(3):
    use_torch()
    counts.append(num_threads())
    sizes.append(use_library())
    counts.append(num_threads())
pools = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rpartition("/")[2]}
print(json.dumps({"counts": counts, "sizes": sizes, "pools": sorted(pools)}))
"""


@pytest.mark.parametrize("order", ["torch first", "library first"])
def test_torch_and_the_library_share_one_pool_of_threads(order: str, probe_library: Path) -> None:
    """Two pools on the same cores would fight: a thread that has run out of work goes on looking for some for a while."""
    command = [sys.executable, "-c", THREADS, str(probe_library), order]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["sizes"] == [[2, 2]] * 3
    assert len(set(found["counts"])) == 1
    assert len(found["pools"]) == 1
