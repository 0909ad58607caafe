"""The check for GPUs and the models of its kernels, as far as a machine without one can run them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_check
from gpu_check import SECTIONS, Section

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
    """Outside of the checkout and its environment, from the sources alone, into a folder that is not there yet."""
    out = tmp_path / "results" / "gpu"
    ended = run("gpu_check.py", "--dry", "--out", str(out), "--budget-s", "1200", PYTHONPATH="")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads((out / "gpu_check.json").read_text())
    assert list(result["parts"]) == [section.name for section in SECTIONS]
    assert not any({"failed", "not done in time"} & set(figures) for figures in result["parts"].values())
    errors = {name: error for name, error in result["parts"]["adapters_are_right"].items() if name != "seconds"}
    assert len(errors) == 8  # two forms of four row types
    assert max(errors.values()) < 1e-4
    assert result["parts"]["graphs_follow_the_mix"]["mixes of 3 rows, fused"] == 1


def test_a_part_without_time_says_what_it_left_out(tmp_path):
    assert (
        run("gpu_check.py", "--dry", "--section", "adapters_are_right", "--out", str(tmp_path), "--budget-s", "0").returncode == 0
    )
    assert "TWO" in json.loads((tmp_path / "gpu_check.json").read_text())["parts"]["adapters_are_right"]["not done in time"]


def test_without_a_gpu_the_check_says_what_to_do():
    ended = run("gpu_check.py")
    assert ended.returncode == 2
    assert "--dry" in ended.stderr


def test_a_part_that_goes_wrong_keeps_what_it_measured_and_costs_no_other(tmp_path, monkeypatch):
    """Exceptions of all kinds, a module that is not there, a process that dies, and one that never looks at its deadline."""
    monkeypatch.setattr(gpu_check, "DRY_GRACE_S", 5.0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = argparse.Namespace(dry=True, budget_s=30.0, seed=0, out=tmp_path, json=True)
    names = ("wrong", "changed_api", "killed", "endless", "absent", "healthy")
    sections = [Section(name, "gpu_faults", 0.01) for name in names]
    sections.insert(0, Section("unknown", "gpu_no_such_module", 0.01))
    assert gpu_check.run(sections, options) == 1
    parts = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert list(parts) == ["unknown", *names]
    failures = {name: figures.get("failed", "") for name, figures in parts.items()}
    assert failures.pop("healthy") == ""
    for name, why in {
        "unknown": "ModuleNotFoundError", "wrong": "Wrong: a kernel", "changed_api": "TypeError", "killed": "signal 6",
        "endless": "beyond its deadline", "absent": "AttributeError",
    }.items():  # fmt: skip
        assert why in failures[name]
    for name in ("wrong", "changed_api", "killed", "endless", "healthy"):
        assert parts[name]["measured"] == 1


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
