"""Does one captured graph serve every mix? Whole steps of a small model, replayed and called over the same memory, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import torch

from gpu_bench import Bench, Figures, Wrong, must_equal, spoiled_memory
from gpu_loads import BLOCK_SIZE, AdapterChanges, fresh_draw, random_adapters
from gpu_model import RandomModel, Step, with_room, write_over
from graftwork_kernels.layout import RowType
from graftwork_kernels.triton.linear import Form

RESULTS = ("hidden states", "logits", "finite rows", "tokens", "logprobs", "most probable tokens", "their logprobs")


def graphs_follow_the_mix(bench: Bench, figures: Figures) -> None:
    """Attention, adapters in both forms, and sampling, of steps of 64 and 8 rows under traffic.

    Between steps, requests join and leave, contexts grow, and adapters are loaded, overwritten, moved and evicted; each time a
    graph captured before the first of them must write what calls at the same padded size write.
    """
    longest, num_layers = (40, 1) if bench.is_dry else (3000, 2)
    ranks = [1, 8, 17, 33] if bench.is_dry else [8, 16, 64, 33, 1, 16, 40, 64]
    sizes = (3,) if bench.is_dry else (64, 8)
    model = RandomModel(bench, max(sizes) * -(-longest // BLOCK_SIZE), num_layers)
    memory = random_adapters(replace(bench.shape, num_layers=16), ranks, RowType.BF16, bench.device, layers=num_layers)
    changes = AdapterChanges(memory)
    for num_rows, form in bench.in_time(list(product(sizes, Form))):
        traffic = Traffic(model, changes, num_rows, longest)
        static = traffic.step()
        run = partial(model.whole_step, bench.operators(form), static, memory)
        replay = bench.replayed(run)
        name = f"{num_rows} rows, {form.value}"
        figures[f"mixes of {name}"] = 0.0
        for number in bench.in_time(range(1 if bench.is_dry else 20), partial("mix {1} of {0}".format, name)):
            for change in range(4 * number, 4 * number + 4) if bench.is_dry else [number]:
                traffic.change(change)
            write_over(static, traffic.step())
            replayed = replay()
            caches = [cache.clone() for cache in model.kv.keys + model.kv.values]
            with spoiled_memory():
                called = run()
            for result, one, other in zip(RESULTS, replayed, called, strict=True):
                must_equal(f"{name}, mix {number}: {result} of a graph beside those of calls", one, other)
            if not all(map(torch.equal, caches, model.kv.keys + model.kv.values)):
                raise Wrong(f"{name}, mix {number}: a graph wrote other keys and values than calls")
            if not called[RESULTS.index("finite rows")].all():
                raise Wrong(f"{name}, mix {number}: logits are not finite")
            figures[f"mixes of {name}"] = number + 1.0


class Traffic:
    """Requests that decode, up to ``num_rows`` at a time, and the adapters that they use."""

    def __init__(self, model: RandomModel, changes: AdapterChanges, num_rows: int, longest: int) -> None:
        self._model, self._changes = model, changes
        self._num_rows, self._longest = num_rows, longest
        self._draw = fresh_draw()
        self._live: list[tuple[int, int]] = []  # adapter and context of each
        self._join(num_rows)

    def change(self, number: int) -> None:
        """What happens between two steps."""
        draw, changes = self._draw, self._changes
        resident = sorted(changes.resident)
        match number % 4:
            case 0 if len(resident) > 1:
                changes.evict(int(draw.choice(resident)))
            case 1 if len(resident) > 1:
                changes.swap(*draw.choice(resident, 2, replace=False).tolist())
            case 2:
                changes.load(int(draw.choice(resident)))
            case _:
                for adapter in self._evicted():
                    changes.load(adapter)
        stays = draw.random(len(self._live)) < 0.85
        self._live = [
            (adapter, min(context + 1, self._longest))
            for (adapter, context), stay in zip(self._live, stays, strict=True)
            if stay and (adapter < 0 or adapter in changes.resident)
        ]
        self._join(int(draw.integers(1, self._num_rows + 1)))

    def step(self) -> Step:
        """The live requests, then padding."""
        missing = self._num_rows - len(self._live)
        adapters = [adapter for adapter, _ in self._live] + [-1] * missing
        contexts = [context for _, context in self._live] + [0] * missing
        step = self._model.step(adapters, [1] * len(self._live) + [0] * missing, contexts, self._num_rows)
        return with_room(step, self._longest, self._model.shape.vocab)

    def _evicted(self) -> set[int]:
        return set(range(self._changes.number)) - self._changes.resident

    def _join(self, wanted: int) -> None:
        known = [-1, *sorted(self._changes.resident)]
        while len(self._live) < wanted:
            self._live.append((int(self._draw.choice(known)), int(self._draw.integers(1, self._longest + 1))))
