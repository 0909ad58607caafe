"""Any order of calls and of background work: nothing leaks, budgets hold, the referenced stay, the bytes are the right ones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.errors import StoreUnavailable
from graftwork_adapters.fetcher import Fetcher
from graftwork_adapters.residency import AdapterResidency

PAGE = 512
NUM_PAGES = 7
HOST_BYTES = 4_000
RANKS = [(1,), (0, 1), (2, 0, 3, 1), (1, 1, 1, 1), (0, 0, 4), (0, 0, 0, 8), (0, 0, 0, 0)]
names = st.integers(0, len(RANKS) - 1)


class Machine(RuleBasedStateMachine):
    """Waiting requests hold, running ones reference; background jobs finish in any order, some by failing."""

    adapters: ClassVar[list] = []  # these four come from fixtures
    new_store = new_executor = kernel_sees = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.folder.name)
        self.store = self.new_store()
        for packed in self.adapters:
            self.store.add(packed, root)
        self.pool = DevicePool(NUM_PAGES * PAGE, 4, 256, page_bytes=PAGE, max_rows=40, max_adapters=4)
        self.loads, self.copies = self.new_executor(), self.new_executor()
        self.residency = AdapterResidency(
            Fetcher(self.store, root / "cache", 6_000),
            self.pool,
            HOST_BYTES,
            load_executor=self.loads,
            copy_executor=self.copies,
        )
        self.holds = [0] * len(self.adapters)
        self.references = [0] * len(self.adapters)
        self.indices: dict[int, int] = {}

    @rule(n=names)
    def hold(self, n):
        self.residency.hold(self.adapters[n].key)
        self.holds[n] += 1

    @rule(n=names)
    def drop(self, n):
        if self.holds[n]:
            self.residency.drop(self.adapters[n].key)
            self.holds[n] -= 1
            assert self.holds[n] or self.residency.failure(self.adapters[n].key) is None

    @rule(n=names)
    def acquire(self, n):
        if not self.holds[n] and not self.references[n]:
            return
        index = self.residency.acquire(self.adapters[n].key)
        if index is None:
            assert not self.references[n]
            return
        self.references[n] += 1
        assert self.indices.setdefault(n, index) == index

    @rule(n=names)
    def release(self, n):
        if self.references[n]:
            self.residency.release(self.adapters[n].key)
            self.references[n] -= 1
            if not self.references[n]:
                del self.indices[n]

    @precondition(lambda self: self.loads.jobs)
    @rule(place=st.integers(0, 20))
    def load_job(self, place):
        self.loads.run(place % len(self.loads.jobs))

    @precondition(lambda self: self.copies.jobs)
    @rule()
    def copy_job(self):
        self.copies.run()

    @rule()
    def poll(self):
        self.residency.poll()

    @rule(up=st.booleans())
    def store_goes_down_or_comes_back(self, up):
        self.store.error = None if up else StoreUnavailable("no answer")

    @invariant()
    def the_books_are_right(self):
        self.residency.check_integrity(sum(self.holds), sum(self.references))
        stats = self.residency.stats()
        assert stats["adapter_host_bytes"] <= HOST_BYTES
        assert stats["adapter_device_bytes"] <= NUM_PAGES * PAGE

    @invariant()
    def every_running_request_sees_its_own_adapter(self):
        assert len(set(self.indices.values())) == len(self.indices)
        for n, index in self.indices.items():
            self.kernel_sees(self.residency.memory, index, self.adapters[n])

    def teardown(self):
        try:
            self.everyone_is_served_and_nothing_is_left()
        finally:
            self.folder.cleanup()

    def everyone_is_served_and_nothing_is_left(self):
        self.store.error = None
        for n, count in enumerate(self.references):
            for _ in range(count):
                self.residency.release(self.adapters[n].key)
        for n in range(len(self.adapters)):  # failures from before are forgotten, as their requests would end
            if self.residency.failure(self.adapters[n].key) is not None:
                for _ in range(self.holds[n]):
                    self.residency.drop(self.adapters[n].key)
                self.holds[n] = 0
        for _ in range(200):
            while self.loads.jobs or self.copies.jobs:
                (self.loads if self.loads.jobs else self.copies).run()
                self.residency.poll()
            self.residency.poll()
            waiting = [n for n, count in enumerate(self.holds) if count]
            if not waiting:
                break
            for n in waiting:
                failure = self.residency.failure(self.adapters[n].key)
                if failure is not None or self.residency.acquire(self.adapters[n].key) is not None:
                    assert failure is None or failure.code == "store_unavailable"
                    if failure is None:
                        self.residency.release(self.adapters[n].key)
                    self.residency.drop(self.adapters[n].key)
                    self.holds[n] -= 1
        assert sum(self.holds) == 0, "someone waits for ever"
        self.residency.check_integrity(0, 0)
        assert self.residency.stats()["adapters_loading"] == 0
        assert self.residency.stats()["adapters_waiting_for_device"] == 0


def test_any_order_of_calls_and_of_background_work(packed_of, new_store, new_executor, kernel_sees):
    class Bound(Machine):
        pass

    Bound.adapters = [packed_of(f"adapter {n}", ranks) for n, ranks in enumerate(RANKS)]
    Bound.new_store, Bound.new_executor, Bound.kernel_sees = map(staticmethod, (new_store, new_executor, kernel_sees))
    run_state_machine_as_test(
        Bound,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
        ),
    )
