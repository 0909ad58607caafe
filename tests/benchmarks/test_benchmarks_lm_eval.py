"""The comparison with lm-eval: its items are sound, its reference is the textbook's, and its verdict can be both."""

from __future__ import annotations

import json
import math
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from benchmark_scripts import FOLDER as BENCHMARKS
from benchmark_scripts import script

FOLDER = BENCHMARKS / "lm_eval"


@pytest.fixture(scope="module")
def compare() -> Any:
    return script("lm_eval/compare")


def items() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "items.jsonl").read_text().splitlines()]


def test_items_are_distinct_and_answerable() -> None:
    found = items()
    assert len(found) == len({item["text"] for item in found}) == 40
    for item in found:
        assert len(item["choices"]) == len(set(item["choices"])) == 3
        assert 0 <= item["answer"] < 3
        assert item["text"] == item["text"].strip(), "a space at the end would move into the continuation"


def test_task_reads_fields_that_items_have(compare: Any) -> None:
    task = yaml.safe_load((FOLDER / f"{compare.TASK}.yaml").read_text())
    assert task["task"] == compare.TASK
    assert (FOLDER / task["dataset_kwargs"]["data_files"][task["test_split"]]).exists()
    fields = {task[f"doc_to_{what}"].strip("{}") for what in ("text", "choice", "target")}
    assert all(fields == set(item) for item in items())


@pytest.mark.parametrize("adapter", [None, "plain"])
def test_reference_is_the_sum_of_each_next_tokens_log_probability(
    compare: Any, tiny_base: Path, make_adapter: Any, adapter: str | None
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = None if adapter is None else make_adapter("plain", 1, r=4, lora_alpha=16)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    if folder is not None:
        model = PeftModel.from_pretrained(model, folder)
    ids = AutoTokenizer.from_pretrained(tiny_base)("abc de", add_special_tokens=False).input_ids
    expected = 0.0
    for i in (3, 4, 5):
        with torch.no_grad():
            expected += float(model.eval()(input_ids=torch.tensor([ids[:i]])).logits[0, -1].log_softmax(-1)[ids[i]])
    [first, other] = compare.reference(tiny_base, folder, [("abc", " de"), ("abc", " dx")])
    assert first == pytest.approx(expected, abs=1e-4)
    assert abs(first - other) > 0.01


def scored(compare: Any, *values: float) -> list[Any]:
    return [compare.Scored(f"context {i}", " word", value) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "passed", "worst"),
    [
        ((-1.0, -2.0), True, "context 0 word"),
        ((-1.0, -2.009), True, "context 1 word"),
        ((-1.0, -2.011), False, "context 1 word"),
        ((math.nan, -2.0), False, "context 0 word"),
        ((-1.0, -math.inf), False, "context 1 word"),
    ],
)
def test_verdict(compare: Any, values: tuple[float, ...], passed: bool, worst: str) -> None:
    verdict = compare.judge("m", scored(compare, *values), [-1.0, -2.0], 0.5)
    assert (verdict.passed, verdict.worst, verdict.requests) == (passed, worst, 2)


def test_a_harness_that_asks_nothing_is_no_success(compare: Any) -> None:
    with pytest.raises(compare.HarnessFailed, match="asked nothing"):
        compare.judge("m", [], [], 1.0)
    with pytest.raises(ValueError, match="shorter"):
        compare.judge("m", scored(compare, -1.0, -2.0), [-1.0], 1.0)


FAKE_HARNESS = """#!{python}
import json, os, pathlib, sys
config = json.loads(pathlib.Path(sys.argv[3]).read_text())
arguments = config["model_args"]
assert sys.argv[1:3] == ["run", "--config"] and pathlib.Path("items.jsonl").exists()
assert (arguments["model"], arguments["base_url"]) == ("m", "http://127.0.0.1:1/v1/completions")
assert pathlib.Path(arguments["tokenizer"]).is_absolute() and arguments["tokenized_requests"] is True
if os.environ["OPENAI_API_KEY"] != "secret" or os.environ["HF_HUB_OFFLINE"] != "1":
    sys.exit("wrong environment")
out = pathlib.Path(config["output_path"], "m")
out.mkdir(parents=True)
samples = {{"arguments": {{"gen_args_0": {{"arg_0": "abc", "arg_1": " d"}}, "gen_args_1": {{"arg_0": "abc", "arg_1": " e"}}}},
           "resps": [[["-1.5", "False"]], [["-2.5", "True"]]], "acc": 1.0}}
(out / "samples_graftwork_facts_now.jsonl").write_text(json.dumps(samples))
"""


def test_harness_is_called_with_the_key_and_without_a_hub(compare: Any, tmp_path: Path) -> None:
    program = tmp_path / "lm-eval"
    program.write_text(FAKE_HARNESS.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    subject = compare.Subject("m", "http://127.0.0.1:1", "secret", None)
    found, accuracy = compare.ask_server(subject, Path("base"), program)
    assert [(one.context + one.continuation, one.loglikelihood) for one in found] == [("abc d", -1.5), ("abc e", -2.5)]
    assert accuracy == 1.0
    with pytest.raises(compare.HarnessFailed, match="wrong environment"):
        compare.ask_server(compare.Subject("m", "http://127.0.0.1:1", "other", None), Path("base"), program)


def test_half_a_description_of_a_server_is_refused(compare: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--base", "b", "--lm-eval", "l"]
    for arguments in (["--url", "http://127.0.0.1:1"], ["--model", "m"], ["--adapter", "a"]):
        with pytest.raises(SystemExit):
            compare.parse([*fixed, *arguments])
        assert "--key-file" in capsys.readouterr().err
