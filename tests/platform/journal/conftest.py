"""Lets the journal's tests import the bench that lies beside them, and gives each a fresh one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from journal_bench import Bench

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A journal with all that it stands between."""
    from journal_bench import Bench

    return Bench(tmp_path / "data" / "journal")
