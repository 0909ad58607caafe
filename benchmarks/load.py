"""Loads an OpenAI-compatible ``/v1/completions`` and prints, as one line of JSON, what its users feel. Knows no server.

Every request streams, ignores the end of sequence and asks for a fixed number of tokens, so that two servers do the same work.
Prompts are seeded random token ids, new in each run unless ``--seed`` is given, so that no server gains from a prefix it has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2


@dataclass
class Outcome:
    """One request: seconds from its start to each chunk of tokens, or why it failed."""

    chunk_times: list[float] = field(default_factory=list)
    output_tokens: int = 0
    error: str | None = None


def model_names(text: str) -> list[str]:
    """``base``, ``a,b,c`` or ``a0..a31``."""
    if ".." not in text:
        return text.split(",")
    first, last = text.split("..")
    stem = first.rstrip("0123456789")
    return [f"{stem}{i}" for i in range(int(first[len(stem) :]), int(last[len(stem) :]) + 1)]


def request_bodies(options: argparse.Namespace, rng: random.Random) -> list[dict[str, Any]]:
    """The requests of a run; adapters are dealt in turn, or drawn with popularity 1/rank^zipf."""
    models = model_names(options.models)
    weights = [1 / (rank + 1) ** options.zipf for rank in range(len(models))]
    shared = [rng.randrange(100, options.vocab) for _ in range(options.shared_prefix)]
    bodies = []
    for i in range(options.requests):
        model = rng.choices(models, weights)[0] if options.zipf else models[i % len(models)]
        own = [rng.randrange(100, options.vocab) for _ in range(options.input - options.shared_prefix)]
        fixed = {"max_tokens": options.output, "ignore_eos": True, "temperature": 0, "stream": True}
        bodies.append({"model": model, "prompt": shared + own, **fixed, "stream_options": {"include_usage": True}})
    return bodies


async def send(client: httpx2.AsyncClient, body: dict[str, Any]) -> Outcome:
    """Run one request to its end."""
    outcome, began = Outcome(), time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                outcome.error = f"{response.status_code} {(await response.aread())[:200]!r}"
                return outcome
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                event = json.loads(line.removeprefix("data:"))
                if "error" in event:
                    outcome.error = str(event["error"])[:200]
                    return outcome
                if event.get("usage"):
                    outcome.output_tokens = event["usage"]["completion_tokens"]
                if event.get("choices"):
                    outcome.chunk_times.append(time.perf_counter() - began)
    except httpx2.HTTPError as error:
        outcome.error = repr(error)[:200]
    if outcome.error is None and outcome.output_tokens != body["max_tokens"]:
        outcome.error = f"{outcome.output_tokens} tokens came, {body['max_tokens']} were asked for"
    return outcome


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """A closed loop of ``--concurrency`` users, or Poisson arrivals of ``--rate`` a second."""
    rng = random.Random(options.seed)
    limit = asyncio.Semaphore(options.concurrency if not options.rate else options.requests)
    headers = {"Authorization": f"Bearer {options.key}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=options.url, headers=headers, timeout=1200, limits=limits) as client:

        async def one(body: dict[str, Any]) -> Outcome:
            async with limit:
                return await send(client, body)

        began, tasks = time.perf_counter(), []
        for body in request_bodies(options, rng):
            tasks.append(asyncio.create_task(one(body)))
            if options.rate:
                await asyncio.sleep(rng.expovariate(options.rate))
        outcomes = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
    return report(options, outcomes, seconds)


def report(options: argparse.Namespace, outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """Throughput in tokens a second, times in milliseconds as [median, 99th percentile]."""
    good = [o for o in outcomes if o.error is None]
    gaps = [b - a for o in good for a, b in zip(o.chunk_times, o.chunk_times[1:], strict=False)]
    return {
        "models": options.models,
        "concurrency": options.concurrency,
        "rate": options.rate,
        "requests": len(good),
        "errors": [o.error for o in outcomes if o.error is not None][:3],
        "input": options.input,
        "output": options.output,
        "seed": options.seed,
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(sum(o.output_tokens for o in good) / seconds, 1),
        "ttft_ms": percentiles([o.chunk_times[0] for o in good if o.chunk_times]),
        "inter_token_ms": percentiles(gaps),
    }


def percentiles(seconds: list[float]) -> list[float]:
    """Median and 99th percentile in milliseconds; empty for no readings."""
    ordered = sorted(seconds)
    return [round(ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1000, 1) for q in (0.5, 0.99)] if ordered else []


def main() -> None:
    """Command line; exit status 1 if any request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    parser.add_argument("--models", default="base", help="one name, a comma list, or a0..a31")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--shared-prefix", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=49_000)
    parser.add_argument("--zipf", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    result = asyncio.run(run(parser.parse_args()))
    print(json.dumps(result))
    sys.exit(bool(result["errors"]))


if __name__ == "__main__":
    main()
