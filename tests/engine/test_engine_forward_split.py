"""Large steps in oneDNN, small ones replayed: a request gets what it gets from either alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_engine import TinyEngine, TinyModel, make_tiny_model

from graftwork_engine import kernel_choice
from graftwork_kernels.choice import METHODS, Choice
from graftwork_kernels.cpu.capture import Program
from graftwork_kernels.cpu.onednn import OneDnnOperators
from graftwork_kernels.layout import Weight

JOBS: Sequence[tuple[str | None, Sequence[int], int]] = [
    (None, list(range(3, 40)), 6),
    ("B", [5, 9, 33, 2, 60], 12),
    ("D", list(range(40, 70)), 5),
    ("A", [7], 9),
    ("C", list(range(10, 22)), 8),
]
FROM_ROWS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Rows of every product of oneDNN's, and of every step that was replayed."""
    seen: dict[str, list[int]] = {"onednn": [], "replayed": []}
    product, run = OneDnnOperators._product, Program.run

    def counted_product(ops: OneDnnOperators, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        seen["onednn"].append(x.shape[0])
        return product(ops, x, weight)

    def counted_run(program: Program, num_rows: int, num_requests: int = 0) -> None:
        seen["replayed"].append(num_rows)
        run(program, num_rows, num_requests)

    monkeypatch.setattr(OneDnnOperators, "_product", counted_product)
    monkeypatch.setattr(Program, "run", counted_run)
    return seen


def outputs(model: TinyModel, folder: Path, **settings: object) -> list[list[int]]:
    engine = TinyEngine(model, folder, **settings)
    try:
        return engine.run(*JOBS)
    finally:
        engine.close()


def test_tokens_are_the_same_with_a_threshold_and_without(
    model: TinyModel, tmp_path: Path, rows: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    expected = outputs(model, tmp_path / "a")
    assert rows["onednn"] == []
    assert max(rows["replayed"]) > FROM_ROWS
    assert "oneDNN" not in caplog.text
    rows["replayed"].clear()

    choice = Choice(dict.fromkeys(METHODS, "cpu"), FROM_ROWS)
    monkeypatch.setattr(kernel_choice, "choose", lambda *_, **__: choice)
    assert outputs(model, tmp_path / "b") == expected
    assert min(rows["onednn"]) >= FROM_ROWS
    assert 0 < min(rows["replayed"]) <= max(rows["replayed"]) < FROM_ROWS
    (line,) = [r.getMessage() for r in caplog.records if "oneDNN" in r.getMessage()]
    assert line == "linears of 8 rows and more are oneDNN's, whose weights take 0 MB beside the others"


def test_pinned_it_computes_every_step(model: TinyModel, tmp_path: Path, rows: dict[str, list[int]]) -> None:
    expected = outputs(model, tmp_path / "a")
    rows["replayed"].clear()
    assert outputs(model, tmp_path / "b", kernels={"all": "cpu", "linear": "onednn"}) == expected
    assert min(rows["onednn"]) == 1
    assert rows["replayed"] == []
