"""The process that looks at an upload's text files: limits itself, reads one job from standard input, writes its verdict.

Run by `publishing.text_check` as ``python -m graftwork_platform.text.upload_text_worker MEMORY_BYTES CPU_SECONDS``.
"""

from __future__ import annotations

import sys

import msgspec

from graftwork_adapters.limited_process import OUT_OF_MEMORY_EXIT, limit_this_process
from graftwork_platform.text.upload_text import TextJob, examine


def main(arguments: list[str]) -> int:
    """Handle one job; the exit status is 0 whatever the verdict."""
    memory_bytes, cpu_seconds = int(arguments[0]), int(arguments[1])
    limit_this_process(memory_bytes, cpu_seconds)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=TextJob)
    try:
        verdict = examine(job)
    except MemoryError:
        return OUT_OF_MEMORY_EXIT
    sys.stdout.buffer.write(msgspec.json.encode(verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
