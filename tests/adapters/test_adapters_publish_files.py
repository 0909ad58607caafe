"""Which files an upload may have: what is read, stored, left out with a word or without one, and refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from upload_changes import assert_refused, findings

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.publish import validate
from graftwork_adapters.publish_job import Limits


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_model.pkl"])
@pytest.mark.parametrize("alone", [True, False])
def test_pickled_weights_are_refused_unopened(
    upload: Path, tmp_path: Path, tiny_base_dir: Path, tiny_spec: BaseSpec, name: str, alone: bool
) -> None:
    (upload / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    expected = [(name, "is a pickle")]
    if alone:
        (upload / "adapter_model.safetensors").unlink()
        expected.append(("adapter_model.safetensors", "is missing"))
    assert_refused(validate(upload, tiny_base_dir, tiny_spec, Limits()), *expected)
    assert not (tmp_path / "exploded").exists()


def test_only_what_the_digest_covers_is_stored_and_only_what_is_unusual_is_warned_of(
    upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec
) -> None:
    for name in ("training_args.bin", "optimizer.pt", "events.out.tfevents.1"):
        (upload / name).write_bytes(b"x")
    for name in ("tokenizer.json", "chat_template.jinja", "notes.txt", "trainer_state.json", ".gitattributes", "LICENSE"):
        (upload / name).write_text("{}")
    validation = validate(upload, tiny_base_dir, tiny_spec, Limits())
    assert validation.report.ok
    warned = {finding.field: finding.message for finding in findings(validation, "warn")}
    assert "a pickle" in warned["training_args.bin"]
    assert "a pickle" in warned["optimizer.pt"]
    assert "not part of an adapter" in warned["events.out.tfevents.1"]
    assert not {"notes.txt", "trainer_state.json", ".gitattributes", "LICENSE", "README.md"} & {*warned}
    assert validation.files.stored == (
        "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.json"
    )  # fmt: skip


def test_entries_that_may_not_be_there(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    (upload / "folder").mkdir()
    (upload / "tokenizer.json").symlink_to("/etc/passwd")
    os.mkfifo(upload / "pipe.txt")
    (upload / "a\nb.txt").write_text("x")
    (upload / "..sneaky").write_text("x")
    (upload / "model.safetensors").write_bytes(b"x")
    (upload / "adapter_model-00001-of-00002.safetensors").write_bytes(b"x")
    (upload / "adapter_model.safetensors.index.json").write_text("{}")
    assert_refused(
        validate(upload, tiny_base_dir, tiny_spec, Limits()),
        ("a\\nb.txt", "has a name that is not served"),
        ("folder", "is a folder"),
        ("model.safetensors", "further weights"),
        ("pipe.txt", "not a regular file"),
        ("tokenizer.json", "symbolic link"),
        ("adapter_model-00001-of-00002.safetensors", "weights in several files"),
        ("adapter_model-00001-of-00002.safetensors", "truncated"),
    )


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_linked_config_or_weights_is_not_read(
    upload: Path, tmp_path: Path, tiny_base_dir: Path, tiny_spec: BaseSpec, name: str
) -> None:
    (upload / name).rename(tmp_path / name)
    (upload / name).symlink_to(tmp_path / name)
    assert_refused(validate(upload, tiny_base_dir, tiny_spec, Limits()), (name, "symbolic link"), (name, "is missing"))


def test_limits_name_both_numbers(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    size = sum(path.stat().st_size for path in upload.iterdir())
    limits = Limits(max_upload_bytes=100, max_files=2, max_header_bytes=50)
    assert_refused(
        validate(upload, tiny_base_dir, tiny_spec, limits),
        ("", "3 files, more than the 2 allowed"),
        ("", f"{size} bytes, more than the 100 allowed"),
        ("adapter_model.safetensors", "more than the 50 allowed"),
    )
