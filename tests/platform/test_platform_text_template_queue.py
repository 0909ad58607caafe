"""Whose template has its turn: one tenant's slow one holds up no other's, and one that always runs out of time is left out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from graftwork_platform.errors import BadRequest, ServiceUnavailable
from graftwork_platform.text import template_queue
from graftwork_platform.text.chat_template import ChatTemplate
from graftwork_platform.text.template_queue import COLD_SECONDS, MAX_STRIKES, SLOW_PLACES, TemplateQueue, TemplatesBusy, Turn
from graftwork_platform.text.template_sandbox import TemplateSandbox

CHAT: list[dict[str, object]] = [{"role": "user", "content": "Hello"}]
SLOW = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
QUICK = "{{ messages[0].content }}"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def new_queue(clock: Clock | None = None, *, is_forgiving: bool = False, max_places: int = 64) -> TemplateQueue:
    return TemplateQueue(max_places, is_forgiving=is_forgiving, now=clock or Clock())


def put(queue: TemplateQueue, group: str) -> Turn:
    turn = Turn(group, lambda: group)
    queue.put(turn)
    return turn


def run(queue: TemplateQueue, seconds: dict[str, float]) -> str:
    """Do the next piece of work; whose it was."""
    turn = queue.take()
    queue.note(turn.group, seconds.get(turn.group, 0.001), ran_out=False)
    turn.future.set_result(None)
    return turn.group


def test_a_quick_one_waits_behind_no_more_than_what_is_under_way() -> None:
    queue, seconds = new_queue(), {f"slow-{n}": 0.4 for n in range(20)}
    for group in seconds:
        for _ in range(3):
            put(queue, group)
    for _ in range(30):
        run(queue, seconds)
    put(queue, "quick")
    assert run(queue, seconds) == "quick"
    put(queue, "quick")
    assert "quick" in [run(queue, seconds) for _ in range(3)]


def test_all_have_their_turn() -> None:
    queue, seconds = new_queue(), {"a": 0.05, "b": 0.05, "c": 0.0001}
    for group in "aaaabbbbcccc":
        put(queue, group)
    order = "".join(run(queue, seconds) for _ in range(12))
    assert order.count("a") == order.count("b") == order.count("c") == 4
    assert "aaa" not in order
    assert "bbb" not in order


def test_a_burst_of_quick_ones_has_places_and_slow_ones_have_few() -> None:
    queue = new_queue(max_places=10)
    for _ in range(10):
        put(queue, "a")
    with pytest.raises(TemplatesBusy, match="Too many"):
        put(queue, "a")
    put(queue, "b")
    for _ in range(11):
        run(queue, {"a": 0.3})
    for _ in range(SLOW_PLACES):
        put(queue, "a")
    with pytest.raises(TemplatesBusy, match="Too many"):
        put(queue, "a")
    put(queue, "b")
    for _ in range(SLOW_PLACES + 1):
        run(queue, {})
    for _ in range(10):
        put(queue, "a")


def test_what_nobody_waits_for_any_more_leaves_its_place() -> None:
    queue = new_queue(max_places=1)
    put(queue, "a").future.cancel()
    put(queue, "a")


def test_one_that_runs_out_of_time_again_and_again_is_left_out_for_a_while() -> None:
    clock = Clock()
    queue = new_queue(clock)
    for _ in range(MAX_STRIKES - 1):
        queue.note("a", 0.5, ran_out=True)
    queue.note("a", 0.001, ran_out=False)
    for _ in range(MAX_STRIKES - 1):
        queue.note("a", 0.5, ran_out=True)
    queue.check_cold("a")
    queue.note("a", 0.5, ran_out=True)
    with pytest.raises(TemplatesBusy, match=f"{MAX_STRIKES} times") as caught:
        put(queue, "a")
    assert 0 < caught.value.retry_after <= COLD_SECONDS + 1
    with pytest.raises(TemplatesBusy):
        queue.check_cold("a")
    put(queue, "b")
    clock.now += COLD_SECONDS
    queue.check_cold("a")
    queue.note("a", 0.5, ran_out=True)
    with pytest.raises(TemplatesBusy):
        queue.check_cold("a")


def test_where_all_use_the_same_one_it_is_never_left_out() -> None:
    queue = new_queue(is_forgiving=True, max_places=3)
    for _ in range(2 * MAX_STRIKES):
        queue.note("", 2.0, ran_out=True)
    for _ in range(3):
        put(queue, "")


def test_groups_that_do_nothing_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_queue, "MAX_GROUPS", 5)
    queue = new_queue()
    for number in range(50):
        put(queue, f"g{number}")
        run(queue, {f"g{number}": 0.3})
    assert len(queue._groups) <= 6


@pytest.fixture
def sandbox() -> Iterator[TemplateSandbox]:
    sandbox = TemplateSandbox(cpu_seconds=0.3, is_forgiving=False)
    yield sandbox
    sandbox.close()


def test_another_s_slow_template_holds_nobody_up(sandbox: TemplateSandbox) -> None:
    slow = ChatTemplate(SLOW, {}, sandbox, group="attacker")
    quick = ChatTemplate(QUICK, {}, sandbox, group="victim")

    async def main() -> None:
        started = time.monotonic()
        attack = [asyncio.create_task(slow.render(CHAT)) for _ in range(64)]
        await asyncio.sleep(0)
        assert await quick.render(CHAT) == "Hello"
        late = asyncio.create_task(quick.render(CHAT))
        ended = await asyncio.gather(*attack, return_exceptions=True)
        assert await late == "Hello"
        kinds = [type(error) for error in ended]
        assert kinds.count(BadRequest) == MAX_STRIKES, "then it is left out"
        assert kinds.count(ServiceUnavailable) == 64 - MAX_STRIKES
        assert time.monotonic() - started < 64 * 0.3
        with pytest.raises(ServiceUnavailable, match="ran out of time") as caught:
            await slow.render(CHAT)
        assert int(caught.value.headers["retry-after"]) > 30
        assert await quick.render(CHAT) == "Hello"

    asyncio.run(main())


def test_a_template_that_is_first_asked_for_waits_behind_no_queue(sandbox: TemplateSandbox) -> None:
    slow = ChatTemplate(SLOW, {}, sandbox, group="attacker")

    async def main() -> None:
        attack = [asyncio.create_task(slow.render(CHAT)) for _ in range(64)]
        await asyncio.sleep(0.1)
        quick = await asyncio.to_thread(lambda: ChatTemplate(QUICK, {}, sandbox, group="victim"))
        assert await quick.render(CHAT) == "Hello"
        assert not all(task.done() for task in attack), "it came before most of them"
        await asyncio.gather(*attack, return_exceptions=True)

    asyncio.run(main())
