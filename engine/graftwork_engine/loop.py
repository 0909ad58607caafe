"""The engine loop: takes requests from the socket's inbox, steps the core, hands each step's output back. Knows no tensors.

One thread computes (`EngineLoop`), one owns the socket (`server.EngineServer`), a few load adapters.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import queue
import signal
import threading
import time
import uuid
from collections.abc import Callable
from typing import Protocol

from graftwork_engine.core import EngineCore
from graftwork_engine.errors import RequestRejected
from graftwork_engine.idle_recount import IdleRecount
from graftwork_engine.messages import PROTOCOL_VERSION, Abort, Add, EngineError, Out, OutItem, Ready, Running, Stats
from graftwork_engine.request import AdapterKey, Request, RequestId
from graftwork_engine.server import EngineServer, aborted_item

logger = logging.getLogger(__name__)

STATS_S = 1.0
IDLE_S = 0.5
BLOCKED_S = 0.02
"""How long the loop rests when every request waits for an adapter; a finished load wakes it sooner."""


class Assembly(Protocol):
    """A core with all it stands on (`graftwork_engine.assembly` builds the real one)."""

    @property
    def core(self) -> EngineCore:
        """What is stepped."""
        ...

    @property
    def base_id(self) -> str:
        """Identity of the base model's weights."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        ...

    @property
    def max_prompt_and_output(self) -> int:
        """The same, bounded by what KV memory can ever hold."""
        ...

    def stats(self) -> dict[str, float]:
        """A reading of everything in it; names end in their unit, counters in ``_total``."""
        ...

    def wake_with(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, from any thread, when a background load has finished."""
        ...

    def close(self) -> None:
        """Stop background threads."""
        ...


class EngineLoop:
    """Takes requests from the server's inbox, steps the core, and hands each step's output back."""

    def __init__(self, assembly: Assembly, server: EngineServer, epoch: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._core, self._stats, self._server, self._epoch, self._clock = assembly.core, assembly.stats, server, epoch, clock
        self._stopping = False  # no Event, whose lock a signal handler could wait for in vain
        self._step_started: float | None = None
        self._recount = IdleRecount(self._check, clock)
        self._core.on_running = lambda ids: server.send(Running(epoch, list(ids)))

    def stop(self) -> None:
        """Ask the loop to end after its current step; may be called from a signal handler."""
        self._stopping = True
        self._server.inbox.put(None)

    @property
    def seconds_in_step(self) -> float:
        """How long the current step has been running; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else self._clock() - started

    def run(self) -> None:
        """Serve until `stop`; whatever the core raises ends the process."""
        next_stats = self._clock()
        rest = 0.0
        while not self._stopping:
            anything_new = self._take_in(rest)
            progressed = False
            if anything_new or self._core.has_work:
                self._recount.touch()
            elif rest:
                self._recount.run_if_due()
            if self._core.has_work:
                self._step_started = self._clock()
                items = self._core.step()
                self._step_started = None
                progressed = bool(items) or self._core.last_num_tokens > 0
                if items:
                    self._server.send(Out(self._epoch, items))
            rest = 0.0 if progressed else BLOCKED_S if self._core.has_work else IDLE_S
            if self._clock() >= next_stats:
                self._server.send(Stats(self._epoch, {**self._stats(), **self._recount.stats()}))
                next_stats = self._clock() + STATS_S

    def _check(self) -> list[str]:
        self._core.take_in_loads()  # of requests that were aborted meanwhile
        return self._core.check_integrity()

    def _take_in(self, rest: float) -> bool:
        """Handle all waiting messages; wait up to ``rest`` seconds for the first. True if there was one."""
        any_came = False
        try:
            message = self._server.inbox.get(timeout=rest) if rest else self._server.inbox.get_nowait()
            while True:
                any_came = True
                if isinstance(message, Add):
                    self._add(message)
                elif isinstance(message, Abort):
                    count = self._core.abort(message.request_id)
                    if count is not None:
                        self._server.send(Out(self._epoch, [aborted_item(message.request_id, count)]))
                message = self._server.inbox.get_nowait()
        except queue.Empty:
            return any_came

    def _add(self, message: Add) -> None:
        now = self._clock()
        request = Request(
            request_id=RequestId(message.request_id),
            prompt_ids=message.prompt_ids,
            sampling=message.sampling,
            cache_salt=message.cache_salt,
            flow=message.flow,
            arrival=now,
            adapter_key=None if message.adapter_key is None else AdapterKey(message.adapter_key),
            adapter_start=message.adapter_start,
            vocab_size=message.vocab_size,
            deadline=None if message.deadline is None else now + (message.deadline - time.time()),
            output_ids=list(message.output_ids),
            num_resumed_tokens=len(message.output_ids),
        )
        try:
            self._core.add(request)
        except RequestRejected as error:
            item = OutItem(message.request_id, len(message.output_ids), finish="error", error=EngineError(error.code, str(error)))
            self._server.send(Out(self._epoch, [item]))


def _watch_for_hangs(loop: EngineLoop, limit_s: float) -> None:
    """End the process when one step takes longer than any step can: a hung engine looks alive to its clients."""
    while True:
        time.sleep(1.0)
        if loop.seconds_in_step > limit_s:
            logger.critical("a step has been running for more than %.0f s; ending so that a new engine can start", limit_s)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(1)


def serve(assembly: Assembly, endpoint: str, step_limit_s: float) -> None:
    """Serve ``assembly`` on ``endpoint`` until SIGTERM or SIGINT."""
    epoch = uuid.uuid4().hex
    ready = Ready(
        version=PROTOCOL_VERSION,
        epoch=epoch,
        pid=os.getpid(),
        base_id=assembly.base_id,
        max_model_len=assembly.max_model_len,
        max_prompt_and_output=assembly.max_prompt_and_output,
    )
    server = EngineServer(endpoint, ready)
    loop = EngineLoop(assembly, server, epoch)
    assembly.wake_with(lambda: server.inbox.put(None))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.stop())
    server.start()
    gc.collect()
    gc.freeze()  # what is here by now stays: a full collection would look through all of torch, and every stream would pause
    threading.Thread(target=_watch_for_hangs, args=(loop, step_limit_s), name="engine-watchdog", daemon=True).start()
    logger.info("engine %s is ready", epoch)
    try:
        loop.run()
    finally:
        server.stop()
        assembly.close()
