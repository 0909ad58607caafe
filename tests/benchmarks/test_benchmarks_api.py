"""The benchmark of the API process: it measures a server that really answers, started as `serve` starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "api.py"
ROOMS = ("platform", "adapters", "engine", "kernels", "admin_ui", "migrations")


def test_it_reports_what_a_token_costs(tiny_base: Path, tmp_path: Path) -> None:
    rooms = os.pathsep.join(str(BENCHMARK.parents[1] / room) for room in ROOMS)
    out = tmp_path / "out.json"
    load = ["--out", str(out), "--streams", "3", "--short", "4", "--long", "40", "--step-ms", "5", "--rounds", "1", "--json"]
    command = [sys.executable, str(BENCHMARK), "--base", str(tiny_base), *load]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": rooms}, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert json.loads(out.read_text()) == report
    (part,) = report["parts"]
    assert (part["name"], part["settings"]["streams"], len(part["readings"])) == ("text", 3, 1)
    assert 0 <= part["readings"][0]["frames_per_token"] <= 1  # the tiny tokenizer has words that say nothing
    tokens, requests = part["claims"]
    assert (tokens["unit"], requests["unit"], tokens["remarks"]) == ("µs", "ms", "short: 1 of 3 repetitions")
    assert "600 tokens/s" in tokens["row"]
