"""Reads pytest's JUnit reports and fails if tests were skipped or expected to fail, naming them, or if one has none at all."""

# ruff: noqa: INP001 - a script of its own
from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree


def main(reports: Sequence[Path]) -> str | None:
    """What is wrong with the reports, or None."""
    skipped = []
    for report in reports:
        try:
            cases = list(ElementTree.parse(report).iter("testcase"))
        except (OSError, ElementTree.ParseError) as error:
            return f"the report of the tests cannot be read: {error}"
        if not cases:
            return f"no test ran for {report.name}"
        skipped += [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("skipped") is not None]
    if skipped:
        return "\n".join(["skipped, though only tests that need a GPU may be left out:", *skipped])
    return None


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
