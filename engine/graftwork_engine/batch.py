"""A step plan as the tensors that the model and the operators read. Built with NumPy, once a step, without a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graftwork_engine.messages import Sampling
from graftwork_engine.model.layers import ForwardBatch
from graftwork_engine.request import Request
from graftwork_engine.sched.plan import BASE, ScheduledRequest, StepPlan
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import AdapterMemory, AttentionBatch, LogitBias, Penalties, SamplingBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step of T rows.

    ``token_ids`` int64 [T]. ``sample_rows`` int64 [S] are the rows whose logits give a token, ``sampling`` says how, in the same
    order; ``logit_bias`` and ``penalties`` are None in a step where no request has any. The logits of ``prompt_rows`` int64 [P]
    score the prompt tokens ``prompt_targets`` int64 [P], each the one that follows.
    """

    token_ids: Tensor
    forward: ForwardBatch
    sample_rows: Tensor
    sampling: SamplingBatch
    logit_bias: LogitBias | None
    penalties: Penalties | None
    prompt_rows: Tensor
    prompt_targets: Tensor


def num_scored(scheduled: ScheduledRequest) -> int:
    """Prompt tokens that this range scores: those that follow one of its tokens, while the client lacks their logprobs."""
    if not scheduled.request.needs_prompt_logprobs:
        return 0
    last = len(scheduled.request.prompt_ids) - 1
    return max(0, min(scheduled.start + scheduled.num_tokens, last) - scheduled.start)


def build_batch(plan: StepPlan, block_size: int, memory: AdapterMemory, device: torch.device) -> StepBatch:
    """The tensors of ``plan``, which must not be empty."""
    scheduled = plan.scheduled
    counts = np.array([s.num_tokens for s in scheduled])
    starts = np.array([s.start for s in scheduled])
    query_start = np.concatenate(([0], np.cumsum(counts)))
    request_of_row = np.repeat(np.arange(len(scheduled)), counts)
    positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[request_of_row]

    token_ids: list[int] = []
    for s in scheduled:
        token_ids.extend(s.request.token_ids(s.start, s.start + s.num_tokens))
    adapter_of_request = np.array([s.adapter_index for s in scheduled], dtype=np.int32)
    adapter_start = np.array([s.request.adapter_start for s in scheduled])
    token_adapter = np.where(positions >= adapter_start[request_of_row], adapter_of_request[request_of_row], np.int32(BASE))

    prompt_rows, prompt_targets = _scored_rows(scheduled, query_start)
    sample_rows = [row - 1 for s, row in zip(scheduled, query_start[1:].tolist(), strict=True) if s.samples]
    sampled = [s.request for s in scheduled if s.samples]
    return StepBatch(
        token_ids=torch.tensor(token_ids, device=device),
        forward=ForwardBatch(
            positions=_tensor(positions, device),
            attention=_attention_batch(scheduled, query_start, starts + counts, positions, request_of_row, block_size, device),
            adapters=build_adapter_batch(_tensor(token_adapter, device), device),
            adapter_memory=memory,
        ),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        sampling=_sampling_batch(sampled, device),
        logit_bias=_logit_bias(sampled, device),
        penalties=_penalties(sampled, device),
        prompt_rows=torch.tensor(prompt_rows, dtype=torch.int64, device=device),
        prompt_targets=torch.tensor(prompt_targets, dtype=torch.int64, device=device),
    )


def _attention_batch(
    scheduled: Sequence[ScheduledRequest],
    query_start: npt.NDArray[np.int64],
    context_len: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    request_of_row: npt.NDArray[np.int64],
    block_size: int,
    device: torch.device,
) -> AttentionBatch:
    blocks_needed = -(-context_len // block_size)
    block_table = np.zeros((len(scheduled), int(blocks_needed.max())), dtype=np.int32)
    for row, (s, needed) in enumerate(zip(scheduled, blocks_needed.tolist(), strict=True)):
        block_table[row, :needed] = s.block_ids[:needed]
    block_of_row = block_table[request_of_row, positions // block_size].astype(np.int64)
    return AttentionBatch(
        query_start=_tensor(query_start.astype(np.int32), device),
        context_len=_tensor(context_len.astype(np.int32), device),
        block_table=_tensor(block_table, device),
        kv_slot=_tensor(block_of_row * block_size + positions % block_size, device),
        max_query_len=int(np.diff(query_start).max()),
        max_context_len=int(context_len.max()),
    )


def _scored_rows(scheduled: Sequence[ScheduledRequest], query_start: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
    rows: list[int] = []
    targets: list[int] = []
    for s, first_row in zip(scheduled, query_start[:-1].tolist(), strict=True):
        if count := num_scored(s):
            rows.extend(range(first_row, first_row + count))
            targets.extend(s.request.prompt_ids[s.start + 1 : s.start + 1 + count])
    return rows, targets


def _sampling_batch(requests: Sequence[Request], device: torch.device) -> SamplingBatch:
    wanted: list[Sampling] = [r.sampling for r in requests]
    return SamplingBatch(
        temperature=torch.tensor([s.temperature for s in wanted], dtype=torch.float32, device=device),
        top_k=torch.tensor([s.top_k for s in wanted], dtype=torch.int32, device=device),
        top_p=torch.tensor([s.top_p for s in wanted], dtype=torch.float32, device=device),
        min_p=torch.tensor([s.min_p for s in wanted], dtype=torch.float32, device=device),
        seed=_tensor(np.array([s.seed for s in wanted], dtype=np.uint64).view(np.int64), device),
        choice=torch.tensor([s.choice for s in wanted], dtype=torch.int32, device=device),
        position=torch.tensor([r.num_output_tokens for r in requests], dtype=torch.int32, device=device),
    )


def _logit_bias(requests: Sequence[Request], device: torch.device) -> LogitBias | None:
    biases = [request.token_bias() for request in requests]
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    return LogitBias(
        row_start=_row_start([0 if bias is None else len(bias.token_ids) for bias in biases], device),
        token_id=_tensor(np.concatenate([np.asarray(bias.token_ids) for bias in present]), device),
        value=_tensor(np.concatenate([np.asarray(bias.values) for bias in present]), device),
    )


def _penalties(requests: Sequence[Request], device: torch.device) -> Penalties | None:
    counts = [request.token_counts() for request in requests]
    present = [count for count in counts if count is not None]
    if not present:
        return None
    wanted = [request.sampling for request in requests]
    return Penalties(
        row_start=_row_start([0 if count is None else len(count.token_ids) for count in counts], device),
        token_id=_tensor(np.concatenate([np.asarray(count.token_ids) for count in present]), device),
        output_count=_tensor(np.concatenate([np.asarray(count.counts) for count in present]), device),
        repetition=torch.tensor([s.repetition_penalty for s in wanted], dtype=torch.float32, device=device),
        frequency=torch.tensor([s.frequency_penalty for s in wanted], dtype=torch.float32, device=device),
        presence=torch.tensor([s.presence_penalty for s in wanted], dtype=torch.float32, device=device),
    )


def _row_start(lengths: Sequence[int], device: torch.device) -> Tensor:
    return _tensor(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32), device)


def _tensor(array: npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.float32], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
