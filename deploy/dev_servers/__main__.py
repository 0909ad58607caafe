"""``python -m dev_servers s3 --data-dir DIR -- COMMAND…``: run a command beside a server, which ends with it."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dev_servers import seaweedfs


def run_beside_s3(folder: Path, command: Sequence[str]) -> int:
    """Run ``command`` with the server's keys in its environment; its exit status.

    ``{endpoint}`` and ``{bucket}`` in its words become the server's. What the bucket holds stays in ``folder``.
    """
    with seaweedfs.running(folder) as server:
        words = [word.replace("{endpoint}", server.endpoint).replace("{bucket}", server.bucket) for word in command]
        with subprocess.Popen(words, env={**os.environ, **server.environment}) as process:
            # Ctrl-C reaches both processes; a signal to this one alone is handed on. The server outlives the command.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, lambda *_: process.terminate())
            status = process.wait()
    return status if status >= 0 else 128 - status


def main() -> int:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m dev_servers", description="Run a command beside a development server.")
    parser.add_argument("server", choices=["s3"])
    parser.add_argument("--data-dir", type=Path, required=True, metavar="DIR", help="where the server keeps its data")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --; {endpoint} and {bucket} become the server's")
    arguments = parser.parse_args()
    try:
        return run_beside_s3(arguments.data_dir, arguments.command)
    except (seaweedfs.ServerDidNotStart, OSError) as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
