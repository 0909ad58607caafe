"""Recording commands: the same bits as calling them, for any number of rows, in memory that results share without meeting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.cpu.capture import Recorder
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.layout import AdapterBatch, AdapterMemory, AttentionBatch, LinearSite, RowType, Weight
from graftwork_kernels.ops import Operators

WIDTH, CAPACITY, LAYERS = 48, 20, 6


def network(ops: Operators, x: Tensor, weights: list[tuple[Weight, Weight]], memory: AdapterMemory, batch: AdapterBatch) -> Tensor:
    """A few residual blocks whose results live for different lengths of time, views of packed results among them."""
    norm = torch.ones(WIDTH, dtype=x.dtype)
    residual: Tensor | None = None
    first: Tensor | None = None
    for up, down in weights:
        x, residual = ops.add_rms_norm(x, residual, norm, 1e-5)
        first = x if first is None else first
        packed = ops.adapter_linear(x, up, None, memory, batch, (LinearSite(0, 0, 2 * WIDTH),))
        halves = packed.view(len(packed), 2, WIDTH)
        gated = ops.silu_and_mul(packed) if len(weights) % 2 else ops.rms_norm(halves[:, 1], norm, 1e-5)
        x = ops.linear(gated, down, out_dtype=torch.float32)
    assert first is not None
    return ops.add_rms_norm(x, residual, norm, 1e-5)[1]


@pytest.fixture
def memory(memory_builder) -> AdapterMemory:
    builder = memory_builder(1)
    for adapter, rank in enumerate((3, 8, 20)):
        builder.add(adapter, 0, rank=rank, size=(WIDTH, 2 * WIDTH), row_type=RowType.BF16)
    return builder.build()


def batch_over(adapters: list[int], whole: AdapterBatch | None = None) -> AdapterBatch:
    """The rows' adapters; laid into the memory of ``whole`` where it is given."""
    batch = build_adapter_batch(adapters)
    if whole is None:
        return batch
    whole.token_adapter[: len(adapters)] = batch.token_adapter
    whole.permutation[: len(adapters)] = batch.permutation
    whole.segment_start[: len(adapters) + 1] = batch.segment_start
    whole.segment_adapter[: len(adapters)] = batch.segment_adapter
    whole.num_segments.copy_(batch.num_segments)
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_layers", [1, LAYERS])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_program_computes_what_its_operators_compute(cpu_library, memory, dtype, num_layers, num_threads):
    now = Operators(CpuOperators(Immediate(cpu_library, num_threads)))
    weights = [
        (
            now.prepare_weight(torch.randn(2 * WIDTH, WIDTH).to(dtype) / 7),
            now.prepare_weight(torch.randn(WIDTH, WIDTH).to(dtype) / 7),
        )
        for _ in range(num_layers)
    ]
    recorder = Recorder(cpu_library, num_threads)
    x, whole = torch.zeros(CAPACITY, WIDTH, dtype=dtype), build_adapter_batch([-1] * CAPACITY)
    program = recorder.finish(network(Operators(CpuOperators(recorder)), x, weights, memory, whole))
    assert len(program) == 4 * num_layers + 1
    for adapters in ([0], [2, -1, 2], [-1] * 5, [0, 1, 2, -1] * 5, [1] * 7):
        rows = torch.randn(len(adapters), WIDTH).to(dtype)
        x[: len(adapters)] = rows
        batch_over(adapters, whole)
        program.run(len(adapters))
        expected = network(now, rows, weights, memory, build_adapter_batch(adapters))
        assert torch.equal(program.outputs[0][: len(adapters)], expected)


def test_results_that_never_live_together_share_memory(cpu_library):
    recorder = Recorder(cpu_library, 1)
    ops = Operators(CpuOperators(recorder))
    x = torch.randn(CAPACITY, WIDTH)
    for _ in range(50):
        x = ops.rms_norm(x, torch.ones(WIDTH), 1e-5)
    program = recorder.finish(x)
    arena = program._kept[-1]
    assert arena.numel() == 2 * CAPACITY * WIDTH * 4
    program.run(CAPACITY)
    assert program.outputs[0].isfinite().all()


def test_an_output_that_no_command_made_is_refused(cpu_library):
    recorder = Recorder(cpu_library, 1)
    with pytest.raises(ValueError, match="no recorded command made"):
        recorder.finish(torch.zeros(3))


def test_a_fault_in_a_program_is_an_error_and_the_next_run_is_well(cpu_library):
    recorder = Recorder(cpu_library, 2)
    now, ops = Operators(CpuOperators(Immediate(cpu_library))), Operators(CpuOperators(recorder))
    weight = now.prepare_weight(torch.randn(5, 8))
    ids = torch.tensor([1, 2, 7])
    program = recorder.finish(ops.embedding(ids, weight))
    with pytest.raises(IndexError, match="token id"):
        program.run(3)
    program.run(2)
    ids[2] = 4
    program.run(3)
    assert torch.equal(program.outputs[0], now.embedding(ids, weight))


def test_pointers_within_structures_move_too(cpu_library):
    """Sampling keeps its logits in a structure of its own."""
    recorder, now = Recorder(cpu_library, 1), Operators(CpuOperators(Immediate(cpu_library, 1)))
    ops = Operators(CpuOperators(recorder))
    x, weight = torch.randn(CAPACITY, WIDTH), now.prepare_weight(torch.randn(100, WIDTH))
    program = recorder.finish(ops.finite_rows(ops.linear(x, weight)))
    x[3, 5] = float("nan")
    program.run(CAPACITY)
    assert program.outputs[0].tolist() == [row != 3 for row in range(CAPACITY)]


def test_what_computes_at_once_cannot_be_recorded(cpu_library):
    ops = Operators(CpuOperators(Recorder(cpu_library, 1)))
    with pytest.raises(ValueError, match="cannot be recorded"):
        ops.rms_norm(torch.zeros(2, 8).half(), torch.ones(8).half(), 1e-5)
    weight = Operators(CpuOperators(Immediate(cpu_library, 1))).prepare_weight(torch.zeros(4, 8))
    with pytest.raises(ValueError, match="cannot be recorded"):
        ops.linear(torch.zeros(8, 2).T, weight)


@pytest.mark.parametrize("num_rows", [CAPACITY + 1, 1 << 40, -1])
def test_more_rows_than_were_recorded_are_refused(cpu_library, num_rows):
    """Memory behind the arena would be written. Commands may differ in what they have room for: the least counts."""
    recorder = Recorder(cpu_library, 1)
    ops = Operators(CpuOperators(recorder))
    outputs = [ops.rms_norm(torch.ones(rows, WIDTH), torch.ones(WIDTH), 1e-5) for rows in (CAPACITY + 9, CAPACITY)]
    program = recorder.finish(*outputs)
    with pytest.raises(ValueError, match=f"0 to {CAPACITY} of rows, as the program was recorded for, got {num_rows}"):
        program.run(num_rows)
    assert (program.max_rows, program.max_requests) == (CAPACITY, None)
    program.run(CAPACITY)
    assert all(output[:CAPACITY].isfinite().all() for output in program.outputs)


@pytest.mark.parametrize("max_requests", [0, 3])
def test_more_requests_than_were_recorded_are_refused(cpu_library, max_requests):
    """Their lengths and blocks would be read from behind the batch's tensors."""
    recorder = Recorder(cpu_library, 1)
    batch = AttentionBatch(
        query_start=torch.arange(max_requests + 1, dtype=torch.int32),
        context_len=torch.ones(max_requests, dtype=torch.int32),
        block_table=torch.zeros(max_requests, 1, dtype=torch.int32),
        kv_slot=torch.zeros(CAPACITY, dtype=torch.int64),
        max_query_len=1,
        max_context_len=1,
    )
    caches = torch.randn(2, 1, 1, 4, 8)
    q = torch.randn(CAPACITY, 1, 8)
    program = recorder.finish(Operators(CpuOperators(recorder)).paged_attention(q, caches[0], caches[1], batch, 1.0))
    for number in (max_requests + 1, -1):
        with pytest.raises(ValueError, match=f"0 to {max_requests} of requests, as the program was recorded for, got {number}"):
            program.run(CAPACITY, number)
    program.run(CAPACITY, max_requests)
    assert torch.equal(program.outputs[0][:max_requests], caches[1, :, 0, :1].expand(max_requests, 1, 8))
    assert not program.outputs[0][max_requests:].any()
