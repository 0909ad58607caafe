"""What was measured survives its file; pins and tables that need no measuring."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftwork_kernels.choice import (
    METHODS,
    BadPin,
    Choice,
    Measured,
    Verdict,
    check_pins,
    choice_file,
    last_measured,
    read_measured,
    table,
    write_measured,
)


def test_verdicts_survive_their_file(tmp_path: Path) -> None:
    seconds = {"reference": {"decode 1": 1.5}, "cpu": {"decode 1": 0.5}, "bad": {}}
    cost, dropped, rows = {"reference": 1.0, "cpu": 1 / 3}, {"bad": "wrong"}, {"decode 1": 1}
    verdicts = {operator: Verdict(seconds, cost, dropped, rows) for operator in METHODS}
    path = choice_file(tmp_path / "new", {"machine": "a"})
    assert path != choice_file(tmp_path / "new", {"machine": "b"})
    for is_provisional in (True, False):
        write_measured(path, {"machine": "a"}, Measured(verdicts, is_provisional))
        assert read_measured(path) == Measured(verdicts, is_provisional)
    assert list(path.parent.iterdir()) == [path]


def test_nothing_was_chosen_where_nothing_was_measured(tmp_path: Path) -> None:
    assert last_measured(tmp_path) is None
    assert last_measured(tmp_path / "nowhere") is None


def test_table_of_nothing_measured_names_what_was_pinned() -> None:
    choice = Choice(dict.fromkeys(METHODS, "reference"))
    assert table({}, choice, {"all": "reference"}).splitlines()[1].split() == ["linear", "reference", "-", "pinned"]


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"attention": "cpu"}, r"there is no operator attention; there are all, linear, paged_attention, .*, token_logprobs"),
        ({"linear": "gpu"}, "there is no implementation gpu; there are reference, cpu, onednn"),
        ({"linear": "onednn"}, "kernel linear=onednn: it cannot be had here: no bf16"),
        ({"sample": "onednn"}, "kernel sample=onednn: onednn is for linear alone"),
        ({"all": "onednn"}, "kernel all=onednn: onednn is for linear alone"),
        ({"all": "cpu"}, "kernel all=cpu: it cannot be had here: no compiler"),
    ],
)
def test_pins_to_what_there_is_not_are_refused(pins: dict[str, str], says: str) -> None:
    with pytest.raises(BadPin, match=says):
        check_pins(pins, {"cpu": "no compiler", "onednn": "no bf16"})
