"""The retry policy alone, with a clock and chance of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError

from graftwork_adapters.errors import BlobNotFound, StoreUnavailable
from graftwork_adapters.s3_budget import Budget
from graftwork_adapters.s3_client import S3Limits

LIMITS = S3Limits(deadline=60, read_timeout=20, max_attempts=6, first_delay=0.1, longest_delay=1.0, slowest_rate=100)


def answer(status: int, code: str = "") -> ClientError:
    response = {"Error": {"Code": code or str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "GetObject")  # type: ignore[arg-type]


class World:
    """Time passes when someone sleeps, and by ``seconds`` at every request."""

    def __init__(self, jitter: float = 1.0, limits: S3Limits = LIMITS) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.requests = 0
        self.budget = Budget(limits, clock=lambda: self.now, sleep=self.sleep, jitter=lambda: jitter)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def run(self, error: Exception, *, seconds: float = 0.0, times: int = 1 << 30) -> str:
        def request() -> str:
            self.requests += 1
            self.now += seconds
            if self.requests <= times:
                raise error
            return "answer"

        return self.budget.run("get", "packed/a", request)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_asked_again_with_growing_pauses(status):
    world = World()
    assert world.run(answer(status), times=3) == "answer"
    assert world.slept == [0.1, 0.2, 0.4]


@pytest.mark.parametrize(("status", "kind"), [(403, StoreUnavailable), (404, BlobNotFound), (501, StoreUnavailable)])
def test_what_is_refused_is_not_asked_again(status, kind):
    world = World()
    with pytest.raises(kind):
        world.run(answer(status))
    assert world.requests == 1


def test_attempts_and_pauses_are_bounded_and_drawn():
    for jitter in (0.0, 1.0):
        world = World(jitter)
        with pytest.raises(StoreUnavailable, match="nothing answers"):
            world.run(EndpointConnectionError(endpoint_url="http://host"))
        assert world.requests == LIMITS.max_attempts
        assert world.slept == [pause * (1 if jitter else 0.5) for pause in (0.1, 0.2, 0.4, 0.8, 1.0)]


def test_no_request_is_sent_whose_answer_could_come_after_the_deadline():
    world = World(limits=replace(LIMITS, max_attempts=100))
    with pytest.raises(StoreUnavailable, match="does not answer in time"):
        world.run(ReadTimeoutError(endpoint_url="http://host"), seconds=20)
    assert world.requests == 2
    assert world.now <= LIMITS.deadline


def test_large_blobs_have_more_time():
    world = World()
    world.budget.extend(4000)  # 40 seconds of the slowest rate
    with pytest.raises(StoreUnavailable):
        world.run(ReadTimeoutError(endpoint_url="http://host"), seconds=20)
    assert world.requests == 4
    world.now = 100
    with pytest.raises(StoreUnavailable, match="too slow"):
        world.budget.check()


def test_a_budget_that_is_cut_sends_nothing_more():
    world = World()
    world.budget.cut()
    with pytest.raises(StoreUnavailable):
        world.run(answer(503))
    assert world.requests == 0
