"""The benchmarks' command lines: what they refuse, what they keep, and how they end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmark_scripts import FOLDER, script

import cold_start
import kernels
import load
import operator_cases
import whole_step
from graftwork_kernels.cpu.build import CompilerMissing
from load import Target
from results import BenchmarkFailed, Report
from servers import HttpContender, process
from workspace import workspace

serving, step, api = script("serving"), script("step"), script("api")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--rows", "33x33"], "32x32"),
        (["--peer", "vllm"], "vllm=VENV"),
        (["--peer", "other=x"], "llamacpp=FOLDER"),
        (["--peer", "peft", "--vllm-slots", "8,x"], "8,16,32"),
        (["--peer", "vllm=/nowhere"], "there is no /nowhere/bin/vllm"),
        (["--peer", "llamacpp=/nowhere"], "/nowhere holds no llama.cpp"),
        (["--peer", "peft", "--peer", "peft"], "each kind of peer once"),
        (["--peer", "peft", "--peer-requests", "peft=0"], "peft=0: write a peer and a number above 0"),
        (["--peer", "peft", "--peer-requests", "vllm=1"], "there is no --peer vllm"),
        (["--peer", "peft", "--peer-repeats", "other=1"], "--peer-repeats other=1"),
        (["--rows", ""], "no row is called ''"),
        (["--repeats", "0"], "at least 1"),
        (["--base", "/nowhere"], "make base"),
    ],
)
def test_serving_arguments(base: Path, arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving.parse(["--base", str(base), *arguments])
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parse", "arguments", "hint"),
    [
        (kernels.parse, ["--only", "linear,other"], "attention"),
        (kernels.parse, ["--budget", "0"], "more than 0"),
        (kernels.parse, ["--threads", "0"], "give 1 to 1024"),
        (kernels.parse, ["--base", "/nowhere"], "make base"),
        (api.parse, ["--base", "/nowhere"], "make base"),
        (api.parse, [], "no tokenizer.json"),
        (cold_start.parse, ["--loads", "0", "--starts", "0"], "nothing to measure"),
        (cold_start.parse, ["--streams", "0"], "at least 1"),
        (cold_start.parse, ["--registered", "1"], "at least 2"),
    ],
)
def test_other_arguments(base: Path, parse: Any, arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--base", str(base), *arguments])
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--models", "a..b..c"], "a0..a31"),
        (["--rate", "-1"], "0 or a number above"),
        (["--rate", "nan"], "0 or a number above"),
        (["--zipf", "inf"], "0 or a number above"),
        (["--vocab", "100"], "more than 100"),
        (["--input", "4", "--shared-prefix", "5"], "a part of --input 4"),
    ],
)
def test_load_arguments(arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load.parse(arguments)
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--cases", "greedy; other"], "no case is called 'other'; there are greedy"),
        (["--cases", ""], "no case is called ''"),
        (["--running", "64,x"], "--running 64,x"),
        (["--running", "0"], "above 0"),
        (["--steps", "0"], "at least 1"),
    ],
)
def test_step_arguments(arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step.parse(arguments)
    assert hint in capsys.readouterr().err


def test_steps_are_claims_with_their_bars(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    assert step.main(["--running", "2", "--steps", "3", "--cases", "greedy; penalties", "--out", str(out)]) == 0
    report = Report.read(out)
    assert [part.name for part in report.parts] == ["greedy, 2", "penalties, 2"]
    assert [len(part.readings) for part in report.parts] == [5, 5]
    assert all(claim.value > 0 and claim.bar is None and "3 of 100 steps" in claim.remarks for claim in report.claims)
    assert step.BARS_MS == {64: 1.0, 256: 2.0}


def test_without_a_compiler_kernels_end_with_a_sentence(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_folder: Path) -> None:
        raise CompilerMissing("there is no C++ compiler; install g++")

    monkeypatch.setattr(kernels, "open_library", missing)
    monkeypatch.setattr(kernels.Shapes, "of", lambda _config: None)
    monkeypatch.setattr(kernels.ModelConfig, "from_dir", lambda _folder: None)
    assert kernels.main(["--base", str(base)]) == 1
    assert capsys.readouterr().err.strip() == "Error: there is no C++ compiler; install g++"


def test_linears_that_are_far_behind_are_not_waited_for_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def taking(seconds: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + seconds)

    monkeypatch.setattr(whole_step, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    work = {"cpu": taking(0.01), "torch fp32": taking(0.012), "torch bf16": taking(0.1)}
    assert whole_step.contenders(work) == [work["cpu"], work["torch fp32"]]


def test_a_base_that_is_none_ends_with_a_sentence(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(["--base", str(base), "--rows", "base-1"]) == 1
    assert "names no vocabulary" in capsys.readouterr().err
    assert kernels.main(["--base", str(base)]) == 1
    assert capsys.readouterr().err.startswith("Error: ")


def test_a_kept_folder_belongs_to_one_base(base: Path, tmp_path: Path) -> None:
    work, weights = tmp_path / "work", base / "model.safetensors"
    weights.write_bytes(b"1" * 100)
    for _ in range(2):
        with workspace(work, base) as folder:
            (folder / "adapters").mkdir(exist_ok=True)
    weights.write_bytes(b"1" * 99 + b"2")
    with pytest.raises(BenchmarkFailed, match="made for another base"), workspace(work, base):
        pass
    weights.write_bytes(b"1" * 100)
    with workspace(work, base):
        pass
    (work / "base.json").unlink()
    with pytest.raises(BenchmarkFailed, match=r"no base\.json; name a new or an empty folder"), workspace(work, base):
        pass
    (work / "base.json").write_text("{}")
    with pytest.raises(BenchmarkFailed, match="cannot be read"), workspace(work, base):
        pass


def test_pauses_of_others_are_those_that_overlap() -> None:
    others = cold_start.Background(Target("http://127.0.0.1:1"), 1, 300, load.random.Random(0))
    others.times = [[0.0, 1.0, 5.0, 6.0]]
    assert others.longest_pause(1.5, 2.0) == 4.0
    assert others.longest_pause(5.2, 5.5) == 1.0
    assert others.usual_pause() == 1.0
    loads = [cold_start.Loaded(0.03, 0.02, 0.4, 0.2)]
    claims = cold_start.load_claims([cold_start.Loaded(0.025, 0.02, 0.0, 0.0)], loads, 4, 0.1)
    assert [round(claim.value, 6) for claim in claims] == [5.0, 10.0, 2.0, 100.0]
    assert [claim.holds for claim in claims] == [True, None, False, None]


def test_adapter_memory_of_mixed_ranks_has_the_bytes_of_one_rank() -> None:
    packed = (operator_cases.Packed(64, (64, 32, 32)), operator_cases.Packed(64, (64,)))
    shapes = operator_cases.Shapes(2, 64, 300, 4, 2, 16, 64, packed)
    mixed = operator_cases.adapter_memory(shapes, list(operator_cases.MIXED_RANKS))
    even = operator_cases.adapter_memory(shapes, [operator_cases.EVEN_RANK] * 4)
    assert mixed.pool.numel() == even.pool.numel() == 4 * operator_cases.EVEN_RANK * shapes.adapter_width * 2
    assert mixed.row_offset.numel() == even.row_offset.numel()


def test_a_servers_children_end_with_it(tmp_path: Path) -> None:
    spawn = "subprocess.Popen(['sleep', '60'], process_group=0)"
    script = f"import subprocess, time; print({spawn}.pid, flush=True); time.sleep(60)"
    with process("server", [sys.executable, "-c", script], tmp_path / "log", pipe=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert HttpContender("x", Target(""), child.pid).cpu_seconds() > 0
    assert has_ended(grandchild)


def has_ended(number: int) -> bool:
    stat = Path(f"/proc/{number}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_a_benchmark_and_its_servers(number: signal.Signals, tmp_path: Path) -> None:
    script = f"""
import argparse, pathlib, signal, sys, time
sys.path.insert(0, {str(FOLDER)!r})
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may ignore them, as shells and nohup do
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from runs import conclude
from servers import process

def measure(results):
    with process("server", ["sleep", "60"], pathlib.Path({str(tmp_path / "log")!r})) as child:
        print(child.pid, flush=True)
        time.sleep(60)

sys.exit(conclude("serving", "base", argparse.Namespace(out=None, json=False), measure))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        server = int(run.stdout.readline())
        run.send_signal(number)
        _, errors = run.communicate(timeout=120)
    assert run.returncode == 130
    assert errors.strip() == "Interrupted."
    assert has_ended(server)
