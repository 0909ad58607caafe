"""The tensors that an adapter may bring whole, beside its rows, by the names they have in the packed form. Vocabulary alone.

    embedding   x = E[id]           E is `EMBEDDING`, the base's where absent;
                                    rows of `EMBEDDING_TOKENS` are those of `EMBEDDING_ROWS` instead;
                x = c (x + A[id] Bᵀ)    `EMBEDDING_LORA_A` [V, r], `EMBEDDING_LORA_B` [H, r], scale folded into it;
                                    `EMBEDDING_SCALE` [H]
    head        y = x Hᵀ            H is `HEAD` [V', H], the base's where absent (its own embedding never stands in for it)
                                    rows of `HEAD_TOKENS` are those of `HEAD_ROWS` instead
                y = c (y + (x Aᵀ) Bᵀ) + b   `HEAD_LORA_A` [r, H], `HEAD_LORA_B` [V, r], scale folded into it and into
                                    b, `HEAD_BIAS` [V]; `HEAD_SCALE` [V]
    norms       `<module>.weight` in place of the base's
    linears     `<module>.weight` [out, in] in place of the base's, and `<module>.bias` [out] (with it, where the base has a bias)

Types: "bfloat16", or "float32" where the adapter's rows are; scales and the head's bias are "float32" always, token ids "int64",
ascending.
"""

from __future__ import annotations

from dataclasses import dataclass

EMBEDDING = "model.embed_tokens.weight"
EMBEDDING_TOKENS = "model.embed_tokens.token_ids"
EMBEDDING_ROWS = "model.embed_tokens.token_rows"
EMBEDDING_LORA_A = "model.embed_tokens.lora_A"
EMBEDDING_LORA_B = "model.embed_tokens.lora_B"
EMBEDDING_SCALE = "model.embed_tokens.scale"

HEAD = "lm_head.weight"
HEAD_TOKENS = "lm_head.token_ids"
HEAD_ROWS = "lm_head.token_rows"
HEAD_LORA_A = "lm_head.lora_A"
HEAD_LORA_B = "lm_head.lora_B"
HEAD_SCALE = "lm_head.scale"
HEAD_BIAS = "lm_head.bias"


@dataclass(frozen=True, slots=True)
class WholeFacts:
    """What whoever plans steps must know of an adapter that brings tensors whole.

    ``num_bytes``: of them, on the device. ``vocab_size``: rows of its own embedding, or of its own head where it has no embedding;
    None where it has neither, which means the base's.
    """

    num_bytes: int
    vocab_size: int | None
