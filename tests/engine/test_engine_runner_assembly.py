"""An engine put together from its configuration: memory sizes, limits, and what is refused at start."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from compiled_kernels import KERNEL_DIR
from transformers import AutoModelForCausalLM, LlamaConfig

from graftwork_adapters.store import StoreConfig
from graftwork_engine import kv_memory
from graftwork_engine.assembly import EngineAssembly, build_engine
from graftwork_engine.config import EngineConfig
from graftwork_engine.errors import ConfigError, ErrorCode, RequestRejected, UnsupportedModel
from graftwork_engine.kv_memory import (
    allocate_kv_cache,
    blocks_that_fit,
    free_memory,
    kv_block_bytes,
    kv_share,
    usual_fraction,
)
from graftwork_engine.messages import OutItem, Sampling
from graftwork_engine.model.config import ModelConfig
from graftwork_engine.request import AdapterKey, Request, RequestId

BLOCK_BYTES = 2 * 2 * 2 * 16 * 8 * 4
"""Keys and values, layers, KV heads, tokens, head dimension, fp32."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assembly") / "tiny-base"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def build(model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., EngineAssembly]]:
    built: list[EngineAssembly] = []

    def make(**settings: object) -> EngineAssembly:
        defaults = {
            "model_dir": str(model_dir),
            "dtype": "float32",
            "kv_memory_bytes": 20 * BLOCK_BYTES,
            "cache_dir": str(tmp_path),
            "kernel_dir": str(KERNEL_DIR),
            "kernels": {"all": "cpu"},
        }
        built.append(build_engine(msgspec.convert({**defaults, **settings}, EngineConfig)))
        return built[-1]

    yield make
    for assembly in built:
        assembly.close()


def make_request(adapter: str | None = None, prompt_length: int = 5, max_tokens: int = 3) -> Request:
    key = None if adapter is None else AdapterKey(adapter)
    sampling = Sampling(max_tokens=max_tokens, seed=1, temperature=0.0)
    return Request(RequestId("r"), list(range(1, prompt_length + 1)), sampling, b"", "flow", 0.0, adapter_key=key)


def run(assembly: EngineAssembly, request: Request) -> list[OutItem]:
    assembly.core.add(request)
    items: list[OutItem] = []
    give_up = time.monotonic() + 60
    while not items or items[-1].finish is None:
        assert time.monotonic() < give_up
        items += assembly.core.step()
    return items


def test_a_base_alone_generates(build: Callable[..., EngineAssembly]) -> None:
    assembly = build()
    items = run(assembly, make_request())
    assert sum(len(item.token_ids) for item in items) == 3
    assert items[-1].finish == "length"
    assert assembly.stats()["kv_blocks_total"] == 20


def test_without_a_store_an_adapter_is_missing(build: Callable[..., EngineAssembly]) -> None:
    (item,) = run(build(), make_request(adapter="ab" * 32))
    assert item.error is not None
    assert item.error.code == ErrorCode.ADAPTER_MISSING
    assert "no adapter store" in item.error.message


def test_an_adapter_that_the_store_lacks_is_missing_and_wakes_the_engine(
    build: Callable[..., EngineAssembly], tmp_path: Path
) -> None:
    assembly = build(store=StoreConfig(str(tmp_path / "store")))
    woken: list[bool] = []
    assembly.wake_with(lambda: woken.append(True))
    (item,) = run(assembly, make_request(adapter="ab" * 32))
    assert item.error is not None
    assert item.error.code == ErrorCode.ADAPTER_MISSING
    assert woken
    assert assembly.stats()["adapter_load_failures_total"] == 1


def test_limits_are_what_the_model_and_memory_allow(build: Callable[..., EngineAssembly]) -> None:
    roomy = build()
    assert (roomy.max_model_len, roomy.max_prompt_and_output) == (128, 128)
    tight = build(kv_memory_bytes=3 * BLOCK_BYTES)
    assert (tight.max_model_len, tight.max_prompt_and_output) == (128, 48)
    with pytest.raises(RequestRejected) as caught:
        tight.core.add(make_request(prompt_length=40, max_tokens=9))
    assert caught.value.code == ErrorCode.CONTEXT_LENGTH
    assert build(max_model_len=64).max_model_len == 64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 129}, "max_model_len is 129.*128"),
        ({"kv_memory_bytes": BLOCK_BYTES - 1}, f"holds no block.*{BLOCK_BYTES} bytes"),
        ({"store": StoreConfig("ftp://host/x")}, "ftp"),
        ({"model_dir": "/nowhere"}, "nowhere"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_settings_that_cannot_work_are_named(
    build: Callable[..., EngineAssembly], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**settings)


def test_a_base_without_weights_is_refused(build: Callable[..., EngineAssembly], model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    with pytest.raises(UnsupportedModel, match="safetensors"):
        build(model_dir=str(folder))


def test_block_bytes_and_counts(model_dir: Path) -> None:
    config = ModelConfig.from_dir(model_dir)
    assert kv_block_bytes(config, 16, torch.float32) == BLOCK_BYTES
    assert kv_block_bytes(config, 16, torch.bfloat16) == BLOCK_BYTES // 2
    assert blocks_that_fit(config, 16, torch.float32, 3 * BLOCK_BYTES - 1) == 2
    kv = allocate_kv_cache(config, 5, 16, torch.float32)
    assert len(kv.keys) == len(kv.values) == 2
    assert all(t.shape == (5, 2, 16, 8) and t.is_contiguous() and not t.any() for t in (*kv.keys, *kv.values))
    assert len({t.data_ptr() for t in (*kv.keys, *kv.values)}) == 4
    assert kv.num_tokens == 80


def test_free_memory_is_the_smaller_of_machine_and_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:      64 kB\n")
    monkeypatch.setattr(kv_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(kv_memory, "CGROUP", tmp_path)
    assert free_memory(torch.device("cpu")) == 64 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(torch.device("cpu")) == 64 * 1024
    (tmp_path / "memory.max").write_text("50000\n")
    (tmp_path / "memory.current").write_text("20000\n")
    assert free_memory(torch.device("cpu")) == 30000
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\n")
    with pytest.raises(ConfigError, match="MemAvailable"):
        free_memory(torch.device("cpu"))


def test_the_fraction_takes_its_part_of_what_is_free(build: Callable[..., EngineAssembly], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftwork_engine.assembly.free_memory", lambda _: 40 * BLOCK_BYTES)
    assembly = build(kv_memory_bytes=None, kv_memory_fraction=0.25)
    assert assembly.stats()["kv_blocks_total"] == 10
    assert build(kv_memory_bytes=None).stats()["kv_blocks_total"] == 16
    with pytest.raises(ConfigError, match=rf"\(0.01 of {40 * BLOCK_BYTES} bytes that are free.*raise kv_memory_bytes or kv_mem"):
        build(kv_memory_bytes=None, kv_memory_fraction=0.01)


def test_what_a_step_needs_is_left_before_the_share_is_taken() -> None:
    assert kv_share(1000, 200, 0.9) == 720
    assert kv_share(1000, 0, 0.25) == 250
    assert kv_share(1000, 1001, 0.9) == 0


def test_a_gpu_is_used_for_more_than_a_machine_that_others_share() -> None:
    assert usual_fraction(torch.device("cpu")) < usual_fraction(torch.device("cuda")) < 1


def test_adapter_memory_that_holds_nothing_is_refused(build: Callable[..., EngineAssembly], tmp_path: Path) -> None:
    """A page is at least the longest row, whatever its size was to be: here of 48 fp32."""
    sizes: dict[str, object] = {"store": StoreConfig(str(tmp_path / "store")), "adapter_page_bytes": 64}
    with pytest.raises(ConfigError, match=r"of 128 bytes holds no page: one page takes 192 bytes.*raise adapter_memory_bytes"):
        build(**sizes, adapter_memory_bytes=128)
    assert build(**sizes, adapter_memory_bytes=192).residency is not None


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "DevicePool",
            r"adapter memory of 268435456 bytes, with 268435456 beside.*777 bytes are free.*lower adapter_memory_bytes or",
        ),
        ("allocate_kv_cache", rf"KV memory of {20 * BLOCK_BYTES} bytes does not fit: 777 bytes are free.*lower kv_memory_bytes"),
    ],
)
def test_a_device_that_refuses_memory_is_a_matter_of_configuration(
    build: Callable[..., EngineAssembly], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(f"graftwork_engine.assembly.{what}", refuse)
    monkeypatch.setattr("graftwork_engine.assembly.free_memory", lambda _: 777)
    with pytest.raises(ConfigError, match=message):
        build(store=StoreConfig(str(tmp_path / "store")))


def test_a_start_says_in_one_line_what_fits(
    build: Callable[..., EngineAssembly], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftwork_engine.assembly.free_memory", lambda _: 20 * BLOCK_BYTES + (3 << 20))
    with caplog.at_level("INFO", "graftwork_engine.assembly"):
        build(store=StoreConfig(str(tmp_path / "store")), adapter_memory_bytes=1 << 20, adapter_page_bytes=4096)
    (line,) = [message for message in caplog.messages if "KV memory" in message]
    assert "holds 320 tokens in 20 blocks of 16, 2.5 requests of the greatest length, 128 tokens" in line
    assert re.search(r"1 MiB in 256 pages of 4 KiB holds \d+ adapters of rank 8, \d+ adapters of rank 16 or \d+ adapters of", line)
    assert re.search(r"on every projection in float32; memory for what adapters bring whole of 256 MiB holds \d+ heads", line)
    assert line.endswith("; 3 MiB are left free")
