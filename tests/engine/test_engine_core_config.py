"""Engine settings: they survive the way to the process, and what contradicts itself is refused with what to do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from graftwork_adapters.store import StoreConfig
from graftwork_engine.config import EngineConfig
from graftwork_engine.errors import ConfigError


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_defaults_are_valid_and_survive_json(model_dir: str) -> None:
    config = EngineConfig(model_dir=model_dir, store=StoreConfig("/blobs"), cache_dir="/cache", kv_memory_bytes=1 << 20)
    config.validate()
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def test_settings_are_frozen(model_dir: str) -> None:
    with pytest.raises(AttributeError):
        EngineConfig(model_dir=model_dir).block_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size is 0; choose a number above 0"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size is 0"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"num_threads": 99_999}, "num_threads is 99999; choose at most 1024"),
        ({"kv_memory_fraction": 0.0}, "kv_memory_fraction is 0.0; choose"),
        ({"kv_memory_fraction": 1.5}, "kv_memory_fraction is 1.5; choose"),
        ({"kv_memory_bytes": 0}, "kv_memory_bytes is 0"),
        ({"adapter_page_bytes": 100}, "adapter_page_bytes is 100; choose a multiple of 64"),
        ({"adapter_memory_bytes": 64}, "less than one page of 262144; raise it, or lower adapter_page_bytes"),
        ({"adapter_whole_bytes": -1}, "adapter_whole_bytes is -1; choose 0, for none, or a number above it"),
        ({"max_adapter_rank": 0}, "max_adapter_rank is 0; choose a number above 0"),
        ({"max_model_len": 1}, "max_model_len is 1; a prompt and an output token need at least 2"),
        ({"store": StoreConfig("/blobs")}, "cache_dir is not; name a folder"),
        ({"model_dir": "/nowhere"}, "/nowhere has no config.json; name a folder"),
    ],
)
def test_refusals_name_the_setting_and_the_way_out(model_dir: str, changes: dict[str, object], message: str) -> None:
    config = msgspec.convert({"model_dir": model_dir, **changes}, EngineConfig)
    with pytest.raises(ConfigError, match=message):
        config.validate()


@pytest.mark.parametrize("changes", [{"dtype": "float16"}, {"device": "tpu"}, {"blocksize": 16}, {"max_num_seqs": "many"}])
def test_unknown_values_and_names_are_refused_when_read(changes: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({"model_dir": ".", **changes}), type=EngineConfig)


def test_every_setting_is_explained() -> None:
    source = (Path(__file__).parents[2] / "engine/graftwork_engine/config.py").read_text()
    for name in EngineConfig.__struct_fields__:
        after = source.split(f"\n    {name}: ", 1)[1].split("\n", 2)[1]
        assert after.startswith('    """'), name
