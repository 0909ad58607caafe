"""The watchdog: when it ends what it watches, and when it does not."""

from __future__ import annotations

import asyncio

import pytest
from idle_time import run

from graftwork_platform.inference.watchdog import Watchdog


def test_a_watchdog_that_looks_away_ends_nothing_until_it_watches_again() -> None:
    steps = []

    async def look_away() -> None:
        with Watchdog(0.01) as watchdog:
            watchdog.look_away()
            await asyncio.sleep(0.05)
            steps.append("not ended")
            watchdog.watch()
            steps.append("not reached")

    with pytest.raises(TimeoutError):
        run(look_away())
    assert steps == ["not ended"]


def test_a_watchdog_takes_its_timer_with_it() -> None:
    async def main() -> None:
        with Watchdog(1000.0) as watchdog:
            watchdog.watch()
            timer = watchdog._timer
        assert timer is not None
        assert timer.cancelled()

    run(main())
