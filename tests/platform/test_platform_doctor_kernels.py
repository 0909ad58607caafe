"""What doctor says of kernels, from the file that an engine's measuring left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graftwork_adapters.report import Report
from graftwork_kernels.choice import METHODS
from graftwork_platform.doctor import examine_kernels


def test_doctor_says_which_kernels_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the latest measuring has it, whose file is written by a process that has torch."""
    verdict: dict[str, object] = {"seconds": {"reference": {}, "cpu": {}}, "dropped": {}, "rows": {}}
    costs = {operator: {"reference": 1.0, "cpu": 2.0 if operator == "sample" else 0.5} for operator in METHODS}
    examine_kernels(first := Report(), tmp_path)
    operators = {operator: {**verdict, "cost": cost} for operator, cost in costs.items()}
    (tmp_path / "choice-1.json").write_text(json.dumps({"provisional": False, "operators": operators}))
    examine_kernels(second := Report(), tmp_path)
    (tmp_path / "choice-1.json").write_text(json.dumps({"provisional": True, "operators": operators}))
    examine_kernels(busy := Report(), tmp_path)
    seconds = {"reference": {"prefill": 4.0}, "cpu": {"prefill": 2.0}, "onednn": {"prefill": 1.0}}
    operators["linear"] |= {"seconds": seconds, "cost": {"reference": 1.0, "cpu": 0.5, "onednn": 0.25}, "rows": {"prefill": 64}}
    (tmp_path / "choice-1.json").write_text(json.dumps({"provisional": False, "operators": operators}))
    examine_kernels(split := Report(), tmp_path)
    monkeypatch.setenv("PATH", "")
    examine_kernels(third := Report(), None)
    assert "cpu: linear, paged_attention" in split.findings[1].message
    assert "; onednn: linear from 64 rows on; " in split.findings[1].message
    assert "not measured yet" in first.findings[1].message
    assert second.findings[1].message.startswith("fastest when last measured: cpu: linear, paged_attention")
    assert second.findings[1].message.endswith("; reference: sample")
    assert "on a busy machine and until a start finds it quiet: cpu: linear" in busy.findings[1].message
    assert [(f.check, f.result) for f in second.findings] == [("compiler", "pass"), ("kernels", "pass")]
    assert [(f.check, f.result) for f in third.findings] == [("compiler", "warn")]
    assert "plain torch" in third.findings[0].message
