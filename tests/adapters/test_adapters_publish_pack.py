"""Packed rows decode to PEFT's own delta weight, and to the same bytes every time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import LlamaForCausalLM

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.keys import RowTypeName
from graftwork_adapters.pack import fold_scale
from graftwork_adapters.packed import ABSENT, ROW_ALIGNMENT, PackedIndex, read_packed
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import PublishJob
from graftwork_adapters.tensor_values import ROW_HEAD_BYTES, encode_rows, row_size, to_bf16_bits, to_e4m3_bits, to_fp8_bits
from graftwork_kernels import layout

SETTINGS: dict[str, object] = {
    "target_modules": "all-linear",
    "r": 4,
    "lora_alpha": 12,
    "use_rslora": True,
    "rank_pattern": {"layers.0.mlp.*": 7, "k_proj": 1},
    "alpha_pattern": {"o_proj": 5},
    "exclude_modules": ["model.layers.1.self_attn.v_proj"],
}


def decode(rows: Tensor, row_type: RowTypeName, length: int) -> Tensor:
    """Rows uint8 [n, bytes] as fp32 [n, length], by torch's own conversions."""
    match row_type:
        case "float32":
            return rows[:, : 4 * length].contiguous().view(torch.float32)
        case "bfloat16":
            return rows[:, : 2 * length].contiguous().view(torch.bfloat16).float()
        case "int8":
            elements = rows[:, 16 : 16 + length].contiguous().view(torch.int8).float()
        case "e4m3":
            elements = rows[:, 16 : 16 + length].contiguous().view(torch.float8_e4m3fn).float()
    assert not rows[:, 4:16].any()
    return elements * rows[:, :4].contiguous().view(torch.float32)


def unpack(index: PackedIndex, rows: np.ndarray, spec: BaseSpec) -> dict[str, tuple[Tensor, Tensor]]:
    """A [r, in] and scaled Bᵀ [r, out] by module, found as a kernel finds them: through row numbers and row offsets."""
    sizes = index.row_bytes
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    assert not (offsets % 64).any()
    found = {}
    for packed_site in index.sites:
        site = spec.sites[packed_site.index]
        assert (packed_site.scale_row, packed_site.bias_row) == (ABSENT, ABSENT)
        matrices = []
        for first, length in ((packed_site.a_row, site.in_features), (packed_site.b_row, site.out_features)):
            held = rows[offsets[first] : offsets[first + packed_site.rank]].reshape(packed_site.rank, -1)
            used = row_size(index.row_type, length)
            assert held.shape[1] == used
            matrices.append(decode(torch.from_numpy(held.copy()), index.row_type, length))
        found[site.module] = (matrices[0], matrices[1])
    return found


@pytest.fixture(scope="module")
def patterned(make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("patterned") / "adapter", seed=3, **SETTINGS)


@pytest.mark.parametrize(("row_type", "tolerance"), [("float32", 1e-6), ("bfloat16", 8e-3), ("int8", 1.2e-2), ("e4m3", 8e-2)])
def test_rows_decode_to_the_delta_weight_of_peft(
    patterned: Path,
    tmp_path: Path,
    tiny_base_model: LlamaForCausalLM,
    tiny_base_dir: Path,
    tiny_spec: BaseSpec,
    row_type: RowTypeName,
    tolerance: float,
) -> None:
    result = publish(PublishJob(patterned, tmp_path / "out.safetensors", tiny_spec, row_type, base_dir=tiny_base_dir))
    assert result.ok, result.report.findings
    assert result.packed_key is not None
    index, rows = read_packed(tmp_path / "out.safetensors", result.packed_key)
    assert (result.num_bytes, result.max_rank) == (rows.nbytes, 7)
    matrices = unpack(index, rows, tiny_spec)
    model = PeftModel.from_pretrained(copy.deepcopy(tiny_base_model), patterned).base_model.model
    assert len(matrices) == 13
    for module, (a, b_transposed) in matrices.items():
        expected = model.get_submodule(module).get_delta_weight("default")
        delta = b_transposed.T @ a
        assert (delta - expected).norm() <= tolerance * expected.norm(), module
    assert model.get_submodule("model.layers.1.self_attn.v_proj") is not None
    assert "model.layers.1.self_attn.v_proj" not in matrices


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_uploads_are_read_exactly(
    make_adapter: Callable[..., Path],
    tmp_path: Path,
    tiny_base_model: LlamaForCausalLM,
    tiny_base_dir: Path,
    tiny_spec: BaseSpec,
    dtype: torch.dtype,
) -> None:
    folder = make_adapter(tmp_path / "adapter", dtype=dtype)
    result = publish(PublishJob(folder, tmp_path / "out.safetensors", tiny_spec, "float32", base_dir=tiny_base_dir))
    index, rows = read_packed(tmp_path / "out.safetensors", str(result.packed_key))
    model = PeftModel.from_pretrained(copy.deepcopy(tiny_base_model), folder).base_model.model
    for module, (a, b_transposed) in unpack(index, rows, tiny_spec).items():
        layer = model.get_submodule(module)
        assert torch.equal(a, layer.lora_A["default"].weight)
        assert torch.equal(b_transposed.T, layer.lora_B["default"].weight * layer.scaling["default"])


def test_the_same_upload_packs_to_the_same_bytes(patterned: Path, tmp_path: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    keys = {publish(PublishJob(patterned, file, tiny_spec, "int8", base_dir=tiny_base_dir)).packed_key for file in files}
    assert len(keys) == 1
    assert files[0].read_bytes() == files[1].read_bytes()
    other = publish(PublishJob(patterned, tmp_path / "three", tiny_spec, "e4m3", base_dir=tiny_base_dir)).packed_key
    assert other not in keys
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three", "two"]


def test_a_rebuild_checks_that_it_is_the_same_adapter(
    patterned: Path, upload: Path, tmp_path: Path, tiny_base_dir: Path, tiny_spec: BaseSpec
) -> None:
    digest = publish(PublishJob(patterned, tmp_path / "out", tiny_spec, "bfloat16", base_dir=tiny_base_dir)).digest
    (tmp_path / "out").unlink()
    again = publish(PublishJob(patterned, tmp_path / "out", tiny_spec, "float32", expected_digest=digest, base_dir=tiny_base_dir))
    assert again.ok
    (tmp_path / "out").unlink()
    other = publish(PublishJob(upload, tmp_path / "out", tiny_spec, "float32", expected_digest=digest, base_dir=tiny_base_dir))
    assert not other.ok
    assert other.digest is None
    assert other.report.findings[-1].check == "digest"
    assert not (tmp_path / "out").exists()


def test_bf16_rounds_as_torch_does() -> None:
    bits = torch.cat(
        [torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0)), torch.arange(0, 2**31, 2**15)]
    )
    values = bits.to(torch.int32).view(torch.float32)
    values = values[values.abs() <= 3.3895e38]
    expected = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bf16_bits(values.numpy()), expected)


def test_e4m3_rounds_as_torch_does() -> None:
    exact = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = exact[exact.isfinite()].sort().values
    halfway = (exact[1:] + exact[:-1]) / 2
    random = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2, 100_000)
    near = [torch.nextafter(halfway, torch.tensor(sign * torch.inf)) for sign in (-1, 1)]
    values = torch.cat([exact, halfway, *near, random]).clamp(-448, 448)
    assert np.array_equal(to_e4m3_bits(values.numpy()), values.to(torch.float8_e4m3fn).view(torch.uint8).numpy())


@pytest.mark.parametrize(("name", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_fp8_copies_are_cast_as_torch_casts_them(name: str, dtype: torch.dtype) -> None:
    """Every bf16 value, and the fp32 values beside and between those of the type: also what it has no value for."""
    of_type = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    of_type = of_type[of_type.isfinite()].sort().values
    halves = (of_type[1:] + of_type[:-1]) / 2
    exact = torch.cat([of_type, halves, torch.tensor([464.0, 465, 480, 61440, 61441, 65536, 3.4e38])])
    beside = [torch.nextafter(exact, torch.tensor(limit)) for limit in (-torch.inf, torch.inf)]
    bf16 = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    values = torch.cat([exact, -exact, *beside, bf16])
    got, expected = to_fp8_bits(values.numpy(), name), values.to(dtype).view(torch.uint8).numpy()
    is_nan = values.isnan().numpy()
    assert np.array_equal(got[~is_nan], expected[~is_nan])
    assert torch.from_numpy(got[is_nan]).view(dtype).float().isnan().all()


@pytest.mark.parametrize(("row_type", "largest"), [("int8", 127.0), ("e4m3", 448.0)])
def test_eight_bit_rows_have_their_own_scale(row_type: RowTypeName, largest: float) -> None:
    matrix = np.array([[0.0, 0.0, 0.0], [1e-6, -2e-6, 5e-7], [100.0, -200.0, 50.0], [1e-45, 0, -1e-45]], dtype=np.float32)
    out = np.zeros((4, row_size(row_type, 3)), dtype=np.uint8)
    encode_rows(matrix, row_type, out)
    scales = out[:, :4].copy().view(np.float32)[:, 0]
    assert np.array_equal(scales, np.abs(matrix).max(axis=1) / np.float32(largest))
    decoded = decode(torch.from_numpy(out), row_type, 3).numpy()
    assert not decoded[0].any()
    assert np.allclose(decoded[1:3], matrix[1:3], rtol=0.07, atol=0)
    assert np.isfinite(decoded).all()
    assert not out[:, 16 + 3 :].any()


@pytest.mark.parametrize(
    ("row_type", "length", "size"),
    [("float32", 16, 64), ("float32", 17, 128), ("bfloat16", 32, 64), ("bfloat16", 33, 128), ("int8", 48, 64), ("e4m3", 49, 128)],
)
def test_rows_are_padded_to_the_alignment(row_type: RowTypeName, length: int, size: int) -> None:
    assert row_size(row_type, length) == size


def test_rows_are_what_the_kernels_expect() -> None:
    assert ROW_ALIGNMENT == layout.ROW_ALIGNMENT
    assert ROW_HEAD_BYTES == layout.QUANTISED_ROW_HEAD


def test_scale_is_folded_in_fp32() -> None:
    b = np.array([[1.0, 3.0]], dtype=np.float32)
    folded = fold_scale(b, 16 / 24)
    assert folded.dtype == np.float32
    assert np.array_equal(folded, (torch.from_numpy(b) * (16 / 24)).numpy())
