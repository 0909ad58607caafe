"""The digest: the same for the same adapter however it is written down, another for any difference in what it does."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.publish import validate
from graftwork_adapters.publish_job import Limits


def digest_of(folder: Path, base_dir: Path, spec: BaseSpec) -> str:
    validation = validate(folder, base_dir, spec, Limits())
    assert validation.digest is not None, validation.report.findings
    return validation.digest


def rewrite_config(upload: Path, **fields: object) -> None:
    path = upload / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_folder_key_order_and_comments_do_not_matter(
    upload: Path, tmp_path: Path, tiny_base_dir: Path, tiny_spec: BaseSpec
) -> None:
    expected = digest_of(upload, tiny_base_dir, tiny_spec)
    moved = Path(shutil.move(upload, tmp_path / "elsewhere"))
    raw = list(json.loads((moved / "adapter_config.json").read_text()).items())
    random.Random(0).shuffle(raw)
    (moved / "adapter_config.json").write_text(json.dumps(dict(raw), indent=7))
    (moved / "README.md").write_text("another text")
    (moved / "optimizer.pt").write_bytes(b"ignored")
    rewrite_config(moved, lora_dropout=0.3, base_model_name_or_path="x/tiny-base", inference_mode=False, lora_alpha=8.0)
    assert digest_of(moved, tiny_base_dir, tiny_spec) == expected


def test_tensor_order_in_the_file_and_its_metadata_do_not_matter(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    expected = digest_of(upload, tiny_base_dir, tiny_spec)
    path = upload / "adapter_model.safetensors"
    before = path.read_bytes()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    save_file(load_file(path), path, metadata={"written": "again"})
    assert path.read_bytes() != before
    assert digest_of(upload, tiny_base_dir, tiny_spec) == expected


def test_one_changed_bit_matters(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    expected = digest_of(upload, tiny_base_dir, tiny_spec)
    path = upload / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)
    assert digest_of(upload, tiny_base_dir, tiny_spec) != expected


@pytest.mark.parametrize("fields", [{"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}])
def test_what_changes_the_output_matters(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec, fields: dict[str, object]) -> None:
    expected = digest_of(upload, tiny_base_dir, tiny_spec)
    rewrite_config(upload, **fields)
    assert digest_of(upload, tiny_base_dir, tiny_spec) != expected


def test_patterns_count_as_what_they_resolve_to(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    plain = digest_of(upload, tiny_base_dir, tiny_spec)
    rewrite_config(upload, rank_pattern={"q_proj": 4}, alpha_pattern={"no_such": 3, "v_proj": 8})
    assert digest_of(upload, tiny_base_dir, tiny_spec) == plain
    seen = []
    for pattern in (
        {"q_proj": 3, "k_proj": 5},
        {"k_proj": 5, "q_proj": 3},  # another order, the same first matches
        {"q_proj": 3, ".*proj": 5, "k_proj": 1},
        {".*proj": 5, "q_proj": 3},  # the first match is another one
    ):
        rewrite_config(upload, rank_pattern={}, alpha_pattern=pattern)
        seen.append(digest_of(upload, tiny_base_dir, tiny_spec))
    assert seen[0] == seen[1]
    assert len({seen[0], seen[2], seen[3], plain}) == 4


def test_selection_counts_only_through_the_tensors(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    expected = digest_of(upload, tiny_base_dir, tiny_spec)
    rewrite_config(upload, target_modules="all-linear")
    assert digest_of(upload, tiny_base_dir, tiny_spec) == expected


def test_tokenizer_files_matter_by_name_and_content(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    seen = {digest_of(upload, tiny_base_dir, tiny_spec)}
    for name, text in (("tokenizer.json", "{}"), ("tokenizer.json", "{ }"), ("chat_template.jinja", "{ }")):
        (upload / name).write_text(text)
        seen.add(digest_of(upload, tiny_base_dir, tiny_spec))
    (upload / "tokenizer.json").unlink()
    seen.add(digest_of(upload, tiny_base_dir, tiny_spec))
    assert len(seen) == 5
    (upload / "chat_template.jinja").unlink()
    assert digest_of(upload, tiny_base_dir, tiny_spec) in seen


def test_the_digest_is_the_same_on_every_machine(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    """A pinned value: a change here makes every stored adapter another one."""
    tensors = load_file(upload / "adapter_model.safetensors")
    kept = {name: (tensor.zero_() + 0.5) for name, tensor in tensors.items() if "layers.1.self_attn.q_proj" in name}
    save_file(kept, upload / "adapter_model.safetensors")
    assert digest_of(upload, tiny_base_dir, tiny_spec) == "cce429f3840fa2969fc0701937cf9d4f9d3bc7db87f09696a93fea3491353944"


def test_how_tensors_are_dealt_out_to_shards_does_not_matter(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    expected = digest_of(upload, tiny_base_dir, tiny_spec)
    tensors = load_file(upload / "adapter_model.safetensors")
    (upload / "adapter_model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"adapter_model-00001-of-00002.safetensors": names[::2], "adapter_model-00002-of-00002.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, upload / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (upload / "adapter_model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert digest_of(upload, tiny_base_dir, tiny_spec) == expected


@pytest.mark.parametrize(
    ("saved", "fields"),
    [
        ({"use_dora": True}, {"lora_alpha": 9}),
        ({"alora_invocation_tokens": [5, 6]}, {"alora_invocation_tokens": [5, 7]}),
        ({"alora_invocation_tokens": [5, 6]}, {"alora_invocation_tokens": None}),
        ({"trainable_token_indices": [5, 6]}, {"trainable_token_indices": [6, 5]}),
        ({"trainable_token_indices": [5, 6]}, {"trainable_token_indices": [5, 7]}),
    ],
)
def test_a_config_that_says_another_format_matters(
    saved: dict[str, object],
    fields: dict[str, object],
    make_adapter: Callable[..., Path],
    tmp_path: Path,
    tiny_base_dir: Path,
    tiny_spec: BaseSpec,
) -> None:
    folder = make_adapter(tmp_path / "adapter", **saved)
    expected = digest_of(folder, tiny_base_dir, tiny_spec)
    rewrite_config(folder, **fields)
    assert digest_of(folder, tiny_base_dir, tiny_spec) != expected


def test_a_base_copy_is_left_out_and_covered_all_the_same(
    make_adapter: Callable[..., Path], tmp_path: Path, tiny_base_dir: Path, tiny_spec: BaseSpec
) -> None:
    folder = make_adapter(tmp_path / "adapter", target_modules=["q_proj", "embed_tokens"])
    expected = digest_of(folder, tiny_base_dir, tiny_spec)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop("base_model.model.model.embed_tokens.base_layer.weight")
    save_file(tensors, path)
    assert digest_of(folder, tiny_base_dir, tiny_spec) != expected
