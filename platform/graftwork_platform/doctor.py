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
from graftwork_platform.admin.client import AdminClient, CallFailed
from graftwork_platform.db_url import UnsupportedDatabase, check_url, describe, sqlite_path
from graftwork_platform.serve.data_dir import DataDirBusy, locked
from graftwork_platform.settings import Settings

_PYTHON = (3, 11)
_TORCH = ((2, 11), (2, 14))  # from, below


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


def examine_data(report: Report, settings: Settings) -> None:
    """The data directory, its lock, secrets, database and store."""
    folder = settings.data_dir
    if not folder.is_dir():
        report.fail("data directory", str(folder), "is not there", "`graftwork serve` makes it at the first start")
        return
    _examine_writable(report, folder)
    _examine_lock(report, settings)
    for path in (settings.admin_key_file, settings.secrets_dir / "pepper", settings.secrets_dir / "cache-salt"):
        _examine_secret(report, path)
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
    if not settings.lock_file.exists():
        report.passed("lock", "no server has used this data directory yet", str(settings.lock_file))
        return
    try:
        with locked(settings.lock_file):
            report.passed("lock", "no server is running on this data directory", str(settings.lock_file))
    except DataDirBusy:
        report.passed("lock", "held by the server that is running", str(settings.lock_file))
    except OSError as error:
        report.fail("lock", str(settings.lock_file), f"cannot be opened: {error.strerror}", "fix its owner")


def _examine_secret(report: Report, path: Path) -> None:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        fix = "`graftwork serve` makes it at the first start; after that, restore it from a backup"
        report.fail("secrets", str(path), f"cannot be read: {error.strerror}", fix)
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
