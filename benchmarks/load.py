"""Loads an OpenAI-compatible ``/v1/completions`` and prints, as one line of JSON, what its users feel. Knows no server.

Every request streams, ignores the end of sequence and asks for a fixed number of tokens, so that two servers do the same work.
Prompts are seeded random token ids, new in each run unless ``--seed`` is given, so that no server gains from a prefix it has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import httpx2

from results import percentile

FIRST_TOKEN_ID = 100
"""Below it lie the special tokens of most vocabularies."""


@dataclass(frozen=True)
class Load:
    """What is asked of a server, without saying which: ``models`` dealt in turn, or drawn with popularity 1/rank^zipf.

    A closed loop of ``streams`` users, or Poisson arrivals of ``rate`` a second. Lengths are tokens.
    """

    models: tuple[str, ...]
    requests: int
    streams: int
    seed: int
    rate: float = 0.0
    input: int = 128
    output: int = 64
    shared_prefix: int = 0
    vocab: int = 49_000
    zipf: float = 0.0


@dataclass(frozen=True)
class Prompt:
    """One request: a model's name and the prompt's token ids."""

    model: str
    token_ids: list[int]


@dataclass(frozen=True)
class Target:
    """A server, and what its requests need beside OpenAI's fields; ``fields`` are those for a model's name."""

    url: str
    key: str = "none"
    fields: Callable[[str], Mapping[str, Any]] = field(default=lambda model: {"model": model})
    keep_alive: bool = True


@dataclass
class Outcome:
    """One request: when it began, when each chunk of tokens came (seconds of `time.perf_counter`), or why it failed."""

    began: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Felt:
    """What a load's users felt: tokens a second, and milliseconds as [median, 99th percentile].

    ``per_token_ms`` is, for each request, the time from its first chunk to its last over its tokens but one: a chunk may hold
    several tokens, so the time between two chunks (``between_chunks_ms``) says nothing of a step.
    """

    requests: int
    errors: list[str]
    seconds: float
    output_tokens_per_s: float
    ttft_ms: list[float]
    per_token_ms: list[float]
    between_chunks_ms: list[float]


def model_names(text: str) -> list[str]:
    """``base``, ``a,b,c`` or ``a0..a31``; raises ValueError for a range that is none."""
    if ".." not in text:
        return text.split(",")
    first, _, last = text.partition("..")
    stem = first.rstrip("0123456789")
    numbers = first[len(stem) :], last.removeprefix(stem)
    if not (all(number.isdigit() for number in numbers) and int(numbers[0]) <= int(numbers[1])):
        raise ValueError(f"{text!r} is no range of names; write one as a0..a31")
    return [f"{stem}{i}" for i in range(int(numbers[0]), int(numbers[1]) + 1)]


def prompts(load: Load) -> list[Prompt]:
    """The requests of a load, the same for the same seed."""
    rng = random.Random(load.seed)
    weights = [1 / (rank + 1) ** load.zipf for rank in range(len(load.models))]
    shared = [rng.randrange(FIRST_TOKEN_ID, load.vocab) for _ in range(load.shared_prefix)]
    made = []
    for i in range(load.requests):
        model = rng.choices(load.models, weights)[0] if load.zipf else load.models[i % len(load.models)]
        own = [rng.randrange(FIRST_TOKEN_ID, load.vocab) for _ in range(load.input - load.shared_prefix)]
        made.append(Prompt(model, shared + own))
    return made


def client_of(target: Target) -> httpx2.AsyncClient:
    """A client that waits long and opens as many connections as are asked for."""
    headers = {"Authorization": f"Bearer {target.key}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None if target.keep_alive else 0)
    return httpx2.AsyncClient(base_url=target.url, headers=headers, timeout=3600, limits=limits)


async def send(client: httpx2.AsyncClient, target: Target, prompt: Prompt, output: int, into: Outcome | None = None) -> Outcome:
    """Run one request of ``output`` tokens to its end; ``into`` lets another task watch it."""
    body = {
        "prompt": prompt.token_ids,
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.fields(prompt.model),
    }
    outcome = into or Outcome()
    outcome.began = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                outcome.error = f"{response.status_code} {(await response.aread())[:200]!r}"
                return outcome
            async for line in _lines(response):
                if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
                    continue
                event = json.loads(line.removeprefix(b"data:"))
                if "error" in event:
                    outcome.error = str(event["error"])[:200]
                    return outcome
                if event.get("usage"):
                    outcome.output_tokens = event["usage"]["completion_tokens"]
                if event.get("choices"):
                    outcome.chunk_times.append(time.perf_counter())
    except (httpx2.HTTPError, ValueError) as error:
        outcome.error = repr(error)[:200]
    if outcome.error is None and outcome.output_tokens != output:
        outcome.error = f"{outcome.output_tokens} tokens came, {output} were asked for"
    return outcome


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Of an event stream, whose lines end at CR and LF alone: httpx would cut a text in two at Unicode's other line breaks."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")


async def run(target: Target, load: Load, on_done: Callable[[], None] = lambda: None) -> Felt:
    """Put ``load`` on ``target``; ``on_done`` is called after each request."""
    limit = asyncio.Semaphore(load.requests if load.rate else load.streams)
    arrivals = random.Random(load.seed + 1)
    made = prompts(load)
    async with client_of(target) as client:

        async def one(prompt: Prompt) -> Outcome:
            async with limit:
                outcome = await send(client, target, prompt, load.output)
            on_done()
            return outcome

        began, tasks = time.perf_counter(), []
        for prompt in made:
            tasks.append(asyncio.create_task(one(prompt)))
            if load.rate:
                await asyncio.sleep(arrivals.expovariate(load.rate))
        outcomes = await asyncio.gather(*tasks)
        return summary(outcomes, time.perf_counter() - began)


def summary(outcomes: list[Outcome], seconds: float) -> Felt:
    """What ``outcomes`` were like; those that failed count only as errors."""
    good = [o for o in outcomes if o.error is None]
    gaps = [b - a for o in good for a, b in pairwise(o.chunk_times)]
    each = [(o.chunk_times[-1] - o.chunk_times[0]) / (o.output_tokens - 1) for o in good if o.output_tokens > 1 and o.chunk_times]
    return Felt(
        requests=len(good),
        errors=[o.error for o in outcomes if o.error is not None],
        seconds=round(seconds, 3),
        output_tokens_per_s=round(sum(o.output_tokens for o in good) / seconds, 2),
        ttft_ms=milliseconds([o.chunk_times[0] - o.began for o in good if o.chunk_times]),
        per_token_ms=milliseconds(each),
        between_chunks_ms=milliseconds(gaps),
    )


def milliseconds(seconds: list[float]) -> list[float]:
    """Median and 99th percentile in milliseconds; empty for no readings."""
    return [round(percentile(seconds, q) * 1000, 3) for q in (0.5, 0.99)] if seconds else []


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Load an OpenAI-compatible /v1/completions.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none", help="the API key")
    parser.add_argument("--models", default="base", help="one name, a comma list, or a0..a31")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8, help="users, each with one request at a time")
    parser.add_argument("--rate", type=float, default=0.0, help="Poisson arrivals a second instead")
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--vocab", type=int, default=49_000, help="token ids are below it")
    parser.add_argument("--zipf", type=float, default=0.0, help="skew of the models' popularity")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    options = parser.parse_args(arguments)
    try:
        options.models = model_names(options.models)
    except ValueError as error:
        parser.error(f"--models {error}")
    for name in ("requests", "concurrency", "input", "output"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: give at least 1")
    for name in ("rate", "zipf"):
        if not 0 <= getattr(options, name) < math.inf:
            parser.error(f"--{name} {getattr(options, name)}: give 0 or a number above")
    if options.vocab <= FIRST_TOKEN_ID:
        parser.error(f"--vocab {options.vocab}: give more than {FIRST_TOKEN_ID}, since special tokens lie below that")
    if not 0 <= options.shared_prefix <= options.input:
        parser.error(f"--shared-prefix {options.shared_prefix}: it is a part of --input {options.input}")
    return options


def main(arguments: list[str]) -> int:
    """Print what was felt; 1 if any request failed."""
    options = parse(arguments)
    load = Load(
        tuple(options.models),
        options.requests,
        options.concurrency,
        options.seed,
        rate=options.rate,
        input=options.input,
        output=options.output,
        shared_prefix=options.shared_prefix,
        vocab=options.vocab,
        zipf=options.zipf,
    )
    felt = asyncio.run(run(Target(options.url, options.key), load))
    print(json.dumps({**asdict(load), **asdict(felt), "models": len(load.models), "errors": felt.errors[:3]}))
    return 1 if felt.errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
