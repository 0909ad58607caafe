"""Reads pytest's JUnit report and fails if tests were skipped or expected to fail, naming them, or if there were none at all."""

# ruff: noqa: INP001 - a script of its own
from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree


def main(report: Path) -> str | None:
    """What is wrong with the report, or None."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        return f"the report of the tests cannot be read: {error}"
    skipped = [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("skipped") is not None]
    if not cases:
        return "no test ran"
    if skipped:
        return "\n".join(["skipped, though only tests that need a GPU may be left out:", *skipped])
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
