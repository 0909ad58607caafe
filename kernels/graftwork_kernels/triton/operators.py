"""The Triton implementation of the operators. Refuses to know steps and graphs: what it launches may be captured, whoever does."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from graftwork_kernels.layout import (
    AdapterBatch,
    AdapterMemory,
    AttentionBatch,
    LinearSite,
    LogitBias,
    Penalties,
    SamplingBatch,
    Weight,
)
from graftwork_kernels.triton import attention, elementwise, linear, logprobs, penalties, philox, sampling
from graftwork_kernels.triton.linear import AdapterLauncher, Form

PROGRAMS_PER_PROCESSOR = 8
"""Of a persistent kernel, on one multiprocessor at once."""


class TritonOperators:
    """An `graftwork_kernels.implementation.Implementation` for adapters of up to ``max_rank``.

    Whoever loads adapters must refuse larger ones, as the engine's `max_adapter_rank` does: a kernel has nobody to tell, and would
    write outside of its memory.

    ``num_programs`` of a persistent kernel run at once. ``is_wide``: everything is multiplied in fp32, as the interpreter must,
    whose products of bf16 are wrong. ``is_exact``, ``has_e4m3``: see `graftwork_kernels.triton.linear.AdapterLauncher`.
    """

    def __init__(
        self,
        num_programs: int,
        max_rank: int,
        *,
        has_e4m3: bool,
        form: Form = Form.TWO,
        is_exact: bool = False,
        is_wide: bool = False,
    ) -> None:
        self._num_programs = num_programs
        self._is_wide = is_wide
        self._add_adapters = AdapterLauncher(num_programs, max_rank, form, is_exact, is_wide, has_e4m3)

    @classmethod
    def on(cls, device: torch.device, max_rank: int, *, form: Form = Form.TWO) -> TritonOperators:
        """For a CUDA device."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(PROGRAMS_PER_PROCESSOR * processors, max_rank, has_e4m3=linear.has_e4m3(device), form=form)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `graftwork_kernels.ops.Operators`, here and below."""
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return elementwise.add_rms_norm(x, residual, weight, eps)

    def rotary_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_slot: Tensor,
    ) -> Tensor:
        return elementwise.rotary_and_write_kv(q, k, v, positions, cos_sin, k_cache, v_cache, kv_slot)

    def silu_and_mul(self, gate_up: Tensor, out_dtype: torch.dtype) -> Tensor:
        return elementwise.silu_and_mul(gate_up, out_dtype)

    def gelu_and_mul(self, gate_up: Tensor, out_dtype: torch.dtype) -> Tensor:
        return elementwise.gelu_and_mul(gate_up, out_dtype)

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
        return attention.paged_attention(q, k_cache, v_cache, batch, scale, num_programs=self._num_programs, is_wide=self._is_wide)

    def prepare_weight(self, weight: Tensor) -> Weight:
        return Weight.plain(weight)

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        return functional.embedding(token_ids, weight.matrix)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        return linear.linear(x, weight, bias, out_dtype)

    def adapter_linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        memory: AdapterMemory,
        batch: AdapterBatch,
        sites: tuple[LinearSite, ...],
        out_dtype: torch.dtype,
    ) -> Tensor:
        return self._add_adapters(x, weight, bias, memory, batch, sites, out_dtype)

    def plan_adapters(self, memory: AdapterMemory, batch: AdapterBatch) -> AdapterBatch:
        if not len(batch.token_adapter) or not memory.sites.shape[0]:  # linears of the base alone, which have no tasks
            return batch
        return dataclasses.replace(batch, tasks=self._add_adapters.plan(memory, batch))

    def plan_attention(self, batch: AttentionBatch, group: int, dtype: torch.dtype) -> AttentionBatch:
        if not len(batch.context_len):
            return batch
        return dataclasses.replace(batch, tasks=attention.plan_attention(batch, group, self._is_wide or dtype == torch.float32))

    def finite_rows(self, logits: Tensor) -> Tensor:
        return penalties.finite_rows(logits)

    def apply_logit_bias(self, logits: Tensor, bias: LogitBias) -> None:
        penalties.apply_logit_bias(logits, bias)

    def apply_penalties(self, logits: Tensor, penalties_: Penalties) -> None:
        penalties.apply_penalties(logits, penalties_)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return sampling.sample(logits, batch)

    def philox_uniform(self, seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
        return philox.philox_uniform(seed, choice, position)

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        return logprobs.token_logprobs(logits, token_ids, num_top)
