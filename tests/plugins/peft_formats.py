"""Tiny bases, adapters that PEFT saves for them, and what PEFT and the packed form make of both."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from packed_model import packed_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from graftwork_adapters.base_spec import BaseSpec, load_base_spec
from graftwork_adapters.packed import read_packed
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import PublishJob, PublishResult

VOCAB, HIDDEN = 96, 32
IDS = torch.tensor([[1, 2, 3, 5, 6, 4, 7, 95, 0, 42]])


@dataclass(frozen=True)
class Base:
    """A tiny base in memory and on disk."""

    model: LlamaForCausalLM
    folder: Path
    spec: BaseSpec


@dataclass(frozen=True)
class BaseMaker:
    """Makes each kind of base once, under ``root``."""

    root: Path

    @cache  # noqa: B019 - lives as long as its module's tests
    def __call__(self, tied: bool, bias: bool = False) -> Base:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            attention_bias=bias,
            initializer_range=0.2,
        )
        model = LlamaForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.data.normal_(1, 0.3)
        folder = self.root / f"{tied}-{bias}" / "tiny-base"
        model.save_pretrained(folder)
        return Base(model, folder, load_base_spec(folder))


def save_adapter(base: Base, folder: Path, rows: int | None = None, **config: object) -> Path:
    """Train, as it were, and save: every parameter that PEFT would train is set at random, in place so that ties hold."""
    start = copy.deepcopy(base.model)
    if rows is not None:
        start.resize_token_embeddings(rows, mean_resizing=False)
    settings: dict[str, object] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(start, LoraConfig(**(settings | config)))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if (parameter.requires_grad or "lora_B" in name) and "original_module" not in name:  # that is replaced
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder, save_embedding_layers=True if rows is not None else "auto")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "somewhere/tiny-base"}))
    return folder


def publish_fp32(base: Base, folder: Path, **job: object) -> PublishResult:
    out = folder.with_suffix(".packed")
    return publish(PublishJob(folder, out, base.spec, "float32", base_dir=base.folder, **job))  # type: ignore[arg-type]


def peft_logits(base: Base, folder: Path, ids: Tensor = IDS, rows: int | None = None) -> Tensor:
    start = copy.deepcopy(base.model)
    if rows is not None:
        start.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        return PeftModel.from_pretrained(start, folder).eval()(input_ids=ids).logits


def packed_logits(base: Base, folder: Path, result: PublishResult, ids: Tensor = IDS) -> Tensor:
    assert result.ok, [finding for finding in result.report.findings if finding.result == "fail"]
    index, rows = read_packed(folder.with_suffix(".packed"), str(result.packed_key))
    with torch.no_grad():
        return packed_model(base.model, index, rows, base.spec)(input_ids=ids).logits
