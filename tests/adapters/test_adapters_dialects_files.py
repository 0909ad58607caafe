"""Weights in one file or in shards, in every type that is served, with exact values; what does not fit is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_edits import to_mlx
from dialect_reading import P, assert_same, failures, golden, read, read_well, values
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.publish import validate
from graftwork_adapters.publish_job import Limits
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import read_header
from graftwork_adapters.tensor_source import TensorSource
from graftwork_adapters.tensor_values import read_fp32
from graftwork_adapters.upload_files import is_stored_file, list_upload
from graftwork_adapters.upload_shards import read_shards

INDEX = "adapter_model.safetensors.index.json"
SINGLE = "adapter_model.safetensors"


def shard_name(number: int, count: int) -> str:
    return f"adapter_model-{number:05}-of-{count:05}.safetensors"


def to_shards(folder: Path, count: int = 3) -> dict[str, str]:
    """The folder's weights in ``count`` files and an index; returns which name is where."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    weight_map: dict[str, str] = {}
    for number in range(count):
        part = dict(list(tensors.items())[number::count])
        name = shard_name(number + 1, count)
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_shards(dora: Path, tiny_spec: BaseSpec) -> None:
    expected = golden(dora)
    to_shards(dora)
    upload, report = read_well(dora, tiny_spec)
    assert_same(values(upload), expected)
    assert upload.shards == tuple(shard_name(number, 3) for number in (1, 2, 3))
    assert upload.num_sent == 42
    assert "42 tensors cover the files exactly" in [finding.message for finding in report.findings]
    files = list_upload(dora, Limits(), Report())
    assert files.stored == ("adapter_config.json", *upload.shards, INDEX)
    assert all(map(is_stored_file, files.stored))


def drop_shard(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / shard_name(2, 3)).unlink()


def add_shard(folder: Path, weight_map: dict[str, str]) -> None:
    save_file({"x": torch.ones(1)}, folder / shard_name(4, 3))


def other_count(folder: Path, weight_map: dict[str, str]) -> None:
    """A third of the shards is left out of folder and index alike."""
    drop_shard(folder, weight_map)
    write_index(folder, {name: shard for name, shard in weight_map.items() if shard != shard_name(2, 3)})


def move_one(folder: Path, weight_map: dict[str, str]) -> None:
    """Two change places, so that no shard is without a tensor."""
    one, other = (f"{P}model.layers.0.mlp.up_proj.{part}" for part in ("lora_A.weight", "lora_B.weight"))
    assert weight_map[one] != weight_map[other]
    write_index(folder, weight_map | {one: weight_map[other], other: weight_map[one]})


def forget_one(folder: Path, weight_map: dict[str, str]) -> None:
    write_index(folder, {name: shard for name, shard in weight_map.items() if "0.mlp.up_proj.lora_A" not in name})


def invent_one(folder: Path, weight_map: dict[str, str]) -> None:
    write_index(folder, weight_map | {"more": shard_name(1, 3)})


def repeat_one(folder: Path, weight_map: dict[str, str]) -> None:
    name = f"{P}model.layers.0.mlp.up_proj.lora_A.weight"
    (other,) = sorted(set(weight_map.values()) - {weight_map[name], shard_name(3, 3)})[:1]
    save_file(load_file(folder / other) | {name: torch.ones(4, 32)}, folder / other)


def spoil_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": 1}}')


def repeat_in_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}')


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (drop_shard, [(shard_name(2, 3), "is missing; adapter_model.safetensors.index.json says")]),
        (add_shard, [(shard_name(4, 3), "does not name it")]),
        (other_count, [(shard_name(1, 3), "another number of files than 2"), (shard_name(3, 3), "another number of files than 2")]),
        (move_one, [("0.mlp.up_proj.lora_", "index.json says adapter_model-0000")] * 2),
        (forget_one, [("0.mlp.up_proj.lora_A.weight", "index.json does not name it")]),
        (invent_one, [("more", f"is missing; {INDEX} says that it lies in {shard_name(1, 3)}")]),
        (repeat_one, [("0.mlp.up_proj.lora_A.weight", "lies in adapter_model-0000")]),
        (spoil_index, [(f"{INDEX}: weight_map", "is not an object that names a file for each tensor")]),
        (repeat_in_index, [(INDEX, "the field a appears more than once")]),
    ],
)
def test_shards_that_do_not_fit_together_are_refused(
    dora: Path, tiny_spec: BaseSpec, change: Callable[[Path, dict[str, str]], None], expected: list[tuple[str, str]]
) -> None:
    change(dora, to_shards(dora))
    upload, report = read(dora, tiny_spec)
    assert upload is None
    failed = failures(report)
    for (where, says), (wanted, message) in zip(failed, expected, strict=True):
        assert wanted in where
        assert message in says


def test_one_file_and_shards_are_not_both_taken(dora: Path, tiny_spec: BaseSpec) -> None:
    tensors = load_file(dora / SINGLE)
    to_shards(dora)
    save_file(tensors, dora / SINGLE)
    upload, report = read(dora, tiny_spec)
    assert upload is None
    assert (shard_name(1, 3), f"is part of weights in several files, and {SINGLE} is there as well") in failures(report)


def test_shards_without_an_index_are_refused(dora: Path, tiny_spec: BaseSpec) -> None:
    to_shards(dora)
    (dora / INDEX).unlink()
    _, report = read(dora, tiny_spec)
    assert [where for where, _ in failures(report)] == [INDEX]


def test_two_trainers_weights_are_refused(dora: Path, tiny_spec: BaseSpec) -> None:
    save_file({"x": torch.ones(1)}, dora / "adapters.safetensors")
    _, report = read(dora, tiny_spec)
    assert failures(report)[0] == ("adapters.safetensors", f"holds weights, and so does {SINGLE}")


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model-1-of-2.safetensors", "x.safetensors.index.json"])
def test_further_weights_are_refused(dora: Path, tiny_spec: BaseSpec, name: str) -> None:
    save_file({"x": torch.ones(1)}, dora / name)
    _, report = read(dora, tiny_spec)
    assert failures(report) == [(name, "holds further weights, which would not be applied")]


CHECKPOINT = "0000100_adapters.safetensors"


def test_checkpoints_beside_mlx_weights_are_left_out(dora: Path, tiny_spec: BaseSpec) -> None:
    to_mlx(dora)
    expected, _ = read_well(dora, tiny_spec)
    save_file({"x": torch.ones(1)}, dora / CHECKPOINT)
    upload, report = read_well(dora, tiny_spec)
    assert_same(values(upload), values(expected))
    assert upload.shards == ("adapters.safetensors",)
    [warning] = [finding for finding in report.findings if finding.field == CHECKPOINT]
    assert (warning.result, warning.message.partition(":")[0]) == ("warn", "ignored and not stored")


def test_a_checkpoint_without_mlx_weights_is_refused(dora: Path, tiny_spec: BaseSpec) -> None:
    save_file({"x": torch.ones(1)}, dora / CHECKPOINT)
    _, report = read(dora, tiny_spec)
    [finding] = [finding for finding in report.findings if finding.result == "fail"]
    assert (finding.field, finding.message) == (CHECKPOINT, "holds further weights, which would not be applied")
    assert "adapters.safetensors" in (finding.fix or "")


def test_a_link_by_a_checkpoints_name_is_refused(dora: Path, tiny_spec: BaseSpec) -> None:
    to_mlx(dora)
    (dora / CHECKPOINT).symlink_to("/etc/passwd")
    _, report = read(dora, tiny_spec)
    assert failures(report) == [(CHECKPOINT, "is a symbolic link")]


def test_every_refusal_of_files_says_what_to_do(dora: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    os.mkfifo(dora / "pipe")
    limits = Limits(max_files=2, max_upload_bytes=10, max_config_bytes=10)
    report = validate(dora, tiny_base_dir, tiny_spec, limits).report
    failed = [finding for finding in report.findings if finding.result == "fail"]
    assert [finding.field for finding in failed] == ["pipe", "files", "files", "adapter_config.json"]
    assert all(finding.fix for finding in failed), failed
    (dora / "pipe").unlink()
    save_file({}, dora / "adapter_model.safetensors")
    _, report = read(dora, tiny_spec)
    assert [bool(finding.fix) for finding in report.findings if finding.result == "fail"] == [True]


def test_headers_share_one_limit(dora: Path) -> None:
    """Many shards with headers that are each within the limit do not add up beyond it."""
    to_shards(dora)
    files = list_upload(dora, Limits(), Report())
    largest = max(read_header(dora / name).tensors[0].start for name in files.weights) + 500
    report = Report()
    assert read_shards(dora, files, Limits(max_header_bytes=2 * largest), report) is None
    assert [where for where, says in failures(report) if "bytes, more than" in says] != []


def test_without_a_config_the_tensors_are_named_all_the_same(dora: Path, tiny_spec: BaseSpec) -> None:
    expected = golden(dora)
    (dora / "adapter_config.json").write_text("{")
    upload, report = read(dora, tiny_spec)
    assert upload is not None
    assert upload.config is None
    assert_same(values(upload), expected)
    assert [where for where, _ in failures(report)] == ["adapter_config.json"]


TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_values_of_every_type_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = (torch.randn(7, 5, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    save_file({"pad": torch.zeros(1, dtype=torch.uint8), "x": tensor}, tmp_path / "x.safetensors")
    entry = next(entry for entry in read_header(tmp_path / "x.safetensors").tensors if entry.name == "x")
    np.testing.assert_array_equal(read_fp32(tmp_path / "x.safetensors", entry), tensor.float().numpy())
    turned = TensorSource(tmp_path / "x.safetensors", entry, "x", transposed=True, rows=(range(3, 5), range(0, 3, 2)))
    assert turned.shape == (4, 7)
    np.testing.assert_array_equal(turned.read(), tensor.float().T[[3, 4, 0, 2]].numpy())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16], ids=str)
def test_every_code_of_a_small_type(tmp_path: Path, dtype: torch.dtype) -> None:
    """Subnormals, zeros of both signs, NaN and infinities as torch decodes them."""
    bits = torch.arange(256, dtype=torch.uint8) if dtype.itemsize == 1 else torch.arange(-(2**15), 2**15, dtype=torch.int16)
    tensor = bits.view(dtype)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    (entry,) = read_header(tmp_path / "x.safetensors").tensors
    got, expected = read_fp32(tmp_path / "x.safetensors", entry), tensor.float().numpy()
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(expected[~np.isnan(expected)]))


def test_signalling_nan_is_nan(dora: Path, tiny_spec: BaseSpec) -> None:
    """The cast would warn of it; the check of values names it."""
    bits = torch.full((4, 32), 0x7FF0000000000001, dtype=torch.int64)
    replaced(dora, bits.view(torch.float64))
    upload, _ = read_well(dora, tiny_spec)
    assert np.isnan(values(upload)["model.layers.0.mlp.up_proj", "lora_A"]).all()


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (1,)])
def test_tensors_of_odd_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save_file({"x": torch.ones(shape)}, tmp_path / "x.safetensors")
    (entry,) = read_header(tmp_path / "x.safetensors").tensors
    source = TensorSource(tmp_path / "x.safetensors", entry, "x")
    assert source.read().shape == source.shape == shape


def replaced(folder: Path, tensor: Tensor) -> str:
    name = f"{P}model.layers.0.mlp.up_proj.lora_A.weight"
    save_file(load_file(folder / SINGLE) | {name: tensor}, folder / SINGLE)
    return name


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(4, 32, dtype=torch.int64), "has dtype I64; served are F64, F32, F16, BF16, F8_E4M3, F8_E5M2"),
        (torch.full((4, 32), 1e39, dtype=torch.float64), "holds 128 values beyond the range of fp32"),
        (torch.full((4, 32), 3.5e38, dtype=torch.float64), "holds 128 values beyond the range of fp32"),
    ],
)
def test_values_that_cannot_be_read_are_refused(dora: Path, tiny_spec: BaseSpec, tensor: Tensor, says: str) -> None:
    name = replaced(dora, tensor)
    _, report = read(dora, tiny_spec)
    assert failures(report) == [(name, says)]


def test_wide_values_within_range_are_rounded(dora: Path, tiny_spec: BaseSpec) -> None:
    """What is NaN or infinite already is for the check of values."""
    wide = torch.tensor([1 + 2.0**-30, 1e-50, 3.4e38, float("inf")], dtype=torch.float64).repeat(4, 8)
    replaced(dora, wide)
    upload, _ = read_well(dora, tiny_spec)
    got = values(upload)["model.layers.0.mlp.up_proj", "lora_A"]
    np.testing.assert_array_equal(got, wide.float().numpy())
