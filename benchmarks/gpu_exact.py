"""What the operators must give, by the contract's formulas in fp64, whatever they are computed in. Measures nothing."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graftwork_kernels.layout import LogitBias, Penalties, SamplingBatch

NOISE_SLACK = 1e-5
"""How near to a step of the running sum the noise may lie for either token to be right."""

EDGE_SLACK = 2e-6
"""Of top_p or min_p: how near to a filter's edge a token may lie to be on either side."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `graftwork_kernels.ops.Operators.rms_norm`, here and below, with nothing rounded in between."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def rotated(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Heads [T, heads, D] turned to their positions."""
    cos, sin = cos_sin[positions].double()[:, None].chunk(2, dim=-1)
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def biased(logits: Tensor, bias: LogitBias) -> Tensor:
    """fp32: the sum in fp64, rounded once, is what fp32 gives."""
    out = logits.clone()
    rows, tokens = _entry_rows(bias.row_start), bias.token_id.long()
    out[rows, tokens] = (logits[rows, tokens].double() + bias.value.double()).float()
    return out


def penalised(logits: Tensor, penalties: Penalties) -> Tensor:
    """fp32, rounded after each operation."""
    out = logits.clone()
    rows, tokens = _entry_rows(penalties.row_start), penalties.token_id.long()
    repetition, frequency, presence = (
        column[rows].double() for column in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    count = penalties.output_count.double()
    x = logits[rows, tokens].double()
    x = torch.where(x > 0, x / repetition, x * repetition).float().double()
    x = (x - (frequency * count).float().double()).float().double()
    out[rows, tokens] = (x - (presence * (count > 0)).float().double()).float()
    return out


def _entry_rows(row_start: Tensor) -> Tensor:
    lengths = row_start.diff().long()
    return torch.arange(len(lengths), device=row_start.device).repeat_interleave(lengths)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities in fp64."""
    logprobs = logits.double().log_softmax(-1)
    top_ids = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    return logprobs.gather(1, token_ids[:, None])[:, 0], top_ids, logprobs.gather(1, top_ids)


def rightly_drawn(logits: Tensor, batch: SamplingBatch, noise: Tensor, tokens: Tensor) -> Tensor:
    """Which rows' tokens the contract allows, bool [R]; the noise is taken as it is."""
    allowed = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    for top_p in (1.0, 1 - EDGE_SLACK, 1 + EDGE_SLACK):
        for min_p in (1.0, 1 - EDGE_SLACK, 1 + EDGE_SLACK):
            allowed |= _drawn_with(logits, batch, noise, tokens, top_p, min_p)
    lowest_largest = logits.sort(dim=-1, descending=True, stable=True).indices[:, 0]
    return torch.where(batch.temperature == 0, tokens == lowest_largest, allowed)


def _drawn_with(
    logits: Tensor, batch: SamplingBatch, noise: Tensor, tokens: Tensor, top_p_times: float, min_p_times: float
) -> Tensor:
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    heat = torch.where(batch.temperature == 0, 1.0, batch.temperature).double()[:, None]
    weight = torch.exp((ordered.double() - ordered[:, :1].double()) / heat)
    place = torch.arange(logits.shape[1], device=logits.device)
    most = torch.where(batch.top_k > 0, batch.top_k, logits.shape[1])[:, None]
    weight = torch.where(place < most, weight, 0.0)
    before = weight.cumsum(-1) - weight
    wanted = batch.top_p.double()[:, None] * top_p_times * weight.sum(-1, keepdim=True)
    stays = (before < wanted) | (place == 0) | (batch.top_p >= 1)[:, None]
    stays &= weight >= batch.min_p.double()[:, None] * min_p_times
    weight = torch.zeros_like(weight).scatter(1, ids, torch.where(stays, weight, 0.0))
    end = weight.cumsum(-1)
    total = end[:, -1]
    own, end = (values.gather(1, tokens[:, None])[:, 0] for values in (weight, end))
    target, slack = noise.double() * total, NOISE_SLACK * total
    return (own > 0) & (end - own <= target + slack) & (target <= end + slack)


def philox_words(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., SC 2011): 32-bit words [N, 4] of counters [N, 4] and keys [N, 2]."""
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (counter[:, word].copy() for word in range(4))
    k0, k1 = key[:, 0].copy(), key[:, 1].copy()
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ k0,
            product1 & low,
            (product0 >> np.uint64(32)) ^ c3 ^ k1,
            product0 & low,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack((c0, c1, c2, c3), axis=1)


KNOWN_WORDS = {
    ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
}
"""The known answers of the authors' Random123, by counter and key."""


def philox_uniform(seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """fp32, on the CPU."""
    seeds = seed.cpu().numpy().view(np.uint64)
    counter = np.zeros((len(seeds), 4), dtype=np.uint64)
    counter[:, 0], counter[:, 1] = (column.cpu().numpy().astype(np.uint32) for column in (choice, position))
    key = np.stack((seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)), axis=1)
    word = philox_words(counter, key)[:, 0]
    return torch.from_numpy(((word >> np.uint64(8)) * 2.0**-24).astype(np.float32))
