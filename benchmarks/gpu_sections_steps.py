"""What does a whole decode step cost, with adapters as a share of its own base, in both forms, and what of it is the host's?"""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch

from gpu_bench import Bench, Figures
from gpu_loads import BLOCK_SIZE, random_adapters
from gpu_model import RandomModel, Step
from graftwork_kernels.adapter_batch import build_adapter_batch
from graftwork_kernels.layout import AdapterMemory, RowType
from graftwork_kernels.triton.linear import Form


class DecodeSteps:
    """Steps of a random model of the bench's sizes in which every request decodes."""

    def __init__(self, bench: Bench) -> None:
        self.rows, self.context = (2, 20) if bench.is_dry else (64, 1024)
        self._bench = bench
        self.model = RandomModel(bench, self.rows * -(-self.context // BLOCK_SIZE), 1 if bench.is_dry else None)
        self._step = self.model.step([-1] * self.rows, [1] * self.rows, [self.context] * self.rows, self.rows)

    def with_adapters(self, number: int, row_type: RowType) -> tuple[Step, AdapterMemory]:
        """A step whose rows use so many adapters of rank 16 in turn; 0: the base, with nothing in memory that is used."""
        memory = random_adapters(self.model.shape, [16] * max(number, 1), row_type, self._bench.device)
        adapters = [row % number if number else -1 for row in range(self.rows)]
        fields = self._step.__dict__ | {"adapters": build_adapter_batch(adapters, self._bench.device)}
        return Step(**fields), memory


def decode_step(bench: Bench, figures: Figures) -> None:
    """All layers and the head, captured: with adapters as a share of the base, 64 of them first."""
    steps, base = DecodeSteps(bench), 0.0
    cases = [(0, RowType.BF16, Form.TWO)]
    for number, row_type in ((64, RowType.BF16), (16, RowType.BF16), (1, RowType.BF16), (64, RowType.INT8)):
        cases += [(number, row_type, form) for form in Form]
    for number, row_type, form in bench.in_time(cases[:3] if bench.is_dry else cases):
        number = min(number, steps.rows)
        step, memory = steps.with_adapters(number, row_type)
        seconds = bench.seconds(partial(steps.model.logits, bench.operators(form), step, memory))
        base = base or seconds
        name = f"{number} adapters {row_type.name.lower()} {form.value}" if number else "base"
        figures[f"{name}, ms"] = seconds * 1e3
        if number:
            figures[f"{name}, share of base"] = base / seconds
        del memory


def host_overhead(bench: Bench, figures: Figures) -> None:
    """The same steps called operator by operator: until they are issued, and until they are done; and the device's own part."""
    steps = DecodeSteps(bench)
    rounds = 1 if bench.is_dry else 7
    for number, form in bench.in_time([(0, Form.TWO)] if bench.is_dry else [(0, Form.TWO), (64, Form.TWO), (64, Form.FUSED)]):
        step, memory = steps.with_adapters(number, RowType.BF16)
        run = partial(steps.model.logits, bench.operators(form), step, memory)
        issued, done = [], []
        for _ in range(rounds):
            _finish(bench)
            started = time.perf_counter()
            run()
            issued.append(time.perf_counter() - started)
            _finish(bench)
            done.append(time.perf_counter() - started)
        name = f"{number} adapters {form.value}" if number else "base"
        figures[f"{name}, called, ms"] = statistics.median(done) * 1e3
        figures[f"{name}, called: the host's share"] = statistics.median(issued) / statistics.median(done)
        if not bench.is_dry:
            figures[f"{name}, device busy"] = bench.seconds(run) / statistics.median(done)
        del memory


def _finish(bench: Bench) -> None:
    if not bench.is_dry:
        torch.cuda.synchronize()
