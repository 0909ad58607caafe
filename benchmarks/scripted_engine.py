"""An engine process without a model: the real socket and loop around a core that makes a token a step of each request.

    python benchmarks/scripted_engine.py ENDPOINT STEP_SECONDS < TOKEN_IDS_AS_JSON

Every output walks through the given tokens, from a place of its own, until its ``max_tokens``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

from graftwork_engine.lifeline import die_with_parent
from graftwork_engine.loop import serve
from graftwork_engine.messages import OutItem
from graftwork_engine.request import Request, RequestId

LIMIT = 1 << 20
"""Tokens of a request that this engine takes: more than any load asks for."""


class ScriptedCore:
    """Stands in for `EngineCore`. Steps begin at even intervals, whatever the machine is busy with."""

    def __init__(self, token_ids: list[int], step_s: float) -> None:
        self.on_running: Callable[[list[RequestId]], None] = lambda _ids: None
        self.last_num_tokens = 0
        self._token_ids, self._step_s = token_ids, step_s
        self._requests: dict[RequestId, tuple[Request, int]] = {}
        self._fresh: list[RequestId] = []
        self._next_step = 0.0
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """True while a request runs."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Take a request, which begins seven tokens behind the one before it."""
        self._requests[request.request_id] = (request, 7 * self._num_added)
        self._num_added += 1
        self._fresh.append(request.request_id)

    def abort(self, request_id: RequestId) -> int | None:
        """End a request; how many tokens it has made, None for an unknown one."""
        entry = self._requests.pop(request_id, None)
        return None if entry is None else len(entry[0].output_ids)

    def step(self) -> list[OutItem]:
        """Wait for the step's time and give each request its next token."""
        self._next_step = max(self._next_step, time.monotonic()) if not self.last_num_tokens else self._next_step
        time.sleep(max(0.0, self._next_step - time.monotonic()))
        self._next_step += self._step_s
        fresh, self._fresh = [name for name in self._fresh if name in self._requests], []
        if fresh:
            self.on_running(fresh)
        items = [self._next_item(request, start) for request, start in list(self._requests.values())]
        self.last_num_tokens = len(items)
        return items

    def _next_item(self, request: Request, start: int) -> OutItem:
        index = len(request.output_ids)
        token_id = self._token_ids[(start + index) % len(self._token_ids)]
        request.output_ids.append(token_id)
        is_last = index + 1 >= request.sampling.max_tokens
        if is_last:
            del self._requests[request.request_id]
        return OutItem(request.request_id, index, [token_id], finish="length" if is_last else None)

    def take_in_loads(self) -> None:
        """There are no adapters to wait for."""

    def check_integrity(self) -> list[str]:
        """There are no books."""
        return []


class ScriptedAssembly:
    """What `serve` asks for around a core."""

    base_id = "base"
    max_model_len = LIMIT
    max_prompt_and_output = LIMIT

    def __init__(self, core: ScriptedCore) -> None:
        self.core = core

    def stats(self) -> dict[str, float]:
        """None."""
        return {}

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Nothing is loaded in the background."""

    def close(self) -> None:
        """Nothing runs beside the core."""


def main() -> None:
    """Command line; see the module's docstring."""
    endpoint, step_s = sys.argv[1], float(sys.argv[2])
    die_with_parent(os.getppid())
    core = ScriptedCore(json.load(sys.stdin), step_s)
    serve(ScriptedAssembly(core), endpoint, step_limit_s=60.0)  # type: ignore[arg-type]  # it is no EngineCore, and serves as one


if __name__ == "__main__":
    main()
