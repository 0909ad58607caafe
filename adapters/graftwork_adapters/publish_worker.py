"""The publishing process: limits itself, reads one job from standard input, writes its verdict to standard output.

Run by `publisher` as ``python -m graftwork_adapters.publish_worker MEMORY_BYTES CPU_SECONDS``.
"""

from __future__ import annotations

import sys

from graftwork_adapters.limited_process import OUT_OF_MEMORY_EXIT, limit_this_process
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import decode_job, encode_result


def main(arguments: list[str]) -> int:
    """Handle one job; the exit status is 0 whatever the verdict."""
    memory_bytes, cpu_seconds = int(arguments[0]), int(arguments[1])
    limit_this_process(memory_bytes, cpu_seconds)
    job = decode_job(sys.stdin.buffer.read())
    try:
        result = publish(job)
    except MemoryError:
        return OUT_OF_MEMORY_EXIT
    sys.stdout.buffer.write(encode_result(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
