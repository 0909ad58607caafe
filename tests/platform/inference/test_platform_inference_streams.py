"""Event streams: a client that goes, silence that is broken, failures before and behind the first byte."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys

import pytest
from idle_time import run

from graftwork_platform.errors import PlatformError
from graftwork_platform.inference.sse import ClientGone, EventStream, event, until_disconnect


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

    run(main())
    assert steps == ["cleaned up", "raised"]


def stream_of(steps, keep_alive: float) -> list[dict]:
    """What an event stream sends for frames, pauses (seconds) and failures."""
    sent: list[dict] = []

    async def frames():
        for step in steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                yield step

    async def send(message) -> None:
        sent.append(message)

    async def receive():
        await asyncio.Event().wait()

    run(EventStream(frames(), keep_alive=keep_alive)({"type": "http"}, receive, send))
    return sent


def bodies(sent: list[dict]) -> list[bytes]:
    return [message["body"] for message in sent if message["type"] == "http.response.body"]


BEAT = b": keep-alive\n\n"


def test_silence_is_broken_by_a_comment_before_and_between_frames() -> None:
    sent = stream_of([0.25, b"one", 0.25, b"two", b"three"], keep_alive=0.1)
    assert [message["type"] for message in sent[:2]] == ["http.response.start", "http.response.body"]
    parts = bodies(sent)
    assert parts[0] == BEAT
    assert [part for part in parts if part != BEAT] == [b"one", b"two", b"three", b""]
    assert BEAT in parts[parts.index(b"one") : parts.index(b"two")]
    assert [message.get("more_body") for message in sent[1:]] == [True] * (len(parts) - 1) + [False]
    assert BEAT not in bodies(stream_of([b"one", 0.02, b"two"], keep_alive=5.0))


def test_a_failure_behind_a_comment_is_an_event_and_before_it_an_answer() -> None:
    failure = PlatformError("no", status=503, code="gone")
    late = stream_of([0.25, failure], keep_alive=0.1)
    assert late[0]["status"] == 200
    assert bodies(late)[-1] == event(failure.to_body()) + b"data: [DONE]\n\n"
    early = stream_of([0.01, failure], keep_alive=5.0)
    assert early[0]["status"] == 503
    assert b'"gone"' in bodies(early)[0]
    bug = stream_of([0.25, RuntimeError("secret")], keep_alive=0.1)
    assert b"had an error" in bodies(bug)[-1]
    assert b"secret" not in bodies(bug)[-1]
    with pytest.raises(RuntimeError):
        stream_of([RuntimeError("for the boundary outside")], keep_alive=5.0)


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
            await EventStream(frames(), keep_alive=15.0)({"type": "http"}, receive, send)

    run(main())
    assert closed == [True]


@pytest.mark.parametrize(("patience", "time_left"), [(0.2, math.inf), (60.0, 0.1)])
def test_a_client_that_does_not_read_has_gone(patience: float, time_left: float) -> None:
    """After some patience, and at the end of its request's time."""
    steps = []

    async def frames():
        try:
            yield b"one"
            yield b"never read"
            steps.append("asked for more")
        finally:
            steps.append("closed")

    async def send(message) -> None:
        if message.get("body") == b"never read":
            await asyncio.Event().wait()

    async def receive():
        await asyncio.Event().wait()

    stream = EventStream(frames(), keep_alive=0.05, time_left=time_left, patience=patience)
    run(asyncio.wait_for(stream({"type": "http"}, receive, send), 10))
    assert steps == ["closed"]


def test_a_client_that_reads_slowly_has_not_gone() -> None:
    read = []

    async def frames():
        for number in range(12):
            yield b"%d" % number

    async def send(message) -> None:
        await asyncio.sleep(0.05)
        read.append(message.get("body"))

    async def receive():
        await asyncio.Event().wait()

    run(EventStream(frames(), keep_alive=5.0, patience=0.4)({"type": "http"}, receive, send))
    assert read == [None, *(b"%d" % number for number in range(12)), b""]


def test_the_api_process_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, graftwork_platform.app; "
        "sys.exit(', '.join(m for m in ('torch', 'transformers', 'triton', 'peft') if m in sys.modules) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
