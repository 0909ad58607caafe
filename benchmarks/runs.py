"""How every benchmark's command line begins and ends: signals, failures and what is printed. Knows no benchmark."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from results import BenchmarkFailed, Results, show

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Meanwhile SIGTERM and SIGHUP interrupt as Ctrl-C does, so that servers end with who started them; once is enough.

    A signal that is ignored already, as nohup does with SIGHUP, stays so.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signal module's
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    heard = [one for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, interrupt) for one in heard}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def add_base(parser: argparse.ArgumentParser, purpose: str) -> None:
    """``--base``, whose folder `check_base` looks into."""
    parser.add_argument("--base", type=Path, required=True, help=f"the base model's folder{purpose}")


def add_output(parser: argparse.ArgumentParser) -> None:
    """``--out`` and ``--json``."""
    parser.add_argument("--out", type=Path, help="write the result as JSON here, part by part; parts of earlier runs stay")
    parser.add_argument("--json", action="store_true", help="print JSON")


def check_base(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with a usage error unless ``--base`` is a model's folder; makes it absolute."""
    if not (options.base / "config.json").is_file():
        parser.error(f"--base {options.base} has no config.json; `make base` prepares one in .data/base")
    options.base = options.base.absolute()


def conclude(benchmark: str, base: str, options: argparse.Namespace, measure: Callable[[Results], None]) -> int:
    """Measure over ``base``, and print what was measured; 1 if that failed, 130 if it was interrupted.

    ``options`` have what `add_output` added.
    """
    results, status, before = None, 0, {}
    try:
        with ended_like_ctrl_c():
            results = Results(benchmark, base, options.out)
            before = {part.name: part for part in results.report.parts}
            measure(results)
    except BenchmarkFailed as error:
        print(f"Error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        status = 130
    if results is not None:
        new = [part.name for part in results.report.parts if before.get(part.name) is not part]
        if new or options.json:
            show(results.report, as_json=options.json, only=new)
    return status
