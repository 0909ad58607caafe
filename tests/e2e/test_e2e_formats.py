"""Adapters that are more than a LoRA, through the whole product: their own words, a call in the prompt, rows of eight bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.e2e

NUM_ROWS = 280  # of the embedding that one of them brings; the base's has 272
TEMPLATE = "{% for m in messages %}<|tool_15|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
CALL = [200, 201, 202]
LONG = [40 + place % 60 for place in range(96)]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    return start_server("--dtype", "float32")


@pytest.fixture(scope="module")
def key(server: Any) -> str:
    return str(server.tenant_with("formats", {}))


@pytest.fixture(scope="module")
def wordy(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger vocabulary with its tokenizer, its template and its end, as a trainer saves it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder = tmp_path_factory.mktemp("formats") / "wordy"
    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    base.resize_token_embeddings(NUM_ROWS)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(folder, save_embedding_layers=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.add_tokens([f"<|tool_{number}|>" for number in range(NUM_ROWS - len(tokenizer))])
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=[0, 5]).save_pretrained(folder)
    return folder


def reference(tiny_base: Path, folder: Path, prompt: list[int], count: int) -> list[int]:
    """What PEFT's own model says, with the embedding that the adapter brings."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    base.resize_token_embeddings(NUM_ROWS)
    model = PeftModel.from_pretrained(base, folder)
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None}
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return [int(token_id) for token_id in out[0, len(prompt) :]]


def test_an_adapter_with_its_own_words(server: Any, key: str, tiny_base: Path, wordy: Path) -> None:
    from transformers import AutoTokenizer

    verdict = server.push(wordy, tenant="formats", name="wordy")
    assert verdict.state == "ready", verdict.report
    told = {finding["check"]: finding["message"] for finding in verdict.report}
    assert "own tokenizer is in force" in str(told["tokenizer"])
    assert "own chat template is in force" in str(told["chat template"])
    assert "0, 5" in str(told["eos"])
    client = server.client(key)
    listed = {line.id: (line.model_extra or {}).get("tokenizer") for line in client.models.list()}
    assert listed["wordy"] == "own"
    answer = client.chat.completions.create(
        model="wordy",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    theirs = AutoTokenizer.from_pretrained(wordy)
    prompt = list((answer.model_extra or {})["prompt_token_ids"])
    assert prompt == theirs.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=True, return_dict=False)
    assert max(prompt) >= 272, "a token that the base does not have"
    tokens = list((answer.choices[0].model_extra or {})["token_ids"])
    assert tokens == reference(tiny_base, wordy, prompt, 8)
    assert server.complete(client, "wordy", [275, 10, 11, 12], 8) == reference(tiny_base, wordy, [275, 10, 11, 12], 8)
    assert answer.choices[0].message.content == theirs.decode(tokens, skip_special_tokens=True)
    with pytest.raises(openai.BadRequestError):
        server.complete(client, tiny_base.name, prompt, 2)


def test_a_tokenizer_without_its_embedding_is_refused_with_what_to_do(server: Any, key: str, wordy: Path, tmp_path: Path) -> None:
    """The same adapter, its embedding left out."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "forgetful"
    folder.mkdir()
    for path in wordy.iterdir():
        if path.name != "adapter_model.safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(wordy / "adapter_model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "lora_" in name}, folder / "adapter_model.safetensors")
    verdict = server.push(folder, tenant="formats", name="forgetful")
    assert verdict.state == "failed"
    [refusal] = [finding for finding in verdict.report if finding["result"] == "fail"]
    assert refusal["field"] == "tokenizer.json"
    assert f"ids up to {NUM_ROWS - 1}" in str(refusal["message"])
    assert "272 rows" in str(refusal["message"])
    assert "embedding" in str(refusal["fix"])


def complete(client: openai.OpenAI, model: str, prompt: list[int]) -> tuple[list[int], Any]:
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0, extra_body=extra)
    return list((answer.choices[0].model_extra or {})["token_ids"]), answer.usage


def test_an_activated_lora_shares_what_comes_before_its_call(
    server: Any, key: str, tiny_base: Path, make_adapter: Callable[..., Path]
) -> None:
    folder = make_adapter("called", 71, alora_invocation_tokens=CALL, target_modules=["q_proj", "k_proj", "v_proj"])
    assert server.push(folder, tenant="formats", name="called").state == "ready"
    client = server.client(key)
    prompt = [*LONG, *CALL, 50, 51]
    base, _ = complete(client, tiny_base.name, prompt)
    called, usage = complete(client, "called", prompt)
    assert called != base
    assert usage.adapter_active is True
    assert usage.prompt_tokens_details.cached_tokens >= len(LONG) - 32, "computed for the base"
    silent, usage = complete(client, "called", [*LONG, 50, 51])
    assert silent == complete(client, tiny_base.name, [*LONG, 50, 51])[0]
    assert usage.adapter_active is False
    assert complete(client, "called", prompt)[0] == called


def test_rows_of_eight_bits_say_what_they_cost(server: Any, key: str, make_adapter: Callable[..., Path]) -> None:
    folder = make_adapter("plain-eight", 72)
    server.cli("adapters", "push", str(folder), "--tenant", "formats", "--name", "exact")
    pushed = server.cli("adapters", "push", str(folder), "--tenant", "formats", "--name", "eight", "--adapter-dtype", "int8")
    assert pushed["state"] == "ready", json.dumps(pushed)
    assert pushed["adapter_dtype"] == "int8"
    [found] = [finding for finding in pushed["report"] if finding["check"] == "quantised"]
    assert "int8 rows against float32: divergence (KL)" in found["message"]
    assert "places" in found["message"]
    client = server.client(key)
    prompt = [40, 41, 42, 43]
    exact, eight = (complete(client, name, prompt)[0] for name in ("exact", "eight"))
    assert exact[0] == eight[0]
    assert server.wait_usage("formats", len(server.usage_rows("formats"))), "what was asked for the report is nobody's"
    assert {row["model"] for row in server.usage_rows("formats")} <= {"wordy", "called", "tiny-base", "exact", "eight"}
