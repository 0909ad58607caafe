"""Parts of a GPU check that go wrong, each in a way of its own."""

from __future__ import annotations

import os
import time

from gpu_bench import Bench, Figures, Wrong


def healthy(bench: Bench, figures: Figures) -> None:
    figures["measured"] = 1.0


def wrong(bench: Bench, figures: Figures) -> None:
    figures["measured"] = 1.0
    raise Wrong("a kernel")


def changed_api(bench: Bench, figures: Figures) -> None:
    figures["measured"] = 1.0
    raise TypeError("an API that changed")


def killed(bench: Bench, figures: Figures) -> None:
    figures["measured"] = 1.0
    os.abort()


def endless(bench: Bench, figures: Figures) -> None:
    figures["measured"] = 1.0
    while True:
        time.sleep(0.1)


def careful(bench: Bench, figures: Figures) -> None:
    for item in bench.in_time(range(3)):
        figures[f"item {item}"] = 1.0
