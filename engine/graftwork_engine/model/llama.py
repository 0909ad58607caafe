"""A decoder-only transformer of the Llama family (Llama, Qwen2, Qwen3, Phi3), read from the top down: model, layer, attention, MLP.

What distinguishes the families (biases, norms of query and key heads, rotary scaling, a tied head) stands in `ModelConfig`. Rows of
all requests lie flat behind each other; who they belong to is the business of the operators that get a `ForwardBatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from graftwork_engine.kv_memory import KvCache
from graftwork_engine.model import wholes
from graftwork_engine.model.config import ModelConfig
from graftwork_engine.model.layers import Destinations, Embedding, ForwardBatch, Placement, Projections, RmsNorm, rotary_table
from graftwork_engine.model.wholes import WholeGroup
from graftwork_kernels.ops import Operators


class Llama:
    """Token ids to hidden states, hidden states to logits. T rows a step, H hidden features, V vocabulary entries."""

    def __init__(self, config: ModelConfig, max_positions: int, place: Placement) -> None:
        self.config = config
        self.place = place
        self.embed_tokens = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, place)
        rotary = rotary_table(config.rope, config.head_dim, max_positions, place.device)
        self.layers = [DecoderLayer(config, layer, rotary, place) for layer in range(config.num_layers)]
        self.norm = RmsNorm("model.norm", config.hidden_size, config.rms_norm_eps, place)
        self.lm_head = (
            self.embed_tokens if config.tie_word_embeddings else Embedding("lm_head", config.vocab_size, config.hidden_size, place)
        )

    def destinations(self) -> Destinations:
        """Where each tensor of a checkpoint goes."""
        yield from self.embed_tokens.destinations()
        for layer in self.layers:
            yield from layer.destinations()
        yield from self.norm.destinations()
        if self.lm_head is not self.embed_tokens:
            yield from self.lm_head.destinations()

    def prepare(self, ops: Operators) -> None:
        """Let ``ops``, which will run this model, lay out the loaded weights, one after the other: only one is kept twice."""
        self.embed_tokens.prepare(ops)
        for layer in self.layers:
            layer.prepare(ops)
        if self.lm_head is not self.embed_tokens:
            self.lm_head.prepare(ops)

    def hidden_states(self, token_ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """int64 [T] → [T, H], normed for the head; writes each row's keys and values into ``kv``."""
        batch = self._planned(batch)
        hidden = self.embed_tokens(token_ids, batch)
        residual: Tensor | None = None  # fp32, as what is added to it: bf16 would round in every layer
        for layer, keys, values in zip(self.layers, kv.keys, kv.values, strict=True):
            hidden, residual = layer(hidden, residual, batch, keys, values)
        hidden, _ = self.norm.add(hidden, residual, batch)
        return hidden

    def _planned(self, batch: ForwardBatch) -> ForwardBatch:
        """With what operators work out of a step once for all layers."""
        group = self.config.num_heads // self.config.num_kv_heads
        adapters, attention = batch.ops.plan_step(batch.adapter_memory, batch.adapters, batch.attention, group, self.place.dtype)
        return replace(batch, adapters=adapters, attention=attention)

    def logits(self, ops: Operators, hidden: Tensor, groups: Sequence[WholeGroup] = (), num_logits: int = 0) -> Tensor:
        """[rows, H] → fp32 [rows, V], for the rows that need them. ``groups`` of them have heads of their own; V is at least
        ``num_logits``, and what a row's head does not have is -inf.
        """
        if groups or num_logits:
            return wholes.logits(ops, hidden, self.lm_head.weight, groups, num_logits)
        return ops.linear(hidden, self.lm_head.weight, out_dtype=torch.float32)


class DecoderLayer:
    """Attention, then the MLP, each on the normed sum of all that came before."""

    def __init__(self, config: ModelConfig, layer: int, rotary: Tensor, place: Placement) -> None:
        name = f"model.layers.{layer}"
        self.input_norm = RmsNorm(f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps, place)
        self.self_attn = Attention(config, layer, rotary, place)
        self.post_attention_norm = RmsNorm(f"{name}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps, place)
        self.mlp = Mlp(config, layer, place)

    def destinations(self) -> Destinations:
        """Where this layer's tensors go."""
        parts = (self.input_norm, self.self_attn, self.post_attention_norm, self.mlp)
        return chain.from_iterable(part.destinations() for part in parts)

    def prepare(self, ops: Operators) -> None:
        """See `Llama.prepare`."""
        for projections in (self.self_attn.qkv_proj, self.self_attn.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj):
            projections.prepare(ops)

    def __call__(
        self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(what this layer adds last, the sum of everything before it); the next norm adds the two."""
        hidden, residual = self.input_norm.add(hidden, residual, batch)
        hidden = self.self_attn(hidden, batch, keys, values)
        hidden, residual = self.post_attention_norm.add(hidden, residual, batch)
        return self.mlp(hidden, batch), residual


class Attention:
    """Grouped-query attention with rotary positions over the paged cache."""

    def __init__(self, config: ModelConfig, layer: int, rotary: Tensor, place: Placement) -> None:
        self.head_dim = config.head_dim
        self.rotary = rotary
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {"self_attn.q_proj": query_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        fused = "self_attn.qkv_proj" if config.fuses_projections else None
        self.qkv_proj = Projections(layer, config.hidden_size, sizes, config.qkv_bias, place, fused)
        self.o_proj = Projections(layer, query_size, {"self_attn.o_proj": config.hidden_size}, config.o_bias, place)
        self.qk_norm: tuple[RmsNorm, RmsNorm] | None = None
        if config.qk_norm:
            name = f"model.layers.{layer}.self_attn"
            self.qk_norm = (
                RmsNorm(f"{name}.q_norm", config.head_dim, config.rms_norm_eps, place),
                RmsNorm(f"{name}.k_norm", config.head_dim, config.rms_norm_eps, place),
            )

    def destinations(self) -> Destinations:
        """Where this block's tensors go."""
        return chain.from_iterable(part.destinations() for part in (self.qkv_proj, self.o_proj, *(self.qk_norm or ())))

    def __call__(self, hidden: Tensor, batch: ForwardBatch, keys: Tensor, values: Tensor) -> Tensor:
        """[T, H] → fp32 [T, H]."""
        packed = torch.split_with_sizes(self.qkv_proj(hidden, batch), self.qkv_proj.sizes, dim=-1)
        q, k, v = (part.view(len(hidden), -1, self.head_dim) for part in packed)
        if self.qk_norm is not None:
            q, k = self.qk_norm[0](q, batch), self.qk_norm[1](k, batch)
        q = batch.ops.rotary_and_write_kv(q, k, v, batch.positions, self.rotary, keys, values, batch.attention.kv_slot)
        attended = batch.ops.paged_attention(q, keys, values, batch.attention, self.head_dim**-0.5)
        return self.o_proj(attended.flatten(-2), batch, torch.float32)


class Mlp:
    """The gated feed-forward block (SwiGLU; Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, layer: int, place: Placement) -> None:
        sizes = {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size}
        fused = "mlp.gate_up_proj" if config.fuses_projections else None
        self.gate_up_proj = Projections(layer, config.hidden_size, sizes, config.mlp_bias, place, fused)
        self.down_proj = Projections(layer, config.intermediate_size, {"mlp.down_proj": config.hidden_size}, config.mlp_bias, place)

    def destinations(self) -> Destinations:
        """Where this block's tensors go."""
        return chain(self.gate_up_proj.destinations(), self.down_proj.destinations())

    def __call__(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, H] → fp32 [T, H]."""
        gate_up = self.gate_up_proj(hidden, batch, torch.float32)
        return self.down_proj(batch.ops.silu_and_mul(gate_up, out_dtype=hidden.dtype), batch, torch.float32)
