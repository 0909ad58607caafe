"""Rows of adapter memory as fp32."""

from __future__ import annotations

import pytest
import torch

from graftwork_kernels.layout import QUANTISED_ROW_HEAD, AdapterMemory, RowType
from graftwork_kernels.row_codec import RowRun, decode_e4m3, read_runs, row_bytes


def test_e4m3_decodes_as_torch_does_for_every_code():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).to(torch.float32)
    actual = decode_e4m3(codes)
    assert torch.equal(actual.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(actual[number].view(torch.int32), expected[number].view(torch.int32))  # -0 included


def test_e4m3_landmarks():
    codes = torch.tensor([0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xFE, 0x7F, 0xFF], dtype=torch.uint8)
    values = decode_e4m3(codes).tolist()
    assert values[:7] == [0.0, 2**-9, 7 * 2**-9, 2**-6, 1.0, 448.0, -448.0]
    assert all(value != value for value in values[7:])


def test_e4m3_subnormals_survive_flush_to_zero():
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor cannot flush subnormals; the check means nothing here")
    try:
        assert decode_e4m3(torch.tensor([0x01], dtype=torch.uint8)).item() == 2**-9
    finally:
        torch.set_flush_denormal(False)


def test_row_bytes():
    assert [row_bytes(kind, 10) for kind in (RowType.BF16, RowType.FP32, RowType.INT8, RowType.E4M3)] == [20, 40, 26, 26]


def test_quantised_rows_carry_their_own_scale():
    pool = torch.zeros(256, dtype=torch.uint8)
    for offset, scale, elements in ((64, 0.5, [-128, -1, 0, 127]), (192, 2.0, [1, 2, 3, 4])):
        pool[offset : offset + 4] = torch.tensor([scale]).view(torch.uint8)
        pool[offset + QUANTISED_ROW_HEAD : offset + QUANTISED_ROW_HEAD + 4] = torch.tensor(elements, dtype=torch.int8).view(
            torch.uint8
        )
    memory = AdapterMemory(pool, torch.tensor([192, 64]), torch.zeros(0, 0, 6, dtype=torch.int64))
    (rows,) = read_runs(memory, [RowRun(0, 2, RowType.INT8)], 4)
    assert rows.tolist() == [[2.0, 4.0, 6.0, 8.0], [-64.0, -0.5, 0.0, 63.5]]


@pytest.mark.parametrize("row_type", [RowType.INT8, RowType.E4M3])
@pytest.mark.parametrize("width", range(1, 9))
def test_a_single_quantised_row_may_have_any_width(row_type: RowType, width: int):
    pool = torch.zeros(64, dtype=torch.uint8)
    pool[:4] = torch.tensor([0.5]).view(torch.uint8)
    pool[QUANTISED_ROW_HEAD : QUANTISED_ROW_HEAD + width] = 0x38  # 56, or 1.0 in e4m3
    memory = AdapterMemory(pool, torch.tensor([0]), torch.zeros(0, 0, 6, dtype=torch.int64))
    (row,) = read_runs(memory, [RowRun(0, 1, row_type)], width)
    assert row.tolist() == [[0.5 * (56.0 if row_type is RowType.INT8 else 1.0)] * width]


def test_runs_of_several_types_keep_their_order():
    pool = torch.zeros(64 * 4, dtype=torch.uint8)
    pool[0:8] = torch.tensor([1.0, 2.0]).view(torch.uint8)
    pool[64:68] = torch.tensor([3.0, 4.0], dtype=torch.bfloat16).view(torch.uint8)
    pool[128:136] = torch.tensor([5.0, 6.0]).view(torch.uint8)
    pool[192:196] = torch.tensor([7.0, 8.0], dtype=torch.bfloat16).view(torch.uint8)
    memory = AdapterMemory(pool, torch.tensor([0, 64, 128, 192]), torch.zeros(0, 0, 6, dtype=torch.int64))
    runs = [RowRun(1, 1, RowType.BF16), RowRun(2, 1, RowType.FP32), RowRun(3, 1, RowType.BF16), RowRun(0, 1, RowType.FP32)]
    assert [run.tolist() for run in read_runs(memory, runs, 2)] == [[[3.0, 4.0]], [[5.0, 6.0]], [[7.0, 8.0]], [[1.0, 2.0]]]
    assert read_runs(memory, [], 2) == []


def test_the_last_row_may_end_with_the_pool():
    pool = torch.zeros(64 + 8, dtype=torch.uint8)
    pool[64:] = torch.tensor([1.0, 2.0]).view(torch.uint8)
    memory = AdapterMemory(pool, torch.tensor([64]), torch.zeros(0, 0, 6, dtype=torch.int64))
    assert read_runs(memory, [RowRun(0, 1, RowType.FP32)], 2)[0].tolist() == [[1.0, 2.0]]


def test_an_unknown_type_is_refused():
    memory = AdapterMemory(torch.zeros(64, dtype=torch.uint8), torch.tensor([0]), torch.zeros(0, 0, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="9 is not a valid RowType"):
        read_runs(memory, [RowRun(0, 1, 9)], 4)
