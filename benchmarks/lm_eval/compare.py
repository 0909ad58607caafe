"""Compares the log likelihoods that lm-eval gets from a Graftwork server with those of transformers and PEFT, both in fp32.

    compare.py --base DIR --lm-eval BIN                                          a server of its own; the base and a demo adapter
    compare.py --base DIR --lm-eval BIN --url URL --key-file FILE --model NAME [--adapter DIR]      a server that runs in float32

The two sides share the task's texts and the tokenizer's files, nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

TASK_DIR = Path(__file__).resolve().parent
TASK = "graftwork_facts"
EXAMPLES = TASK_DIR.parents[1] / "examples"
DEMO_TENANT, DEMO_ADAPTER = "acme-support", "ticket-router"
TOLERANCE = 1e-2
"""Greatest difference of a continuation's log likelihood, in nats."""

BATCH = 12
"""Texts of one forward pass of the reference."""


@dataclass(frozen=True)
class Subject:
    """A model as a server's clients name it, the key that may call it, and the adapter folder behind the name (None: the base)."""

    model: str
    url: str
    key: str
    adapter: Path | None


@dataclass(frozen=True)
class Scored:
    """One request of the harness and the log likelihood it got for ``continuation`` after ``context``."""

    context: str
    continuation: str
    loglikelihood: float


@dataclass(frozen=True)
class Verdict:
    """How far a subject is from the reference. ``worst`` is the text whose difference is ``greatest``."""

    model: str
    requests: int
    greatest: float
    worst: str
    accuracy: float

    @property
    def passed(self) -> bool:
        """False above the tolerance, and for a difference that is not a number."""
        return self.greatest <= TOLERANCE


class HarnessFailed(Exception):
    """lm-eval or the server it asks did not come to an end; the message holds their last words."""


def ask_server(subject: Subject, base: Path, lm_eval: Path) -> tuple[list[Scored], float]:
    """Run the task with lm-eval's ``local-completions``; every request in the task's order, and the accuracy.

    No hub is asked for anything. Raises `HarnessFailed`.
    """
    with tempfile.TemporaryDirectory(prefix="lm-eval-") as folder:
        config = {
            "model": "local-completions",
            "model_args": {
                "model": subject.model,
                "base_url": f"{subject.url}/v1/completions",
                "tokenizer_backend": "huggingface",
                "tokenizer": str(base.absolute()),  # the harness runs in another folder
                "tokenized_requests": True,
                "num_concurrent": 8,
                "max_retries": 1,
            },
            "tasks": [TASK],
            "include_path": str(TASK_DIR),
            "output_path": f"{folder}/out",
            "log_samples": True,
        }
        config_file = Path(folder, "config.yaml")
        config_file.write_text(json.dumps(config))  # JSON is YAML, and a path may hold what the command line would split at
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": f"{folder}/hf", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [lm_eval.absolute(), "run", "--config", config_file],
            cwd=TASK_DIR,
            env={**os.environ, **offline, "OPENAI_API_KEY": subject.key},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise HarnessFailed(f"lm-eval for {subject.model} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        (samples,) = Path(folder, "out").rglob("samples_*.jsonl")
        return read_samples(samples)


def read_samples(path: Path) -> tuple[list[Scored], float]:
    """What lm-eval logged: one line a text, with a context, a continuation and a log likelihood for each of its choices."""
    scored, num_right, num_texts = [], 0.0, 0
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        num_right += sample["acc"]
        num_texts += 1
        for request, [response] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            scored.append(Scored(request["arg_0"], request["arg_1"], float(response[0])))
    return scored, num_right / num_texts


def reference(base: Path, adapter: Path | None, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Log likelihood of each continuation after its context by transformers, and by PEFT for an adapter, in fp32."""
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    model.eval()
    whole = [tokenizer(context + continuation, add_special_tokens=False).input_ids for context, continuation in pairs]
    starts = [len(tokenizer(context, add_special_tokens=False).input_ids) for context, _ in pairs]
    results = []
    for first in range(0, len(whole), BATCH):
        texts = whole[first : first + BATCH]
        padded = pad_sequence([torch.tensor(ids) for ids in texts], batch_first=True)  # on the right, where nothing looks
        with torch.inference_mode():
            logprobs = model(input_ids=padded).logits.log_softmax(-1)
        for ids, start, rows in zip(texts, starts[first : first + BATCH], logprobs, strict=True):
            results.append(sum(float(rows[i - 1, ids[i]]) for i in range(start, len(ids))))
    return results


def judge(model: str, scored: Sequence[Scored], expected: Sequence[float], accuracy: float) -> Verdict:
    """Compare request by request; what is no number counts as infinitely far. Raises `HarnessFailed` if nothing was asked."""
    if not scored:
        raise HarnessFailed(f"lm-eval asked nothing of {model}")
    differences = [abs(one.loglikelihood - value) for one, value in zip(scored, expected, strict=True)]
    differences = [math.inf if math.isnan(difference) else difference for difference in differences]
    greatest = max(differences)
    worst = scored[differences.index(greatest)]
    return Verdict(model, len(scored), greatest, worst.context + worst.continuation, accuracy)


@contextmanager
def demo_server(base: Path) -> Iterator[list[Subject]]:
    """A server in float32 on a free port with data of its own, and the demo's tenants; the base and one adapter to ask for."""
    with tempfile.TemporaryDirectory(prefix="graftwork-") as data_dir:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "graftwork_platform.cli", "serve", "--json", "--port", "0", "--dtype", "float32"),
                *("--model", str(base), "--data-dir", data_dir, "--seed", str(EXAMPLES / "demo.json")),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            if process.stdout is None:
                raise AssertionError("no pipe from the server")
            facts = json.loads(process.stdout.readline() or "{}")
            if "url" not in facts:
                raise HarnessFailed(f"the server did not start: {facts.get('error', 'its log above says why')}")
            key = Path(data_dir, "demo", f"{DEMO_TENANT}.key").read_text().strip()
            yield [
                Subject(base.resolve().name, facts["url"], key, None),
                Subject(DEMO_ADAPTER, facts["url"], key, EXAMPLES / "adapters" / DEMO_ADAPTER),
            ]
        finally:
            process.terminate()
            process.wait()


def compare(subjects: Sequence[Subject], base: Path, lm_eval: Path) -> list[Verdict]:
    """Each subject's verdict, in order."""
    verdicts = []
    for subject in subjects:
        scored, accuracy = ask_server(subject, base, lm_eval)
        expected = reference(base, subject.adapter, [(one.context, one.continuation) for one in scored])
        verdicts.append(judge(subject.model, scored, expected, accuracy))
    return verdicts


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare a server's log likelihoods with Hugging Face's, through lm-eval.")
    parser.add_argument("--base", type=Path, required=True, help="the base model's folder")
    parser.add_argument("--lm-eval", type=Path, required=True, help="the lm-eval program")
    parser.add_argument("--url", help="a server that runs in float32; without it one is started for the comparison")
    parser.add_argument("--key-file", type=Path, help="file with a key of that server")
    parser.add_argument("--model", help="the model's name there")
    parser.add_argument("--adapter", type=Path, help="the adapter's folder, if the name is an adapter's")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.url and not (options.key_file and options.model):
        parser.error("--url needs --key-file and --model")
    if not options.url and (options.key_file or options.model or options.adapter):
        parser.error("--key-file, --model and --adapter go with --url")
    return options


def main(arguments: Sequence[str]) -> int:
    """Print a line for each subject; 0 if all are within the tolerance, 1 if one is not, 2 if the comparison did not take place."""
    options = parse(arguments)
    try:
        if options.url:
            key = options.key_file.read_text().strip()
            subjects = [Subject(options.model, options.url.rstrip("/"), key, options.adapter)]
            verdicts = compare(subjects, options.base, options.lm_eval)
        else:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("Terminated"))  # not without stopping the server
            with demo_server(options.base) as subjects:
                verdicts = compare(subjects, options.base, options.lm_eval)
    except (HarnessFailed, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    for verdict in verdicts:
        if options.json:
            print(json.dumps({**vars(verdict), "tolerance": TOLERANCE, "passed": verdict.passed}))
        else:
            print(
                f"{'ok' if verdict.passed else 'FAILED':6} {verdict.model}: {verdict.requests} log likelihoods, "
                f"greatest difference {verdict.greatest:.2e} (tolerance {TOLERANCE:.0e}) at {verdict.worst!r}; "
                f"accuracy {verdict.accuracy:.2f}"
            )
    return 0 if all(verdict.passed for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
