"""Running one request on a scripted engine: rebuilding a missing adapter once, and accounting whatever is cancelled when."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import aclosing
from uuid import UUID

import pytest

from graftwork_adapters.errors import AdapterTooLarge, BlobCorrupt, BlobNotFound, StoreUnavailable
from graftwork_adapters.keys import AdapterDigest, PackedKey
from graftwork_engine.errors import ErrorCode, RequestFailed
from graftwork_engine.messages import OutItem, Sampling
from graftwork_platform.catalog.catalog import ResolvedModel
from graftwork_platform.errors import PlatformError
from graftwork_platform.inference.admission import Admitted, Origin
from graftwork_platform.inference.generation import Generator, Tally
from graftwork_platform.inference.sse import ClientGone, EventStream, event, until_disconnect
from graftwork_platform.inference.watchdog import Watchdog
from graftwork_platform.keys.ring import Caller
from graftwork_platform.usage import UsageNotRecorded

MISSING = RequestFailed(ErrorCode.ADAPTER_MISSING, "no packed form")
CALLER = Caller(UUID(int=1), "acme", UUID(int=2), None, b"salt")
ADMITTED = Admitted(
    origin=Origin(CALLER, UUID(int=7 << 76 | 2 << 62), "job", 1000.0),
    model=ResolvedModel("triage", 1, AdapterDigest("d" * 64), UUID(int=3)),
    prompt_ids=[1, 2, 3],
    sampling=Sampling(max_tokens=5, seed=1),
    adapter_key=PackedKey("k" * 64),
)


class Engine:
    """Each call follows the next list: items, or an exception to raise, or None to wait for ever."""

    healthy, info, stats = True, None, {}

    def __init__(self, *scripts) -> None:
        self.scripts = list(scripts)
        self.requests = []
        self.closed = 0

    async def generate(self, request):
        self.requests.append(request)
        try:
            for step in self.scripts.pop(0):
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    await asyncio.Event().wait()
                yield step
        finally:
            await asyncio.sleep(0)  # as the real one does, to send its abort
            self.closed += 1


class Recorder:
    def __init__(self, failure: Exception | None = None, gate: asyncio.Event | None = None) -> None:
        self.rows = []
        self.failure = failure
        self.gate = gate

    async def record(self, row) -> None:
        self.rows.append(row)
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure


class Packer:
    def __init__(self, failure: Exception | None = None) -> None:
        self.calls = []
        self.failure = failure

    async def __call__(self, digest) -> None:
        self.calls.append(digest)
        if self.failure is not None:
            raise self.failure


def item(place: int, finish: str | None = None) -> OutItem:
    return OutItem("r", place, [40 + place], finish=finish, cached_tokens=2)


def generator(engine: Engine, recorder: Recorder, packer: Packer | None = None, now: float = 1010.0) -> Generator:
    return Generator(engine, recorder, packer or Packer(), timeout=30.0, observe=lambda _row: None, now=lambda: now)


async def collect(running) -> list[OutItem]:
    async with aclosing(running) as items:
        return [each async for each in items]


def test_a_missing_packed_form_is_rebuilt_and_the_request_runs_again() -> None:
    engine, recorder, packer = Engine([MISSING], [item(0), item(1, "stop")]), Recorder(), Packer()
    items = asyncio.run(collect(generator(engine, recorder, packer).run(ADMITTED, Tally(3))))
    assert [each.token_ids for each in items] == [[40], [41]]
    assert packer.calls == ["d" * 64]
    first, second = engine.requests
    assert first == second
    assert (first.timeout_s, first.adapter_key, first.cache_salt) == (20.0, "k" * 64, b"salt")
    [row] = recorder.rows
    assert (row.status, row.prompt_tokens, row.cached_tokens, row.output_tokens) == ("completed", 3, 2, 2)
    assert engine.closed == 2


def test_it_is_rebuilt_once_only() -> None:
    engine, recorder, packer = Engine([MISSING], [MISSING]), Recorder(), Packer()
    with pytest.raises(PlatformError, match="`triage`") as caught:
        asyncio.run(collect(generator(engine, recorder, packer).run(ADMITTED, Tally(3))))
    assert (caught.value.status, len(packer.calls), len(recorder.rows)) == (503, 1, 1)


def test_nothing_is_rebuilt_after_the_first_token() -> None:
    engine, recorder, packer = Engine([item(0), MISSING]), Recorder(), Packer()
    with pytest.raises(PlatformError) as caught:
        asyncio.run(collect(generator(engine, recorder, packer).run(ADMITTED, Tally(3))))
    assert (caught.value.status, packer.calls) == (503, [])
    assert (recorder.rows[0].prompt_tokens, recorder.rows[0].output_tokens) == (3, 1)


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
def test_a_rebuild_that_fails(failure: Exception, status: int, code: str) -> None:
    recorder = Recorder()
    with pytest.raises(PlatformError) as caught:
        asyncio.run(collect(generator(Engine([MISSING]), recorder, Packer(failure)).run(ADMITTED, Tally(3))))
    assert (caught.value.status, caught.value.code) == (status, code)
    assert [row.status for row in recorder.rows] == ["failed"]


def test_a_request_the_engine_stops_by_itself_has_failed() -> None:
    recorder = Recorder()
    with pytest.raises(PlatformError) as caught:
        asyncio.run(collect(generator(Engine([item(0), item(1, "abort")]), recorder).run(ADMITTED, Tally(3))))
    assert (caught.value.status, recorder.rows[0].status, recorder.rows[0].output_tokens) == (503, "failed", 2)


@pytest.mark.parametrize("script", [[None], [item(0), None], [MISSING]])
def test_an_engine_that_never_answers_is_not_waited_for_for_ever(script: list) -> None:
    engine, recorder = Engine(script), Recorder()

    async def pack(_digest) -> None:
        await asyncio.Event().wait()

    late = Generator(engine, recorder, pack, timeout=30.0, observe=lambda _row: None, grace=0.02, now=lambda: 1031.0)
    with pytest.raises(PlatformError) as caught:
        asyncio.run(collect(late.run(ADMITTED, Tally(3))))
    assert (caught.value.status, caught.value.headers) == (504, {"x-should-retry": "false"})
    assert [row.status for row in recorder.rows] == ["failed"]
    assert engine.closed == 1


def test_an_output_that_just_ends_has_failed() -> None:
    recorder = Recorder()
    with pytest.raises(PlatformError) as caught:
        asyncio.run(collect(generator(Engine([item(0)]), recorder).run(ADMITTED, Tally(3))))
    assert (caught.value.status, recorder.rows[0].status, recorder.rows[0].output_tokens) == (503, "failed", 1)


def test_an_answer_that_cannot_be_accounted_for_is_not_given() -> None:
    recorder = Recorder(UsageNotRecorded("disk full"))
    seen = []

    async def main() -> None:
        running = generator(Engine([item(0), item(1, "stop")]), recorder).run(ADMITTED, Tally(3))
        seen.append(await anext(running))
        await anext(running)

    with pytest.raises(PlatformError) as caught:
        asyncio.run(main())
    assert caught.value.code == "usage_not_recorded"
    assert (len(seen), len(recorder.rows)) == (1, 1)


@pytest.mark.parametrize("cancels", [1, 2, 3])
def test_cancelling_again_and_again_loses_no_row(cancels: int) -> None:
    engine, recorder = Engine([item(0), None]), Recorder()

    async def main() -> None:
        task = asyncio.create_task(collect(generator(engine, recorder).run(ADMITTED, Tally(3))))
        await asyncio.sleep(0.01)
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [(row.status, row.output_tokens) for row in recorder.rows] == [("aborted", 1)]


def test_cancelled_while_the_completed_row_is_written_there_is_no_second_row() -> None:
    async def main() -> list:
        recorder = Recorder(gate=asyncio.Event())
        task = asyncio.create_task(collect(generator(Engine([item(0, "stop")]), recorder).run(ADMITTED, Tally(3))))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return recorder.rows

    assert [row.status for row in asyncio.run(main())] == ["completed"]


def test_a_cancellation_of_its_own_is_no_timeout() -> None:
    async def forever():
        await asyncio.Event().wait()
        yield 1

    async def work() -> None:
        with Watchdog(0.01) as watchdog:
            await watchdog.next_of(forever())

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await work()
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_work_is_cancelled_and_finished_when_the_client_goes() -> None:
    steps = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            steps.append("cleaned up")

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def main() -> None:
        with pytest.raises(ClientGone):
            await until_disconnect(receive, work())
        steps.append("raised")

    asyncio.run(main())
    assert steps == ["cleaned up", "raised"]


def test_event_stream_closes_its_frames_when_sending_fails() -> None:
    closed = []

    async def frames():
        try:
            yield event({"error": {"message": None}})
            yield b"never"
        finally:
            closed.append(True)

    async def send(message) -> None:
        if message["type"] == "http.response.body":
            raise OSError("broken pipe")

    async def receive():
        await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(OSError, match="broken"):
            await EventStream(frames())({"type": "http"}, receive, send)

    asyncio.run(main())
    assert closed == [True]


def test_the_api_process_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, graftwork_platform.app; "
        "sys.exit(', '.join(m for m in ('torch', 'transformers', 'triton', 'peft') if m in sys.modules) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
