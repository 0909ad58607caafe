"""The operator contract: everything the engine may ask of arithmetic. Refuses to know requests, models and files.

Each operator states what it computes in pseudo-NumPy, then what goes wrong. Arguments share a device; T rows are a step's tokens.
A wrong shape or type raises ValueError naming the argument; values (an index out of range, a NaN) are the caller's word and
are not searched for. Where a line below says that one raises, it does on the CPU; on a GPU nobody looks. "Float" is fp32, bf16 or
fp16; arithmetic is fp32 inside and is rounded once, where a line says no other.

Rows: an operator writes every row of its results. A row of padding, which has no request, adapter or slot, is one like any other
where an operator says nothing else, so its token id and position must be valid. Where a recorded pass runs a step with fewer rows
than it was recorded with, the rows beyond are neither read nor written. After an error, results are undefined.

Batch invariance: whether a row's result is the same bits whatever else is in the step. It holds where an operator says so, for one
implementation, device and number of threads. Where it does not, results differ by the rounding of an fp32 sum in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graftwork_kernels.checks import (
    check_adapters,
    check_caches,
    check_dtype,
    check_entries,
    check_even_last_dim,
    check_float,
    check_last_dim,
    check_linear,
    check_logits,
    check_norm,
    check_requests,
    check_shape,
    check_vocabulary,
)
from graftwork_kernels.implementation import Implementation
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


class Operators:
    """The operators of one `Implementation`, their arguments checked."""

    def __init__(self, implementation: Implementation) -> None:
        self._implementation = implementation

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension; leading dimensions are any, so it also norms each head of q or k.

        Semantics: ``weight * cast(x / sqrt(mean(x**2, -1) + eps))``: normalised in fp32, cast to x's type, then multiplied in that
        type, the order Hugging Face's Llama has. x float [..., H], weight [H] of x's type → [..., H]. Batch-invariant.
        """
        check_norm(x, weight, x.dtype)
        return self._implementation.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add to the residual stream and norm the sum.

        Semantics: ``total = x + residual`` in fp32; ``(rms_norm(total, weight, eps), total)``, the first cast to the weight's type
        before the weight is multiplied. None for the residual, where nothing came before, is 0. x float [..., H] of the weight's
        type or fp32, residual fp32 (a stream of many layers loses what a bf16 sum rounds away). Batch-invariant.
        """
        check_norm(x, weight, weight.dtype if x.dtype == torch.float32 else x.dtype)
        if residual is not None:
            check_dtype("residual", residual, torch.float32)
            check_shape("residual", residual, *x.shape)
        return self._implementation.add_rms_norm(x, residual, weight, eps)

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
        """Rotate queries and keys to their positions, and put keys and values into the paged cache; the rotated queries.

        Semantics: a head x of row t is turned, its two halves paired (Hugging Face's convention), as ``cos, sin =
        split(cos_sin[positions[t]], 2)``; ``a, b = split(x, 2)``; ``concat(a * cos - b * sin, b * cos + a * sin)``, and cast to
        its type. Then, for each row t with ``s = kv_slot[t] >= 0``: ``k_cache[s // block_size, :, s % block_size] = turned k[t]``,
        the same for v as it is. A slot of -1 writes nowhere; two rows with one slot: either may win.

        q float [T, Hq, D], k and v [T, Hk, D] of its type, whose rows may lie apart (heads of a row may not); positions int64 [T];
        cos_sin fp32 [P, D], cosines in the first half; caches of the same type, contiguous, [num_blocks, Hk, block_size, D];
        kv_slot int64 [T]. A position >= P is an IndexError. Returns [T, Hq, D]. Batch-invariant.
        """
        check_float("q", q)
        check_even_last_dim("q", q)
        check_shape("q", q, None, None, None)
        num_kv_heads, head_dim = check_caches(k_cache, v_cache)
        num_rows = q.shape[0]
        check_shape("q", q, num_rows, None, head_dim)
        for name, tensor in (("k", k), ("v", v)):
            check_dtype(name, tensor, k_cache.dtype)
            check_shape(name, tensor, num_rows, num_kv_heads, head_dim)
        check_dtype("k", k, q.dtype)
        check_dtype("positions", positions, torch.int64)
        check_shape("positions", positions, num_rows)
        check_dtype("cos_sin", cos_sin, torch.float32)
        check_shape("cos_sin", cos_sin, None, head_dim)
        check_dtype("kv_slot", kv_slot, torch.int64)
        check_shape("kv_slot", kv_slot, num_rows)
        return self._implementation.rotary_and_write_kv(q, k, v, positions, cos_sin, k_cache, v_cache, kv_slot)

    def silu_and_mul(self, gate_up: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """The gated activation of Llama's MLP, SwiGLU.

        Semantics: ``gate, up = split(gate_up, 2, -1)``; ``gate / (1 + exp(-gate)) * up``. Float [..., 2I] → [..., I], of its type
        if ``out_dtype`` is None. Batch-invariant.
        """
        check_float("gate_up", gate_up)
        check_even_last_dim("gate_up", gate_up)
        return self._implementation.silu_and_mul(gate_up, out_dtype or gate_up.dtype)

    def gelu_and_mul(self, gate_up: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """The gated activation of Gemma's MLP, GEGLU.

        Semantics: ``gate, up = split(gate_up, 2, -1)``; ``gelu(gate) * up``. Float [..., 2I] → [..., I], of its type if
        ``out_dtype`` is None. Batch-invariant.
        gelu is the tanh approximation, ``0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g**3)))`` (Hugging Face's "gelu_pytorch_tanh").
        """
        check_float("gate_up", gate_up)
        check_even_last_dim("gate_up", gate_up)
        return self._implementation.gelu_and_mul(gate_up, out_dtype or gate_up.dtype)

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
        """Causal attention of a step's rows, any mix of prefill chunks and decode rows, over the paged cache.

        Semantics, for row i of request r and query head h, at position ``p = context_len[r] - query_len[r] + i``:
        ``slots = [block_table[r, j // block_size] * block_size + j % block_size for j in 0 .. p]``; with K and V those slots of the
        caches' head ``h // (Hq / Hk)``: ``softmax(scale * K @ q) @ V``, softmax and sums in fp32. The row's own key and value have
        been written before. Rows of no request, before the first's or after the last's, are 0. Nothing outside a request's own
        context is read into its result.

        q float [T, Hq, D], Hq a multiple of Hk; caches as in `rotary_and_write_kv`; 1 ≤ query_len ≤ context_len for a request that
        has rows.

        Batch-invariant: a decode row is summed in chunks fixed by its own context, a prefill chunk is computed alone. The same
        token computed in a prefill chunk and as a decode row differs by fp32 rounding.
        """
        check_float("q", q)
        check_shape("q", q, None, None, None)
        num_kv_heads, head_dim = check_caches(k_cache, v_cache)
        check_last_dim("q", q, head_dim)
        if q.shape[1] % num_kv_heads:
            raise ValueError(f"q: {q.shape[1]} heads do not divide among {num_kv_heads} key and value heads")
        check_requests(batch)
        return self._implementation.paged_attention(q, k_cache, v_cache, batch, scale)

    def prepare_weight(self, weight: Tensor) -> Weight:
        """A matrix [out, in] in the order in which this implementation reads it, for `embedding`, `linear` and `adapter_linear`.

        The tensor may be kept or copied: it is not to be written afterwards. Done once, after loading.
        """
        check_float("weight", weight)
        check_shape("weight", weight, None, None)
        if weight.shape[1] == 0:
            raise ValueError(f"weight: expected a column at least, got {tuple(weight.shape)}")
        return self._implementation.prepare_weight(weight)

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Rows of a matrix. token_ids int64 [T], 0 <= id < out → [T, in] of the weight's type; another id is an IndexError.

        Batch-invariant.
        """
        check_dtype("token_ids", token_ids, torch.int64)
        check_shape("token_ids", token_ids, None)
        return self._implementation.embedding(token_ids, weight)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """A linear that carries no adapter, for instance the output head, whose logits ask for ``out_dtype`` fp32.

        Semantics: ``cast(x @ weight.T + bias)``, in x's type if ``out_dtype`` is None. x float [T, in], weight [out, in] of its
        type, bias [out] or None.

        Batch-invariant in the `cpu` implementation; not in the reference, in `onednn` and in `triton`, whose libraries pick their
        kernel by the number of rows. In `onednn`, with x in bf16, the product is rounded to bf16 before the bias is added.
        """
        check_linear(x, weight, bias)
        return self._implementation.linear(x, weight, bias, x.dtype if out_dtype is None else out_dtype)

    def adapter_linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        memory: AdapterMemory,
        batch: AdapterBatch,
        sites: tuple[LinearSite, ...],
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A linear, or several packed into one weight, to which each row's own adapter is added.

        Semantics, for row t with adapter ``a = token_adapter[t]``, from ``y = x[t] @ weight.T`` and ``b = bias`` (None: 0)::

            if a >= 0:
                for site in sites:
                    record, columns = memory.sites[a, site.index], site.start : site.start + site.size
                    A = rows record.A_ROW .. + RANK   of memory, [r, in]
                    B = rows record.B_ROW .. + RANK   of memory, [r, size], B of the LoRA paper transposed, the scale folded in
                    y[columns] += (x[t] @ A.T) @ B
                    if record.SCALE_ROW >= 0: y[columns] *= that fp32 row
                    if record.BIAS_ROW >= 0: b[columns] = that fp32 row     # in place of the base's, not beside it
            out[t] = cast(y + b)

        Rows of memory are found through ``row_offset`` and read as `graftwork_kernels.row_codec` says; all is fp32 until the cast.
        x float [T, in], weight [out, in] of its type, bias [out] or None; the result in x's type if ``out_dtype`` is None.
        ``sites`` do not overlap and need not cover the columns.
        An adapter that memory does not hold, and a record that points outside memory, raise ValueError or IndexError.

        Batch invariance: the base product has that of `linear`, and its rounding; in `triton` it is rounded to the result's type
        before adapter and bias are added. What the adapter adds is batch-invariant in all but the reference; there it depends, by
        fp32 rounding, on how many rows of the same adapter are in the step. It never depends on rows of others: their weights,
        ranks and values never meet.
        """
        check_linear(x, weight, bias)
        check_adapters(memory, batch, x.shape[0])
        for site in sites:
            if not (0 <= site.index < memory.sites.shape[1] and 0 <= site.start <= site.start + site.size <= weight.out_features):
                raise ValueError(f"sites: {site} lies outside {memory.sites.shape[1]} sites or {weight.out_features} columns")
        return self._implementation.adapter_linear(x, weight, bias, memory, batch, sites, out_dtype or x.dtype)

    def plan_step(
        self, memory: AdapterMemory, adapters: AdapterBatch, requests: AttentionBatch, group: int, dtype: torch.dtype
    ) -> tuple[AdapterBatch, AttentionBatch]:
        """The batches of a step with whatever lists of work its implementation reads in every linear and every attention: made
        once a step, where each of them would else make its own. ``group``: query heads for each head of the cache;
        ``dtype``: of queries.

        Semantics: none; `adapter_linear` and `paged_attention` give the same bits with what comes back as without it. It is for
        this memory, group and type, until one of them or a batch is written. Launches nothing that a captured graph cannot hold
        where none of the two operators does.
        """
        check_adapters(memory, adapters, adapters.token_adapter.numel())
        check_requests(requests)
        if group < 1:
            raise ValueError(f"group: expected a query head at least for each head of the cache, got {group}")
        implementation = self._implementation
        return implementation.plan_adapters(memory, adapters), implementation.plan_attention(requests, group, dtype)

    def finite_rows(self, logits: Tensor) -> Tensor:
        """Which rows a token can be drawn from.

        Semantics: ``isfinite(max(logits, -1))``, where the maximum of a row that holds NaN is NaN: false for a row with NaN or +inf
        anywhere, and for one with nothing but -inf. fp32 [R, V], V ≥ 1 → bool [R]. Batch-invariant.
        """
        check_logits(logits)
        return self._implementation.finite_rows(logits)

    def apply_logit_bias(self, logits: Tensor, bias: LogitBias) -> None:
        """Add to single logits, in place; the first of what is done to logits before `sample`.

        Semantics, for each entry e of row r: ``logits[r, token_id[e]] += value[e]``. fp32 [R, V]; a row without entries keeps every
        bit. Entries of one row with the same token: either may win. Batch-invariant.
        """
        check_logits(logits)
        check_entries("bias", bias.row_start, bias.token_id, logits.shape[0])
        check_dtype("bias.value", bias.value, torch.float32)
        check_shape("bias.value", bias.value, bias.token_id.numel())
        self._implementation.apply_logit_bias(logits, bias)

    def apply_penalties(self, logits: Tensor, penalties: Penalties) -> None:
        """Make tokens that prompt and output hold less (or more) probable, in place; after `apply_logit_bias`, before `sample`.

        Semantics, for each entry e of row r with ``x = logits[r, token_id[e]]`` and ``n = output_count[e]``, fp32, rounded after
        each operation and in this order::

            x = x / repetition[r] if x > 0 else x * repetition[r]
            x = x - frequency[r] * n
            x = x - presence[r] * (n > 0)

        The first is the penalty of Keskar et al., "CTRL" (2019), over prompt and output; the others are OpenAI's, over the output
        alone. fp32 [R, V]; a row without entries keeps every bit. Entries of one row with the same token: either may win.
        Batch-invariant.
        """
        check_logits(logits)
        num_rows = logits.shape[0]
        check_entries("penalties", penalties.row_start, penalties.token_id, num_rows)
        check_dtype("penalties.output_count", penalties.output_count, torch.int32)
        check_shape("penalties.output_count", penalties.output_count, penalties.token_id.numel())
        for name, column in (
            ("repetition", penalties.repetition),
            ("frequency", penalties.frequency),
            ("presence", penalties.presence),
        ):
            check_dtype(f"penalties.{name}", column, torch.float32)
            check_shape(f"penalties.{name}", column, num_rows)
        self._implementation.apply_penalties(logits, penalties)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Draw one token for each row of logits: fp32 [R, V] → int64 [R]. The logits are left as they are.

        Semantics of a row. Temperature 0: the id of the largest logit, of equals the lowest. Otherwise, with all tokens ordered by
        (logit descending, id ascending) and ``w = exp((logit - max) / temperature)``:

        1. top-k: the first ``top_k`` tokens stay (0, or ≥ V: all), exactly so many even where logits are equal.
        2. top-p: of these the shortest beginning whose sum of w reaches ``top_p`` times the sum over all of these stays; at least
           one token; 1 or more: all.
        3. min-p: of these the tokens with ``w >= min_p`` stay, w being relative to the most probable token.
        4. ``u = philox_uniform(seed, choice, position)``; the token is the lowest id whose running sum of w, over the ids that
           stay in ascending order, exceeds ``u`` times the total. So what stays is renormalised, after each filter.

        All fp32. Another implementation draws the same token unless u lies within 1e-5 of a step of that running sum, whatever the
        vocabulary and the filters. Where a filter's edge lies within rounding of a token (2e-6 of top_p or min_p), either side is
        right. A row that is not one of `finite_rows` draws a meaningless id in range. Batch-invariant.
        """
        check_logits(logits)
        for name, column in (
            ("temperature", batch.temperature),
            ("top_k", batch.top_k),
            ("top_p", batch.top_p),
            ("min_p", batch.min_p),
            ("seed", batch.seed),
            ("choice", batch.choice),
            ("position", batch.position),
        ):
            check_shape(f"batch.{name}", column, logits.shape[0])
        return self._implementation.sample(logits, batch)

    def philox_uniform(self, seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
        """The noise of one drawn token, fp32 in [0, 1), a function of its arguments alone.

        Semantics: ``(word >> 8) * 2**-24`` with ``word`` the first of Philox4x32-10 (Salmon et al., SC 2011), key = (low, high
        word of seed), counter = (choice, position, 0, 0). seed int64, the bits of an unsigned value; choice and position integers;
        all [R]. Batch-invariant.
        """
        check_dtype("seed", seed, torch.int64)
        check_shape("choice", choice, *seed.shape)
        check_shape("position", position, *seed.shape)
        return self._implementation.philox_uniform(seed, choice, position)

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Natural-log probabilities, under the raw logits, of given tokens and of each row's most probable ones.

        Semantics: ``p = logits - log(sum(exp(logits), -1))``; ``(p[i, token_ids[i]], top_ids, p[i, top_ids[i]])``, top_ids the
        first ``num_top`` by (logit descending, id ascending). logits float [R, V], token_ids int64 [R], 0 ≤ num_top ≤ V → fp32 [R],
        int64 [R, num_top], fp32 [R, num_top]. Batch-invariant.
        """
        check_float("logits", logits)
        check_vocabulary(logits)
        check_dtype("token_ids", token_ids, torch.int64)
        check_shape("token_ids", token_ids, logits.shape[0])
        if not 0 <= num_top <= logits.shape[1]:
            raise ValueError(f"num_top: expected 0 to {logits.shape[1]}, got {num_top}")
        return self._implementation.token_logprobs(logits, token_ids, num_top)
