"""One folder of compiled kernels for all tests and test runs of a checkout: compiling takes longer than most tests do."""

from __future__ import annotations

from pathlib import Path

import pytest

KERNEL_DIR = Path(__file__).resolve().parents[2] / ".pytest_cache" / "kernels"


@pytest.fixture(scope="session")
def shared_kernels() -> Path:
    """Where they are."""
    return KERNEL_DIR
