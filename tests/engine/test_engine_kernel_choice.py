"""Which kernels an engine gets: with a compiler and without one, pinned and refused, kept for the next start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from graftwork_engine import kernel_choice
from graftwork_engine.config import EngineConfig
from graftwork_engine.errors import ConfigError
from graftwork_engine.kernel_choice import Kernels, choose_kernels, kernel_dir
from graftwork_engine.model.config import ModelConfig, RopeConfig
from graftwork_engine.model.layers import Placement
from graftwork_engine.warm_up import StepLimits
from graftwork_kernels import reference
from graftwork_kernels.choice import METHODS, Choice
from graftwork_kernels.cpu.build import CompilerMissing, default_cache_dir
from graftwork_kernels.cpu.library import Library
from graftwork_kernels.ops import Operators
from graftwork_kernels.probes import StepSizes
from graftwork_kernels.triton import device as gpu

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope=RopeConfig(10000.0),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_word_embeddings=False,
    max_position_embeddings=128,
    eos_token_ids=(),
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

Chooser = Callable[..., Kernels]


@pytest.fixture
def choose(tmp_path: Path) -> Chooser:
    (tmp_path / "config.json").write_text("{}")

    def choosing(
        max_model_len: int = 128, dtype: torch.dtype = torch.float32, on: torch.device = CPU, **settings: object
    ) -> Kernels:
        defaults = {"model_dir": str(tmp_path), "kernel_dir": str(tmp_path / "kernels"), "max_num_batched_tokens": 16}
        config = msgspec.convert({**defaults, **settings}, EngineConfig)
        config.validate()
        steps = StepLimits(config.max_num_batched_tokens or 0, config.max_num_seqs or 64, max_model_len, config.block_size)
        return choose_kernels(config, MODEL, steps, Placement(dtype, on))

    return choosing


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


def test_without_a_compiler_torch_serves_and_one_line_says_what_to_install(
    choose: Chooser, no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = choose()
    assert (set(kernels.choice.names.values()), kernels.library) == ({"reference"}, None)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "every operator runs in plain torch, which takes several times as long" in warning
    assert "install" in warning
    x = torch.randn(3, 32)
    assert torch.equal(kernels.operators().rms_norm(x, torch.ones(32), 1e-6), reference.rms_norm(x, torch.ones(32), 1e-6))


def test_a_pin_that_needs_a_compiler_is_refused_with_the_reason(choose: Chooser, no_compiler: None) -> None:
    with pytest.raises(ConfigError, match=r"kernel sample=cpu: it cannot be had here: no C\+\+ compiler"):
        choose(kernels={"sample": "cpu"})
    with pytest.raises(ConfigError, match=r"kernel linear=onednn: .* it needs the compiled operators: no C\+\+ compiler"):
        choose(kernels={"linear": "onednn"})


def test_a_pin_that_needs_other_instructions_is_refused_with_the_reason(
    choose: Chooser, shared_kernels: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_choice, "onednn_unavailable", lambda dtype: f"no instructions for {dtype}")
    with pytest.raises(ConfigError, match=r"kernel linear=onednn: it cannot be had here: no instructions for torch.bfloat"):
        choose(dtype=torch.bfloat16, kernel_dir=str(shared_kernels), kernels={"linear": "onednn"})
    assert "plain torch" not in caplog.text


@pytest.mark.parametrize(("name", "rows", "recorded"), [("cpu", None, True), ("cpu", 8, True), ("onednn", None, False)])
def test_large_steps_in_onednn_leave_the_recorded_pass_as_it_is(
    choose: Chooser, shared_kernels: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: int | None, recorded: bool
) -> None:
    chosen = Choice({operator: name if operator == "linear" else "cpu" for operator in METHODS}, rows)
    monkeypatch.setattr(kernel_choice, "choose", lambda *_, **__: chosen)
    kernels = choose(kernel_dir=str(shared_kernels))
    assert kernels.packs_twice == (kernels.operators().prepare_weight(torch.randn(6, 5)).large is not None)
    assert kernels.packs_twice == (rows is not None or name == "onednn")
    found = kernels.recorder()
    assert (found is not None) == recorded
    if found is not None:
        _, ops = found
        ops.linear(torch.randn(40, 5), kernels.operators().prepare_weight(torch.randn(6, 5)))  # recorded, not called


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        ({"attention": "cpu"}, "no operator attention; there are all, linear"),
        ({"sample": "gpu"}, "there are reference, cpu, onednn"),
        ({"sample": "onednn"}, "onednn is for linear alone"),
    ],
)
def test_settings_with_unknown_names_are_refused(kernels: dict[str, str], says: str, choose: Chooser) -> None:
    with pytest.raises(ConfigError, match=says):
        choose(kernels=kernels)


def test_pinned_to_the_reference_nothing_is_compiled(choose: Chooser, no_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    assert set(choose(kernels={"all": "reference"}).choice.names.values()) == {"reference"}
    assert set(choose(kernels=dict.fromkeys(METHODS, "reference")).choice.names.values()) == {"reference"}
    assert caplog.records == []


def test_a_build_that_fails_is_told_as_a_missing_compiler_is(
    choose: Chooser, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path) -> Library:
        raise CompilerMissing("nothing here; install one")

    monkeypatch.setattr(kernel_choice, "open_library", fail)
    assert choose().library is None
    assert "nothing here; install one" in caplog.text


def test_kernels_lie_where_the_configuration_says(tmp_path: Path) -> None:
    config = EngineConfig(model_dir=".")
    assert kernel_dir(config) == default_cache_dir()
    config = msgspec.structs.replace(config, cache_dir="/cache")
    assert kernel_dir(config) == Path("/cache/kernels")
    assert kernel_dir(msgspec.structs.replace(config, kernel_dir="/kernels")) == Path("/kernels")


@pytest.mark.parametrize(
    ("settings", "max_model_len", "rows"),
    [({}, 128, 16), ({"prefill_chunk_size": 4}, 128, 4), ({"max_num_batched_tokens": 512}, 100, 100)],
)
def test_what_is_measured_are_the_sizes_that_will_run(
    settings: dict[str, int], max_model_len: int, rows: int, choose: Chooser, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[StepSizes] = []

    def choosing(sizes: StepSizes, *_: object, **__: object) -> Choice:
        seen.append(sizes)
        return Choice(dict.fromkeys(METHODS, "reference"))

    monkeypatch.setattr(kernel_choice, "choose", choosing)
    choose(max_model_len, max_num_seqs=7, block_size=8, **settings)
    assert seen == [StepSizes(32, 48, 4, 2, 8, 64, 8, rows, 7, torch.float32)]


def test_compiled_kernels_are_used_and_kept(
    choose: Chooser, shared_kernels: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftwork_kernels.candidates.machine_is_busy", lambda: False)
    caplog.set_level(logging.INFO)
    first = choose(kernel_dir=str(shared_kernels), kernels={"rms_norm": "cpu", "sample": "reference"})
    assert first.choice.names["rms_norm"] == "cpu"
    assert first.library is not None
    assert isinstance(first.operators(), Operators)
    caplog.clear()
    again = choose(kernel_dir=str(shared_kernels), kernels={"rms_norm": "cpu", "sample": "reference"})
    assert again.choice == first.choice
    assert [r.getMessage() for r in caplog.records if "compiled by" in r.getMessage() or "measured in" in r.getMessage()] == []


# On a GPU, which the tests' machine lacks


@pytest.fixture
def on_gpu(choose: Chooser, no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> Chooser:
    """Choose for one whose kernels can be compiled; all that is not named was chosen to be its kernels."""
    monkeypatch.setattr(gpu, "unavailable", lambda _: None)
    monkeypatch.setattr(gpu, "operators", lambda *_: reference)
    monkeypatch.setattr(gpu, "keep_compiled_in", lambda _: None)

    def choosing(names: dict[str, str], **settings: object) -> Kernels:
        choice = Choice(dict.fromkeys(METHODS, "triton") | names)
        monkeypatch.setattr(kernel_choice, "choose", lambda *_, **__: choice)
        return choose(on=CUDA, **settings)

    return choosing


def test_a_gpus_kernels_need_no_compiler_and_can_be_captured(on_gpu: Chooser, caplog: pytest.LogCaptureFixture) -> None:
    kernels = on_gpu({"linear": "triton_fused", "sample": "reference"})
    assert (kernels.library, kernels.recorder(), kernels.packs_twice) == (None, None, False)
    assert kernels.is_capturable
    assert (kernels.device, kernels.max_rank) == (CUDA, 256)
    assert isinstance(kernels.operators(), Operators)
    assert caplog.records == []


def test_a_pass_with_an_operator_of_the_reference_is_called_and_says_so(on_gpu: Chooser, caplog: pytest.LogCaptureFixture) -> None:
    assert not on_gpu({"paged_attention": "reference"}).is_capturable
    (warning,) = [r.getMessage() for r in caplog.records]
    assert warning.endswith("these are not kernels of the GPU: paged_attention")


def test_a_gpu_is_measured_as_a_gpu_and_keeps_what_it_compiles(choose: Chooser, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    seen: dict[str, object] = {}

    def choosing(sizes: StepSizes, found: dict[str, object], **settings: object) -> Choice:
        seen.update(settings, found=list(found))
        return Choice(dict.fromkeys(METHODS, "triton"))

    monkeypatch.setattr(gpu, "unavailable", lambda _: None)
    monkeypatch.setattr(gpu, "operators", lambda *_: reference)
    monkeypatch.setattr(gpu, "keep_compiled_in", folders.append)
    monkeypatch.setattr(kernel_choice, "choose", choosing)
    choose(on=CUDA, max_adapter_rank=32, kernel_dir="/kernels")
    assert folders == [Path("/kernels/triton")]
    assert seen["device"] == CUDA
    assert seen["found"] == ["reference", "triton", "triton_fused"]
    assert seen["unavailable"] == dict.fromkeys(("cpu", "onednn"), "it runs on the CPU, and the engine's device is cuda")


def test_a_gpu_refuses_pins_to_the_cpus_kernels(choose: Chooser, no_compiler: None) -> None:
    with pytest.raises(
        ConfigError, match="kernel all=cpu: it cannot be had here: it runs on the CPU, and the engine's device is cuda"
    ):
        choose(on=CUDA, kernels={"all": "cpu"})


def test_a_gpu_under_the_interpreter_serves_with_torch_and_says_why(
    choose: Chooser, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels = choose(on=CUDA)
    assert set(kernels.choice.names.values()) == {"reference"}
    assert "every operator runs in plain torch, which takes several times as long" in caplog.text
    assert "TRITON_INTERPRET is set" in caplog.text
    with pytest.raises(ConfigError, match="kernel linear=triton_fused: it cannot be had here: TRITON_INTERPRET is set"):
        choose(on=CUDA, kernels={"linear": "triton_fused"})


# Interpreted, on a CPU


def test_pinned_to_interpreted_kernels_nothing_is_compiled(
    choose: Chooser, no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = choose(kernels={"all": "triton", "linear": "triton_fused"})
    assert set(kernels.choice.names.values()) == {"triton", "triton_fused"}
    assert (kernels.library, kernels.is_capturable, caplog.records) == (None, False, [])
    x = torch.randn(3, 32)
    expected = reference.rms_norm(x, torch.ones(32), 1e-6)
    torch.testing.assert_close(kernels.operators().rms_norm(x, torch.ones(32), 1e-6), expected)


def test_interpreted_kernels_are_refused_unless_they_are_asked_for(choose: Chooser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(
        ConfigError, match="kernel all=triton: it cannot be had here: its kernels are a GPU's; on a CPU they are inte"
    ):
        choose(kernels={"all": "triton"})
