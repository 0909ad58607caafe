"""The step of an engine whose model runs on a device of its own: the next one is planned and launched while this one runs.

    host      plan 1 ▸ launch 1 ▸ plan 2 ▸ launch 2 ▸ wait for 1 ▸ update 1 ▸ plan 3 ▸ launch 3 ▸ wait for 2 ▸ update 2 ...
    device             [────────── 1 ──────────][────────── 2 ──────────][────────── 3 ──────────]

A plan does not know the tokens that the step before it draws; they stay on the device, where its rows find them. A request that
turns out to have ended has one row too many in the next step, whose result is dropped. Refuses to know sockets and tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graftwork_engine.core import EngineCore
from graftwork_engine.messages import OutItem
from graftwork_engine.sched.plan import AdapterGate, AheadRunner, Results, StepPlan
from graftwork_engine.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _Launched:
    """A plan that runs, and what waits for its results."""

    plan: StepPlan
    results: Callable[[], Results]


class AheadCore(EngineCore):
    """An `EngineCore` that is one step ahead of what it knows."""

    def __init__(self, scheduler: Scheduler, runner: AheadRunner, gate: AdapterGate) -> None:
        super().__init__(scheduler, runner, gate)
        self._launch = runner.launch
        self._launched: _Launched | None = None

    @property
    def has_work(self) -> bool:
        """True while there is a request to run, a step that runs, or an item to hand over."""
        return self._launched is not None or super().has_work

    def step(self) -> list[OutItem]:
        """Schedule → launch → update with what the step before made of each request."""
        self._gate.poll()
        num_running = 0 if self._launched is None else self._launched.plan.num_tokens
        items = self._take_in() if self._scheduler.needs_results else []
        plan = self._schedule()
        self.last_num_tokens = self.last_num_tokens or num_running  # taking results in is progress too
        launched = None
        if plan.scheduled:
            launched = _Launched(plan, self._launch(plan))
            self._scheduler.launch(plan)
        items += self._take_in()
        self._launched = launched
        return items

    def _take_in(self) -> list[OutItem]:
        """Wait for the launched step, if there is one, and book it."""
        if self._launched is None:
            return self._scheduler.take_ended()
        launched, self._launched = self._launched, None
        return self._scheduler.update(launched.plan, launched.results())
