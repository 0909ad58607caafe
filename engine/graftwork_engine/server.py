"""The engine process's socket: one thread that talks to API processes while another one computes. Knows no tensors.

    API process ─DEALER→ ROUTER ─(inbox)→ engine loop
                                ←(outbox)─

The socket thread never computes and the engine loop never waits for a socket, so heartbeats go out during a long step, and a
client's death is noticed in the middle of one.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from graftwork_engine.errors import ErrorCode
from graftwork_engine.lifeline import open_process_handle
from graftwork_engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Add,
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
    decode_to_engine,
    encode,
)
from graftwork_engine.sessions import Session, SessionTable

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.2
SILENCE_S = 10.0
"""A client not heard for this long is taken for dead, where its process cannot be watched; one that can be is merely busy."""

Incoming = Add | Abort
Outgoing = Running | Out | Stats


@dataclass(frozen=True, slots=True)
class _Stop:
    """Tells the socket thread to end."""


class EngineServer:
    """Owns the ROUTER socket. ``inbox`` carries `Add` and `Abort` to the engine loop (None only wakes it up)."""

    def __init__(self, endpoint: str, ready: Ready) -> None:
        self.inbox: queue.SimpleQueue[Incoming | None] = queue.SimpleQueue()
        self._endpoint = endpoint
        self._ready = ready
        self._outbox: queue.SimpleQueue[Outgoing | _Stop] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sessions = SessionTable()
        self._bound = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine-socket", daemon=True)

    def start(self) -> None:
        """Bind and begin to answer; raises what binding raised."""
        self._thread.start()
        self._bound.wait()
        if self._failure is not None:
            raise self._failure

    def send(self, message: Outgoing) -> None:
        """Hand a message to the socket thread; it goes to the clients it concerns."""
        self._outbox.put(message)
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Send what is queued and close the socket."""
        self._outbox.put(_Stop())
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout=5)

    # The socket thread

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.SNDHWM, 0)  # a slow client must not make the router drop tokens
        try:
            socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            self._failure = error
            self._bound.set()
            return
        self._bound.set()
        try:
            _SocketLoop(socket, self._wake_fd, self._ready, self._sessions, self.inbox, self._outbox).run()
        finally:
            socket.close()
            context.term()


class _SocketLoop:
    """The body of the socket thread."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        wake_fd: int,
        ready: Ready,
        sessions: SessionTable,
        inbox: queue.SimpleQueue[Incoming | None],
        outbox: queue.SimpleQueue[Outgoing | _Stop],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket, self._wake_fd, self._ready = socket, wake_fd, ready
        self._sessions, self._inbox, self._outbox, self._clock = sessions, inbox, outbox, clock
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(wake_fd, zmq.POLLIN)
        self._watched: dict[int, Session] = {}
        self._held: list[tuple[bytes, Add]] = []

    def run(self) -> None:
        next_beat = self._clock()
        while True:
            now = self._clock()
            if now >= next_beat:
                self._beat(now)
                next_beat = now + HEARTBEAT_S
            events = dict(self._poller.poll(max(0, int((next_beat - self._clock()) * 1000))))
            for handle in [h for h in self._watched if h in events]:
                self._close(self._watched[handle], "its process ended")
            if self._socket in events:
                self._receive_all()
            if self._wake_fd in events:
                os.eventfd_read(self._wake_fd)
                if not self._send_all():
                    return

    def _beat(self, now: float) -> None:
        for session in self._sessions:
            if session.process_handle is None and now - session.last_heard > SILENCE_S:
                self._close(session, f"it was silent for {SILENCE_S:.0f} s")
            else:
                self._send(session.identity, Heartbeat(self._ready.epoch))

    def _receive_all(self) -> None:
        while True:
            try:
                identity, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                logger.warning("a message of the wrong number of frames was dropped")
                continue
            try:
                message = decode_to_engine(frame)
            except msgspec.DecodeError as error:
                logger.warning("a message that cannot be read was dropped: %s", error)
                self._send(identity, Refused("malformed", str(error)))
                continue
            self._handle(identity, message)

    def _handle(self, identity: bytes, message: ToEngine) -> None:
        if isinstance(message, Hello):
            self._hello(identity, message)
            return
        session = self._sessions.find(identity)
        if session is None or (not isinstance(message, Abort) and message.epoch != self._ready.epoch):
            self._send(identity, Refused("unknown_client", "this engine has no session with you: say Hello again"))
            return
        session.last_heard = self._clock()
        match message:
            case Add():
                self._add(session, message)
            case Abort():
                if self._sessions.owned_by(session, message.request_id):
                    self._sessions.forget(message.request_id, message.output_index)
                    self._inbox.put(message)
                else:
                    self._drop_held(identity, message)
            case Claim():
                self._send(identity, Orphans(self._ready.epoch, *self._sessions.claim(message.request_ids)))
            case Settled():
                self._sessions.settle(message.request_ids)
            case Heartbeat():
                pass

    def _add(self, session: Session, message: Add) -> None:
        if self._sessions.is_stopping(message.request_id):
            # It was aborted, or its client was taken for dead and came back: the first run's last item must not end the second.
            self._held.append((session.identity, message))
        elif self._sessions.own(session, message.request_id, len(message.output_ids)):
            self._inbox.put(message)
        else:
            logger.error("request %s is already running here; the second one is refused", message.request_id)
            error = EngineError(ErrorCode.INTERNAL, "a request of this id is running")
            item = OutItem(message.request_id, len(message.output_ids), finish="error", error=error)
            self._send(session.identity, Out(self._ready.epoch, [item]))

    def _drop_held(self, identity: bytes, abort: Abort) -> None:
        """An abort of what has not begun."""
        for place, (holder, add) in enumerate(self._held):
            if (holder, add.request_id) == (identity, abort.request_id):
                del self._held[place]
                self._send(identity, Out(self._ready.epoch, [aborted_item(add.request_id, len(add.output_ids))]))
                return

    def _release_held(self) -> None:
        held, self._held = self._held, []
        for identity, message in held:
            session = self._sessions.find(identity)
            if session is not None:
                self._add(session, message)

    def _hello(self, identity: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            reason = f"this engine speaks protocol {PROTOCOL_VERSION}, the API process {hello.version}: run one version of both"
            self._send(identity, Refused("version", reason))
            return
        known = self._sessions.find(identity)
        if known is not None:
            known.last_heard = self._clock()
        else:
            try:
                handle = open_process_handle(hello.pid)
            except ProcessLookupError:
                return  # it died before we answered
            session = Session(hello.client_id, identity, self._clock(), handle)
            self._sessions.open(session)
            if handle is not None:
                self._watched[handle] = session
                self._poller.register(handle, zmq.POLLIN)
        self._send(identity, self._ready)

    def _close(self, session: Session, why: str) -> None:
        left = self._sessions.close(session)
        if session.process_handle is not None:
            self._poller.unregister(session.process_handle)
            del self._watched[session.process_handle]
            os.close(session.process_handle)
        logger.info("API process %s is gone (%s); %d requests stop", session.client_id, why, len(left))
        for request_id in left:
            self._inbox.put(Abort(request_id, 0))

    def _send_all(self) -> bool:
        while True:
            try:
                message = self._outbox.get_nowait()
            except queue.Empty:
                return True
            match message:
                case _Stop():
                    return False
                case Running():
                    for identity, ids in self._sessions.owners(message.request_ids).items():
                        self._send(identity, Running(message.epoch, ids))
                case Out():
                    for identity, items in self._sessions.deliver(message.items).items():
                        self._send(identity, Out(message.epoch, items))
                    self._release_held()
                case Stats():
                    for session in self._sessions:
                        self._send(session.identity, message)

    def _send(self, identity: bytes, message: ToClient) -> None:
        self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)


def aborted_item(request_id: str, output_count: int) -> OutItem:
    """The last word on a request that was aborted, so that its final count is known."""
    return OutItem(request_id, output_count, finish="abort")
