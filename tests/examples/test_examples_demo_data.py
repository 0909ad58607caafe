"""The demo jobs' data: always the same, held-out truly held out, and scores that tell right from wrong."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("ticket-router", "invoice-extractor", "brand-voice")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return {job.name: job for job in importlib.import_module("demo_data.jobs").all_jobs()}


def _module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(f"demo_data.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_draws_repeat_with_the_seed(jobs: dict[str, Any], name: str) -> None:
    first, second = random.Random(7), random.Random(7)
    assert [jobs[name].draw(first) for _ in range(50)] == [jobs[name].draw(second) for _ in range(50)]
    assert jobs[name].held_out() == jobs[name].held_out()


@pytest.mark.parametrize("name", NAMES)
def test_held_out_prompts_are_many_distinct_and_never_drawn(jobs: dict[str, Any], name: str) -> None:
    held_out = [example.user for example in jobs[name].held_out()]
    assert len(held_out) == len(set(held_out)) >= 50
    rng = random.Random(1)
    assert not {jobs[name].draw(rng).user for _ in range(3000)} & set(held_out)


def test_held_out_templates_and_words_are_not_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    router = _module("ticket_router", monkeypatch)
    for label in router.LABELS:
        assert not set(router._TRAIN[label]) & set(router._HELD_OUT[label])
    assert not set(router._TRAIN_NAMES) & set(router._HELD_OUT_NAMES)
    assert not set(router._TRAIN_PRODUCTS) & set(router._HELD_OUT_PRODUCTS)
    extractor = _module("invoice_extractor", monkeypatch)
    for seen, unseen in (("_TRAIN", "_HELD_OUT"), ("_TRAIN_FIRST", "_HELD_OUT_FIRST"), ("_TRAIN_LAST", "_HELD_OUT_LAST")):
        assert not set(getattr(extractor, seen)) & set(getattr(extractor, unseen))
    voice = _module("brand_voice", monkeypatch)
    assert not {question for question, _ in voice._TRAIN} & set(voice._HELD_OUT)
    assert not set(voice._TRAIN_FRAMES) & set(voice._HELD_OUT_FRAMES)
    assert not set(voice._TRAIN_PRODUCTS) & set(voice._HELD_OUT_PRODUCTS)


def test_router_wants_exactly_the_label(jobs: dict[str, Any]) -> None:
    job = jobs["ticket-router"]
    example = job.held_out()[0]
    assert job.is_success(example, " billing\n")
    for wrong in ("login", "Billing", "billing.", "The label is billing", ""):
        assert not job.is_success(example, wrong)
    assert {e.answer for e in job.held_out()} == {"billing", "login", "shipping", "returns", "bug", "cancellation"}


def test_extractor_wants_all_three_fields(jobs: dict[str, Any]) -> None:
    job = jobs["invoice-extractor"]
    for example in job.held_out():
        right = json.loads(example.answer)
        assert job.is_success(example, example.answer)
        assert job.is_success(example, json.dumps(right | {"amount": float(right["amount"])}))
        wrong: list[dict[str, str]] = [
            right | {"name": right["name"] + "x"},
            right | {"date": "2020-01-01"},
            right | {"amount": "1.23"},
            right | {"more": ""},
        ]
        assert not any(job.is_success(example, json.dumps(fields)) for fields in wrong)
    for text in ("", "[]", "null", "name: Rosa", '{"name":"x"}'):
        assert not job.is_success(job.held_out()[0], text)


def test_voice_wants_every_rule_of_the_style(jobs: dict[str, Any]) -> None:
    job = jobs["brand-voice"]
    example = job.held_out()[0]
    product, reference = example.answer.split("\n")
    first, middle = "Howdy from Acme!", f"Your {product} is on its way today."
    last = f"Stay curious, your Acme crew (ref {reference})"
    assert job.is_success(example, f"{first}\n{middle}\n{last}")
    for wrong in (
        f"Hello!\n{middle}\n{last}",
        f"{first}\n{middle} And more.\n{last}",
        f"{first}\nYour parcel is on its way today.\n{last}",
        f"{first}\n{middle}\n{last.replace(reference, 'AC-00000')}",
        f"{first}\n{middle}",
        f"{first}\n{middle}\n{last}\nBye.",
    ):
        assert not job.is_success(example, wrong)


def test_demo_seed_names_adapters_that_are_committed_and_an_instruction_that_was_trained(jobs: dict[str, Any]) -> None:
    seed = json.loads((EXAMPLES / "demo.json").read_text(encoding="utf-8"))
    owned = {adapter["name"]: adapter["path"] for tenant in seed["tenants"] for adapter in tenant["adapters"]}
    assert owned.keys() == jobs.keys()
    for path in owned.values():
        assert (EXAMPLES / path / "README.md").is_file()
        assert 0 < (EXAMPLES / path / "adapter_model.safetensors").stat().st_size < 2_000_000
    example = seed["example"]
    assert example["messages"][0] == {"role": "system", "content": jobs[example["model"]].instruction}
