"""The benchmark of how threads are dealt: real servers, and a real engine beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cores

ROOMS = ("platform", "adapters", "engine", "kernels", "admin_ui", "migrations")
ROOT = Path(cores.__file__).parents[1]


def test_every_way_is_held_beside_the_engine_alone(tiny_base: Path, tmp_path: Path, shared_kernels: Path) -> None:
    rooms = os.pathsep.join(str(ROOT / room) for room in ROOMS)
    load = ["--streams", "3", "--input", "5", "--output", "4", "--repeats", "1", "--json"]
    folders = ["--work", str(tmp_path / "work"), "--kernel-dir", str(shared_kernels)]
    command = [sys.executable, cores.__file__, "--base", str(tiny_base), *load, *folders]
    environment = {**os.environ, "PYTHONPATH": rooms}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    (part,) = json.loads(done.stdout)["parts"]
    assert [claim["row"] for claim in part["claims"]] == [f"3 streams, {way}: throughput" for way in cores.WAYS]
    assert all(claim["against"] == cores.ALONE and claim["value"] > 0 for claim in part["claims"])
    assert [reading["way"] for reading in part["readings"]] == [cores.ALONE, *cores.WAYS]


def test_a_load_of_nothing_is_refused(tiny_base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cores.parse(["--base", str(tiny_base), "--streams", "0"])
    assert "--streams 0: give at least 1" in capsys.readouterr().err
