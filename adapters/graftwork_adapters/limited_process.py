"""A process for work on what a stranger sent, with limits of memory and time: how it is started, and how it limits itself.

It is run as ``python -m MODULE MEMORY_BYTES CPU_SECONDS``, calls `limit_this_process` first, reads its job from standard input and
writes its answer to standard output. Opens no upload itself and imports no torch.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_logger = logging.getLogger(__name__)

OUT_OF_MEMORY_EXIT = 75
"""Exit status of a process whose allocation was refused."""

_PR_SET_PDEATHSIG = 1


class ProcessStopped(Exception):
    """The process gave no answer; the message says why, behind the name of what it did."""


async def run_limited(module: str, job: bytes, *, timeout_s: float, memory_bytes: int, path: Sequence[Path]) -> bytes:
    """What ``module`` answers to ``job`` with at most ``memory_bytes`` of data and ``timeout_s`` seconds.

    ``path``: where it finds its packages. If cancelled, the process is killed before the cancellation goes on. Raises
    `ProcessStopped`, or `OSError` if no process can be started.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", module, str(memory_bytes), str(math.ceil(timeout_s) + 1)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(path),
        start_new_session=True,  # the terminal's Ctrl-C is the server's to handle
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate(job)
    except TimeoutError:
        raise ProcessStopped(f"ran out of time ({timeout_s:g} s)") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    status = process.returncode or 0
    if status == 0:
        return output
    if status == -signal.SIGXCPU:
        raise ProcessStopped("ran out of time (processor seconds)")
    if status in (OUT_OF_MEMORY_EXIT, -signal.SIGKILL):
        raise ProcessStopped(f"ran out of memory ({memory_bytes} bytes)")
    _logger.error("%s ended with status %d: %s", module, status, errors[-4000:].decode(errors="replace"))
    raise ProcessStopped(f"ended unexpectedly (status {status})")


def limit_this_process(memory_bytes: int, cpu_seconds: int) -> None:
    """Bound this process for good, before it opens anything a stranger sent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the server
    # Data, not address space: mapped libraries cost nothing and differ from build to build.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    # The kernel warns (SIGXCPU, which ends the process) at the first and kills at the second; the first tells time from memory.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _environment(path: Sequence[Path]) -> dict[str, str]:
    """All that the process inherits: an upload is handled out of reach of the server's secrets."""
    return {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        # One thread: an upload takes one core's share, and no thread pool's stacks are charged to the memory limit.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "LC_ALL": "C.UTF-8",
    }
