"""The engine's socket and its client: streams, aborts, the engine's death, the client's death, poisoned requests.

A scripted engine stands in for the model: token i of a request is (sum of its prompt + i) mod 1000, so a resumed stream can be told
from a restarted one. This file is long because all its tests run against the engine that it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from graftwork_engine.client import EngineClient
from graftwork_engine.errors import EngineUnavailable, ErrorCode, RequestFailed, RequestRejected
from graftwork_engine.messages import PROTOCOL_VERSION, Abort, Add, Orphan, Out, OutItem, Ready, Sampling, ToClient, ToEngine
from graftwork_engine.server import _SocketLoop, aborted_item
from graftwork_engine.sessions import Session, SessionTable
from graftwork_engine.streams import GenerationRequest, Stream

POISON = 666
HANGS_ONCE = 667

ENGINE = textwrap.dedent(
    """
    import os, sys, time
    from graftwork_engine.errors import ErrorCode, RequestRejected
    from graftwork_engine.messages import OutItem
    from graftwork_engine.loop import serve

    STEP_S, POISON, HANGS_ONCE = float(sys.argv[2]), 666, 667

    class ScriptedCore:
        def __init__(self):
            self.requests, self.on_running, self.last_num_tokens = {}, lambda ids: None, 0
            self.fresh = []
        def add(self, request):
            if len(request.prompt_ids) > 100:
                raise RequestRejected(ErrorCode.CONTEXT_LENGTH, "101 tokens do not fit 100")
            self.requests[request.request_id] = request
            self.fresh.append(request.request_id)
        def abort(self, request_id):
            request = self.requests.pop(request_id, None)
            return None if request is None else len(request.output_ids)
        @property
        def has_work(self):
            return bool(self.requests)
        def stats(self):
            return {"requests_running": float(len(self.requests))}
        def take_in_loads(self):
            pass
        def check_integrity(self):
            return []
        def step(self):
            if self.fresh:
                self.on_running(self.fresh)
                self.fresh = []
                time.sleep(0.02)  # the socket thread's turn, as a model's step would give it
            time.sleep(STEP_S)
            items = []
            for request in list(self.requests.values()):
                if POISON in request.prompt_ids and len(request.output_ids) >= 2:
                    os.kill(os.getpid(), 9)
                if HANGS_ONCE in request.prompt_ids and not os.path.exists(sys.argv[0] + ".hung"):
                    open(sys.argv[0] + ".hung", "x").close()
                    time.sleep(1000)
                index = len(request.output_ids)
                request.output_ids.append((sum(request.prompt_ids) + index) % 1000)
                done = index + 1 == request.sampling.max_tokens
                items.append(OutItem(request.request_id, index, request.output_ids[-1:], finish="length" if done else None))
                if done:
                    del self.requests[request.request_id]
            self.last_num_tokens = len(items)
            return items

    class Assembly:
        core, base_id, max_model_len, max_prompt_and_output = ScriptedCore(), "base", 100, 100
        def stats(self): return self.core.stats()
        def wake_with(self, wake): pass
        def close(self): pass

    serve(Assembly(), sys.argv[1], step_limit_s=float(sys.argv[3]))
    """
)


class EngineProcess:
    """Starts and restarts the scripted engine."""

    def __init__(self, folder: Path, step_s: float, step_limit_s: float) -> None:
        self.script = folder / "scripted_engine.py"
        self.script.write_text(ENGINE)
        self.endpoint = f"ipc://{folder}/e"
        self.arguments = [str(step_s), str(step_limit_s)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, str(self.script), self.endpoint, *self.arguments])

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def keep_alive(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if self.process is not None and self.process.poll() is not None:
                self.start()


@contextlib.asynccontextmanager
async def engine_and_client(
    tmp_path: Path, step_s: float = 0.005, step_limit_s: float = 600.0
) -> AsyncIterator[tuple[EngineProcess, EngineClient]]:
    engine = EngineProcess(tmp_path, step_s, step_limit_s)
    engine.start()
    try:
        async with EngineClient(engine.endpoint) as client:
            await client.wait_ready(120)
            yield engine, client
    finally:
        if engine.process is not None:
            engine.kill()


def request_of(name: str, prompt: list[int], max_tokens: int = 20) -> GenerationRequest:
    return GenerationRequest(name, prompt, Sampling(max_tokens=max_tokens, seed=1), b"salt", "flow")


async def tokens_of(client: EngineClient, request: GenerationRequest) -> list[int]:
    return [token async for item in client.generate(request) for token in item.token_ids]


def expected(prompt: list[int], count: int) -> list[int]:
    return [(sum(prompt) + i) % 1000 for i in range(count)]


async def until(condition: object, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def test_streams_side_by_side(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path) as (_, client):
            outputs = await asyncio.gather(*(tokens_of(client, request_of(f"r{i}", [i, 7])) for i in range(20)))
            assert outputs == [expected([i, 7], 20) for i in range(20)]
            assert client.num_streams == 0

    asyncio.run(run())


def test_rejected_request_raises_and_the_rest_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path) as (_, client):
            with pytest.raises(RequestRejected) as raised:
                await tokens_of(client, request_of("long", [1] * 101))
            assert raised.value.code is ErrorCode.CONTEXT_LENGTH
            assert await tokens_of(client, request_of("short", [1])) == expected([1], 20)

    asyncio.run(run())


def test_closing_the_stream_aborts_in_the_engine(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path) as (_, client):
            stream = client.generate(request_of("r", [5], max_tokens=100_000))
            async for _ in stream:
                break
            await stream.aclose()
            await until(lambda: client.stats.get("requests_running") == 0.0)
            assert client.num_streams == 0

    asyncio.run(run())


def test_requests_read_as_one_stream(tmp_path: Path) -> None:
    """A request may be added or stopped while others run; of one that was stopped nothing more comes, of the others all does."""

    async def run() -> None:
        async with engine_and_client(tmp_path) as (_, client), client.streams() as group:
            got: dict[str, list[int]] = {"a": [], "b": [], "c": []}
            finishes: dict[str, str] = {}
            await group.add(request_of("a", [1]))
            await group.add(request_of("b", [2], max_tokens=100_000))
            async for item in group:
                got[item.request_id] += item.token_ids
                if item.finish is not None:
                    finishes[item.request_id] = item.finish
                if item.request_id == "b" and len(got["b"]) == 5:
                    await group.stop("b", 5)
                    await group.add(request_of("c", [3]))
            assert got == {"a": expected([1], 20), "b": expected([2], 5), "c": expected([3], 20)}
            assert finishes == {"a": "length", "c": "length"}
            await until(lambda: client.stats.get("requests_running") == 0.0)

    asyncio.run(run())


def test_leaving_a_group_aborts_all_of_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path) as (_, client):
            async with client.streams() as group:
                for place in range(5):
                    await group.add(request_of(f"r{place}", [place], max_tokens=100_000))
                await anext(group)
                assert client.num_streams == 5
            assert client.num_streams == 0
            await until(lambda: client.stats.get("requests_running") == 0.0)

    asyncio.run(run())


def test_one_failure_of_a_group_is_raised_and_the_others_can_go_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path) as (_, client), client.streams() as group:
            await group.add(request_of("long", [1] * 101))
            await group.add(request_of("short", [1]))
            tokens, failures = [], 0
            while True:
                try:
                    tokens += (await anext(group)).token_ids
                except RequestRejected:
                    failures += 1
                except StopAsyncIteration:
                    break
            assert (tokens, failures) == (expected([1], 20), 1)

    asyncio.run(run())


def test_streams_go_on_through_kills_of_the_engine(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path, step_s=0.01) as (engine, client):
            keeper = asyncio.create_task(engine.keep_alive())
            prompts = [[i, 3] for i in range(8)]
            tasks = [asyncio.create_task(tokens_of(client, request_of(f"r{i}", p, 60))) for i, p in enumerate(prompts)]
            await until(lambda: len(client._streams) == 8 and all(stream.output_ids for stream in client._streams.values()))
            assert engine.process is not None
            engine.process.kill()
            outputs = await asyncio.wait_for(asyncio.gather(*tasks), 120)
            keeper.cancel()
            assert outputs == [expected(p, 60) for p in prompts]
            assert client.restarts == 1

    asyncio.run(run())


def test_poisoned_request_fails_and_the_others_end_well(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path, step_s=0.01) as (engine, client):
            keeper = asyncio.create_task(engine.keep_alive())
            with pytest.raises(RequestFailed) as raised:
                await asyncio.wait_for(tokens_of(client, request_of("bad", [POISON])), 120)
            assert raised.value.code == ErrorCode.POISONED
            await client.wait_ready(120)
            assert await asyncio.wait_for(tokens_of(client, request_of("good", [4])), 120) == expected([4], 20)
            keeper.cancel()

    asyncio.run(run())


def test_an_engine_whose_step_hangs_ends_itself_and_its_streams_go_on(tmp_path: Path) -> None:
    """lorax#149: a kernel hung in production while the process looked alive."""

    async def run() -> None:
        async with engine_and_client(tmp_path, step_limit_s=6.0) as (engine, client):  # longer than a machine stalls
            keeper = asyncio.create_task(engine.keep_alive())
            prompts = [[HANGS_ONCE], [4]]
            tasks = [asyncio.create_task(tokens_of(client, request_of(f"r{i}", p))) for i, p in enumerate(prompts)]
            assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == [expected(p, 20) for p in prompts]
            keeper.cancel()
            assert client.restarts == 1

    asyncio.run(run())


def test_waiting_for_an_engine_ends_with_unavailable(tmp_path: Path) -> None:
    async def run() -> None:
        async with EngineClient(f"ipc://{tmp_path}/nobody") as client:
            with pytest.raises(EngineUnavailable):
                await anext(client.generate(request_of("r", [1]), wait_s=0.3))

    asyncio.run(run())


def test_a_deadline_holds_while_no_engine_answers(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path) as (engine, client):
            request = GenerationRequest("r", [1], Sampling(max_tokens=100_000, seed=1), b"", "f", timeout_s=1.0)
            with pytest.raises(RequestFailed) as raised:  # noqa: PT012 - the stream raises it, on its way
                async for _ in client.generate(request):
                    engine.kill()
            assert raised.value.code == ErrorCode.TIMEOUT
            assert client.num_streams == 0

    asyncio.run(run())


DYING_CLIENT = textwrap.dedent(
    """
    import asyncio, sys
    from graftwork_engine.client import EngineClient
    from graftwork_engine.messages import Sampling
    from graftwork_engine.streams import GenerationRequest
    async def main():
        async with EngineClient(sys.argv[1]) as client:
            request = GenerationRequest("orphan", [1], Sampling(max_tokens=int(sys.argv[2]), seed=1), b"", "f")
            async for item in client.generate(request):
                print(item.first_output_index, flush=True)
            await asyncio.Event().wait()
    asyncio.run(main())
    """
)


async def tokens_before_death(endpoint: str, max_tokens: int, num_tokens: int) -> int:
    """Start a client, kill it once it has had ``num_tokens``, and return how many it got in all."""
    arguments = [sys.executable, "-c", DYING_CLIENT, endpoint, str(max_tokens)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    assert process.stdout is not None
    seen = 0
    while seen < num_tokens:
        seen = int(await asyncio.to_thread(process.stdout.readline)) + 1
    os.kill(process.pid, signal.SIGKILL)
    seen = max([seen, *[int(line) + 1 for line in process.stdout.read().split()]])
    process.wait()
    process.stdout.close()
    return seen


def test_orphans_of_a_killed_client_stop_at_once_and_are_kept_until_they_are_settled(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path) as (engine, client):
            seen = await tokens_before_death(engine.endpoint, 100_000, 5)
            async with asyncio.timeout(60):
                while "orphan" in (answer := await client.claim_orphans(["orphan", "stranger"])).stopping:
                    await asyncio.sleep(0.01)
            [orphan] = answer.items
            assert orphan.request_id == "orphan"
            assert seen <= orphan.output_count < 50_000
            assert (await client.claim_orphans(["orphan"])).items == [orphan], "two claims are answered alike"
            await client.settle_orphans(["orphan"])
            answer = await client.claim_orphans(["orphan"])
            assert (answer.items, answer.stopping) == ([], [])

    asyncio.run(run())


def test_a_request_that_ended_before_its_client_wrote_it_down_is_an_orphan_too(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path) as (engine, client):
            assert await tokens_before_death(engine.endpoint, 7, 7) == 7
            async with asyncio.timeout(60):
                while not (answer := await client.claim_orphans(["orphan"])).items:
                    assert answer.stopping == ["orphan"]
                    await asyncio.sleep(0.01)
            assert answer.items == [Orphan("orphan", 7)]

    asyncio.run(run())


def test_a_claim_no_engine_answers_is_unavailable(tmp_path: Path) -> None:
    async def run() -> None:
        async with EngineClient(f"ipc://{tmp_path}/nobody") as client:
            with pytest.raises(EngineUnavailable):
                await client.claim_orphans(["r"], wait_s=0.1)
            await client.settle_orphans(["r"])

    asyncio.run(run())


def test_an_id_that_is_aborted_can_be_used_again_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path, step_s=0.001) as (_, client):
            for number in range(30):
                first = client.generate(request_of("r", [5, number], max_tokens=100_000))
                for _ in range(number % 3):
                    await anext(first)
                async with client.streams() as group:  # left at once: the abort and the next run's start lie behind each other
                    if not number % 3:
                        await group.add(request_of("r", [5, number], max_tokens=100_000))
                await first.aclose()
                if number % 2:  # one that does not even begin
                    async with client.streams() as group:
                        await group.add(request_of("r", [6]))
                second = tokens_of(client, request_of("r", [7, number], max_tokens=5))
                assert await asyncio.wait_for(second, 60) == expected([7, number], 5)
            await until(lambda: client.stats.get("requests_running") == 0.0)
            assert (client.num_streams, client._stopping) == (0, set())

    asyncio.run(run())


def test_a_second_client_with_the_id_of_a_running_request_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path) as (engine, client), EngineClient(engine.endpoint) as other:
            first = client.generate(request_of("r", [1], max_tokens=40))
            await anext(first)
            await other.wait_ready(60)
            with pytest.raises(RequestFailed, match="running"):
                await asyncio.wait_for(tokens_of(other, request_of("r", [2])), 60)
            assert [token async for item in first for token in item.token_ids] == expected([1], 40)[1:]

    asyncio.run(run())


def test_an_abort_of_what_waits_in_the_engine_for_an_earlier_run_is_answered() -> None:
    """The engine's own wall, against a client that adds an id again before the last item of its first run came."""
    inbox, loop, sent = socket_loop()
    session = Session("a", b"a", 0.0, None)
    loop._sessions.open(session)
    add = request_stream("r").as_add("epoch")
    loop._handle(b"a", add)
    loop._handle(b"a", Abort("r", 0))
    loop._handle(b"a", add)
    loop._handle(b"a", Abort("r", 0))
    assert [inbox.get_nowait(), inbox.get_nowait(), inbox.empty()] == [add, Abort("r", 0), True], "the second run is held"
    assert sent == [(b"a", Out("epoch", [aborted_item("r", 0)]))], "and dropped"
    loop._handle(b"a", add)
    loop._outbox.put(Out("epoch", [aborted_item("r", 0)]))
    loop._send_all()
    assert [inbox.get_nowait(), inbox.empty()] == [add, True], "the third one begins once the first has stopped"
    assert loop._sessions.owned_by(session, "r")


def test_a_stream_that_lost_tokens_is_stopped_in_the_engine(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path) as (_, client):
            stream = client.generate(request_of("r", [5], max_tokens=100_000))
            await anext(stream)
            await client._deliver([OutItem("r", 1000, [1])])
            with pytest.raises(RequestFailed, match="lost"):
                async for _ in stream:
                    pass
            await until(lambda: client.stats.get("requests_running") == 0.0)
            assert await tokens_of(client, request_of("r", [6])) == expected([6], 20)

    asyncio.run(run())


def test_heartbeats_go_on_after_a_fault_of_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path) as (_, client):
            send, faults = client._send, [zmq.ZMQError(zmq.ENOTSUP), OSError(24, "Too many open files")]

            async def faulty(message: ToEngine) -> None:
                if faults:
                    raise faults.pop()
                await send(message)

            monkeypatch.setattr(client, "_send", faulty)
            await until(lambda: not faults and "Too many open files" in caplog.text)
            assert client._beater is not None
            assert not client._beater.done()
            assert await tokens_of(client, request_of("r", [1])) == expected([1], 20)

    asyncio.run(run())


def test_reading_goes_on_on_a_new_socket_after_an_unforeseen_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with engine_and_client(tmp_path) as (_, client):
            deliver = client._deliver

            async def broken(items: list[OutItem]) -> None:
                client._deliver = deliver  # type: ignore[method-assign]
                raise AssertionError("nobody foresaw it")

            client._deliver = broken  # type: ignore[method-assign]
            with contextlib.suppress(RequestFailed):
                await asyncio.wait_for(tokens_of(client, request_of("first", [1], 3)), 60)
            assert "nobody foresaw it" in caplog.text
            await client.wait_ready(60)
            assert await asyncio.wait_for(tokens_of(client, request_of("second", [1])), 60) == expected([1], 20)

    asyncio.run(run())


def socket_loop() -> tuple[queue.SimpleQueue[Add | Abort | None], _SocketLoop, list[tuple[bytes, ToClient]]]:
    """The engine's socket loop with nobody at the socket: what it would compute, itself, and what it sends."""
    inbox: queue.SimpleQueue[Add | Abort | None] = queue.SimpleQueue()
    sent: list[tuple[bytes, ToClient]] = []

    class Loop(_SocketLoop):
        def _send(self, identity: bytes, message: ToClient) -> None:
            sent.append((identity, message))

    context = zmq.Context.instance()
    with context.socket(zmq.ROUTER) as socket:
        ready = Ready(PROTOCOL_VERSION, "epoch", 1, "base", 100, 100)
        return inbox, Loop(socket, os.eventfd(0), ready, SessionTable(), inbox, queue.SimpleQueue()), sent


def request_stream(name: str) -> Stream:
    return Stream(request_of(name, [1]), None)


def test_items_that_overlap_what_the_client_has_are_trimmed() -> None:
    stream = Stream(request_of("r", [1]), None)
    stream.push(OutItem("r", 0, [1, 2, 3]))
    assert not stream.push(OutItem("r", 2, [3, 4]))
    assert stream.output_ids == [1, 2, 3, 4]
    assert stream.inbox.take().token_ids == [1, 2, 3, 4]
    assert stream.push(OutItem("r", 9, [10])), "a gap ends the stream"
    assert stream.inbox.take().error is not None
