"""Philox4x32-10 noise, keyed by seed, choice and position. Refuses to know what it decides."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftwork_kernels.triton.vocabulary import UNSPECIALISED

BLOCK = 256
"""Values that one program makes."""


@triton.jit
def uniform(seed, choice, position):
    """The noise of `graftwork_kernels.ops.Operators.philox_uniform`, fp32; seed int64, choice and position any integers.

    Conversions to uint32 keep the low word, whatever the sign.
    """
    first = choice.to(tl.uint32)
    zero = first * 0
    word, _, _, _ = tl.philox_impl(
        first, position.to(tl.uint32), zero, zero, seed.to(tl.uint32), (seed >> 32).to(tl.uint32), n_rounds=10
    )
    return (word >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit(**UNSPECIALISED)
def _uniform(seed, choice, position, noise, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = index < count
    drawn = uniform(
        tl.load(seed + index, mask=there, other=0),
        tl.load(choice + index, mask=there, other=0),
        tl.load(position + index, mask=there, other=0),
    )
    tl.store(noise + index, drawn, mask=there)


def philox_uniform(seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """See `graftwork_kernels.ops.Operators.philox_uniform`."""
    noise = torch.empty(seed.shape, dtype=torch.float32, device=seed.device)
    count = seed.numel()
    if count:
        _uniform[(triton.cdiv(count, BLOCK),)](
            seed.contiguous(), choice.contiguous(), position.contiguous(), noise, count, BLOCK=BLOCK, enable_fp_fusion=False
        )
    return noise
