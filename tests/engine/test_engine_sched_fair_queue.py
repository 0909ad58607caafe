"""The fair line: bounded difference between busy flows, no credit for absent ones, first come first served inside a flow."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graftwork_engine.sched.fair_queue import FairQueue


@dataclass(frozen=True)
class Item:
    flow: str
    order: int
    tokens: int = 1


class Line:
    """A queue and a counter of arrivals."""

    def __init__(self) -> None:
        self.queue: FairQueue[Item] = FairQueue()
        self.num_added = 0

    def push(self, flow: str, tokens: int = 1) -> Item:
        item = Item(flow, self.num_added, tokens)
        self.num_added += 1
        self.queue.push(item)
        return item

    def serve(self) -> Item:
        item = self.queue.pop()
        assert item is not None
        self.queue.charge(item.flow, item.tokens)
        return item


def test_flows_take_turns_whatever_the_order_of_arrival() -> None:
    line = Line()
    for flow in "aaaabb":
        line.push(flow)
    assert "".join(line.serve().flow for _ in range(6)) == "ababaa"
    assert line.queue.pop() is None


def test_one_flow_is_served_in_order_of_arrival() -> None:
    line = Line()
    items = [line.push("a", tokens) for tokens in (5, 1, 9)]
    assert [line.serve() for _ in items] == items


def test_large_items_make_a_flow_wait() -> None:
    line = Line()
    for _ in range(4):
        line.push("large", 10)
        line.push("small", 1)
    assert [line.serve().flow for _ in range(5)] == ["large", "small", "small", "small", "small"]


def test_an_item_put_back_keeps_its_place() -> None:
    line = Line()
    first, second = line.push("a"), line.push("a")
    assert line.queue.pop() is first
    line.queue.put_back(first)
    assert [line.serve(), line.serve()] == [first, second]


def test_a_preempted_item_goes_before_later_ones_of_its_flow() -> None:
    line = Line()
    first, second = line.push("a"), line.push("a")
    assert line.serve() is first
    line.queue.push(first)
    assert [line.serve(), line.serve()] == [first, second]


def test_a_flow_that_was_away_saved_up_nothing() -> None:
    line = Line()
    line.push("late")
    line.serve()
    for _ in range(100):
        line.push("busy", 10)
    for _ in range(50):
        line.serve()
    for _ in range(10):
        line.push("late", 10)
    served = [line.serve().flow for _ in range(10)]
    assert served.count("late") == served.count("busy") == 5


def test_a_flow_that_finds_nobody_waiting_is_lifted_to_the_one_at_work() -> None:
    line = Line()
    line.push("busy", 1000)
    line.serve()
    line.push("new", 10)
    assert line.queue.counter("new") == line.queue.counter("busy") == 1000


def test_parked_items_are_passed_and_save_up_nothing() -> None:
    line = Line()
    parked = [line.push("slow", 10) for _ in range(5)]
    for _ in range(20):
        line.push("busy", 10)
    for _ in range(10):  # each round finds what the slow flow needs absent
        line.queue.unpark()
        while (item := line.queue.pop()) is not None and item.flow == "slow":
            line.queue.park(item)
        assert item is not None
        line.queue.charge(item.flow, item.tokens)
    assert len(line.queue) == 15
    line.queue.unpark()
    served = [line.serve().flow for _ in range(8)]
    assert served.count("slow") == 4, "it gets its share from now on, not what it missed"
    assert [i for i in line.queue if i.flow == "slow"] == parked[4:]


def test_unparking_does_not_set_one_waiting_flow_back_to_another() -> None:
    line = Line()
    line.queue.charge("rich", 50)
    poor, rich = line.push("poor"), line.push("rich")
    for item in (line.queue.pop(), line.queue.pop()):
        assert item is not None
        line.queue.park(item)
    line.queue.unpark()
    assert line.queue.counter("poor") == 0
    assert [line.serve(), line.serve()] == [poor, rich]


def test_removing_from_line_and_from_parking() -> None:
    line = Line()
    first, second, third = line.push("a"), line.push("b"), line.push("a")
    line.queue.remove(first)
    assert line.queue.pop() is second
    line.queue.park(second)
    line.queue.remove(second)
    line.queue.unpark()
    assert list(line.queue) == [third]
    assert line.serve() is third
    assert len(line.queue) == 0
    assert line.queue.pop() is None


def test_counters_of_flows_long_gone_are_forgotten() -> None:
    line = Line()
    for number in range(20_000):
        line.push(f"flow {number}")
        line.serve()
    assert len(line.queue._counters) < 10_000


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=2),
    rounds=st.integers(1, 150),
)
def test_busy_flows_differ_by_at_most_one_item(sizes: dict[str, list[int]], rounds: int) -> None:
    line, served = Line(), dict.fromkeys(sizes, 0)
    for flow in [*sizes, *sizes]:  # two each, so that one is waiting while the other is served
        line.push(flow, sizes[flow][0])
    for number in range(rounds):
        item = line.serve()
        served[item.flow] += item.tokens
        line.push(item.flow, sizes[item.flow][number % len(sizes[item.flow])])
        assert max(served.values()) - min(served.values()) <= 20


@settings(max_examples=100, deadline=None)
@given(absence=st.integers(1, 200), size=st.integers(1, 20))
def test_a_returning_flow_is_never_ahead_by_more_than_one_item(absence: int, size: int) -> None:
    line = Line()
    line.push("away", size)
    line.serve()
    line.push("busy", 20)
    for _ in range(absence):
        line.push("busy", 20)
        line.serve()
    served = {"away": 0, "busy": 0}
    line.push("away", size)
    for _ in range(100):
        item = line.serve()
        served[item.flow] += item.tokens
        line.push(item.flow, item.tokens)
        assert served["away"] - served["busy"] <= 20 + size


class QueueMachine(RuleBasedStateMachine):
    """Any order of operations: nobody is lost, flows are served in order, and the flow picked has the smallest counter."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line()
        self.inside: dict[int, Item] = {}
        self.parked: dict[int, Item] = {}

    @rule(flow=st.sampled_from("abc"), tokens=st.integers(1, 9))
    def push(self, flow: str, tokens: int) -> None:
        item = self.line.push(flow, tokens)
        self.inside[item.order] = item

    @rule(fate=st.sampled_from(["serve", "park", "put back"]))
    def pop(self, fate: str) -> None:
        item = self.line.queue.pop()
        if not self.inside:
            assert item is None
            return
        assert item is not None
        assert item.order == min(order for order, other in self.inside.items() if other.flow == item.flow)
        lowest = min(self.line.queue.counter(other.flow) for other in self.inside.values())
        assert self.line.queue.counter(item.flow) == lowest
        if fate == "serve":
            del self.inside[item.order]
            self.line.queue.charge(item.flow, item.tokens)
        elif fate == "park":
            self.parked[item.order] = self.inside.pop(item.order)
            self.line.queue.park(item)
        else:
            self.line.queue.put_back(item)

    @rule()
    def unpark(self) -> None:
        self.line.queue.unpark()
        self.inside |= self.parked
        self.parked = {}

    @rule(flow=st.sampled_from("abc"), tokens=st.integers(1, 30))
    def charge(self, flow: str, tokens: int) -> None:
        self.line.queue.charge(flow, tokens)

    @precondition(lambda self: self.inside or self.parked)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        everyone = self.inside | self.parked
        item = everyone[data.draw(st.sampled_from(sorted(everyone)))]
        self.line.queue.remove(item)
        self.inside.pop(item.order, None)
        self.parked.pop(item.order, None)

    @invariant()
    def everyone_is_there(self) -> None:
        everyone = self.inside | self.parked
        assert len(self.line.queue) == len(everyone)
        assert [item.order for item in self.line.queue] == sorted(everyone)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
