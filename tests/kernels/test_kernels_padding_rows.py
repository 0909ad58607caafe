"""Rows that mean nothing: padding in a step comes out written and defined, rows beyond a recorded step's stay as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from graftwork_kernels import reference
from graftwork_kernels.cpu.capture import Recorder
from graftwork_kernels.cpu.issue import Immediate
from graftwork_kernels.cpu.operators import CpuOperators
from graftwork_kernels.layout import AttentionBatch, SamplingBatch
from graftwork_kernels.ops import Operators

NUM_ROWS, NUM_TOKENS, NUM_HEADS, HEAD_DIM, BLOCK = 11, 700, 4, 16, 4
FIRST, REQUESTS = 2, (1, 3, 1)
"""The first requests' rows begin at the third; four are left over at the end."""

LEFT_OVER = 0x5A
"""Every byte of memory that is handed out: what an operator does not write is seen."""


class LeftOver(Immediate):
    """Hands out memory in which something was before."""

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        tensor = super().empty(*shape, dtype=dtype)
        tensor.view(torch.uint8).fill_(LEFT_OVER)
        return tensor


def rows(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(NUM_ROWS, *shape).to(dtype)


def attention_batch() -> AttentionBatch:
    starts = torch.tensor([FIRST, *REQUESTS]).cumsum(0)
    num_requests = len(REQUESTS)
    return AttentionBatch(
        query_start=starts.int(),
        context_len=torch.tensor([5, 3, 9]).int(),
        block_table=torch.arange(3 * num_requests).int().view(num_requests, 3),
        kv_slot=torch.full((NUM_ROWS,), -1),
        max_query_len=max(REQUESTS),
        max_context_len=9,
    )


def caches(dtype: torch.dtype) -> Sequence[Tensor]:
    return torch.randn(2, 3 * len(REQUESTS), 2, BLOCK, HEAD_DIM).to(dtype).unbind()


def sampling_batch() -> SamplingBatch:
    return SamplingBatch(
        temperature=torch.linspace(0, 2, NUM_ROWS),
        top_k=torch.arange(NUM_ROWS).int() % 3 * 50,
        top_p=torch.linspace(0.3, 1.2, NUM_ROWS),
        min_p=torch.linspace(-0.2, 0.1, NUM_ROWS),
        seed=torch.arange(NUM_ROWS),
        choice=torch.zeros(NUM_ROWS).int(),
        position=torch.arange(NUM_ROWS).int(),
    )


Call = Callable[[Operators], Tensor | tuple[Tensor, ...]]


def rotary(dtype: torch.dtype) -> Call:
    """All but two rows go nowhere in the cache."""
    q, k, v = rows(NUM_HEADS, HEAD_DIM, dtype=dtype), rows(2, HEAD_DIM, dtype=dtype), rows(2, HEAD_DIM, dtype=dtype)
    positions, slots = torch.arange(NUM_ROWS) % 4, torch.full((NUM_ROWS,), -1)
    slots[[1, 5]] = torch.tensor([3, 17])
    cos_sin, (k_cache, v_cache) = torch.randn(4, HEAD_DIM), caches(dtype)
    return lambda ops: ops.rotary_and_write_kv(q, k, v, positions, cos_sin, k_cache, v_cache, slots)


def attend(dtype: torch.dtype) -> Call:
    q, (k_cache, v_cache), batch = rows(NUM_HEADS, HEAD_DIM, dtype=dtype), caches(dtype), attention_batch()
    return lambda ops: ops.paged_attention(q, k_cache, v_cache, batch, 0.25)


def norm(dtype: torch.dtype) -> Call:
    x, weight = rows(5, 37, dtype=dtype), torch.randn(37).to(dtype)
    return lambda ops: ops.rms_norm(x, weight, 1e-5)


def add_norm(dtype: torch.dtype) -> Call:
    x, residual, weight = rows(37, dtype=dtype), rows(37, dtype=torch.float32), torch.randn(37).to(dtype)
    return lambda ops: ops.add_rms_norm(x, residual, weight, 1e-5)


def silu(dtype: torch.dtype) -> Call:
    x = rows(74, dtype=dtype)
    return lambda ops: ops.silu_and_mul(x)


def gelu(dtype: torch.dtype) -> Call:
    x = rows(74, dtype=dtype)
    return lambda ops: ops.gelu_and_mul(x)


def sample(dtype: torch.dtype) -> Call:
    logits, batch = rows(NUM_TOKENS, dtype=dtype).float(), sampling_batch()
    return lambda ops: ops.sample(logits, batch)


def logprobs(dtype: torch.dtype) -> Call:
    logits, token_ids = rows(NUM_TOKENS, dtype=dtype), torch.arange(NUM_ROWS)
    return lambda ops: ops.token_logprobs(logits, token_ids, 3)


def finite(dtype: torch.dtype) -> Call:
    logits = rows(NUM_TOKENS, dtype=dtype).float()
    logits[::2, 5] = torch.nan
    return lambda ops: ops.finite_rows(logits)


def noise(dtype: torch.dtype) -> Call:
    batch = sampling_batch()
    return lambda ops: ops.philox_uniform(batch.seed, batch.choice, batch.position)


CALLS = [rotary, attend, norm, add_norm, silu, gelu, sample, logprobs, finite, noise]
TYPES = [torch.float32, torch.bfloat16]


def results_of(call: Call, ops: Operators) -> tuple[Tensor, ...]:
    results = call(ops)
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("make", CALLS)
def test_every_row_is_written_whatever_lay_in_its_memory(cpu_library, make, dtype, num_threads):
    call = make(dtype)
    actual = results_of(call, Operators(CpuOperators(LeftOver(cpu_library, num_threads))))
    expected = results_of(call, Operators(reference))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if one.dtype == torch.bfloat16 else 1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_no_request_attend_to_nothing(ops: Operators, dtype):
    out = results_of(attend(dtype), ops)[0]
    last = FIRST + sum(REQUESTS)
    assert not out[:FIRST].any()
    assert not out[last:].any()
    assert out[FIRST:last].any(-1).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_padding_embeds_as_its_token(cpu_library, dtype):
    matrix, ids = torch.randn(20, 9).to(dtype), torch.arange(NUM_ROWS) % 3
    ops = Operators(CpuOperators(LeftOver(cpu_library, 2)))
    assert torch.equal(ops.embedding(ids, ops.prepare_weight(matrix)), matrix[ids])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("make", CALLS)
@pytest.mark.parametrize("num_rows", [0, 1, 8])
def test_rows_beyond_a_recorded_step_stay_as_they_were(cpu_library, make, dtype, num_threads, num_rows):
    """And those of the step come out as they do alone."""
    call = make(dtype)
    whole = results_of(call, Operators(CpuOperators(Immediate(cpu_library, num_threads))))
    recorder = Recorder(cpu_library, num_threads)
    program = recorder.finish(*results_of(call, Operators(CpuOperators(recorder))))
    for output in program.outputs:
        output.view(torch.uint8).fill_(LEFT_OVER)
    program.run(num_rows, 2 if make is attend and num_rows == 8 else 0)
    for output, alone in zip(program.outputs, whole, strict=False):
        assert (output[num_rows:].contiguous().view(torch.uint8) == LEFT_OVER).all()
        if make is not attend:
            assert torch.equal(output[:num_rows], alone[:num_rows])
        elif num_rows == 8:
            two = FIRST + sum(REQUESTS[:2])
            assert torch.equal(output[:two], alone[:two])
            assert not output[two:num_rows].any()
