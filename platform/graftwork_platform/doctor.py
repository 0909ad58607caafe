"""Is this machine, data directory and server fit to serve? Looks, and changes nothing. Knows no terminal."""

from __future__ import annotations

import stat
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from graftwork_adapters.errors import StoreError, StoreUnavailable
from graftwork_adapters.report import Report
from graftwork_adapters.store import StoreConfig
from graftwork_adapters.stores import check_store
from graftwork_kernels.choice import ONEDNN, decide, last_measured
from graftwork_kernels.cpu.build import CompilerMissing, find_compiler
from graftwork_platform.admin.client import AdminClient, CallFailed
from graftwork_platform.db_url import UnsupportedDatabase, check_url, describe, is_postgresql, sqlite_path
from graftwork_platform.secrets import BadSecret, load_or_create
from graftwork_platform.serve.data_dir import holder
from graftwork_platform.settings import GivenSecrets, Settings

_PYTHON = (3, 11)
_TORCH = ((2, 11), (2, 14))  # from, below

_FROM_A_BACKUP = "`graftwork serve` makes it at the first start; after that, restore it from a backup"
_STAND_IN = "00" * 32


def examine_software(report: Report) -> None:
    """Versions of Python and torch; torch is looked up, not imported."""
    running = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= _PYTHON:
        report.passed("python", running)
    else:
        report.fail("python", None, running, "install Python 3.11 or newer")
    try:
        torch = version("torch")
    except PackageNotFoundError:
        report.fail("torch", None, "not installed", "pip install 'torch>=2.11,<2.14'")
        return
    found = tuple(int(part) for part in torch.split("+")[0].split(".")[:2])
    if _TORCH[0] <= found < _TORCH[1]:
        report.passed("torch", torch)
    else:
        report.warn("torch", None, f"{torch} was not tested", "pip install 'torch>=2.11,<2.14'")


def examine_kernels(report: Report, folder: Path | None) -> None:
    """The compiler that makes the fast kernels, and what the engine's latest measuring in ``folder`` chose of them."""
    try:
        report.passed("compiler", str(find_compiler()))
    except CompilerMissing as missing:
        slow = "without it every operator runs in plain torch and takes several times as long"
        report.warn("compiler", None, f"{missing}; {slow}", "apt-get install g++, or your system's package of it; then start again")
    if folder is None:
        return
    measured = last_measured(folder) if folder.is_dir() else None
    if measured is None:
        report.passed("kernels", "not measured yet: the first start of a server does, and compiles them before", str(folder))
        return
    by_name: dict[str, list[str]] = {}
    choice = decide(measured.verdicts, {})
    for operator, name in choice.names.items():
        by_name.setdefault(name, []).append(operator)
    if choice.onednn_rows is not None:
        by_name[ONEDNN] = [f"linear from {choice.onednn_rows} rows on"]
    chosen = "; ".join(f"{name}: {', '.join(operators)}" for name, operators in sorted(by_name.items()))
    when = "last measured, on a busy machine and until a start finds it quiet" if measured.is_provisional else "last measured"
    report.passed("kernels", f"fastest when {when}: {chosen}", str(folder))


def examine_data(report: Report, settings: Settings, given: GivenSecrets = GivenSecrets(), *, has_admin_key: bool = False) -> None:
    """The data directory, its lock, secrets, database and store.

    What is ``given`` is not looked for in files. ``has_admin_key``: whoever asks has an admin key, wherever it came from.
    """
    folder = settings.data_dir
    if not folder.is_dir():
        report.fail("data directory", str(folder), "is not there", "`graftwork serve` makes it at the first start")
        return
    _examine_writable(report, folder)
    _examine_lock(report, settings)
    _examine_admin_key_file(report, settings, has_admin_key=has_admin_key)
    _examine_given(report, given)
    for name, text in (("pepper", given.pepper), ("cache-salt", given.cache_salt)):
        if text is None:
            _examine_secret(report, settings.secrets_dir / name)
    _examine_database(report, settings.database)
    _examine_store(report, settings.store)


def examine_server(report: Report, client: AdminClient) -> None:
    """The running server, and whether it takes the admin key."""
    try:
        ready = client.is_ready()
    except CallFailed as failed:
        report.fail("server", client.url, failed.message, failed.next_step)
        return
    if ready:
        report.passed("server", "is ready", client.url)
    else:
        report.warn("server", client.url, "is up but not ready", "wait for the engine to start, or look at its log")
    if not client.has_key:
        report.warn("admin key", client.url, "was not tried, since none is given", "give --admin-key or GRAFTWORK_ADMIN_KEY")
        return
    try:
        client.check_key()
        report.passed("admin key", "is accepted", client.url)
    except CallFailed as failed:
        report.fail("admin key", client.url, failed.message, failed.next_step)


def _examine_writable(report: Report, folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
        report.passed("data directory", "can be written", str(folder))
    except OSError as error:
        report.fail("data directory", str(folder), f"cannot be written: {error.strerror}", "free space, or fix its owner")


def _examine_lock(report: Report, settings: Settings) -> None:
    try:
        process = holder(settings.lock_file)
    except OSError as error:
        report.fail("lock", str(settings.lock_file), f"cannot be read: {error.strerror}", "fix its owner")
        return
    found = "no server is running on this data directory" if process is None else f"held by the server that is running ({process})"
    report.passed("lock", found, str(settings.lock_file))


def _examine_admin_key_file(report: Report, settings: Settings, *, has_admin_key: bool) -> None:
    """The first server on a database has the file; others are asked with its key."""
    file = settings.admin_key_file
    if file.exists():
        _examine_secret(report, file)
    elif has_admin_key:
        report.passed("secrets", "is not there, and not needed: an admin key is given", str(file))
    elif _is_shared(settings.database):
        fix = "copy it from the first server on this database, or set GRAFTWORK_ADMIN_KEY"
        report.warn("secrets", str(file), "is not there, as on every server on a database but the first", fix)
    else:
        report.fail("secrets", str(file), "is not there", _FROM_A_BACKUP)


def _is_shared(database_url: str) -> bool:
    try:
        return is_postgresql(check_url(database_url))
    except UnsupportedDatabase:  # told where the database is examined
        return False


def _examine_given(report: Report, given: GivenSecrets) -> None:
    """The secrets of the environment. One that is not given has a stand-in, so that no file is read or made."""
    for name, text, alone in (
        ("GRAFTWORK_PEPPER", given.pepper, GivenSecrets(given.pepper, _STAND_IN)),
        ("GRAFTWORK_CACHE_SALT", given.cache_salt, GivenSecrets(_STAND_IN, given.cache_salt)),
    ):
        if text is None:
            continue
        try:
            load_or_create(Path(), alone)
            report.passed("secrets", "is given in the environment", name)
        except BadSecret as error:
            report.fail("secrets", name, str(error), "give 32 bytes in hex, the same on every server on this database")


def _examine_secret(report: Report, path: Path) -> None:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        report.fail("secrets", str(path), f"cannot be read: {error.strerror}", _FROM_A_BACKUP)
        return
    if mode & 0o077:
        report.warn("secrets", str(path), f"others may read it (mode {mode:o})", f"chmod 600 {path}")
    else:
        report.passed("secrets", "readable by its owner alone", str(path))


def _examine_store(report: Report, config: StoreConfig) -> None:
    try:
        check_store(config)
        report.passed("object store", "can be read", config.url)
    except StoreUnavailable as error:
        fix = error.fix or "`graftwork serve` makes a folder at the first start; after that, restore it from a backup"
        report.fail("object store", config.url, f"cannot be used: {error}", fix)
    except StoreError as error:
        report.fail("object store", None, f"cannot be used: {error}", "correct --object-store and the options beside it")


def _examine_database(report: Report, url: str) -> None:
    try:
        parsed = check_url(url)
    except UnsupportedDatabase as error:
        report.fail("database", None, str(error), "fix the database URL")
        return
    path = sqlite_path(parsed)
    if path is not None and not path.exists():
        report.fail("database", str(path), "is not there", "`graftwork serve` makes it at the first start")
        return
    where = str(path) if path is not None else describe(parsed)
    # A process of its own, since this package lies below the migrations and may not import them.
    command = [sys.executable, "-m", "graftwork_migrations", "current", "--database-url", "-"]
    done = subprocess.run(command, input=f"{url}\n", capture_output=True, text=True, check=False)
    found, _, newest = done.stdout.strip().partition(" ")
    if done.returncode != 0:
        fix = "restore it from a backup" if path is not None else "see that it runs, and that --database-url is right"
        report.fail("database", where, f"cannot be read: {done.stderr.strip()[-300:]}", fix)
    elif found == newest:
        report.passed("database", f"at revision {found}", where)
    else:
        report.warn("database", where, f"at revision {found}, this version wants {newest}", "`graftwork serve` upgrades it")
