"""The step, from beginning to end. Refuses to know sockets and tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graftwork_engine.messages import OutItem
from graftwork_engine.request import Request, RequestId
from graftwork_engine.sched.plan import AdapterGate, Runner, StepPlan
from graftwork_engine.sched.scheduler import Scheduler


def _nobody_listens(request_ids: Sequence[RequestId]) -> None:
    """Default of `EngineCore.on_running`."""


class EngineCore:
    """Tokens in, tokens out. One thread calls it; nothing in it waits for disk, network or a lock.

    ``on_running`` is called with the requests that take part in a step for the first time, before it is executed, so that a
    crash can be laid at the right door.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, gate: AdapterGate) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._gate = gate
        self.on_running: Callable[[Sequence[RequestId]], None] = _nobody_listens
        self.last_num_tokens = 0
        """Rows of the last step; 0 when every request waits."""
        self._num_steps = 0
        self._num_step_tokens = 0

    @property
    def has_work(self) -> bool:
        """True while there is a request to run or an item to hand over."""
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Take in a new request; raises `RequestRejected` if it can never run."""
        self._scheduler.add(request)

    def abort(self, request_id: str) -> int | None:
        """Stop a request and return how many output tokens it has; None if there is none of that id. No item follows."""
        return self._scheduler.abort(request_id)

    def step(self) -> list[OutItem]:
        """Schedule → execute → update; what the step made of each request."""
        self._gate.poll()
        plan = self._schedule()
        results = self._runner.execute(plan) if plan.scheduled else []
        return self._scheduler.update(plan, results)

    def _schedule(self) -> StepPlan:
        plan = self._scheduler.schedule()
        if plan.newly_running:
            self.on_running(plan.newly_running)
        self.last_num_tokens = plan.num_tokens
        self._num_steps += bool(plan.scheduled)
        self._num_step_tokens += self.last_num_tokens
        return plan

    def take_in_loads(self) -> None:
        """Take in what background loads have finished, as `step` does, for an engine that has nothing to step."""
        self._gate.poll()

    def stats(self) -> dict[str, float]:
        """A reading of requests, tokens, blocks and steps; counters end in ``_total``."""
        return {**self._scheduler.stats(), "steps_total": self._num_steps, "step_tokens_total": self._num_step_tokens}

    def check_integrity(self) -> list[str]:
        """Recount blocks, queues, adapters' references, pages, host and disk bytes, between steps; empty when all is well.

        May take long and touch the disk: not for a busy engine.
        """
        return self._scheduler.discrepancies()
