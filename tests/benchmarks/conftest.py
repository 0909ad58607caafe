"""The benchmarks are scripts in one folder that import each other by name: here they are found as they are when run."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

for folder in (str(FOLDER), str(Path(__file__).parent)):
    if folder not in sys.path:
        sys.path.append(folder)
