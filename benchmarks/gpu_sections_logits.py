"""Is what is done to logits right? Biases, penalties, the search for rows that are not finite, logprobs, noise and drawn tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import gpu_exact
from gpu_bench import Bench, Figures, Wrong, must_equal, spoiled_memory
from graftwork_kernels.layout import LogitBias, Penalties, SamplingBatch

LOGPROB_SLACK = 2e-5
"""How far a log probability may lie off: some roundings of a sum over a hundred thousand tokens, and of a logit's own."""


def logits_are_right(bench: Bench, figures: Figures) -> None:
    """Biases and penalties to the last bit; finite rows; logprobs with the order of equals."""
    num_rows, num_tokens = (4, bench.shape.vocab) if bench.is_dry else (64, bench.shape.vocab)
    ops, device = bench.operators(), bench.device
    kinds = list(random_logits(num_rows, num_tokens, device).items())
    for name, logits in bench.in_time(kinds[:2] if bench.is_dry else kinds, lambda item: item[0]):
        bias, penalties = random_bias(num_rows, num_tokens, device), random_penalties(num_rows, num_tokens, device)
        for kind, entries, apply, exact in (
            ("bias", bias, ops.apply_logit_bias, gpu_exact.biased),
            ("penalties", penalties, ops.apply_penalties, gpu_exact.penalised),
        ):
            out = logits.clone()
            with spoiled_memory():
                apply(out, entries)  # type: ignore[arg-type]
            must_equal(f"{kind}, {name}", out, exact(logits, entries))  # type: ignore[arg-type]
            figures[f"{kind}, rows"] = float(figures.get(f"{kind}, rows", 0.0)) + num_rows
        _check_logprobs(bench, figures, name, logits)
    broken = torch.randn(num_rows, num_tokens, device=device)
    broken[0, num_tokens // 2] = torch.nan
    broken[1, -1] = torch.inf
    broken[2] = -torch.inf
    broken[3, : num_tokens - 1] = -torch.inf
    with spoiled_memory():
        finite = ops.finite_rows(broken)
    must_equal("finite rows", finite.float(), broken.max(-1).values.isfinite().float())
    figures["finite rows, rows"] = float(num_rows)


def _check_logprobs(bench: Bench, figures: Figures, name: str, logits: Tensor) -> None:
    num_rows, num_tokens = logits.shape
    given = torch.randint(0, num_tokens, (num_rows,)).to(logits.device)
    for dtype, num_top in ((torch.float32, min(20, num_tokens)), (torch.bfloat16, 0)):
        rows = logits.to(dtype)
        with spoiled_memory():
            chosen, top_ids, tops = bench.operators().token_logprobs(rows, given, num_top)
        exact_chosen, exact_ids, exact_tops = gpu_exact.token_logprobs(rows, given, num_top)
        must_equal(f"most probable tokens, {name}", top_ids.double(), exact_ids.double())
        for value, exact in ((chosen, exact_chosen), (tops, exact_tops)):
            off = torch.where(value == exact, 0.0, (value.double() - exact).abs() / (1 + exact.abs())).nan_to_num(torch.inf)
            error = float(off.max()) if off.numel() else 0.0
            if error > LOGPROB_SLACK:
                raise Wrong(f"logprobs, {name}: off by {error:.3g}, {LOGPROB_SLACK:g} is allowed")
            figures["logprobs"] = max(error, float(figures.get("logprobs", 0.0)))


def sampling_is_right(bench: Bench, figures: Figures) -> None:
    """Noise by known answers, then tokens by the contract in fp64: filters of every strength, rows of every kind."""
    check_noise(bench, figures)
    num_rows, num_tokens = (6, bench.shape.vocab) if bench.is_dry else (256, bench.shape.vocab)
    for name, logits in bench.in_time(list(random_logits(num_rows, num_tokens, bench.device).items()), lambda item: item[0]):
        batch = random_sampling(num_rows, num_tokens, bench.device)
        noise = gpu_exact.philox_uniform(batch.seed, batch.choice, batch.position).to(bench.device)
        with spoiled_memory():
            tokens = bench.operators().sample(logits, batch)
        check_draws(name, logits, batch, noise, tokens)
        figures[f"rows drawn, {name}"] = float(num_rows)


def check_draws(name: str, logits: Tensor, batch: SamplingBatch, noise: Tensor, tokens: Tensor) -> None:
    """Raises `Wrong` for a token that the contract does not allow."""
    if not ((tokens >= 0) & (tokens < logits.shape[1])).all():
        raise Wrong(f"sampling, {name}: a token outside the vocabulary")
    # A part of the rows at a time: a row of a large vocabulary takes megabytes in fp64.
    for start in range(0, len(logits), 32):
        rows = slice(start, start + 32)
        part = SamplingBatch(**{field: getattr(batch, field)[rows] for field in SamplingBatch.__dataclass_fields__})
        right = gpu_exact.rightly_drawn(logits[rows], part, noise[rows], tokens[rows])
        if not right.all():
            row = start + int((~right).nonzero()[0])
            raise Wrong(f"sampling, {name}: {int((~right).sum())} of {len(right)} rows drew a wrong token, row {row} the first")


def check_noise(bench: Bench, figures: Figures) -> None:
    """The reference by the authors' known answers, the kernel by the reference, bit for bit."""
    counters, keys = (np.array([case[part] for case in gpu_exact.KNOWN_WORDS], dtype=np.uint64) for part in (0, 1))
    if gpu_exact.philox_words(counters, keys).tolist() != [list(words) for words in gpu_exact.KNOWN_WORDS.values()]:
        raise Wrong("noise: the reference does not give the known answers")
    count = 300 if bench.is_dry else 100_000
    seed = torch.randint(-(2**62), 2**62, (count,))
    seed[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    choice, position = (torch.randint(0, most, (count,), dtype=torch.int32) for most in (9, 2**31 - 1))
    choice[0] = position[0] = 0
    given = [column.to(bench.device) for column in (seed, choice, position)]
    with spoiled_memory():
        noise = bench.operators().philox_uniform(*given)
    must_equal("noise", noise.cpu(), gpu_exact.philox_uniform(seed, choice, position))
    figures["values of noise"] = float(count)


def random_logits(num_rows: int, num_tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Rows in which samplers go wrong; every one has a token that can be drawn."""
    plain = torch.randn(num_rows, num_tokens, device=device)
    masked = plain.masked_fill(torch.rand_like(plain) < 0.9, -torch.inf)
    masked[:, 0] = plain[:, 0]
    return {"equals": (plain * 2).round() / 2, "masked": masked, "steep": plain * 6, "flat": plain * 0.05}


def random_sampling(num_rows: int, num_tokens: int, device: torch.device) -> SamplingBatch:
    """Filters of every strength, some of which switch each other off."""

    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (num_rows,))].to(device, dtype)

    return SamplingBatch(
        temperature=pick([0.0, 1e-6, 0.1, 0.7, 1.0, 1.3, 50.0], torch.float32),
        top_k=pick([0, 0, 1, 2, 50, num_tokens - 1, num_tokens + 3], torch.int32),
        top_p=pick([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0], torch.float32),
        min_p=pick([0.0, 0.0, 0.05, 0.3], torch.float32),
        seed=torch.randint(-(2**62), 2**62, (num_rows,)).to(device),
        choice=torch.randint(0, 9, (num_rows,), dtype=torch.int32).to(device),
        position=torch.randint(0, 9999, (num_rows,), dtype=torch.int32).to(device),
    )


MOST_BIASES, MOST_PENALTIES = 300, 5000
"""Entries of a row, where the vocabulary has as many."""


def _random_entries(num_rows: int, num_tokens: int, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Distinct tokens of each row, none in every third: where a row's begin, and all of them."""
    most = min(most, num_tokens)
    counts = torch.randint(1, most + 1, (num_rows,))
    counts[2::3] = 0
    steps = [torch.randint(1, num_tokens // most + 1, (int(count),)) for count in counts]
    tokens = torch.cat([step.cumsum(0) - 1 for step in steps]).int()
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    return starts.to(device), tokens.to(device)


def random_bias(num_rows: int, num_tokens: int, device: torch.device) -> LogitBias:
    """Some of a row's tokens, a few of them banned."""
    starts, tokens = _random_entries(num_rows, num_tokens, MOST_BIASES, device)
    value = torch.randn(len(tokens), device=device) * 20
    value[::7] = -torch.inf
    return LogitBias(starts, tokens, value)


def random_penalties(num_rows: int, num_tokens: int, device: torch.device) -> Penalties:
    """Many of a row's tokens, half of them of the prompt alone."""
    starts, tokens = _random_entries(num_rows, num_tokens, MOST_PENALTIES, device)
    count = torch.randint(-3, 4, (len(tokens),), dtype=torch.int32).clamp(min=0).to(device)
    columns = (torch.rand(3, num_rows, device=device) * torch.tensor([[0.9], [4.0], [4.0]], device=device)).float()
    return Penalties(starts, tokens, count, 0.7 + columns[0], columns[1] - 2, columns[2] - 2)
