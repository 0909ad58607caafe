"""The check for GPUs and the models of its kernels, as far as a machine without one can run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_check_runs_to_its_end_without_a_gpu(tmp_path):
    """Outside of the checkout and its environment, from the sources alone."""
    out = tmp_path / "gpu.json"
    ended = run("gpu_check.py", "--dry", "--out", str(out), "--budget-s", "600", PYTHONPATH="")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(out.read_text())
    assert list(result["parts"]) == [
        "copy_rate", "adapters_are_right", "attention_is_right", "graphs_follow_the_mix", "adapter_bandwidth", "decode_step",
        "attention_bandwidth", "adapter_load",
    ]  # fmt: skip
    assert not any({"failed", "not done in time"} & set(figures) for figures in result["parts"].values())
    errors = {name: error for name, error in result["parts"]["adapters_are_right"].items() if name != "seconds"}
    assert len(errors) == 8  # two forms of four row types
    assert max(errors.values()) < 1e-4


def test_a_part_without_time_says_what_it_left_out(tmp_path):
    out = tmp_path / "gpu.json"
    assert run("gpu_check.py", "--dry", "--out", str(out), "--budget-s", "0").returncode == 0
    assert "two" in json.loads(out.read_text())["parts"]["adapters_are_right"]["not done in time"].lower()


def test_without_a_gpu_the_check_says_what_to_do():
    ended = run("gpu_check.py")
    assert ended.returncode == 2
    assert "--dry" in ended.stderr


@pytest.fixture(scope="module")
def model() -> dict[str, object]:
    ended = run("kernel_model.py", "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_kernels_move_little_more_than_the_roofline(model):
    """Beside the rows of 64 adapters, which is where bandwidth decides; a single adapter is small beside the activations."""
    steps = {step["adapters"]: step for step in model["steps"]}
    assert steps["64 × r16"]["memory_over_roofline"] < 1.15
    assert steps["64 × r8/16/32/64"]["memory_over_roofline"] < 1.15
    assert steps["64 × r16"]["share"] > 0.7
    assert steps["1 × r16"]["share_at_roofline"] > 0.99 > steps["1 × r16"]["share"] > 0.96
    assert steps["64 × r16, 8 bits"]["share"] > 0.8


def test_launches_of_a_layer(model):
    """Eight for a layer's adapters in two launches each, four fused."""
    assert model["launches"]["two"] - model["launches"]["fused"] == 32 * 4
