"""Every Triton kernel compiled for GPUs that are not here: what each takes is what is kept; how many launches a linear makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernel_resources.py"
KEPT = Path(__file__).with_name("kernel_resources.json")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, object]]]:
    """By architecture and kernel, compiled anew: what triton keeps is not looked at."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(SCRIPT), "--check", str(KEPT), "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


def test_what_each_takes_is_what_is_kept(compiled):
    assert compiled == json.loads(KEPT.read_text())[triton.__version__]
    assert list(compiled) == ["sm_80", "sm_90", "sm_100"]


SPILLING = {
    "sm_80": {"sample: collect"},
    "sm_90": set(),
    "sm_100": {"attention: prefill"},
}
"""What is left: a register or two each."""


def test_nothing_else_spills(compiled):
    for architecture, kernels in compiled.items():
        spilling = {name for name, taken in kernels.items() if taken["spills"] or taken["stack_bytes"]}
        assert spilling == SPILLING[architecture]
        assert all(kernels[name]["spills"] <= 4 for name in spilling)


def test_rows_are_read_16_bytes_at_a_time(compiled):
    """Adapters' rows, keys and values: a load that lost its alignment is several times as many."""
    linears = ("qkv: shrink", "qkv: expand", "qkv with bias: expand", "down: shrink", "down: expand", "down fused: fused")
    attention = (f"{case}: {kernel}" for case in ("attention", "attention of small heads") for kernel in ("decode", "prefill"))
    for name in (*linears, *attention):
        assert compiled["sm_90"][name]["loads"].get("128", 0) > 0, name


def test_tensor_cores_multiply(compiled):
    for kernels in compiled.values():
        linears = ("qkv: shrink", "qkv: expand", "down fused: fused")
        attention = (f"{case}: {kernel}" for case in ("attention", "attention of small heads") for kernel in ("decode", "prefill"))
        for name in (*linears, *attention):
            assert kernels[name]["tensor_cores"], name


def test_gpus_that_can_convert_e4m3_do(compiled):
    """Of its 256 codes two are NaN, which that instruction knows (PTX, cvt) and the interpreter's stand-in for it does not."""
    halves = (f"{case}: {kernel}" for case in ("qkv", "down in fp32") for kernel in ("shrink", "expand"))
    names = (*halves, "qkv fused: fused", "down fused: fused")
    for architecture, kernels in compiled.items():
        for name in names:
            assert (kernels[name]["from_e4m3"] > 0) == (architecture != "sm_80"), (architecture, name)


def test_launches_of_one_linear(compiled):
    """Beside the product: two for the step's tasks, made here by the linear itself, then two; or one."""
    names = [name.split(": ") for name in compiled["sm_90"]]
    assert [kernel for case, kernel in names if case == "qkv"] == ["count_rank_tiles", "write_tasks", "shrink", "expand"]
    assert [kernel for case, kernel in names if case == "qkv fused"] == ["count_rank_tiles", "write_tasks", "fused"]
