"""Run a publishing job in a process of its own, within limits of memory and time. Opens no upload itself and imports no torch.

Whatever an upload does to that process (a crash, a hang, too much memory) comes back as a finding of its report.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

import graftwork_adapters
from graftwork_adapters.publish_job import OUT_OF_MEMORY_EXIT, PublishJob, PublishResult, decode_result, encode_job
from graftwork_adapters.report import Report

_logger = logging.getLogger(__name__)


async def run_publish(job: PublishJob, *, timeout_s: float = 300.0, memory_bytes: int = 4 << 30) -> PublishResult:
    """Validate and pack an upload in a subprocess of at most ``memory_bytes`` of data and ``timeout_s`` seconds.

    Never raises on account of the upload. If cancelled, the subprocess is killed before the cancellation goes on. Several may run
    at once; the caller bounds how many. Raises `OSError` if no process can be started.
    """
    arguments = ["-P", "-m", "graftwork_adapters.publish_worker", str(memory_bytes), str(math.ceil(timeout_s) + 1)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(),
        start_new_session=True,  # the terminal's Ctrl-C is the server's to handle
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate(encode_job(job))
    except TimeoutError:
        return _stopped(job, f"the validation process ran out of time ({timeout_s:g} s)")
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    return _verdict(job, process.returncode or 0, output, errors, memory_bytes)


def _environment() -> dict[str, str]:
    """All that the worker inherits: an upload is handled out of reach of the server's secrets."""
    return {
        "PYTHONPATH": str(Path(graftwork_adapters.__file__).resolve().parent.parent),
        # One thread: an upload takes one core's share, and no thread pool's stacks are charged to the memory limit.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "LC_ALL": "C.UTF-8",
    }


def _verdict(job: PublishJob, status: int, output: bytes, errors: bytes, memory_bytes: int) -> PublishResult:
    if status == 0:
        try:
            return decode_result(output)
        except msgspec.MsgspecError:
            _logger.exception("the validation process gave no readable verdict")
            return _stopped(job, "the validation process gave no readable verdict")
    if status == -signal.SIGXCPU:
        return _stopped(job, "the validation process ran out of time (processor seconds)")
    if status in (OUT_OF_MEMORY_EXIT, -signal.SIGKILL):
        return _stopped(job, f"the validation process ran out of memory ({memory_bytes} bytes)")
    _logger.error("the validation process ended with status %d: %s", status, errors[-4000:].decode(errors="replace"))
    return _stopped(job, f"the validation process ended unexpectedly (status {status})")


def _stopped(job: PublishJob, message: str) -> PublishResult:
    for path in (job.partial_path, job.out_path):
        path.unlink(missing_ok=True)
    report = Report()
    report.fail("process", None, message, "upload a smaller adapter, or raise the server's limits for publishing")
    return PublishResult(ok=False, report=report)
