"""Running one request on a scripted engine: rebuilding a missing adapter once, and accounting whatever is cancelled when."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from uuid import UUID

import msgspec
import pytest
from idle_time import run

from graftwork_adapters.errors import AdapterTooLarge, BlobCorrupt, BlobNotFound, StoreUnavailable
from graftwork_adapters.keys import AdapterDigest, PackedKey
from graftwork_engine.errors import ErrorCode, RequestFailed
from graftwork_engine.messages import OutItem, Sampling
from graftwork_engine.request import FinishReason
from graftwork_platform.catalog.catalog import ResolvedModel
from graftwork_platform.errors import PlatformError
from graftwork_platform.inference.admission import Admitted, Origin, Prompt
from graftwork_platform.inference.generation import Generator, Tally
from graftwork_platform.inference.output import Delta, StopRule
from graftwork_platform.inference.watchdog import Watchdog
from graftwork_platform.keys.ring import Caller
from graftwork_platform.usage import UsageNotRecorded

MISSING = RequestFailed(ErrorCode.ADAPTER_MISSING, "no packed form")
CALLER = Caller(UUID(int=1), "acme", UUID(int=2), None, b"salt")


@pytest.fixture
def admitted(model_text) -> Admitted:
    return Admitted(
        origin=Origin(CALLER, UUID(int=7 << 76 | 2 << 62), "job", 1000.0),
        model=ResolvedModel("triage", 1, AdapterDigest("d" * 64), UUID(int=3)),
        tokenizer=model_text.tokenizer,
        prompts=(Prompt([1, 2, 3], Sampling(max_tokens=5, seed=1)),),
        adapter_key=PackedKey("k" * 64),
        n=1,
        stop=StopRule(),
        echo=False,
    )


class Engine:
    """Each added request follows the next list: items, or an exception to raise, or None to wait for ever."""

    healthy, info, stats = True, None, {}

    def __init__(self, *scripts) -> None:
        self.scripts = list(scripts)
        self.requests = []
        self.stopped = []
        self.log = []
        self.closed = 0

    @asynccontextmanager
    async def streams(self):
        try:
            yield Streams(self)
        finally:
            await asyncio.sleep(0)  # as the real one does, to send its aborts
            self.closed += 1


class Streams:
    """The items of all requests that are there, in turn."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.running = {}

    async def add(self, request) -> None:
        self.engine.requests.append(request)
        self.engine.log.append(f"add {request.request_id[36:]}")
        self.running[request.request_id] = list(self.engine.scripts.pop(0))

    async def stop(self, request_id: str, output_index: int) -> None:
        self.engine.stopped.append((request_id, output_index))
        del self.running[request_id]

    def __aiter__(self):
        return self

    async def __anext__(self) -> OutItem:
        if not any(self.running.values()):
            raise StopAsyncIteration
        request_id, steps = next((name, steps) for name, steps in self.running.items() if steps)
        step = steps.pop(0)
        self.running[request_id] = self.running.pop(request_id)  # to the end of the queue
        if isinstance(step, Exception):
            raise step
        if step is None:
            await asyncio.Event().wait()
        self.engine.log.append(f"item {request_id[36:]}")
        return msgspec.structs.replace(step, request_id=request_id)


class Ledger:
    """Keeps what it is told. A row waits for the gate, or is refused with ``failure``; ``shut`` refuses to open."""

    def __init__(self, failure: Exception | None = None, gate: asyncio.Event | None = None, shut: Exception | None = None) -> None:
        self.opened = []
        self.counts = {}
        self.rows = []
        self.failure = failure
        self.gate = gate
        self.shut = shut

    def open(self, row, engine_ids):
        if self.shut is not None:
            raise self.shut
        self.opened.append((row, list(engine_ids)))
        return self

    def count(self, engine_id: str, output_tokens: int, cached_tokens: int) -> None:
        assert engine_id in self.opened[0][1]
        self.counts[engine_id] = (output_tokens, cached_tokens)

    async def close(self, row) -> None:
        self.rows.append(row)
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure


class Packer:
    def __init__(self, failure: Exception | None = None) -> None:
        self.calls = []
        self.failure = failure

    async def __call__(self, digest, row_type=None, *, replace: bool = False) -> None:
        self.calls.append((digest, replace) if replace else digest)
        if self.failure is not None:
            raise self.failure


def item(place: int, finish: str | None = None) -> OutItem:
    return OutItem("r", place, [40 + place], finish=finish, cached_tokens=2)


@pytest.fixture
def generator():
    def make(engine: Engine, ledger: Ledger, packer: Packer | None = None, **changes) -> Generator:
        options = {"timeout": 30.0, "observe": lambda _row: None, "now": lambda: 1010.0} | changes
        return Generator(engine, ledger, packer or Packer(), **options)

    return make


async def collect(running) -> list[Delta]:
    async with aclosing(running) as deltas:
        return [each async for each in deltas]


def test_a_missing_packed_form_is_rebuilt_and_the_request_runs_again(generator, admitted) -> None:
    engine, ledger, packer = Engine([MISSING], [item(0), item(1, "stop")]), Ledger(), Packer()
    items = run(collect(generator(engine, ledger, packer).run(admitted, Tally())))
    assert [each.token_ids for each in items] == [[40], [41]]
    assert packer.calls == ["d" * 64]
    first, second = engine.requests
    assert first == second
    assert (first.timeout_s, first.adapter_key, first.cache_salt) == (20.0, "k" * 64, b"salt")
    [row] = ledger.rows
    assert (row.status, row.prompt_tokens, row.cached_tokens, row.output_tokens) == ("completed", 3, 2, 2)
    assert engine.closed == 2


def test_a_corrupt_packed_form_is_replaced_and_the_request_runs_again(generator, admitted) -> None:
    corrupt = RequestFailed(ErrorCode.ADAPTER_CORRUPT, "the bytes of its rows do not match their checksum")
    engine, ledger, packer = Engine([corrupt], [item(0), item(1, "stop")]), Ledger(), Packer()
    items = run(collect(generator(engine, ledger, packer).run(admitted, Tally())))
    assert [each.token_ids for each in items] == [[40], [41]]
    assert packer.calls == [("d" * 64, True)]
    assert [row.status for row in ledger.rows] == ["completed"]


def test_it_is_rebuilt_once_only(generator, admitted) -> None:
    engine, ledger, packer = Engine([MISSING], [MISSING]), Ledger(), Packer()
    with pytest.raises(PlatformError, match="`triage`") as caught:
        run(collect(generator(engine, ledger, packer).run(admitted, Tally())))
    assert (caught.value.status, len(packer.calls), len(ledger.rows)) == (503, 1, 1)


def test_nothing_is_rebuilt_after_the_first_token(generator, admitted) -> None:
    engine, ledger, packer = Engine([item(0), MISSING]), Ledger(), Packer()
    with pytest.raises(PlatformError) as caught:
        run(collect(generator(engine, ledger, packer).run(admitted, Tally())))
    assert (caught.value.status, packer.calls) == (503, [])
    assert (ledger.rows[0].prompt_tokens, ledger.rows[0].output_tokens) == (3, 1)


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (BlobNotFound("the upload is gone"), 503, "adapter_missing"),
        (BlobCorrupt("another upload"), 503, "adapter_corrupt"),
        (AdapterTooLarge("9 > 8"), 503, "adapter_too_large"),
        (StoreUnavailable("disk full"), 503, "store_unavailable"),
        (TimeoutError(), 504, "timeout"),
    ],
)
def test_a_rebuild_that_fails(generator, admitted, failure: Exception, status: int, code: str) -> None:
    ledger = Ledger()
    with pytest.raises(PlatformError) as caught:
        run(collect(generator(Engine([MISSING]), ledger, Packer(failure)).run(admitted, Tally())))
    assert (caught.value.status, caught.value.code) == (status, code)
    assert [row.status for row in ledger.rows] == ["failed"]


def test_a_request_the_engine_stops_by_itself_has_failed(generator, admitted) -> None:
    ledger = Ledger()
    with pytest.raises(PlatformError) as caught:
        run(collect(generator(Engine([item(0), item(1, "abort")]), ledger).run(admitted, Tally())))
    assert (caught.value.status, ledger.rows[0].status, ledger.rows[0].output_tokens) == (503, "failed", 1)


@pytest.mark.parametrize("script", [[None], [item(0), None], [MISSING]])
def test_an_engine_that_never_answers_is_not_waited_for_for_ever(generator, admitted, script: list) -> None:
    engine, ledger = Engine(script), Ledger()

    async def pack(_digest, _row_type, **_how) -> None:
        await asyncio.Event().wait()

    late = generator(engine, ledger, pack, grace=0.02, now=lambda: 1031.0)
    with pytest.raises(PlatformError) as caught:
        run(collect(late.run(admitted, Tally())))
    assert (caught.value.status, caught.value.headers) == (504, {"x-should-retry": "false"})
    assert [row.status for row in ledger.rows] == ["failed"]
    assert engine.closed == 1


@pytest.mark.parametrize(("script", "billed"), [([None], 0), ([item(0), None], 3)])
def test_a_prompt_is_billed_once_its_first_item_has_come(generator, admitted, script: list, billed: int) -> None:
    """Whether its time ran out or its client left."""
    timed_out, left = Ledger(), Ledger()
    with pytest.raises(PlatformError):
        run(collect(generator(Engine(list(script)), timed_out, grace=0.02, now=lambda: 1031.0).run(admitted, Tally())))

    async def leave() -> None:
        task = asyncio.create_task(collect(generator(Engine(list(script)), left).run(admitted, Tally())))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])

    run(leave())
    assert [(row.status, row.prompt_tokens) for row in (*timed_out.rows, *left.rows)] == [("failed", billed), ("aborted", billed)]
    assert [row.prompt_tokens for row, _ in (*timed_out.opened, *left.opened)] == [3, 3]


def test_of_several_prompts_those_that_have_begun_are_billed(generator, admitted) -> None:
    prompts = (Prompt([1, 2, 3], Sampling(max_tokens=5, seed=1)), Prompt([4], Sampling(max_tokens=5, seed=1)))
    ledger = Ledger()
    late = generator(Engine([item(0), item(1, "stop")], [None], [item(0, "stop")]), ledger, grace=0.02, now=lambda: 1031.0)
    with pytest.raises(PlatformError):
        run(collect(late.run(replace(admitted, prompts=prompts, n=2), Tally())))
    assert ledger.rows[0].prompt_tokens == 3


def test_a_finished_request_is_not_told_of_a_timeout(generator, admitted) -> None:
    """The deadline passes while the last token is being sent."""
    ledger = Ledger()

    async def main() -> None:
        late = generator(Engine([item(0, "stop")]), ledger, grace=0.02, now=lambda: 1030.0)
        async with aclosing(late.run(admitted, Tally())) as deltas:
            assert (await anext(deltas)).finish is FinishReason.STOP
            await asyncio.sleep(0.1)
            assert await anext(deltas, None) is None

    run(main())
    assert [row.status for row in ledger.rows] == ["completed"]


def test_an_output_that_just_ends_has_failed(generator, admitted) -> None:
    ledger = Ledger()
    with pytest.raises(PlatformError) as caught:
        run(collect(generator(Engine([item(0)]), ledger).run(admitted, Tally())))
    assert (caught.value.status, ledger.rows[0].status, ledger.rows[0].output_tokens) == (503, "failed", 1)


def test_an_answer_that_cannot_be_accounted_for_is_not_given(generator, admitted) -> None:
    ledger = Ledger(UsageNotRecorded("disk full"))
    seen = []

    async def main() -> None:
        running = generator(Engine([item(0), item(1, "stop")]), ledger).run(admitted, Tally())
        seen.append(await anext(running))
        await anext(running)

    with pytest.raises(PlatformError) as caught:
        run(main())
    assert caught.value.code == "usage_not_recorded"
    assert (len(seen), len(ledger.rows)) == (1, 1)


def test_a_prompts_other_choices_start_when_its_first_item_is_there(generator, admitted) -> None:
    prompts = (Prompt([1, 2, 3], Sampling(max_tokens=5, seed=1)), Prompt([4], Sampling(max_tokens=5, seed=1)))
    engine, ledger = Engine(*([item(0), item(1, "stop")] for _ in range(6))), Ledger()
    tally = Tally()
    admitted = replace(admitted, prompts=prompts, n=3)
    deltas = run(collect(generator(engine, ledger).run(admitted, tally)))
    assert engine.log[:8] == ["add ", "add -3", "item ", "add -1", "add -2", "item -3", "add -4", "add -5"]
    assert sorted((delta.index, delta.finish is not None) for delta in deltas) == [
        (i, last) for i in range(6) for last in (False, True)
    ]
    [(opened, ids)] = ledger.opened
    assert (opened.status, opened.prompt_tokens, opened.output_tokens) == ("aborted", 4, 0)
    assert ids == [admitted.engine_id(index) for index in range(6)]
    assert [ledger.counts[name] for name in ids] == [(2, 2), (2, 0), (2, 0), (2, 2), (2, 0), (2, 0)]
    [row] = ledger.rows
    assert (row.status, row.prompt_tokens, row.cached_tokens, row.output_tokens) == ("completed", 4, 4, 12)


def test_a_stop_string_ends_the_engines_request_and_what_comes_later_is_not_counted(generator, admitted, model_text) -> None:
    ids = model_text.tokenizer.encode("hello world", add_special_tokens=False)
    steps = [OutItem("r", place, [token_id]) for place, token_id in enumerate([*ids, *ids])]
    engine, ledger = Engine(steps, [OutItem("r", 0, ids + ids, finish="length")]), Ledger()
    admitted = replace(admitted, n=2, stop=StopRule((" world",)))
    deltas = run(collect(generator(engine, ledger).run(admitted, Tally())))
    for index in range(2):
        mine = [delta for delta in deltas if delta.index == index]
        assert ("".join(delta.text for delta in mine), mine[-1].finish) == ("hello", FinishReason.STOP)
        assert ledger.counts[admitted.engine_id(index)][0] == len(ids)
    assert engine.stopped == [(admitted.engine_id(0), len(ids))], "the other one had ended already"
    assert ledger.rows[0].output_tokens == 2 * len(ids)


def test_a_request_that_cannot_be_accounted_for_does_not_run(generator, admitted) -> None:
    engine, ledger = Engine([item(0, "stop")]), Ledger(shut=UsageNotRecorded("disk full"))
    with pytest.raises(PlatformError) as caught:
        run(collect(generator(engine, ledger).run(admitted, Tally())))
    assert (caught.value.status, caught.value.code) == (503, "usage_not_recordable")
    assert "retry-after" in caught.value.headers
    assert not engine.requests


@pytest.mark.parametrize("cancels", [1, 2, 3])
def test_cancelling_again_and_again_loses_no_row(generator, admitted, cancels: int) -> None:
    engine, ledger = Engine([item(0), None]), Ledger()

    async def main() -> None:
        task = asyncio.create_task(collect(generator(engine, ledger).run(admitted, Tally())))
        await asyncio.sleep(0.01)
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert [(row.status, row.output_tokens) for row in ledger.rows] == [("aborted", 1)]


def test_cancelled_while_the_completed_row_is_written_there_is_no_second_row(generator, admitted) -> None:
    async def main() -> list:
        ledger = Ledger(gate=asyncio.Event())
        task = asyncio.create_task(collect(generator(Engine([item(0, "stop")]), ledger).run(admitted, Tally())))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ledger.rows

    assert [row.status for row in run(main())] == ["completed"]


def test_a_cancellation_of_its_own_is_no_timeout() -> None:
    async def work() -> None:
        with Watchdog(0.01):
            await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await work()
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
