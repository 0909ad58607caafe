"""What an implementation of the operators is: the functions of `graftwork_kernels.ops.Operators`, arguments already checked."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

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


class Implementation(Protocol):
    """Every function does what the method of its name in `graftwork_kernels.ops.Operators` says; the two that plan do their part
    of its `plan_step`, and give back what they got where nothing is to be planned."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
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
    ) -> Tensor: ...
    def silu_and_mul(self, gate_up: Tensor, out_dtype: torch.dtype) -> Tensor: ...
    def gelu_and_mul(self, gate_up: Tensor, out_dtype: torch.dtype) -> Tensor: ...
    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor: ...
    def prepare_weight(self, weight: Tensor) -> Weight: ...
    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor: ...
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor: ...
    def adapter_linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        memory: AdapterMemory,
        batch: AdapterBatch,
        sites: tuple[LinearSite, ...],
        out_dtype: torch.dtype,
    ) -> Tensor: ...
    def plan_adapters(self, memory: AdapterMemory, batch: AdapterBatch) -> AdapterBatch: ...
    def plan_attention(self, batch: AttentionBatch, group: int, dtype: torch.dtype) -> AttentionBatch: ...
    def finite_rows(self, logits: Tensor) -> Tensor: ...
    def apply_logit_bias(self, logits: Tensor, bias: LogitBias) -> None: ...
    def apply_penalties(self, logits: Tensor, penalties: Penalties) -> None: ...
    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor: ...
    def philox_uniform(self, seed: Tensor, choice: Tensor, position: Tensor) -> Tensor: ...
    def token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]: ...
