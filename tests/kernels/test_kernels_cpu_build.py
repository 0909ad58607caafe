"""The C++ sources become a library once for each machine, and nothing that is torn, foreign or unfit is ever loaded.

This file is long because one small room of sources and one fake compiler serve all its tests.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graftwork_kernels.cpu import build
from graftwork_kernels.cpu.build import (
    FLAGS,
    SOURCES,
    CacheUnusable,
    CompilerFailed,
    CompilerMissing,
    KernelsUnavailable,
    build_library,
    default_cache_dir,
    find_compiler,
)
from graftwork_kernels.cpu.library import open_library


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small room of C++: two files and a header."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "number.h").write_text("#define NUMBER 42\n")
    (folder / "answer.cpp").write_text('#include "number.h"\nextern "C" int answer() { return NUMBER; }\n')
    (folder / "run.cpp").write_text('extern "C" void graftwork_run() {}\n')
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


class FakeCompiler:
    """A script in place of the compiler, which writes down how it is called before it does anything else."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._log = folder / "calls"
        self._script = folder / "g++"
        self.real = find_compiler().path
        self.does(f'exec {self.real} "$@"')

    def does(self, script: str) -> None:
        """What it does, in shell."""
        self._script.write_text(f'#!/bin/sh\necho "$$ $*" >> {self._log}\n{script}\n')
        self._script.chmod(0o755)

    def refuses(self, flag: str, instead: str = "exit 1") -> None:
        """It does not know ``flag``."""
        self.does(
            f'for a in "$@"; do [ "$a" = "{flag}" ] && {{ echo "unknown {flag}" >&2; {instead}; }}; done; exec {self.real} "$@"'
        )

    def calls(self, *words: str) -> list[str]:
        """Its command lines that have all these words."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [line for line in lines if set(words) <= set(line.split())]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return fake


def answer(path: Path) -> int:
    found: int = ctypes.CDLL(str(path)).answer()
    return found


def wait_until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# The cache


def test_is_compiled_once_and_its_folder_is_its_owners_alone(cache: Path, sources: Path, compiler: FakeCompiler) -> None:
    first = build_library(cache, sources)
    assert answer(first) == 42
    assert (cache.stat().st_mode & 0o777, first.stat().st_mode & 0o777) == (0o700, 0o600)
    assert len(compiler.calls("-c")) == 2
    assert build_library(cache, sources) == first
    assert len(compiler.calls("-c")) == 2
    assert sorted(path.name for path in cache.iterdir()) == sorted([first.name, "lock"])


@pytest.mark.parametrize("change", ["source", "header", "new file", "flags", "processor", "compiler"])
def test_whatever_changes_the_result_gives_another_library(
    change: str, cache: Path, sources: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_library(cache, sources)
    match change:
        case "source":
            (sources / "run.cpp").write_text('extern "C" void graftwork_run() { }\n')
        case "header":
            (sources / "number.h").write_text("#define NUMBER 43\n")
        case "new file":
            (sources / "other.cpp").write_text("int other;\n")
        case "flags":
            monkeypatch.setattr(build, "FLAGS", (*FLAGS, "-DX"))
        case "processor":
            monkeypatch.setattr(build, "machine", lambda: "another")
        case "compiler":
            compiler.does(f'[ "$1" = --version ] && echo 99; exec {shutil.which("c++")} "$@"')
    second = build_library(cache, sources)
    assert second != first
    assert answer(second) == (43 if change == "header" else 42)


def test_processor_is_described_by_its_features() -> None:
    described = build.machine()
    assert described.startswith(platform.machine())
    assert len(described.splitlines()) > 1


@pytest.mark.parametrize("damage", ["empty", "torn", "a bit", "text", "of another build"])
def test_damaged_library_is_compiled_again(damage: str, cache: Path, sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = build_library(cache, sources)
    whole = path.read_bytes()
    middle = len(whole) // 2
    if damage == "of another build":
        (sources / "number.h").write_text("#define NUMBER 43\n")
        content = build_library(cache, sources).read_bytes()
        (sources / "number.h").write_text("#define NUMBER 42\n")
    else:
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        content = {"empty": b"", "torn": whole[:middle], "a bit": flipped, "text": b"#!/bin/sh\n"}[damage]
    path.write_bytes(content)
    assert build_library(cache, sources) == path
    assert answer(path) == 42
    assert "compiled again" in caplog.text


ASK = "import sys; from pathlib import Path; from graftwork_kernels.cpu.build import build_library; "
ASK += "print(build_library(Path(sys.argv[1]), Path(sys.argv[2])))"


def ask(cache: Path, sources: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", ASK, str(cache), str(sources)], stdout=subprocess.PIPE, text=True)


def test_processes_that_start_at_once_compile_once(cache: Path, sources: Path, compiler: FakeCompiler) -> None:
    compiler.does(f'case "$*" in *" -c "*) sleep 0.5;; esac; exec {shutil.which("c++")} "$@"')
    processes = [ask(cache, sources) for _ in range(4)]
    found = {process.communicate(timeout=300)[0].strip() for process in processes}
    assert len(found) == 1
    assert answer(Path(found.pop())) == 42
    assert len(compiler.calls("-c")) == 2


def test_a_process_killed_while_it_compiles_leaves_nothing_that_matters(cache: Path, sources: Path, compiler: FakeCompiler) -> None:
    compiler.does(f'case "$*" in *" -c "*) exec sleep 60;; esac; exec {shutil.which("c++")} "$@"')
    process = ask(cache, sources)
    at_once = min(len(list(sources.glob("*.cpp"))), len(os.sched_getaffinity(0)))
    wait_until(lambda: len(compiler.calls("-c")) == at_once)  # one that is still to begin would do so while others compile
    process.kill()
    process.communicate()
    for line in compiler.calls("-c"):
        os.kill(int(line.split()[0]), signal.SIGKILL)
    assert list(cache.glob("*.so")) == []
    (left,) = cache.glob("making-*")
    os.utime(left, (0, 0))  # long ago
    compiler.does(f'exec {shutil.which("c++")} "$@"')
    assert answer(build_library(cache, sources)) == 42
    assert list(cache.glob("making-*")) == []


def test_a_process_that_hangs_is_not_waited_for_for_ever(cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(mode=0o700)
    monkeypatch.setattr(build, "WAIT_LIMIT_S", 0.2)
    with (cache / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert answer(build_library(cache, sources)) == 42


# Who may write where libraries are


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_folder_that_others_can_write_to_is_refused(mode: int, cache: Path, sources: Path) -> None:
    build_library(cache, sources)
    cache.chmod(mode)
    with pytest.raises(CacheUnusable, match=r"others can write to .*chmod go-w"):
        build_library(cache, sources)
    (link := cache.parent / "link").symlink_to(cache)
    with pytest.raises(CacheUnusable, match="others can write to"):
        build_library(link, sources)


def test_folder_below_one_that_everybody_can_write_to_is_refused(tmp_path: Path, sources: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    with pytest.raises(CacheUnusable, match="everybody can write to"):
        build_library(shared / "kernels", sources)
    shared.chmod(0o1777)  # as /tmp: what is in it can be moved by its owner alone
    assert answer(build_library(shared / "kernels", sources)) == 42


def test_folder_of_another_user_is_refused(cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_library(cache, sources)
    me = os.geteuid()
    if me == 0:
        os.chown(cache, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(CacheUnusable, match="belongs to another user"):
        build_library(cache, sources)


def test_library_that_others_can_write_to_is_refused(cache: Path, sources: Path) -> None:
    build_library(cache, sources).chmod(0o666)
    with pytest.raises(CacheUnusable, match="others can write to"):
        build_library(cache, sources)


def test_users_own_folder_is_in_their_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "graftwork" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/graftwork/kernels")


# What cannot be compiled, kept or loaded


def test_without_a_compiler_it_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(CompilerMissing, match=r"no C\+\+ compiler .* install"):
        build_library(cache)
    assert not cache.exists()


def test_of_compilers_that_all_fail_it_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("g++", "clang++"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} is out of order\nexit 3\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerMissing, match=r"(?s)answers.*g\+\+ is out of order.*clang\+\+ is out of order"):
        find_compiler()


def test_a_compiler_that_does_not_answer_is_passed_over(cache: Path, sources: Path, compiler: FakeCompiler) -> None:
    compiler.does("exit 1")
    assert answer(build_library(cache, sources)) == 42
    assert find_compiler().path == shutil.which("c++")


def test_compiler_errors_are_shown_from_their_end(cache: Path, sources: Path) -> None:
    (sources / "answer.cpp").write_text('#include "number.h"\n' + "nonsense_here;\n" * 30 + "nonsense_at_the_end;\n")
    with pytest.raises(CompilerFailed, match="nonsense_at_the_end") as failed:
        build_library(cache, sources)
    assert "answer.cpp" in str(failed.value)
    assert len(str(failed.value).splitlines()) < 30
    assert list(cache.glob("*.so")) == []


def test_a_broken_compiler_is_told_in_its_own_words(cache: Path, sources: Path, compiler: FakeCompiler) -> None:
    compiler.does('[ "$1" = --version ] && exec echo 1.0; echo "cc1plus: internal error, out of luck" >&2; exit 4')
    with pytest.raises(CompilerFailed, match="exit status 4\ncc1plus: internal error, out of luck"):
        build_library(cache, sources)


def test_a_compiler_that_hangs_is_ended_with_all_its_processes(
    cache: Path, sources: Path, compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "run.cpp").unlink()
    (child := tmp_path / "child").write_text("")
    compiler.does(
        f'case "$*" in *" -c "*) sleep 60 & echo $! > {child}; wait;; esac; exec {shutil.which("c++")} "$@"',
    )
    monkeypatch.setattr(build, "COMPILE_LIMIT_S", 0.5)
    with pytest.raises(CompilerFailed, match="did not end in time"):
        build_library(cache, sources)
    pids = [int(line.split()[0]) for line in (*child.read_text().splitlines(), *compiler.calls("-c"))]
    wait_until(lambda: not any(map(is_alive, pids)))


def test_an_interrupt_does_not_wait_for_files_that_have_not_begun(
    cache: Path, sources: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arrived = tmp_path / "arrived"

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            arrived.touch()
            super().shutdown(wait)

    monkeypatch.setattr(build.concurrent.futures, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    for number in range(6):
        (sources / f"more{number}.cpp").write_text("")
    once = f"mkdir {sources / 'begun'} 2>/dev/null && kill -INT {os.getpid()}"
    until_then = f"while [ ! -e {arrived} ]; do sleep 0.05; done"
    compiler.does(f'case " $* " in *" -c "*) {once}; {until_then};; esac; exec {compiler.real} "$@"')
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may ignore it, as shells and nohup do
    try:
        with pytest.raises(KeyboardInterrupt):
            build_library(cache, sources)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(compiler.calls("-c")) == 1
    assert list(cache.glob("*.so")) == list(cache.glob("making-*")) == []


def test_a_folder_that_cannot_be_made_or_is_full_is_told(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheUnusable, match="Not a directory"):
        build_library(tmp_path / "file" / "kernels", sources)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CacheUnusable, match="No space left"):
        build_library(tmp_path / "kernels", sources)


def test_where_nothing_can_be_kept_it_is_compiled_for_one_process(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    library = open_library(tmp_path / "file" / "kernels", sources)
    assert library.fingerprint == build_library(tmp_path / "kernels", sources).stem
    assert list(temporary.iterdir()) == []
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "at every start" in r.getMessage()] != []


def test_a_library_that_cannot_be_loaded_says_why(cache: Path, sources: Path) -> None:
    (sources / "answer.cpp").write_text('int missing();\nextern "C" int answer() { return missing(); }\n')
    with pytest.raises(KernelsUnavailable, match=r"cannot be loaded: .*missing"):
        open_library(cache, sources)


# Compilers that know less


def test_a_compiler_without_march_gets_mcpu(cache: Path, sources: Path, compiler: FakeCompiler) -> None:
    real = shutil.which("c++")
    compiler.does(
        'for a in "$@"; do [ "$a" = -march=native ] && exit 1; done; '
        f'n=$#; for a in "$@"; do [ "$a" = -mcpu=native ] || set -- "$@" "$a"; done; shift $n; exec {real} "$@"'
    )
    assert answer(build_library(cache, sources)) == 42
    assert len(compiler.calls("-c", "-mcpu=native", "-fopenmp")) == 2


def test_a_compiler_for_no_machine_in_particular_says_so(
    cache: Path, sources: Path, compiler: FakeCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    real = shutil.which("c++")
    compiler.does(f'for a in "$@"; do case "$a" in -m*=native) exit 1;; esac; done; exec {real} "$@"')
    assert answer(build_library(cache, sources)) == 42
    assert "cannot compile for this very machine" in caplog.text


def test_without_openmp_there_is_one_thread_and_one_line_in_the_log(
    cache: Path, sources: Path, compiler: FakeCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.refuses("-fopenmp")
    path = build_library(cache, sources)
    assert answer(path) == 42
    assert len([r for r in caplog.records if "one thread" in r.getMessage()]) == 1
    assert len(compiler.calls("-c")) == 2
    assert build_library(cache, sources) == path
    assert len(compiler.calls("-c")) == 2


OTHER_MACHINES = {
    "x86_64": ["x86-64", "x86-64-v3", "x86-64-v4", "cooperlake"],
    "aarch64": ["armv8-a", "armv8.2-a+sve"],
}


@pytest.mark.parametrize("march", OTHER_MACHINES.get(platform.machine(), ["native"]))
def test_sources_compile_without_a_warning_for_other_machines(march: str) -> None:
    """From no vector unit worth the name, and no OpenMP either, to AVX-512 with BF16."""
    flags = [f"-march={march}" if flag == "-march=native" else flag for flag in FLAGS]
    if march in ("x86-64", "armv8-a"):
        flags = [*(flag for flag in flags if flag != "-fopenmp"), "-Wno-unknown-pragmas"]
    command = [find_compiler().path, *flags, "-Werror", "-fsyntax-only"]

    def complaints(source: Path) -> str:
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
        return done.stderr[-3000:] + ("failed" if done.returncode else "")

    with ThreadPoolExecutor(2) as pool:
        assert list(filter(None, pool.map(complaints, sorted(SOURCES.glob("*.cpp"))))) == []
