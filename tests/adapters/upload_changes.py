"""Uploads that PEFT saved, changed by hand, and what publishing finds wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftwork_adapters.publish import Validation
from graftwork_adapters.publish_job import PublishResult
from graftwork_adapters.report import Finding

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]

TOP = "base_model.model."
EMBED = f"{TOP}model.embed_tokens"
HEAD = f"{TOP}lm_head"
Q = f"{TOP}model.layers.0.self_attn.q_proj"
DOWN = f"{TOP}model.layers.1.mlp.down_proj"
ENDS = ["q_proj", "embed_tokens", "lm_head"]


def failures(result: PublishResult) -> list[Finding]:
    return [finding for finding in result.report.findings if finding.result == "fail"]


def edit(folder: Path, change: Change, config: dict[str, object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    fields = folder / "adapter_config.json"
    fields.write_text(json.dumps(json.loads(fields.read_text()) | config))


def drop(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


def add(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.full(shape, 0.5)})


def shift(name: str) -> Change:
    return lambda tensors: tensors[name].add_(1)


def unchanged(_tensors: Tensors) -> None:
    pass


def findings(validation: Validation, result: str) -> list[Finding]:
    return [finding for finding in validation.report.findings if finding.result == result]


def assert_refused(validation: Validation, *expected: tuple[str, str]) -> None:
    """Exactly these findings fail: (part of the field, part of the message)."""
    failed = findings(validation, "fail")
    assert not validation.report.ok
    assert validation.digest is None
    assert len(failed) == len(expected), failed
    for finding, (where, says) in zip(failed, expected, strict=True):
        assert where in (finding.field or ""), finding
        assert says in finding.message, finding
        assert finding.fix, finding
