"""Steps of no one's tokens, run before the first request: so that none waits for a kernel to be compiled. Knows no device.

Kernels come in variants, by powers of two of a step's rows and of its requests, and by what requests want of their logits. What is
computed means nothing; keys and values of it lie in blocks that nobody has yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graftwork_engine.batch import StepCapacity
from graftwork_engine.messages import Sampling
from graftwork_engine.request import Request, RequestId
from graftwork_engine.sched.plan import BASE, Runner, ScheduledRequest, StepPlan

PLAIN = Sampling(max_tokens=2, seed=0, temperature=0.0)
GREEDIEST = Sampling(
    max_tokens=2, seed=0, temperature=0.8, top_p=0.9, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=20, prompt_logprobs=20
)
"""What takes the most memory for a time."""

WISHES = (
    PLAIN,
    Sampling(max_tokens=2, seed=0, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    Sampling(max_tokens=2, seed=0, logit_bias={0: 1.0}),
    Sampling(max_tokens=2, seed=0, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),
    Sampling(max_tokens=2, seed=0, logprobs=0),
    Sampling(max_tokens=2, seed=0, logprobs=20, prompt_logprobs=20),
)
"""What requests may want, each kind once."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step: ``num_rows`` of ``num_requests``, each of up to ``longest`` tokens in blocks of ``block_size``."""

    num_rows: int
    num_requests: int
    longest: int
    block_size: int

    @property
    def capacity(self) -> StepCapacity:
        """The same as whoever builds steps has it."""
        return StepCapacity(self.num_rows, self.num_requests, -(-self.longest // self.block_size))

    def plan(self, num_requests: int, num_rows: int, sampling: Sampling = PLAIN) -> StepPlan:
        """A step of so many rows, shared out evenly, each request at its beginning; fewer rows where there is no room for all."""
        return StepPlan(
            [
                self._scheduled(number, rows, sampling)
                for number in range(num_requests)
                if (rows := min(num_rows // num_requests + (number < num_rows % num_requests), self.longest))
            ]
        )

    def largest(self, sampling: Sampling = PLAIN) -> StepPlan:
        """As many rows as a step may have, of as many requests, all of which draw a token."""
        return self.plan(min(self.num_requests, self.num_rows), self.num_rows, sampling)

    def _scheduled(self, number: int, num_rows: int, sampling: Sampling) -> ScheduledRequest:
        request = Request(RequestId(f"warm-up-{number}"), [0] * num_rows, sampling, b"", "", 0.0)
        blocks = list(range(-(-num_rows // self.block_size)))  # the same for all: they write the same
        return ScheduledRequest(request, 0, num_rows, blocks, BASE, True)


def warm_up_plans(limits: StepLimits) -> Iterator[StepPlan]:
    """Steps that between them need every variant of every kernel."""
    power = 0
    for requests in _powers(min(limits.num_requests, limits.num_rows)):
        yield limits.plan(requests, requests)
        fewest = power + 1  # of the same variant, so that there is room for one of several rows
        yield limits.plan(fewest, min(2 * fewest, limits.num_rows))
        power = requests
    for rows in _powers(limits.num_rows):
        yield limits.plan(min(-(-rows // limits.longest), limits.num_requests), rows)
    for wish in WISHES:
        yield limits.plan(1, 2, wish)
    yield limits.largest()


def warm_up(runner: Runner, limits: StepLimits) -> int:
    """Run them all; how many there were."""
    number = 0
    for plan in warm_up_plans(limits):
        runner.execute(plan)
        number += 1
    return number


def _powers(most: int) -> Iterator[int]:
    """1, 2, 4 ... and ``most``."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most
