"""The API process's end of the engine: streams of tokens that survive the engine's death. Imports no torch.

A stream holds all it needs to be resumed. When another engine answers (a new epoch), every unfinished stream is added again
with the tokens already received as a fixed prefix, so its reader sees a pause and nothing else. A request that was running in two
crashes fails instead: one poisoned request cannot kill the engine for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType

import msgspec
import zmq
import zmq.asyncio

from graftwork_engine.errors import EngineUnavailable, ErrorCode
from graftwork_engine.lifeline import open_process_handle
from graftwork_engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Claim,
    EngineError,
    Heartbeat,
    Hello,
    Orphans,
    Out,
    OutItem,
    Ready,
    Refused,
    Running,
    Settled,
    Stats,
    ToClient,
    ToEngine,
    decode_to_client,
    encode,
)
from graftwork_engine.streams import GenerationRequest, Inbox, Stream, StreamGroup

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.2
SILENCE_S = 10.0
"""An engine not heard for this long is taken for dead, where its process cannot be watched."""
MAX_CRASHES = 2
"""A request that was running in this many crashes of the engine is given up."""


class EngineClient:
    """Runs requests on whichever engine answers at ``endpoint``. Use as an async context manager, or call `start` and `close`."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._client_id = uuid.uuid4().hex
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._streams: dict[str, Stream] = {}
        self._stopping: set[str] = set()  # aborted, and the engine's last item of them is still to come
        self._info: Ready | None = None
        self._connected = asyncio.Event()
        self._last_heard = 0.0
        self._process_handle: int | None = None
        self._refusal: str | None = None
        self._claims: list[asyncio.Future[Orphans]] = []
        self._stats: dict[str, float] = {}
        self._reader: asyncio.Task[None] | None = None
        self._beater: asyncio.Task[None] | None = None
        self.restarts = 0

    async def __aenter__(self) -> EngineClient:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @property
    def info(self) -> Ready | None:
        """What the engine said of itself; the last engine's word while a new one starts."""
        return self._info

    @property
    def healthy(self) -> bool:
        """True while an engine answers."""
        return self._connected.is_set() and asyncio.get_running_loop().time() - self._last_heard < SILENCE_S

    @property
    def stats(self) -> Mapping[str, float]:
        """The engine's last reading of itself (each second), and how often another one had to take over."""
        return {**self._stats, "restarts_total": float(self.restarts)}

    @property
    def num_streams(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def start(self) -> None:
        """Begin to look for an engine; returns at once."""
        self._open_socket()
        self._beater = asyncio.create_task(self._beat(), name="engine-beat")
        self._beater.add_done_callback(_report_end)

    async def close(self) -> None:
        """End every stream and leave."""
        await self.end_streams()
        tasks = [task for task in (self._reader, self._beater) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._forget_engine()
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close(linger=200)
        self._context.term()

    async def end_streams(self) -> None:
        """Abort what runs: every stream ends with ``finish`` abort."""
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.end("abort")
            await self._abort_in_engine(request_id, len(stream.output_ids))

    async def wait_ready(self, timeout_s: float) -> Ready:
        """Wait for an engine; raises `EngineUnavailable` after ``timeout_s``, or at once when the engine is of another version."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        except TimeoutError:
            raise EngineUnavailable(
                self._refusal or f"no engine answered within {timeout_s:.0f} s; it may still be starting"
            ) from None
        if self._info is None:
            raise AssertionError("connected without an engine's word")
        return self._info

    @contextlib.asynccontextmanager
    async def streams(self, *, wait_s: float = 10.0) -> AsyncIterator[StreamGroup]:
        """Requests that are read as one stream; those unfinished at the end of the context are aborted.

        The group raises `RequestRejected` for a request that can never run, `RequestFailed` for one that failed later. The last
        item of each has ``finish`` set to stop, length or abort. Raises `EngineUnavailable` if no engine answered within
        ``wait_s`` of the call.
        """
        await self.wait_ready(wait_s)
        async with StreamGroup(self._begin, self._abort) as group:
            yield group

    async def generate(self, request: GenerationRequest, *, wait_s: float = 10.0) -> AsyncGenerator[OutItem, None]:
        """One request's output as it is made; closing the generator aborts the request. Raises as `streams` does."""
        async with self.streams(wait_s=wait_s) as group:
            await group.add(request)
            async for item in group:
                yield item

    async def claim_orphans(self, request_ids: Sequence[str], *, wait_s: float = 10.0) -> Orphans:
        """The final counts of those of these requests that an API process left by dying; they are kept until `settle_orphans`.

        Waits up to ``wait_s`` for an engine; raises `EngineUnavailable` if none answers.
        """
        ready = await self.wait_ready(wait_s)
        claim: asyncio.Future[Orphans] = asyncio.get_running_loop().create_future()
        self._claims.append(claim)
        await self._send(Claim(ready.epoch, list(request_ids)))
        return await claim

    async def settle_orphans(self, request_ids: Sequence[str]) -> None:
        """Tell the engine that these counts are durable. One that is gone has nothing to forget."""
        if self._info is not None:
            await self._send_if_connected(Settled(self._info.epoch, list(request_ids)))

    # Sending

    async def _begin(self, request: GenerationRequest, inbox: Inbox) -> None:
        if request.request_id in self._streams:
            raise AssertionError(f"request id {request.request_id} is in use")
        deadline = None if request.timeout_s is None else time.time() + request.timeout_s
        stream = self._streams[request.request_id] = Stream(request, deadline, inbox)
        await self._submit(stream)

    async def _abort(self, request_id: str, output_index: int | None) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            await self._abort_in_engine(request_id, len(stream.output_ids) if output_index is None else output_index)

    async def _abort_in_engine(self, request_id: str, output_index: int) -> None:
        """Nothing more of this run reaches a reader. One that still waits for an earlier run's end has not been sent at all."""
        if self._connected.is_set() and request_id not in self._stopping:
            self._stopping.add(request_id)
            await self._send(Abort(request_id, output_index))

    async def _submit(self, stream: Stream) -> None:
        """Send a request to the engine, if there is one; after an earlier run of its id has ended, if there was one."""
        if self._info is not None and self._connected.is_set() and stream.request.request_id not in self._stopping:
            await self._send(stream.as_add(self._info.epoch))

    async def _send(self, message: ToEngine) -> None:
        """Send to the engine of the moment. What was meant for one that is being given up is lost, as it would be with it."""
        socket = self._socket
        if socket is None:
            return
        try:
            await socket.send(encode(message))
        except zmq.ZMQError:
            if socket is self._socket:
                raise

    async def _send_if_connected(self, message: ToEngine) -> None:
        if self._connected.is_set():
            await self._send(message)

    async def _beat(self) -> None:
        while True:
            try:
                await self._beat_once()
            except (zmq.ZMQError, OSError) as error:
                logger.error("the engine cannot be spoken to, trying again: %s", error)
            await asyncio.sleep(HEARTBEAT_S)

    async def _beat_once(self) -> None:
        if self._reader is None or self._reader.done():
            self._open_socket()  # the last attempt failed
        if self._connected.is_set() and self._info is not None:
            if self._process_handle is None and asyncio.get_running_loop().time() - self._last_heard > SILENCE_S:
                self._lose_engine(f"it was silent for {SILENCE_S:.0f} s")
            else:
                await self._send(Heartbeat(self._info.epoch))
        if not self._connected.is_set():
            self._fail_expired()  # a living engine does this itself
            await self._send(Hello(PROTOCOL_VERSION, self._client_id, os.getpid()))

    # Receiving

    def _open_socket(self) -> None:
        """A fresh socket for each engine, so that nothing meant for a dead one waits in a buffer for its successor."""
        if self._reader is not None:
            self._reader.cancel()
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.connect(self._endpoint)
        self._reader = asyncio.create_task(self._read(self._socket), name="engine-read")
        self._reader.add_done_callback(_report_end)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frame = await socket.recv()
            self._last_heard = asyncio.get_running_loop().time()
            try:
                message = decode_to_client(frame)
            except msgspec.DecodeError as error:  # one bad frame must not end the reading of all streams
                logger.error("a message from the engine cannot be read and is dropped: %s", error)
                continue
            await self._handle(message)

    async def _handle(self, message: ToClient) -> None:
        if isinstance(message, Ready):
            await self._meet(message)
            return
        if isinstance(message, Refused):
            self._refused(message)
            return
        if self._info is None or not self._connected.is_set() or message.epoch != self._info.epoch:
            return  # the last words of an engine we have given up
        match message:
            case Out():
                await self._deliver(message.items)
            case Running():
                for request_id in message.request_ids:
                    if request_id not in self._stopping and (stream := self._streams.get(request_id)) is not None:
                        stream.running_in = message.epoch
            case Stats():
                self._stats = message.values
            case Orphans():
                if self._claims:
                    claim = self._claims.pop(0)
                    if not claim.done():
                        claim.set_result(message)
            case Heartbeat():
                pass

    async def _deliver(self, items: list[OutItem]) -> None:
        for item in items:
            request_id = item.request_id
            stream = self._streams.get(request_id)
            if request_id in self._stopping:  # of the aborted run: a stream of this id is another one, which waits for its end
                if item.finish is not None:
                    self._stopping.discard(request_id)
                    if stream is not None:
                        await self._submit(stream)
            elif stream is not None and stream.push(item):
                del self._streams[request_id]
                if item.finish is None:  # tokens were lost; the engine does not know of it
                    await self._abort_in_engine(request_id, len(stream.output_ids))

    def _fail_expired(self) -> None:
        now = time.time()
        for request_id, stream in list(self._streams.items()):
            if stream.deadline is not None and stream.deadline <= now:
                error = EngineError(ErrorCode.TIMEOUT, "the time limit passed while no engine answered")
                stream.end("error", error)
                del self._streams[request_id]

    def _refused(self, message: Refused) -> None:
        if message.reason == "unknown_client":
            self._lose_engine(message.message)
        else:
            self._refusal = message.message
            logger.error("the engine refused us: %s", message.message)

    async def _meet(self, ready: Ready) -> None:
        """An engine answered our Hello: resume every stream that it does not know."""
        if self._connected.is_set():
            return  # a second answer to a repeated Hello
        if self._info is not None and ready.epoch != self._info.epoch:
            self.restarts += 1
            self._count_crash(self._info.epoch)
        self._info, self._refusal = ready, None
        self._watch(ready.pid)
        self._connected.set()
        for stream in list(self._streams.values()):
            await self._submit(stream)

    def _count_crash(self, epoch: str) -> None:
        """The engine of ``epoch`` is dead: lay it at the door of the requests that were running in it."""
        for request_id, stream in list(self._streams.items()):
            if stream.running_in != epoch:
                continue
            stream.crashes += 1
            if stream.crashes >= MAX_CRASHES:
                error = EngineError(ErrorCode.POISONED, f"the engine crashed {stream.crashes} times while this request was running")
                stream.end("error", error)
                del self._streams[request_id]

    def _watch(self, pid: int) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ProcessLookupError):
            self._process_handle = open_process_handle(pid)
            if self._process_handle is not None:
                loop.add_reader(self._process_handle, self._lose_engine, "its process ended")

    def _lose_engine(self, why: str) -> None:
        """No engine answers from now on; `_beat` says Hello until one does."""
        if self._forget_engine():
            logger.warning("the engine is gone (%s); %d streams wait for the next one", why, len(self._streams))
            self._open_socket()

    def _forget_engine(self) -> bool:
        """Drop what belongs to the connection; True if there was one."""
        if self._process_handle is not None:
            asyncio.get_running_loop().remove_reader(self._process_handle)
            os.close(self._process_handle)
            self._process_handle = None
        was_connected = self._connected.is_set()
        self._connected.clear()
        self._stopping.clear()
        for claim in self._claims:
            if not claim.done():
                claim.set_exception(EngineUnavailable("the engine ended before it answered"))
        self._claims.clear()
        return was_connected


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("the task %s has failed", task.get_name(), exc_info=error)
