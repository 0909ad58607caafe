"""The CPU implementation of the operators: every method issues a command. Refuses to know whether it runs now or is recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from graftwork_kernels.cpu import attention, elementwise, linear, sampling
from graftwork_kernels.cpu.issue import Issuer
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


class CpuOperators:
    """An `graftwork_kernels.implementation.Implementation` in C++."""

    def __init__(self, issuer: Issuer) -> None:
        self.issuer = issuer

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `graftwork_kernels.ops.Operators`, here and below."""
        return elementwise.rms_norm(self.issuer, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return elementwise.add_rms_norm(self.issuer, x, residual, weight, eps)

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
        return attention.rotary_and_write_kv(self.issuer, q, k, v, positions, cos_sin, k_cache, v_cache, kv_slot)

    def silu_and_mul(self, gate_up: Tensor, out_dtype: torch.dtype) -> Tensor:
        return elementwise.silu_and_mul(self.issuer, gate_up, out_dtype)

    def gelu_and_mul(self, gate_up: Tensor, out_dtype: torch.dtype) -> Tensor:
        return elementwise.gelu_and_mul(self.issuer, gate_up, out_dtype)

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
        return attention.paged_attention(self.issuer, q, k_cache, v_cache, batch, scale)

    def prepare_weight(self, weight: Tensor) -> Weight:
        return linear.prepare_weight(self.issuer, weight)

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        return linear.embedding(self.issuer, token_ids, weight)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        return linear.linear(self.issuer, x, weight, bias, out_dtype)

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
        return linear.adapter_linear(self.issuer, x, weight, bias, memory, batch, sites, out_dtype)

    def plan_adapters(self, memory: AdapterMemory, batch: AdapterBatch) -> AdapterBatch:  # noqa: ARG002 - the implementations'
        return batch

    def plan_attention(self, batch: AttentionBatch, group: int, dtype: torch.dtype) -> AttentionBatch:  # noqa: ARG002 - the implementations'
        return batch

    def finite_rows(self, logits: Tensor) -> Tensor:
        return sampling.finite_rows(self.issuer, logits)

    def apply_logit_bias(self, logits: Tensor, bias: LogitBias) -> None:
        sampling.apply_logit_bias(self.issuer, logits, bias)

    def apply_penalties(self, logits: Tensor, penalties: Penalties) -> None:
        sampling.apply_penalties(self.issuer, logits, penalties)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return sampling.sample(self.issuer, logits, batch)

    def philox_uniform(self, seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
        return sampling.philox_uniform(self.issuer, seed, choice, position)

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        return sampling.token_logprobs(self.issuer, logits, token_ids, num_top)
