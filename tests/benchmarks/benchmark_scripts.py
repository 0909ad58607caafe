"""Benchmarks by their file: another module may have the name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def script(name: str) -> Any:
    """A benchmark by its path in `FOLDER`, without the ending."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name.replace('/', '_')}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
