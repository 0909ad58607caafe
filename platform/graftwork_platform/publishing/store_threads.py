"""Threads of their own for calls that block on the object store, so that nothing else waits behind a store that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_NUM_THREADS = 16  # each may be in one call to the store; calls beyond wait for one another


class StoreThreads:
    """A bounded pool. `close` when done."""

    def __init__(self, num_threads: int = _NUM_THREADS) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="store")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``work`` on one of the threads. Once begun it is carried through even if the caller is cancelled."""
        return await asyncio.wrap_future(self._pool.submit(work, *args, **kwargs))

    async def close(self) -> None:
        """Finish running work, as long as it may take; what has not begun is dropped."""
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
