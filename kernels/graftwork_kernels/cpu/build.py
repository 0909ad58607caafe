"""Compiles the C++ sources beside this file into one library, once for each machine, and keeps it. Knows no operator, and no torch.

To load a library is to run it. So it is kept in a folder that nobody else can write to, and each file ends with a digest of what
was built: a file that was torn, damaged or brought from elsewhere is compiled again, not loaded.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-Wall",
    "-Wextra",
)
"""What is asked of a compiler that knows them all. Never -ffast-math: a library linked with it turns denormals off for the thread
that loads it, and NaN goes unnoticed."""

MACHINE_FLAGS = ("-march=native", "-mcpu=native")
"""What compilers call "for this machine"; those for ARM and POWER did not always know the first."""

THREAD_FLAG = "-fopenmp"

COMPILE_LIMIT_S = 300.0
"""For all files together."""

WAIT_LIMIT_S = COMPILE_LIMIT_S
"""For another process that compiles."""

_PROBE_LIMIT_S = 30.0
_POLL_S = 0.05
_OUTPUT_LINES = 20
_ROOM_BYTES = 16 << 20
_DIGEST_BYTES = hashlib.sha256().digest_size

_OPENMP_PROBE = "#include <omp.h>\nint probe() { return omp_get_max_threads(); }\n"


class KernelsUnavailable(Exception):
    """This machine cannot have the compiled operators; the message says why, and what to do."""


class CompilerMissing(KernelsUnavailable):
    """There is no C++ compiler."""


class CompilerFailed(KernelsUnavailable):
    """There is one, and it cannot compile the sources, or not in time."""


class CacheUnusable(KernelsUnavailable):
    """The folder for libraries cannot be written to, or others can write to it."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler that answers. ``version`` is all that it says of itself."""

    path: str
    version: str

    def __str__(self) -> str:
        return f"{self.path}, {self.version.partition(chr(10))[0]}"


def find_compiler() -> Compiler:
    """The first of g++, c++ and clang++ on the PATH; raises `CompilerMissing`."""
    broken = []
    for name in ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            return Compiler(path, _run([path, "--version"], _PROBE_LIMIT_S))
        except CompilerFailed as error:
            broken.append(str(error).strip())
    advice = "install one, for instance with apt-get install g++"
    if broken:
        raise CompilerMissing(f"no C++ compiler on the PATH answers; {advice}: {'; '.join(broken)}")
    raise CompilerMissing(f"no C++ compiler (g++, c++ or clang++) on the PATH; {advice}")


def default_cache_dir() -> Path:
    """This user's folder for compiled libraries."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"graftwork-{os.geteuid()}"
    return base / "graftwork" / "kernels"


def machine() -> str:
    """What the compiler's "native" depends on, and speed too: the processor's architecture, name and features."""
    lines = [platform.machine()]
    wanted = {"model name", "flags", "Features", "CPU implementer", "CPU part", "isa", "cpu"}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                wanted.remove(name.strip())
                lines.append(value.strip())
    return "\n".join(lines)


def build_library(cache_dir: Path, sources: Path = SOURCES) -> Path:
    """The library of ``sources`` for this machine, from ``cache_dir`` where that has it.

    Processes that ask at the same time compile once. Raises `KernelsUnavailable`, of the kind that applies.
    """
    compiler = find_compiler()
    try:
        folder = private_folder(cache_dir)
        found = _lookup(folder, _fingerprint(compiler, FLAGS, sources))
        if found is not None:
            return found
        with _lock(folder):
            flags = _known_flags(compiler, folder)
            fingerprint = _fingerprint(compiler, flags, sources)
            return _lookup(folder, fingerprint) or _build(compiler, flags, sources, folder, fingerprint)
    except OSError as error:
        raise CacheUnusable(f"{cache_dir} cannot hold compiled kernels: {error.strerror or error}") from error


def private_folder(path: Path) -> Path:
    """``path``, made where it is missing, if nobody else can put a file there. Raises `CacheUnusable` and OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.resolve()
    _refuse_foreign(folder)
    for above in folder.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise CacheUnusable(f"{folder}: everybody can write to {above} above it, and a library that is loaded runs")
    return folder


def _refuse_foreign(path: Path) -> None:
    status = path.lstat()
    if status.st_uid not in (0, os.geteuid()):
        raise CacheUnusable(f"{path} belongs to another user, and a library that is loaded runs; name another folder")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheUnusable(f"others can write to {path}, and a library that is loaded runs; chmod go-w {path}")


def _fingerprint(compiler: Compiler, flags: Sequence[str], sources: Path) -> str:
    digest = hashlib.sha256()
    for source in sorted(sources.iterdir()):
        if source.suffix in (".cpp", ".h"):
            content = source.read_bytes()
            digest.update(f"{source.name} {len(content)}\n".encode())
            digest.update(content)
    digest.update("\n".join((*flags, compiler.path, compiler.version, machine())).encode())
    return digest.hexdigest()[:32]


def _lookup(folder: Path, fingerprint: str) -> Path | None:
    """The library of this fingerprint, if it is there and whole."""
    path = folder / f"{fingerprint}.so"
    try:
        _refuse_foreign(path)
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if content[-_DIGEST_BYTES:] == _digest(fingerprint, content[:-_DIGEST_BYTES]):
        return path
    logger.warning("%s is not as it was written; the kernels are compiled again", path)
    return None


def _digest(fingerprint: str, content: bytes) -> bytes:
    """Stands at the end of a library's file, where no loader looks. The fingerprint is in it: a renamed library is none."""
    return hashlib.sha256(fingerprint.encode() + content).digest()


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lets one process compile while others wait. It saves their work alone: without it, each would write a whole file.

    The system frees it when its holder ends, whatever ended it; one that hangs is waited for no longer than it may compile.
    """
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        give_up = time.monotonic() + WAIT_LIMIT_S
        while time.monotonic() < give_up:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)


def _known_flags(compiler: Compiler, folder: Path) -> tuple[str, ...]:
    """Those of `FLAGS` that this compiler knows; what it lacks is logged."""
    with _scratch(folder) as scratch:
        (source := scratch / "probe.cpp").write_text("int probe;\n")
        output = str(scratch / "probe.so")

        def knows(*flags: str) -> bool:
            try:
                _run([compiler.path, "-fPIC", "-shared", *flags, str(source), "-o", output], _PROBE_LIMIT_S, scratch)
            except CompilerFailed:
                return False
            return True

        native = next((flag for flag in MACHINE_FLAGS if knows(flag)), None)
        source.write_text(_OPENMP_PROBE)
        has_threads = knows(THREAD_FLAG)
    if native is None:
        logger.warning("%s cannot compile for this very machine: kernels use what all of its kind have", compiler)
    if not has_threads:
        logger.warning("%s has no OpenMP: kernels run on one thread; install libgomp or libomp", compiler)
    known = (native if flag in MACHINE_FLAGS else flag for flag in FLAGS if has_threads or flag != THREAD_FLAG)
    return tuple(flag for flag in known if flag is not None)


def _build(compiler: Compiler, flags: tuple[str, ...], sources: Path, folder: Path, fingerprint: str) -> Path:
    """Compile, and put the library in its place whole."""
    started = time.monotonic()
    target = folder / f"{fingerprint}.so"
    with _scratch(folder) as scratch:
        content = _compile(compiler, flags, sorted(sources.glob("*.cpp")), scratch).read_bytes()
        descriptor = os.open(scratch / target.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content + _digest(fingerprint, content))
            file.flush()
            os.fsync(descriptor)
        os.replace(scratch / target.name, target)
    logger.info("kernels compiled by %s in %.1f s: %s", compiler, time.monotonic() - started, target)
    return target


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder in ``folder`` for half-made files, with room for them; what a killed process left of its own is removed."""
    for left in folder.glob("making-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 2 * COMPILE_LIMIT_S:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=folder, ignore_cleanup_errors=True) as name:
        with (Path(name) / "room").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
        (Path(name) / "room").unlink()
        yield Path(name)


def _compile(compiler: Compiler, flags: tuple[str, ...], files: Sequence[Path], scratch: Path) -> Path:
    """Every file by a process of its own, as many at a time as there are cores; then the link."""
    give_up = time.monotonic() + COMPILE_LIMIT_S

    def compile_one(file: Path) -> str:
        result = str(scratch / f"{file.stem}.o")
        _run([compiler.path, *flags, "-c", str(file), "-o", result], give_up - time.monotonic(), scratch)
        return result

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            waiting = [pool.submit(compile_one, file) for file in files]
            objects = [future.result() for future in waiting]
        finally:  # after a failure, and after Ctrl-C, what has not begun is not begun
            pool.shutdown(cancel_futures=True)
    library = scratch / "kernels.so"
    _run([compiler.path, *flags, "-shared", *objects, "-o", str(library)], give_up - time.monotonic(), scratch)
    return library


def _run(command: Sequence[str], limit_s: float, scratch: Path | None = None) -> str:
    """What a compiler prints; raises `CompilerFailed` with its last lines if it fails, or does not end in ``limit_s``."""
    environment = {**os.environ, "LC_ALL": "C"} | ({} if scratch is None else {"TMPDIR": str(scratch)})
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # a compiler is several processes, which a time limit has to end together
        )
    except OSError as error:
        raise CompilerFailed(f"{command[0]} cannot be run: {error.strerror}") from error
    with process:
        try:
            output, _ = process.communicate(timeout=max(limit_s, 0.0))
        except subprocess.TimeoutExpired as error:
            raise CompilerFailed(f"{' '.join(command)}: did not end in time") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        last = "\n".join(output.strip().splitlines()[-_OUTPUT_LINES:])
        raise CompilerFailed(f"{' '.join(command)}: exit status {process.returncode}\n{last}")
    return output
