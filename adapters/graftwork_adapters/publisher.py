"""Run a publishing job in a process of its own, within limits of memory and time. Opens no upload itself and imports no torch.

Whatever an upload does to that process (a crash, a hang, too much memory) comes back as a finding of its report.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

import graftwork_adapters
from graftwork_adapters.limited_process import ProcessStopped, run_limited
from graftwork_adapters.publish_job import PublishJob, PublishResult, decode_result, encode_job
from graftwork_adapters.report import Report

_logger = logging.getLogger(__name__)


async def run_publish(job: PublishJob, *, timeout_s: float = 300.0, memory_bytes: int = 4 << 30) -> PublishResult:
    """Validate and pack an upload in a subprocess of at most ``memory_bytes`` of data and ``timeout_s`` seconds.

    Never raises on account of the upload. If cancelled, the subprocess is killed before the cancellation goes on. Several may run
    at once; the caller bounds how many. Raises `OSError` if no process can be started.
    """
    path = [Path(graftwork_adapters.__file__).resolve().parent.parent]
    try:
        output = await run_limited(
            "graftwork_adapters.publish_worker", encode_job(job), timeout_s=timeout_s, memory_bytes=memory_bytes, path=path
        )
        return decode_result(output)
    except ProcessStopped as stopped:
        return _stopped(job, str(stopped))
    except msgspec.MsgspecError:
        _logger.exception("the validation process gave no readable verdict")
        return _stopped(job, "gave no readable verdict")


def _stopped(job: PublishJob, why: str) -> PublishResult:
    for path in (job.partial_path, job.out_path):
        path.unlink(missing_ok=True)
    report = Report()
    message = f"the validation process {why}"
    report.fail("process", "files", message, "upload a smaller adapter, or raise the server's limits for publishing")
    return PublishResult(ok=False, report=report)
