"""What 8-bit rows of an adapter change: divergence and agreement of its next-token distributions, and its bytes, beside bf16 rows.

    row_types.py --base DIR [--prompts N] [--out FILE] [--json]

Held-out prompts of the demo's jobs with their answers go through the whole model, once with an adapter's rows in bf16 and once in
each 8-bit type; every position of prompt and answer is one reading. Divergence is KL(bf16 ‖ 8-bit) over the whole vocabulary, in
thousandths of a nat.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from demo_data.job import Job, chat
from demo_data.jobs import all_jobs

from graftwork_adapters.base_spec import BaseSpec, load_base_spec
from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.fetcher import HostAdapter
from graftwork_adapters.keys import RowTypeName
from graftwork_adapters.pack import longest_row_bytes
from graftwork_adapters.packed import read_packed
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import PublishJob
from graftwork_engine.batch import BatchBuilder, StepCapacity
from graftwork_engine.kv_memory import allocate_kv_cache
from graftwork_engine.messages import Sampling
from graftwork_engine.model.config import ModelConfig
from graftwork_engine.model.layers import Placement
from graftwork_engine.model.llama import Llama
from graftwork_engine.model.loader import load_weights
from graftwork_engine.request import Request, RequestId
from graftwork_engine.sched.plan import ScheduledRequest, StepPlan
from graftwork_kernels import reference
from graftwork_kernels.layout import AdapterMemory
from graftwork_kernels.ops import Operators
from results import BenchmarkFailed, Claim, Part, Results
from runs import add_base, add_output, check_base, conclude

DEMO_ADAPTERS = Path(__file__).resolve().parent.parent / "examples" / "adapters"
EIGHT_BIT: tuple[RowTypeName, ...] = ("int8", "e4m3")
MOST_KL = {"int8": 1.0}
"""Thousandths of a nat, the mean over positions; bars."""

BLOCK_SIZE = 16
LONGEST = 512


@dataclass(frozen=True)
class Packed:
    """An adapter in one row type: where it lies in the pool, and the bytes of its rows."""

    index: int
    num_bytes: int


class Scorer:
    """A base in bf16 with adapters in memory, and the distributions that they give. No engine around it: all logits are wanted."""

    def __init__(self, base: Path, pool_bytes: int) -> None:
        config = ModelConfig.from_dir(base)
        place = Placement(torch.bfloat16, torch.device("cpu"))
        self.spec: BaseSpec = load_base_spec(base)
        self._ops = Operators(reference)  # the specification: what is measured is the rows, not a kernel
        self._model = Llama(config, LONGEST, place)
        load_weights(self._model, base)
        self._model.prepare(self._ops)
        self.pool = DevicePool(pool_bytes, len(self.spec.sites), longest_row_bytes(self.spec))
        self._kv = allocate_kv_cache(config, LONGEST // BLOCK_SIZE, BLOCK_SIZE, place.dtype, place.device)
        memory = AdapterMemory(*self.pool.tensors[:3])
        self._builder = BatchBuilder(self._ops, memory, BLOCK_SIZE, StepCapacity(LONGEST, 1, self._kv.num_blocks))

    def load(self, upload: Path, row_type: RowTypeName, base: Path, scratch: Path) -> Packed:
        """Publish ``upload`` and bring it into memory; raises `BenchmarkFailed` with the report if it is refused."""
        out = scratch / f"{upload.name}.{row_type}"
        result = publish(PublishJob(upload, out, self.spec, row_type, base_dir=base))
        if result.packed_key is None:
            raise BenchmarkFailed(f"{upload} is refused: {[f.message for f in result.report.findings if f.result == 'fail']}")
        index, rows = read_packed(out, result.packed_key)
        layout = self.pool.plan(index)
        placement = self.pool.place(layout.extent)
        if placement is None:
            raise BenchmarkFailed(f"there is no room for {upload} in the pool")
        self.pool.write(placement, layout, HostAdapter(index, rows))
        return Packed(placement.index, index.num_bytes)

    def logprobs(self, token_ids: list[int], adapter: Packed) -> Tensor:
        """fp32 [tokens, vocabulary]: of what follows each token."""
        request = Request(
            RequestId("scored"), token_ids, Sampling(max_tokens=1, seed=0, temperature=0.0), b"", "benchmark", arrival=0.0
        )
        blocks = list(range(-(-len(token_ids) // BLOCK_SIZE)))
        plan = StepPlan([ScheduledRequest(request, 0, len(token_ids), blocks, adapter.index, samples=True)])
        batch = self._builder.build(plan)
        hidden = self._model.hidden_states(batch.token_ids, batch.forward, self._kv)
        return self._model.logits(self._ops, hidden).log_softmax(-1)


def texts(base: Path, job: Job, count: int) -> Iterator[list[int]]:
    """Token ids of held-out prompts with their answers."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    for example in job.held_out()[:count]:
        prompt = cast("str", tokenizer.apply_chat_template(chat(job, example), tokenize=False, add_generation_prompt=True))
        ids = cast("list[int]", tokenizer(prompt + example.answer, add_special_tokens=False)["input_ids"])
        yield ids[:LONGEST]


@torch.inference_mode()
def measure(options: argparse.Namespace, results: Results) -> None:
    """Each demo adapter in each 8-bit type."""
    scorer = Scorer(options.base, pool_bytes=256 << 20)
    for job in all_jobs():
        upload = DEMO_ADAPTERS / job.name
        part = Part(job.name, {}, {"prompts": options.prompts})
        with tempfile.TemporaryDirectory() as scratch:
            plain = scorer.load(upload, "bfloat16", options.base, Path(scratch))
            packed = {row_type: scorer.load(upload, row_type, options.base, Path(scratch)) for row_type in EIGHT_BIT}
        divergences: dict[str, list[float]] = {row_type: [] for row_type in EIGHT_BIT}
        agreements: dict[str, list[float]] = {row_type: [] for row_type in EIGHT_BIT}
        for number, ids in enumerate(texts(options.base, job, options.prompts)):
            print(f"{job.name}: prompt {number + 1} of {options.prompts}", file=sys.stderr)
            wanted = scorer.logprobs(ids, plain)
            for row_type, adapter in packed.items():
                got = scorer.logprobs(ids, adapter)
                divergences[row_type].append(1e3 * float((wanted.exp() * (wanted - got)).sum(-1).mean()))
                agreements[row_type].append(100 * float((wanted.argmax(-1) == got.argmax(-1)).float().mean()))
        for row_type, adapter in packed.items():
            name = f"{job.name}, {row_type} rows"
            mean = sum(divergences[row_type]) / len(divergences[row_type])
            part.claims.append(Claim.of(f"{name}: KL to bf16 rows", "", [mean], "mnat", MOST_KL.get(row_type), "at most", needed=1))
            part.claims.append(Claim.of(f"{name}: same most probable token", "", agreements[row_type], "%"))
            part.claims.append(Claim.of(f"{name}: bytes", "bf16 rows", [adapter.num_bytes / plain.num_bytes], "×"))
        results.put(part)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure what 8-bit rows change of the demo adapters' output.")
    add_base(parser, "")
    parser.add_argument("--prompts", type=int, default=10, help="held-out prompts of each job")
    add_output(parser)
    options = parser.parse_args(arguments)
    if options.prompts < 1:
        parser.error(f"--prompts {options.prompts}: give 1 or more")
    check_base(parser, options)
    return options


def main(arguments: Sequence[str]) -> int:
    """Print a table or JSON; 1 if the measurement failed, 130 if it was interrupted."""
    options = parse(arguments)
    return conclude("row_types", options.base.name, options, lambda results: measure(options, results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
