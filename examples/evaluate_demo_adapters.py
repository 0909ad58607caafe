"""Measures base and demo adapters on held-out prompts, through the HTTP API or offline with PEFT. Knows nothing of training.

Both get the same messages: the instruction states the whole task in words, and only the model's name differs. Output is greedy.
Exit status 1 unless every adapter beats the base by at least 30 points.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from demo_data.job import Example, Job, chat
from demo_data.jobs import all_jobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
MARGIN = 30.0  # points by which an adapter must beat the base


@dataclass(frozen=True, slots=True)
class Score:
    """How base and adapter did on one job's held-out prompts. ``base`` and ``adapter`` are percentages."""

    job: str
    num_prompts: int
    base: float
    adapter: float

    @property
    def gain(self) -> float:
        """Points by which the adapter is better."""
        return self.adapter - self.base


def percentage(job: Job, examples: Sequence[Example], outputs: Sequence[str]) -> float:
    """How many of the outputs do the job, in percent."""
    num_right = sum(job.is_success(example, output) for example, output in zip(examples, outputs, strict=True))
    return 100.0 * num_right / len(examples)


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: Job, examples: Sequence[Example], batch_size: int = 30
) -> list[str]:
    """Answer each example greedily with ``model`` as it stands (with whatever adapter is in it)."""
    import torch

    tokenizer.padding_side = "left"
    outputs: list[str] = []
    for start in range(0, len(examples), batch_size):
        prompts = [
            tokenizer.apply_chat_template(chat(job, example), tokenize=False, add_generation_prompt=True)
            for example in examples[start : start + batch_size]
        ]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            ids = model.generate(**batch, max_new_tokens=job.max_tokens, do_sample=False)
        outputs += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return outputs


def score_offline(job: Job, model_dir: Path, adapter_dir: Path, show: int = 0) -> Score:
    """Score one adapter in fp32 with transformers and PEFT; prints the first ``show`` failures of each side to stderr."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    examples = job.held_out()
    from_base = generate(base, tokenizer, job, examples)
    from_adapter = generate(PeftModel.from_pretrained(base, adapter_dir).eval(), tokenizer, job, examples)
    for side, outputs in (("base", from_base), (job.name, from_adapter)):
        failures = [(e, o) for e, o in zip(examples, outputs, strict=True) if not job.is_success(e, o)]
        for example, output in failures[:show]:
            print(f"{side} failed: {example.user!r}\n  wanted {example.answer!r}\n  got    {output!r}", file=sys.stderr)
    return Score(job.name, len(examples), percentage(job, examples, from_base), percentage(job, examples, from_adapter))


class Endpoint:
    """A running server, spoken to with one tenant's key."""

    def __init__(self, url: str, key: str, concurrency: int) -> None:
        """``url`` is the server's root, without ``/v1``."""
        import httpx2

        self._concurrency = concurrency
        self._client = httpx2.Client(base_url=url.rstrip("/") + "/v1/", headers={"Authorization": f"Bearer {key}"}, timeout=600)

    def base_model(self) -> str:
        """The base's name: the server lists it first."""
        answer = self._client.get("models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])

    def complete(self, model: str, job: Job, examples: Sequence[Example]) -> list[str]:
        """Answer every example greedily, several at a time."""

        def one(example: Example) -> str:
            body = {"model": model, "messages": chat(job, example), "temperature": 0, "max_tokens": job.max_tokens}
            answer = self._client.post("chat/completions", json=body)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["message"]["content"])

        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(pool.map(one, examples))


def score_over_http(job: Job, endpoint: Endpoint) -> Score:
    """Score one adapter through a running server."""
    examples = job.held_out()
    from_base = endpoint.complete(endpoint.base_model(), job, examples)
    from_adapter = endpoint.complete(job.name, job, examples)
    return Score(job.name, len(examples), percentage(job, examples, from_base), percentage(job, examples, from_adapter))


def tenant_of(adapter: str) -> str:
    """The demo tenant that owns an adapter, by ``demo.json``."""
    seed = json.loads((HERE / "demo.json").read_text(encoding="utf-8"))
    return next(str(tenant["name"]) for tenant in seed["tenants"] for entry in tenant["adapters"] if entry["name"] == adapter)


def read_keys(keys_dir: Path | None, pairs: Sequence[str]) -> dict[str, str]:
    """Keys by tenant, from ``TENANT.key`` files and from ``TENANT=KEY`` pairs, which win."""
    keys = (
        {} if keys_dir is None else {file.stem: file.read_text(encoding="utf-8").strip() for file in sorted(keys_dir.glob("*.key"))}
    )
    return keys | dict(pair.split("=", 1) for pair in pairs)


def print_table(scores: Sequence[Score]) -> None:
    """One line for each job."""
    from rich.console import Console
    from rich.table import Table

    table = Table("job", "prompts", "base", "adapter", "gain", title="held-out prompts answered right")
    for score in scores:
        table.add_row(score.job, str(score.num_prompts), f"{score.base:.1f} %", f"{score.adapter:.1f} %", f"{score.gain:+.1f}")
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry."""
    names = [job.name for job in all_jobs()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a running server, for example http://127.0.0.1:8000")
    where.add_argument("--peft", type=Path, metavar="MODEL_DIR", help="score offline with transformers and PEFT on this base")
    parser.add_argument("--keys-dir", type=Path, help="folder with TENANT.key files, as the server writes them under DATA_DIR/demo")
    parser.add_argument("--key", action="append", default=[], metavar="TENANT=KEY", help="one tenant's key; may be repeated")
    parser.add_argument("--only", action="append", choices=names, help="one job; may be repeated")
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight (with --url)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N failures of each side (with --peft)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    keys = read_keys(options.keys_dir, options.key)
    scores = []
    for job in all_jobs():
        if options.only and job.name not in options.only:
            continue
        if options.peft is not None:
            scores.append(score_offline(job, options.peft, HERE / "adapters" / job.name, options.show))
            continue
        key = keys.get(tenant_of(job.name))
        if key is None:
            parser.error(f"no key for tenant {tenant_of(job.name)}: give --keys-dir or --key")
        scores.append(score_over_http(job, Endpoint(options.url, key, options.concurrency)))
    if options.json:
        print(json.dumps([asdict(score) | {"gain": score.gain} for score in scores], indent=2))
    else:
        print_table(scores)
    return 0 if all(score.gain >= MARGIN for score in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
