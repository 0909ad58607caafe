"""Have an upload's text files looked at in a process of its own. Whatever they do to it comes back as a finding."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import msgspec

import graftwork_adapters
import graftwork_engine
import graftwork_platform
from graftwork_adapters.limited_process import ProcessStopped, run_limited
from graftwork_adapters.report import Report
from graftwork_platform.catalog.facts import OwnText
from graftwork_platform.text.upload_text import TextJob, TextVerdict

_log = logging.getLogger(__name__)

_WORKER = "graftwork_platform.text.upload_text_worker"
_TIMEOUT_S = 60.0
_MEMORY_BYTES = 2 << 30


class CheckText(Protocol):
    """`check_text`, or what stands in for it."""

    async def __call__(self, job: TextJob) -> TextVerdict:
        """Raises `OSError` if no process can be started."""
        ...


async def check_text(job: TextJob, *, timeout_s: float = _TIMEOUT_S, memory_bytes: int = _MEMORY_BYTES) -> TextVerdict:
    """What the text files of ``job`` are; never raises on account of them. Raises `OSError` if no process can be started."""
    rooms = (graftwork_adapters, graftwork_engine, graftwork_platform)
    path = [Path(room.__file__ or "").resolve().parent.parent for room in rooms]
    try:
        output = await run_limited(_WORKER, msgspec.json.encode(job), timeout_s=timeout_s, memory_bytes=memory_bytes, path=path)
        return msgspec.json.decode(output, type=TextVerdict)
    except ProcessStopped as stopped:
        why = str(stopped)
    except msgspec.MsgspecError:
        _log.exception("the process that looks at text files gave no readable verdict")
        why = "gave no readable verdict"
    report = Report()
    message = f"the process that looked at them {why}"
    report.fail(
        "tokenizer", ", ".join(job.names), message, "save the tokenizer again, or leave these files out: then the base's hold"
    )
    return TextVerdict(report, OwnText())
