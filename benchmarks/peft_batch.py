"""PEFT's mixed batch as a contender: transformers' ``generate`` with an adapter named for each row. Serves nothing.

Requests are taken ``streams`` at a time, and a batch is done when its longest is; all are of one length here, so nothing is wasted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from load import Felt, Load, prompts

BASE_NAME = "base"
NO_ADAPTER = "__base__"
"""PEFT's name for a row that uses none."""


class PeftBatch:
    """The base with all adapters loaded, in this process. A processor without bf16 instructions is faster in ``float32``."""

    def __init__(self, base: Path, adapters: Mapping[str, Path], dtype: str) -> None:
        self.name = (
            f"PEFT, {str(dtype).removeprefix('torch.')}" if adapters else f"transformers, {str(dtype).removeprefix('torch.')}"
        )
        self._model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
        self._has_adapters = bool(adapters)
        if adapters:
            from peft import PeftModel

            (first, folder), *others = adapters.items()
            self._model = PeftModel.from_pretrained(self._model, folder, adapter_name=first)
            for name, folder in others:
                self._model.load_adapter(folder, adapter_name=name)
        self._model.eval()
        self._used = 0.0

    def measure(self, load: Load, on_done: Callable[[], None]) -> Felt:
        """See `servers.Contender`. All tokens of a batch come at its end, so there are no times between tokens."""
        asked = prompts(load)
        began, before = time.perf_counter(), time.process_time()
        done_at: list[float] = []
        for first in range(0, len(asked), load.streams):
            batch = asked[first : first + load.streams]
            ids = torch.tensor([prompt.token_ids for prompt in batch])
            lora: dict[str, Any] = {}
            if self._has_adapters:
                lora["adapter_names"] = [NO_ADAPTER if p.model == BASE_NAME else p.model for p in batch]
            with torch.inference_mode():
                made = self._model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    min_new_tokens=load.output,
                    max_new_tokens=load.output,
                    pad_token_id=0,
                    **lora,
                )
            if made.shape[1] != load.input + load.output:
                raise RuntimeError(f"generate made {made.shape[1] - load.input} tokens of {load.output}")
            for _ in batch:
                done_at.append(time.perf_counter() - began)
                on_done()
        seconds = time.perf_counter() - began
        self._used += time.process_time() - before
        return Felt(len(asked), [], round(seconds, 3), round(len(asked) * load.output / seconds, 2), [], [], [])

    def cpu_seconds(self) -> float:
        """What its batches have used: between them it is idle, and this process is the load's too."""
        return self._used
