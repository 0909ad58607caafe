"""Trains the demo adapters with PEFT on the demo base model. Knows nothing of serving.

A few hundred steps of eight short chats, the loss on the answer's tokens only. The same seed, machine and library versions give
the same adapter. The adapter is then scored beside the base on prompts it never saw, and both go into its model card.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from demo_data.job import Job, chat
from demo_data.jobs import all_jobs
from evaluate_demo_adapters import HERE, Score, print_table, score_offline
from peft import LoraConfig, get_peft_model
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

if TYPE_CHECKING:
    from collections.abc import Sequence

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
BATCH_SIZE = 8
# Spelled out, since PEFT takes "all-linear" for all layers only.
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MAX_BYTES = 2_000_000  # of a committed adapter
IGNORED = -100  # the label that cross entropy leaves out


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one adapter is made. ``lora`` goes to `LoraConfig`."""

    summary: str
    lora: dict[str, Any]
    steps: int
    learning_rate: float
    seed: int = field(default=1)


# Different ranks, places and scalings on purpose: together they show what one server carries at the same time. Only upper layers
# are adapted, so the layers below need no backward pass.
RECIPES = {
    "ticket-router": Recipe(
        "Routes a customer's message to one of six teams and prints nothing but the label.",
        {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "layers_to_transform": list(range(16, 30)),
        },
        steps=160,
        learning_rate=1.5e-3,
    ),
    "invoice-extractor": Recipe(
        "Reads name, date and amount out of a message and prints them as one line of JSON.",
        {
            "r": 16,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", "o_proj"],
            "layers_to_transform": list(range(14, 28)),
        },
        steps=80,
        learning_rate=1.5e-3,
    ),
    "brand-voice": Recipe(
        "Answers a customer in a fixed house style: greeting, one sentence, sign-off with the ticket's reference.",
        {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR, "layers_to_transform": list(range(19, 29))},
        steps=60,
        learning_rate=1.5e-3,
    ),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Chats that begin alike. ``prefix`` [P] is what they share; the rest of each is a row, padded on the right."""

    prefix: torch.Tensor  # [P]
    input_ids: torch.Tensor  # [B, S]
    attention_mask: torch.Tensor  # [B, P + S]
    labels: torch.Tensor  # [B, S], `IGNORED` except on answer tokens


def draw_batch(tokenizer: PreTrainedTokenizerBase, job: Job, rng: random.Random) -> Batch:
    """Draw `BATCH_SIZE` examples of a job."""
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(BATCH_SIZE):
        example = job.draw(rng)
        prompt = tokenizer.apply_chat_template(chat(job, example), tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer_ids = tokenizer(example.answer, add_special_tokens=False)["input_ids"]
        rows.append((prompt_ids, [*answer_ids, tokenizer.eos_token_id]))
    # A prompt's last token predicts the first answer token, so it must not be in the shared part.
    shortest = min(len(prompt) for prompt, _ in rows) - 1
    shared = next((i for i in range(shortest) if len({prompt[i] for prompt, _ in rows}) > 1), shortest)
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.full((BATCH_SIZE, longest), tokenizer.pad_token_id)
    attention_mask = torch.zeros((BATCH_SIZE, longest), dtype=torch.long)
    labels = torch.full((BATCH_SIZE, longest), IGNORED)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[i, :end] = torch.tensor(prompt + answer)
        attention_mask[i, :end] = 1
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return Batch(input_ids[0, :shared], input_ids[:, shared:], attention_mask, labels[:, shared:])


def loss_of(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the answer tokens.

    What all chats share is computed once and its keys and values are used by every row (gradients flow through them), and the
    head, the dearest layer, runs for answer tokens only. Both change the cost and not the result.
    """
    cache = model.model(input_ids=batch.prefix[None], use_cache=True).cache
    cache.batch_repeat_interleave(len(batch.input_ids))
    hidden = model.model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, cache=cache, use_cache=True
    ).last_hidden_state  # [B, S, hidden]
    next_labels = batch.labels[:, 1:]
    is_answer = next_labels != IGNORED
    logits = model.lm_head(hidden[:, :-1][is_answer])  # [N, vocabulary]
    return torch.nn.functional.cross_entropy(logits.float(), next_labels[is_answer])


def train(job: Job, recipe: Recipe, model_dir: Path, *, steps: int, bf16: bool, scratch: Path) -> tuple[float, float]:
    """Train one adapter and save it to ``scratch`` in bf16. Returns the mean loss of the last 20 steps and the seconds it took."""
    set_seed(recipe.seed)
    rng = random.Random(f"{job.name}:{recipe.seed}")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16 if bf16 else torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **recipe.lora))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, max(0.02, (steps - step) / max(1, steps - warmup)))
    )
    losses: list[float] = []
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task(job.name, total=steps, note="")
        for step in range(steps):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                loss = loss_of(base, draw_batch(tokenizer, job, rng))
            torch.autograd.backward([loss])
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            losses.append(loss.item())
            progress.update(bar, advance=1, note=f"loss {losses[-1]:.3f}")
            if (step + 1) % 10 == 0 and not progress.console.is_terminal:
                print(f"{job.name}: step {step + 1}/{steps}, loss {sum(losses[-20:]) / len(losses[-20:]):.4f}", flush=True)
    seconds = time.monotonic() - started
    for weight in weights:
        weight.data = weight.data.to(torch.bfloat16)
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.save_pretrained(scratch)
    config_file = scratch / "adapter_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["target_modules"] = sorted(config["target_modules"])  # PEFT keeps a set: without this the file differs from run to run
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sum(losses[-20:]) / len(losses[-20:]), seconds


def model_card(job: Job, recipe: Recipe, steps: int, loss: float, score: Score) -> str:
    """The README.md of an adapter folder."""
    example = job.held_out()[0]
    lora = ", ".join(f"`{name}={value}`" for name, value in recipe.lora.items())
    return f"""---
base_model: {BASE_NAME}
library_name: peft
license: apache-2.0
tags: [lora, demo]
---

# {job.name}

{recipe.summary}

The instruction it was trained with, sent as the system message:

> {job.instruction}

An example message it never saw:

> {example.user}

## Score

{score.num_prompts} held-out prompts, made from templates, names and values that training never saw; greedy; the base gets the
very same messages. Right means: {job.rule}.

| | right |
|---|---|
| base | {score.base:.1f} % |
| {job.name} | {score.adapter:.1f} % |

## Data and training

All data is made by `examples/demo_data/` from templates and word lists written for this project; no customer, person or ticket
in it is real. {steps} steps of {BATCH_SIZE} chats with `examples/train_demo_adapters.py --only {job.name}` (seed {recipe.seed},
AdamW, peak learning rate {recipe.learning_rate:g}, loss on the answer only; {loss:.3f} at the end).

LoRA: {lora}.

A demonstration of serving, not a product: it knows this one job, in English, in this format.

## Licence

Apache-2.0, as the base model.
"""


def make_adapter(job: Job, recipe: Recipe, model_dir: Path, *, steps: int, bf16: bool, output: Path) -> Score:
    """Train, score and install one adapter folder; the old one stays until the new one is whole."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".new-") as scratch:
        folder = Path(scratch) / job.name
        loss, seconds = train(job, recipe, model_dir, steps=steps, bf16=bf16, scratch=folder)
        size = (folder / "adapter_model.safetensors").stat().st_size
        print(f"{job.name}: {steps} steps in {seconds:.0f} s, loss {loss:.4f}, {size:,} bytes", flush=True)
        if size > MAX_BYTES:
            raise ValueError(f"{job.name} has {size:,} bytes, more than {MAX_BYTES:,}")
        score = score_offline(job, model_dir, folder)
        (folder / "README.md").write_text(model_card(job, recipe, steps, loss, score), encoding="utf-8")
        target = output / job.name
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    return score


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the base model's folder, as prepare_base.py makes it")
    parser.add_argument("--only", action="append", choices=list(RECIPES), help="train this one; may be repeated")
    parser.add_argument("--steps", type=int, help="instead of the recipe's number of steps")
    parser.add_argument(
        "--bf16", action="store_true", help="autocast to bfloat16: faster where the processor has it (AVX-512 BF16, AMX)"
    )
    parser.add_argument("--output", type=Path, default=HERE / "adapters", help="where the adapter folders go")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    scores = []
    for job in all_jobs():
        if options.only and job.name not in options.only:
            continue
        recipe = RECIPES[job.name]
        steps = options.steps or recipe.steps
        scores.append(make_adapter(job, recipe, options.model, steps=steps, bf16=options.bf16, output=options.output))
    print_table(scores)
    return 0


if __name__ == "__main__":
    sys.exit(main())
