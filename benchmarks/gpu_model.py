"""A random model on the GPU kernels, and random steps for it: what graphs, whole steps and compiled variants are checked with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from gpu_bench import Bench
from gpu_loads import BLOCK_SIZE, attention_step
from gpu_sections_logits import MOST_BIASES, MOST_PENALTIES, random_bias, random_penalties, random_sampling
from graftwork_engine.kv_memory import allocate_kv_cache
from graftwork_engine.model.layers import ForwardBatch, Placement
from graftwork_engine.model.registry import build_model
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import AdapterBatch, AdapterMemory, AttentionBatch, LogitBias, Penalties, SamplingBatch
from graftwork_kernels.ops import Operators
from graftwork_kernels.triton.operators import TritonOperators

TOP_LOGPROBS = 5


@dataclass(frozen=True)
class Step:
    """All that a step reads beside the model, its cache and the adapters. Rows beyond the requests' are padding."""

    token_ids: Tensor
    positions: Tensor
    adapters: AdapterBatch
    requests: AttentionBatch
    sampled: Tensor  # the rows that tokens are drawn from
    sampling: SamplingBatch
    bias: LogitBias
    penalties: Penalties


class RandomModel:
    """A Llama of the bench's sizes, or of fewer layers, with random weights and a cache full of random keys and values."""

    def __init__(self, bench: Bench, num_blocks: int, num_layers: int | None = None) -> None:
        self.bench, self.num_blocks = bench, num_blocks
        self.shape = replace(bench.shape, num_layers=num_layers or bench.shape.num_layers)
        self.dtype = bench.dtypes[0]
        self.max_positions = num_blocks * BLOCK_SIZE
        config = self.shape.config(self.max_positions)
        self.model = build_model(config, self.max_positions, Placement(self.dtype, bench.device))
        for _, parameter in self.model.destinations():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
        self.kv = allocate_kv_cache(config, num_blocks, BLOCK_SIZE, self.dtype, bench.device)
        for cache in (*self.kv.keys, *self.kv.values):
            cache.normal_()

    def logits(self, ops: TritonOperators, step: Step, memory: AdapterMemory) -> tuple[Tensor, Tensor]:
        """Hidden states of all rows, and the logits of those that tokens are drawn from."""
        checked = Operators(ops)
        batch = ForwardBatch(checked, step.positions, step.requests, step.adapters, memory)
        hidden = self.model.hidden_states(step.token_ids, batch, self.kv)
        return hidden, self.model.logits(checked, hidden[step.sampled])

    def whole_step(self, ops: TritonOperators, step: Step, memory: AdapterMemory) -> tuple[Tensor, ...]:
        """A step with all that a request may ask for: hidden states, raw logits, which are finite, tokens, logprobs."""
        hidden, logits = self.logits(ops, step, memory)
        raw, finite = logits.clone(), ops.finite_rows(logits)
        ops.apply_logit_bias(logits, step.bias)
        ops.apply_penalties(logits, step.penalties)
        tokens = ops.sample(logits, step.sampling)
        return hidden, raw, finite, tokens, *ops.token_logprobs(raw, tokens, TOP_LOGPROBS)

    def step(self, adapters: Sequence[int], query_len: Sequence[int], context_len: Sequence[int], num_rows: int) -> Step:
        """``num_rows`` rows, the first of which are those of requests; ``adapters`` of each request.

        Requests without rows stand for those that a padded step lacks. Every request draws a token from its last row; one without
        rows from row 0, which nobody reads.
        """
        device, vocab = self.bench.device, self.shape.vocab
        requests = attention_step(query_len, context_len, self.num_blocks, device)
        missing = num_rows - sum(query_len)
        slots = torch.cat((requests.kv_slot, torch.full((missing,), -1, dtype=torch.int64, device=device)))
        positions = [
            position
            for length, context in zip(query_len, context_len, strict=True)
            for position in range(context - length, context)
        ]
        its = [adapter for adapter, length in zip(adapters, query_len, strict=True) for _ in range(length)]
        ends = requests.query_start[1:].long() - 1
        return Step(
            token_ids=torch.randint(0, vocab, (num_rows,)).to(device),
            positions=torch.tensor(positions + [0] * missing).to(device),
            adapters=build_adapter_batch(its + [-1] * missing, device),
            requests=replace(requests, kv_slot=slots),
            sampled=torch.where(requests.query_start.diff() > 0, ends, 0),
            sampling=random_sampling(len(query_len), vocab, device),
            bias=random_bias(len(query_len), vocab, device),
            penalties=random_penalties(len(query_len), vocab, device),
        )


def with_room(step: Step, max_context_len: int, vocab: int) -> Step:
    """The same with lists as long as any step's of its requests can be, as memory has them that stays where it is."""
    num_requests = len(step.requests.context_len)
    width = -(-max_context_len // (16 * BLOCK_SIZE)) * 16
    biases, penalties = (num_requests * min(most, vocab) for most in (MOST_BIASES, MOST_PENALTIES))
    return replace(
        step,
        requests=replace(step.requests, block_table=_widened(step.requests.block_table, width), max_context_len=max_context_len),
        bias=replace(step.bias, token_id=_widened(step.bias.token_id, biases), value=_widened(step.bias.value, biases)),
        penalties=replace(
            step.penalties,
            token_id=_widened(step.penalties.token_id, penalties),
            output_count=_widened(step.penalties.output_count, penalties),
        ),
    )


def _widened(tensor: Tensor, size: int) -> Tensor:
    """Its last dimension filled up with zeros."""
    return torch.nn.functional.pad(tensor, (0, size - tensor.shape[-1]))


def write_over(target: object, source: object) -> None:
    """Every tensor of ``source`` into that of ``target``, which has its shape."""
    for field in fields(target):  # type: ignore[arg-type]
        to, value = getattr(target, field.name), getattr(source, field.name)
        if isinstance(to, Tensor):
            to.copy_(value)
        elif is_dataclass(to):
            write_over(to, value)
