"""Tiny bases and adapters of every kind that PEFT saves, made by PEFT itself, and what transformers and PEFT answer with them.

A `Recipe` says how an adapter is made and what must become of it: served exactly (`peft_recipes.py`) or refused with a field
(`refused_recipes.py`).
"""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedConfig, Qwen2Config, Qwen3Config

VOCAB_SIZE = 160
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,  # wide enough that few greedy choices are near ties
    "eos_token_id": None,
}

BASES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen2-tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "phi3": lambda: Phi3Config(**SHAPE, pad_token_id=0, tie_word_embeddings=False),
    "qwen3-tied": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
}

Edit = Callable[[Path], None]


@dataclass(frozen=True)
class Recipe:
    """One adapter.

    ``row`` is its line in the table of formats, ``config`` what PEFT's `LoraConfig` is given. PEFT saves the adapter, ``change``
    then rewrites the folder that PEFT is to load again, and ``convert`` the copy of it that is uploaded: what is served means the
    same afterwards, what is refused is refused for it. ``refused`` matches the field of a finding that refuses it; None: it is
    served exactly.
    """

    name: str
    row: str
    config: Mapping[str, object]
    base: str = "llama"
    vocab_size: int = VOCAB_SIZE  # of the embedding and the head that it was trained with
    change: Edit | None = None
    convert: Edit | None = None
    save: Callable[[PeftModel, Path], None] | None = None
    make: Callable[[Path, Path], None] | None = None  # base's folder, upload's folder: what no LoraConfig makes
    refused: str | None = None

    @property
    def invocation(self) -> list[int]:
        """The tokens that switch an aLoRA on; none for another adapter."""
        tokens = self.config.get("alora_invocation_tokens") or []
        assert isinstance(tokens, list)
        return tokens


def make_base(name: str, folder: Path) -> None:
    """Save the base: every value is one that bfloat16 has, so that engines of either type compute with the same weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(BASES[name](), dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # biases start as zeros and norms as ones: a fault in either would not show
            nn.init.normal_(parameter, 1.0 if "norm" in parameter_name else 0.0, 0.3)
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder)


@dataclass
class Made:
    """An adapter of a recipe: the folder that PEFT loads (None: the bare base) and the one that is uploaded."""

    recipe: Recipe
    base_dir: Path
    peft_dir: Path | None
    upload_dir: Path
    _known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @cached_property
    def reference(self) -> nn.Module:
        """The model as transformers and PEFT load it again, in fp32."""
        base = AutoModelForCausalLM.from_pretrained(self.base_dir, dtype=torch.float32)
        _resize(base, self.recipe.vocab_size)
        if self.peft_dir is None:
            return base.eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PeftModel.from_pretrained(base, self.peft_dir).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int], num_prompt: int) -> Tensor:
        """The reference's logits after each token, [T, V']; an aLoRA is switched on as by the first ``num_prompt`` of them."""
        key = (num_prompt, *token_ids)
        if key not in self._known:
            kwargs = {}
            if self.recipe.invocation:
                start = last_start(token_ids[:num_prompt], self.recipe.invocation)
                kwargs["alora_offsets"] = [None if start is None else len(token_ids) - start]
            self._known[key] = self.reference(input_ids=torch.tensor([token_ids]), **kwargs).logits[0]
        return self._known[key]


def last_start(token_ids: list[int], invocation: list[int]) -> int | None:
    """Where the last occurrence of ``invocation`` begins."""
    size = len(invocation)
    starts = [start for start in range(len(token_ids) - size + 1) if token_ids[start : start + size] == invocation]
    return starts[-1] if starts else None


def make_adapter(recipe: Recipe, base_dir: Path, folder: Path) -> Made:
    """Make, randomise and save the adapter below ``folder``."""
    peft_dir, upload_dir = folder / "peft", folder / "upload"
    if recipe.make is not None:
        upload_dir.mkdir(parents=True)
        recipe.make(base_dir, upload_dir)
        return Made(recipe, base_dir, upload_dir, upload_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of nearly everything that is tried here
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
        _resize(base, recipe.vocab_size)
        settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **copy.deepcopy(dict(recipe.config))}
        model = get_peft_model(base, LoraConfig(**settings))
        if recipe.save is None:
            randomise(model)
            model.save_pretrained(peft_dir)
        else:
            recipe.save(model, peft_dir)
    if recipe.change is not None:
        recipe.change(peft_dir)
    shutil.copytree(peft_dir, upload_dir)
    if recipe.convert is not None:
        recipe.convert(upload_dir)
    return Made(recipe, base_dir, peft_dir, upload_dir)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Give every trained tensor values that show: as PEFT makes them, B is zero and rows and biases are the base's."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or "original_module" in name:  # what is replaced takes no part in training
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if "lora_A" in name or "lora_embedding_A" in name:
            parameter.copy_(noise * 0.2)
        elif "lora_B" in name or "lora_embedding_B" in name:
            parameter.copy_(noise * 0.15)
        elif "lora_magnitude_vector" in name:
            parameter.mul_(1 + 0.3 * noise)
        else:  # a whole matrix, a norm, a bias, rows of tokens: all start as the base's
            parameter.add_(0.15 * noise)


def _resize(base: nn.Module, vocab_size: int) -> None:
    if vocab_size != VOCAB_SIZE:
        torch.manual_seed(2)
        base.resize_token_embeddings(vocab_size, mean_resizing=False)
