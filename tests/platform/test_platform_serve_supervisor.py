"""The supervisor with small scripted children, and the lock of the data directory."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from graftwork_platform.serve.command import _socket_folder
from graftwork_platform.serve.data_dir import DataDirBusy, locked
from graftwork_platform.serve.supervisor import EXIT_CONFIG, Child, ChildFailed, Supervisor
from graftwork_platform.settings import engine_environment

CHILD = """
import os, pathlib, sys, time, signal
log = pathlib.Path(sys.argv[1])
with log.open("a") as file:
    file.write(sys.stdin.read() + "\\n")
behaviour = sys.argv[2]
if behaviour == "crash":
    sys.exit(3)
if behaviour == "config":
    sys.exit(78)
if behaviour == "environment":
    with log.open("a") as file:
        file.write(os.environ["SPIN"] + os.environ["PYTHONPATH"] + "\\n")
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with log.open("a") as file:
        file.write("deaf\\n")
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def module_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scripted_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def child(tmp_path: Path, behaviour: str, stop_within: float = 5.0) -> Child:
    return Child("child", "scripted_child", [str(tmp_path / "log"), behaviour], b"configuration", stop_within)


def lines(tmp_path: Path) -> list[str]:
    log = tmp_path / "log"
    return log.read_text().split() if log.exists() else []


def wait_for(tmp_path: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(lines(tmp_path)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_crashing_child_is_started_again_with_growing_pauses(tmp_path: Path) -> None:
    supervised = child(tmp_path, "crash")
    supervisor = Supervisor([supervised])
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    wait_for(tmp_path, 3)
    supervisor.request_stop()
    thread.join()
    assert set(lines(tmp_path)) == {"configuration"}
    assert supervised.crashes >= 2


def test_a_child_that_cannot_be_helped_ends_the_supervisor(tmp_path: Path) -> None:
    healthy = Child("healthy", "scripted_child", [str(tmp_path / "other"), "run"], b"", 5.0)
    with pytest.raises(ChildFailed):
        Supervisor([healthy, child(tmp_path, "config")]).run()
    assert EXIT_CONFIG == 78
    assert healthy.process is not None
    assert healthy.process.poll() is not None, "the other child was stopped"


def test_a_deaf_child_is_killed(tmp_path: Path) -> None:
    supervised = child(tmp_path, "stubborn", stop_within=0.3)
    supervisor = Supervisor([supervised])
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    wait_for(tmp_path, 2)
    supervisor.request_stop()
    thread.join(60)
    assert supervised.process is not None
    assert supervised.process.returncode == -9


def test_a_child_has_its_own_environment_beside_the_supervisors(tmp_path: Path) -> None:
    supervised = child(tmp_path, "environment")
    supervised.environment = {"SPIN": "1000"}
    supervised.look_after(0.0)
    wait_for(tmp_path, 2)
    supervised.stop()
    assert lines(tmp_path)[1] == f"1000{tmp_path}"
    assert "SPIN" not in os.environ


def test_the_engines_threads_spin_for_a_moment_only_unless_the_operator_says_otherwise() -> None:
    assert engine_environment({}) == {"GOMP_SPINCOUNT": "1000"}
    assert engine_environment({"GOMP_SPINCOUNT": "7"}) == engine_environment({"OMP_WAIT_POLICY": "active"}) == {}


def test_a_long_life_forgives_earlier_crashes(tmp_path: Path) -> None:
    supervised = child(tmp_path, "crash")
    now = 0.0
    for life in (1.0, 1.0, 500.0):
        supervised.look_after(now)
        assert supervised.process is not None
        supervised.process.wait()
        now += life
        supervised.look_after(now)
        assert supervised.start_at is not None
        now = supervised.start_at
    assert supervised.crashes == 1


def test_data_directory_has_one_owner_and_dies_with_it(tmp_path: Path) -> None:
    lock = tmp_path / "data" / "server.lock"
    code = (
        "import sys, time; from pathlib import Path; from graftwork_platform.serve.data_dir import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(DataDirBusy, match=str(holder.pid)), locked(lock):
        pass
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with locked(lock):
        assert lock.read_text().strip() == str(os.getpid())


def test_the_engines_socket_lies_beside_the_data_unless_that_path_is_too_long(tmp_path: Path) -> None:
    with _socket_folder(tmp_path) as folder:
        assert folder == tmp_path / "run"
        assert folder.is_dir()
    deep = tmp_path / ("d" * 100)
    with _socket_folder(deep) as folder:
        assert folder.is_dir()
        assert len(str(folder / "engine")) < 107
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


SIGNALLED = """
import random, signal
from graftwork_platform.serve import supervisor
supervisor.POLL_S = 0.0001
rng = random.Random(1)
for _ in range(1500):
    supervised = supervisor.Supervisor([])
    signal.signal(signal.SIGALRM, lambda *_: supervised.request_stop())
    signal.setitimer(signal.ITIMER_REAL, 0.00005 + rng.random() * 0.0005)
    supervised.run()
"""


def test_a_signal_at_any_moment_stops_it() -> None:
    """A handler that takes a lock waits for ever if it interrupts the holder of that lock: Ctrl-C then does nothing."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED], timeout=300, check=False)
    assert done.returncode == 0
