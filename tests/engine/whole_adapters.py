"""Adapters that bring tensors whole, packed by hand, and what each must give: a plain model into which its tensors were put."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tiny_engine import HIDDEN, INNER, KV, VOCAB_SIZE, TinyModel
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from graftwork_adapters import wholes
from graftwork_adapters.base_spec import PROJECTIONS, BaseSpec, load_base_spec
from graftwork_adapters.folder_store import FolderStore
from graftwork_adapters.keys import AdapterDigest, RowTypeName, packed_key, packed_path
from graftwork_adapters.packed import ABSENT, PackedIndex, PackedSite, PackedWhole, write_packed
from graftwork_engine.request import AdapterKey

WIDE, NARROW = VOCAB_SIZE + 3, VOCAB_SIZE - 5
LAYER = "model.layers.{}.{}"
SHAPES = {  # input and output features
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
HEAD_DIM = 8


@dataclass(frozen=True)
class Adapter:
    """``rows``: A [r, in] and B [out, r] by (layer, projection), with the scale in B; ``wholes`` by their packed names."""

    name: str
    rows: Mapping[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict)
    wholes: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int | None:
        """As a request for it says."""
        own = self.wholes.get(wholes.EMBEDDING, self.wholes.get(wholes.HEAD))
        return None if own is None or len(own) == VOCAB_SIZE else len(own)

    @property
    def whole_bytes(self) -> int:
        return sum(-(-tensor.nbytes // 64) * 64 for tensor in self.wholes.values())


class Dice:
    """Random tensors, another seed for each adapter."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 0.3, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=self._generator) * scale + mean

    def rows(self, rank: int, *projections: str) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
        return {
            (layer, name): (self(rank, SHAPES[name][0]), self(SHAPES[name][1], rank)) for layer in range(2) for name in projections
        }

    def norms(self) -> dict[str, Tensor]:
        names = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN, "self_attn.q_norm": HEAD_DIM}
        names["self_attn.k_norm"] = HEAD_DIM
        found = {f"{LAYER.format(layer, name)}.weight": self(size, mean=1.0) for layer in range(2) for name, size in names.items()}
        return {**found, "model.norm.weight": self(HIDDEN, mean=1.0)}

    def linear(self, layer: int, name: str) -> dict[str, Tensor]:
        width_in, width_out = SHAPES[name]
        made = {f"{LAYER.format(layer, name)}.weight": self(width_out, width_in)}
        return made if name.startswith("mlp") else {**made, f"{LAYER.format(layer, name)}.bias": self(width_out)}

    def tokens(self, count: int, most: int) -> dict[str, Tensor]:
        ids = torch.randperm(most, generator=self._generator)[:count].sort().values
        head_ids = torch.randperm(most, generator=self._generator)[:count].sort().values
        return {
            wholes.EMBEDDING_TOKENS: ids,
            wholes.EMBEDDING_ROWS: self(count, HIDDEN),
            wholes.HEAD_TOKENS: head_ids,
            wholes.HEAD_ROWS: self(count, HIDDEN, scale=0.6),
        }

    def lora(self, rank: int, vocab: int) -> dict[str, Tensor]:
        return {
            wholes.EMBEDDING_LORA_A: self(vocab, rank),
            wholes.EMBEDDING_LORA_B: self(HIDDEN, rank),
            wholes.EMBEDDING_SCALE: self(HIDDEN, mean=1.0),
            wholes.HEAD_LORA_A: self(rank, HIDDEN),
            wholes.HEAD_LORA_B: self(vocab, rank),
            wholes.HEAD_SCALE: self(vocab, mean=1.0),
            wholes.HEAD_BIAS: self(vocab),
        }


def make_adapters() -> dict[str, Adapter]:
    """One of each kind, mixtures of them, and one with rows alone."""

    adapters = []
    d = Dice(1)
    adapters.append(Adapter("embedding", wholes={wholes.EMBEDDING: d(VOCAB_SIZE, HIDDEN)}))
    adapters.append(Adapter("head", d.rows(3, "self_attn.v_proj"), {wholes.HEAD: d(VOCAB_SIZE, HIDDEN)}))
    adapters.append(Adapter("norms", wholes=d.norms()))
    linears = {**d.linear(0, "self_attn.k_proj"), **d.linear(0, "self_attn.o_proj"), **d.linear(1, "mlp.down_proj")}
    adapters.append(Adapter("linears", d.rows(2, "mlp.up_proj"), {**linears, **d.linear(1, "mlp.gate_proj")}))
    adapters.append(Adapter("tokens", wholes=d.tokens(11, VOCAB_SIZE)))
    adapters.append(Adapter("lora", d.rows(5, "self_attn.q_proj"), d.lora(3, VOCAB_SIZE)))
    wide = {wholes.EMBEDDING: d(WIDE, HIDDEN), wholes.HEAD: d(WIDE, HIDDEN)}
    adapters.append(Adapter("wide", d.rows(4, *SHAPES), wide))
    narrow = {wholes.EMBEDDING: d(NARROW, HIDDEN), wholes.HEAD: d(NARROW, HIDDEN), **d.norms()}
    adapters.append(Adapter("narrow", wholes=narrow))
    everything = {
        wholes.EMBEDDING: d(WIDE, HIDDEN),
        wholes.HEAD: d(WIDE - 1, HIDDEN),
        **d.norms(),
        **d.linear(0, "self_attn.v_proj"),
    }
    everything |= {**d.tokens(7, WIDE - 1), **d.lora(2, WIDE)}
    everything[wholes.HEAD_LORA_B], everything[wholes.HEAD_SCALE] = d(WIDE - 1, 2), d(WIDE - 1, mean=1.0)
    everything[wholes.HEAD_BIAS] = d(WIDE - 1)
    adapters.append(Adapter("everything", d.rows(6, "self_attn.q_proj", "mlp.down_proj"), everything))
    adapters.append(Adapter("plain", d.rows(7, *SHAPES)))
    return {adapter.name: adapter for adapter in adapters}


@dataclass(frozen=True)
class WholeModel:
    """A tiny engine's folders, the adapters, and the plain model of each (None: the base)."""

    tiny: TinyModel
    adapters: Mapping[str | None, Adapter]
    plain: Mapping[str | None, PreTrainedModel]

    def run(self, adapter: str | None, prompt: Sequence[int], max_tokens: int, start: int = 0) -> PlainRun:
        """Greedy, the adapter switched on at token ``start``: what comes before has been computed by the base alone."""
        cache, known = DynamicCache(), list(prompt)
        rows: list[Tensor] = []
        with torch.inference_mode():
            for which, part in ((None, prompt[:start]), (adapter, prompt[start:])):
                if part:
                    rows += self._step(which, part, cache)
            while len(known) < len(prompt) + max_tokens:
                known.append(int(rows[-1].argmax()))
                rows += self._step(adapter, known[-1:], cache)
        logprobs = [row.log_softmax(-1) for row in rows]
        scored = [float(row[token]) if token < len(row) else float("-inf") for row, token in zip(logprobs, known[1:], strict=False)]
        split = len(prompt) - 1
        return PlainRun(known[len(prompt) :], scored[split : split + max_tokens], scored[:split], rows[split:-1])

    def _step(self, adapter: str | None, token_ids: Sequence[int], cache: DynamicCache) -> list[Tensor]:
        model = self.plain[adapter]
        return list(model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True).logits[0])


@dataclass(frozen=True)
class PlainRun:
    """Tokens with their log probabilities, those of the prompt's tokens after the first, and the logits that gave each token."""

    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    logits: list[Tensor]


def make_whole_model(folder: Path, *, is_tied: bool = False) -> WholeModel:
    """Save a base with biases and norms of heads, and the packed form of each adapter."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        attention_bias=True,
        initializer_range=0.3,
        tie_word_embeddings=is_tied,
        eos_token_id=None,
    )
    base = Qwen3ForCausalLM(config).eval()
    for name, parameter in base.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    base.save_pretrained(folder / "base")
    spec, store = load_base_spec(folder / "base"), FolderStore(folder / "store")
    keys: dict[str | None, AdapterKey | None] = {None: None}
    sizes = {}
    adapters: dict[str | None, Adapter] = {None: Adapter("base"), **make_adapters()}
    plain: dict[str | None, PreTrainedModel] = {None: base}
    for name, adapter in make_adapters().items():
        index, rows = pack(adapter, spec)
        path = folder / f"{name}.packed"
        write_packed(path, index, rows)
        store.put_if_absent(packed_path(index.key), path)
        keys[name], sizes[name] = AdapterKey(index.key), index.num_bytes
        plain[name] = put_in(base, adapter)
    return WholeModel(TinyModel(folder / "base", folder / "store", keys, sizes), adapters, plain)


def pack(adapter: Adapter, spec: BaseSpec, row_type: RowTypeName = "float32") -> tuple[PackedIndex, np.ndarray]:
    """Its packed form, in fp32."""
    sites, runs, data, row = [], [], [], 0
    for (layer, name), (a, b) in sorted(adapter.rows.items(), key=lambda entry: _site(*entry[0])):
        rank = len(a)
        sites.append(PackedSite(_site(layer, name), rank, row, row + rank, ABSENT, ABSENT))
        row += 2 * rank
        for matrix in (a, b.T):
            padded = nn.functional.pad(matrix, (0, -matrix.shape[1] % 16)).contiguous()
            runs.append((rank, padded.shape[1] * 4))
            data.append(padded.numpy().tobytes())
    packed_wholes = []
    for name, tensor in adapter.wholes.items():
        packed_wholes.append(PackedWhole(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        data.append(tensor.numpy().tobytes() + b"\0" * (-tensor.nbytes % 64))
    digest = AdapterDigest(hashlib.sha256(adapter.name.encode()).hexdigest())
    key = packed_key(digest, spec.base_id, row_type)
    index = PackedIndex(key, digest, spec.base_id, row_type, tuple(sites), tuple(runs), tuple(packed_wholes))
    return index, np.frombuffer(b"".join(data), dtype=np.uint8)


def put_in(base: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """A copy of ``base`` with all that the adapter changes merged into its weights."""
    model, own = deepcopy(base), adapter.wholes
    with torch.no_grad():
        embedding = own.get(wholes.EMBEDDING, base.get_input_embeddings().weight).clone()
        head = own.get(wholes.HEAD, base.get_output_embeddings().weight).clone()
        if wholes.EMBEDDING_TOKENS in own:
            embedding[own[wholes.EMBEDDING_TOKENS]] = own[wholes.EMBEDDING_ROWS]
            head[own[wholes.HEAD_TOKENS]] = own[wholes.HEAD_ROWS]
        if wholes.EMBEDDING_LORA_A in own:
            embedding += own[wholes.EMBEDDING_LORA_A] @ own[wholes.EMBEDDING_LORA_B].T
            embedding *= own[wholes.EMBEDDING_SCALE]
            head += own[wholes.HEAD_LORA_B] @ own[wholes.HEAD_LORA_A]
            head *= own[wholes.HEAD_SCALE][:, None]
        model.model.embed_tokens = nn.Embedding.from_pretrained(embedding)
        model.lm_head = nn.Linear(*reversed(head.shape), bias=wholes.HEAD_BIAS in own)
        model.lm_head.weight = nn.Parameter(head)
        if wholes.HEAD_BIAS in own:
            model.lm_head.bias = nn.Parameter(own[wholes.HEAD_BIAS])
        parameters = dict(model.named_parameters())
        for name, tensor in own.items():
            if name.startswith(("model.layers.", "model.norm.")):
                parameters[name].copy_(tensor)
        for (layer, name), (a, b) in adapter.rows.items():
            parameters[f"{LAYER.format(layer, name)}.weight"] += b @ a
    return model


def _site(layer: int, name: str) -> int:
    return layer * len(PROJECTIONS) + PROJECTIONS.index(name)
