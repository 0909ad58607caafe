"""The publishing process: limits itself, reads one job from standard input, writes its verdict to standard output.

Run by `publisher` as ``python -m graftwork_adapters.publish_worker MEMORY_BYTES CPU_SECONDS``.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import sys

from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import OUT_OF_MEMORY_EXIT, decode_job, encode_result

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Handle one job; the exit status is 0 whatever the verdict."""
    memory_bytes, cpu_seconds = int(arguments[0]), int(arguments[1])
    _limit(memory_bytes, cpu_seconds)
    job = decode_job(sys.stdin.buffer.read())
    try:
        result = publish(job)
    except MemoryError:
        return OUT_OF_MEMORY_EXIT
    sys.stdout.buffer.write(encode_result(result))
    return 0


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    """Bound this process for good, before it opens anything a stranger sent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the server
    # Data, not address space: mapped libraries cost nothing and differ from build to build.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    # The kernel warns (SIGXCPU, which ends the process) at the first and kills at the second; the first tells time from memory.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
