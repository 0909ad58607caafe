"""Jobs that run beside the thread that started them and whose results come back to it. Knows nothing of what they do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Background:
    """Hands finished jobs to the thread that calls `take_in`. ``on_change`` is called from the job's thread as each one ends."""

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        self._on_change = on_change
        self._finished: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def start(
        self,
        executor: Executor,
        job: Callable[[], T],
        take_in: Callable[[Future[T]], None],
        started_by_job: Callable[[], Future[None] | None] = lambda: None,
    ) -> None:
        """Run ``job`` on the executor; a later call of this object's `take_in` passes the finished future to ``take_in``.

        Where the job has started another one, which ``started_by_job`` then tells, both must have finished.
        """

        def finished(future: Future[T]) -> None:
            other = started_by_job()
            if other is None:
                hand_over(future)
            else:
                other.add_done_callback(lambda _: hand_over(future))

        def hand_over(future: Future[T]) -> None:
            if not future.cancelled():
                self._finished.put(partial(take_in, future))
                if self._on_change is not None:
                    self._on_change()

        executor.submit(job).add_done_callback(finished)

    def take_in(self) -> bool:
        """Take in every job that has finished, in the order in which they did; true if there was one. Does not wait."""
        any_finished = False
        while True:
            try:
                take_in_one = self._finished.get_nowait()
            except Empty:
                return any_finished
            take_in_one()
            any_finished = True
