"""Reading an upload in tests: as names and values, and what was found on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.publish_job import Limits
from graftwork_adapters.report import Report
from graftwork_adapters.tensor_source import PARTS, UploadTensors
from graftwork_adapters.upload_files import list_upload
from graftwork_adapters.upload_tensors import read_upload, read_upload_config

P = "base_model.model."
LAYER = "model.layers.0."
Tensors = dict[str, Tensor]
Named = dict[tuple[str, str], np.ndarray]


def read(folder: Path, spec: BaseSpec) -> tuple[UploadTensors | None, Report]:
    report = Report()
    files = list_upload(folder, Limits(), report)
    config = read_upload_config(folder, files, Limits(), report)
    return read_upload(folder, files, config, spec, Limits(), report), report


def read_well(folder: Path, spec: BaseSpec) -> tuple[UploadTensors, Report]:
    upload, report = read(folder, spec)
    assert report.ok, report.findings
    assert upload is not None
    return upload, report


def failures(report: Report) -> list[tuple[str, str]]:
    return [(finding.field or "", finding.message) for finding in report.findings if finding.result == "fail"]


def dialect_findings(report: Report) -> list[str]:
    return [finding.result for finding in report.findings if finding.check == "dialect"]


def values(upload: UploadTensors) -> Named:
    named: Named = {}
    for tensor in upload.tensors:
        assert tensor.part in PARTS
        matrix = tensor.source.read()
        assert matrix.shape == tensor.source.shape
        assert matrix.flags.c_contiguous
        named[tensor.module, tensor.part] = matrix
    assert len(named) == len(upload.tensors)
    return named


def assert_same(got: Named, expected: Named) -> None:
    assert got.keys() == expected.keys()
    for key, matrix in expected.items():
        assert got[key].dtype == np.float32
        np.testing.assert_array_equal(got[key], matrix, err_msg=str(key))


def golden(folder: Path) -> Named:
    """PEFT's own file, named by hand: only `lora_A`, `lora_B` and magnitudes are in it."""
    named: Named = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, part = name.removeprefix(P).removesuffix(".weight").rsplit(".", 1)
        named[module, part] = tensor.float().numpy()
    return named


def edit(folder: Path, change: Callable[[str], str], **config: object) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({change(name): tensor.clone() for name, tensor in load_file(path).items()}, path)
    edit_config(folder, **config)


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
