"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011)."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, as 32-bit fractions
_WORD = 0xFFFFFFFF


def philox4x32(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four output words for each key and counter; every word an int64 tensor of one shape, in 0 .. 2^32 - 1."""
    key0, key1 = key
    word0, word1, word2, word3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(word0, _MULTIPLIERS[0])
        high1, low1 = _multiply(word2, _MULTIPLIERS[1])
        word0, word1, word2, word3 = high1 ^ word1 ^ key0, low1, high0 ^ word3 ^ key1, low0
        key0, key1 = (key0 + _KEY_STEPS[0]) & _WORD, (key1 + _KEY_STEPS[1]) & _WORD
    return word0, word1, word2, word3


def philox_uniform(seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """See `graftwork_kernels.ops.Operators.philox_uniform`."""
    seed = seed.to(torch.int64)
    zero = torch.zeros_like(seed)
    key = (seed & _WORD, (seed >> 32) & _WORD)
    word, _, _, _ = philox4x32(key, (choice.to(torch.int64) & _WORD, position.to(torch.int64) & _WORD, zero, zero))
    return (word >> 8).to(torch.float32) * 2.0**-24


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low words of the 64-bit product. int64 wraps to the right bits; the mask takes off the sign's copies."""
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD
