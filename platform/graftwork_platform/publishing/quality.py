"""What 8-bit rows cost an adapter: its scores beside those of its unrounded form, asked of the running engine. Bills nobody."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from graftwork_adapters.keys import PackedKey
from graftwork_engine.errors import GraftworkEngineError
from graftwork_engine.messages import OutItem, Sampling, TokenLogprob
from graftwork_engine.streams import GenerationRequest
from graftwork_platform.inference.engine import Engine

DEADLINE_S = 60.0
"""For all of it, the loading of both forms and a wait behind customers' requests among it."""

_TOP = 20  # alternatives at each place; the rest counts as one
_NEW_TOKENS = 24  # that the unrounded form says behind each text, so that its own words are compared too
_LEAST = 1e-9  # of the rest: below it are roundings
_Scores = Sequence[TokenLogprob | None]


class NotMeasured(Exception):
    """The engine did not answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near one form is to another over ``num_places`` tokens.

    ``divergence``: the mean Kullback–Leibler divergence from the other form's probabilities, in nats; ``same_token``: the share of
    places where both find the same token the most probable.
    """

    divergence: float
    same_token: float
    num_places: int


class Measure(Protocol):
    """`Quality.compare`, or what stands in for it."""

    async def __call__(
        self, key: PackedKey, reference: PackedKey, vocab_size: int | None, prompts: Sequence[list[int]] | None
    ) -> Agreement:
        """How near ``key`` is to ``reference``; both lie in the object store. ``prompts``: texts as the adapter's own tokenizer
        cuts them; None: it has none. Raises `NotMeasured`.
        """
        ...


class Quality:
    """Compares packed forms of one adapter."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], *, deadline: float = DEADLINE_S) -> None:
        """``prompts``: what adapters without a tokenizer of their own are compared on."""
        self._engine = engine
        self._prompts = prompts
        self._deadline = deadline

    async def compare(
        self, key: PackedKey, reference: PackedKey, vocab_size: int | None, prompts: Sequence[list[int]] | None = None
    ) -> Agreement:
        """As `Measure` says: both forms score the same tokens, each text and what ``reference`` says behind it."""
        try:
            begun = self._prompts if prompts is None else prompts
            async with asyncio.timeout(self._deadline):
                continued = await self._run(reference, begun, vocab_size, max_tokens=_NEW_TOKENS, scored=False)
                texts = [prompt + said for prompt, (said, _) in zip(begun, continued, strict=True)]
                theirs = await self._run(reference, texts, vocab_size, max_tokens=1, scored=True)
                ours = await self._run(key, texts, vocab_size, max_tokens=1, scored=True)
        except TimeoutError as error:
            raise NotMeasured(f"the engine did not answer within {self._deadline:g} s") from error
        except GraftworkEngineError as error:
            raise NotMeasured(str(error)) from error
        scores = [(ids, their, our) for ids, (_, their), (_, our) in zip(texts, theirs, ours, strict=True)]
        return agreement(scores)

    async def _run(
        self, key: PackedKey, prompts: Sequence[list[int]], vocab_size: int | None, *, max_tokens: int, scored: bool
    ) -> list[tuple[list[int], _Scores]]:
        """Of each prompt: the most probable tokens behind it, and the scores of its own."""
        sampling = Sampling(max_tokens, seed=0, temperature=0.0, prompt_logprobs=_TOP if scored else None)
        salt, name = secrets.token_bytes(32), f"quality-{secrets.token_hex(8)}"  # its prefixes are nobody else's
        requests = [
            GenerationRequest(f"{name}-{place}", prompt, sampling, salt, "publishing", key, vocab_size=vocab_size)
            for place, prompt in enumerate(prompts)
        ]
        items: dict[str, list[OutItem]] = {request.request_id: [] for request in requests}
        async with self._engine.streams() as streams:
            for request in requests:
                await streams.add(request)
            async for item in streams:
                items[item.request_id].append(item)
        return [(_ids_of(found), _scores_of(found)) for found in items.values()]


def _ids_of(items: Sequence[OutItem]) -> list[int]:
    return [token_id for item in items for token_id in item.token_ids]


def _scores_of(items: Sequence[OutItem]) -> _Scores:
    return next((item.prompt_logprobs for item in items if item.prompt_logprobs is not None), [])


def agreement(scores: Sequence[tuple[Sequence[int], _Scores, _Scores]]) -> Agreement:
    """Of texts: their tokens, the reference's scores and the other's. Raises `NotMeasured` if nothing was scored."""
    divergences: list[float] = []
    num_same = 0
    for ids, theirs, ours in scores:
        for token_id, their, our in zip(ids, theirs, ours, strict=True):
            if their is None or our is None:
                continue
            divergences.append(divergence(_known(token_id, their), _known(token_id, our)))
            num_same += their.top_ids[:1] == our.top_ids[:1]
    if not divergences:
        raise NotMeasured("the engine scored nothing")
    return Agreement(fmean(divergences), num_same / len(divergences), len(divergences))


def divergence(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Kullback–Leibler divergence in nats between log-probabilities of tokens that both know, all others counted as one.

    That is at most the divergence over the whole vocabulary, and near it where the tokens both know carry the weight.
    """
    shared = reference.keys() & other.keys()
    total = sum(math.exp(reference[token_id]) * (reference[token_id] - other[token_id]) for token_id in shared)
    rest = max(1.0 - sum(math.exp(reference[token_id]) for token_id in shared), _LEAST)
    other_rest = max(1.0 - sum(math.exp(other[token_id]) for token_id in shared), _LEAST)
    return max(0.0, total + rest * math.log(rest / other_rest))


def _known(token_id: int, entry: TokenLogprob) -> dict[int, float]:
    return {token_id: entry.logprob, **dict(zip(entry.top_ids, entry.top_logprobs, strict=True))}
