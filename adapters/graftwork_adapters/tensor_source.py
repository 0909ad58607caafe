"""An upload's tensors as packing reads them: by the names PEFT gives them, whatever trainer wrote the files. Knows no dialect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graftwork_adapters.safetensors_header import TensorEntry
from graftwork_adapters.tensor_values import Matrix, RawValues, map_values, to_fp32


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor: which bytes of which file, and how they are turned. ``sent_as`` is the upload's own name for it.

    A ``transposed`` one lies in the file the other way round. ``rows`` are the rows that are meant, after turning, in order: its
    part of a fused projection, or the order in which another trainer writes heads; None means all as they lie.
    """

    path: Path
    entry: TensorEntry
    sent_as: str
    transposed: bool = False
    rows: tuple[range, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that `read` gives."""
        shape = self.entry.shape[::-1] if self.transposed else self.entry.shape
        return shape if self.rows is None else (sum(map(len, self.rows)), *shape[1:])

    @property
    def dtype(self) -> str:
        """The file's type, in safetensors' own name."""
        return self.entry.dtype

    def read(self) -> Matrix:
        """The values as fp32, row after row, as `tensor_values.to_fp32` gives them. May be the file's own: not to be written to."""
        return np.asarray(to_fp32(self.map(), self.entry.dtype), order="C")

    def map(self) -> RawValues:
        """The values as the file's type has them, mapped where they lie in one piece."""
        values = map_values(self.path, self.entry)
        if self.transposed:
            values = values.T
        if self.rows is None:
            return values
        parts = [values[rows.start : rows.stop : rows.step] for rows in self.rows]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """One tensor by the name PEFT gives it, without ``base_model.model.`` and the adapter's name.

    ``module`` is a path of the served base, such as ``model.layers.0.self_attn.q_proj``, ``lm_head`` or ``model.embed_tokens``, and
    ``part`` is one of `PARTS`. ``trained_module`` is the path as the trainer's config knows it, by which ranks, alphas and targets
    are looked up: the fused projection's where ``module`` is a part of one, else the same.
    """

    module: str
    part: str
    source: TensorSource
    trained_module: str


PARTS = (
    "lora_A",
    "lora_B",
    "lora_B.bias",
    "lora_magnitude_vector",
    "lora_embedding_A",
    "lora_embedding_B",
    "weight",  # saved whole (modules_to_save), in place of the base's
    "bias",  # in place of the base's: of a module saved whole, or trained (bias "all" or "lora_only")
    "base_layer.weight",  # the base's own, which PEFT writes beside LoRA on an embedding or a head, and beside what is saved whole
    "base_layer.bias",
    "token_rows",  # PEFT's trainable_tokens_delta: whole rows for the config's trainable_token_indices
    "training_state",  # of the training's own, which PEFT saves and never reads when it serves: VeLoRA's projection
    "expert",  # of a mixture's experts, in whatever layout: `experts.expert_findings` says which
)


@dataclass(frozen=True, slots=True)
class UploadTensors:
    """All tensors of an upload. ``num_sent`` counts those in its files: one fused tensor may stand for several of ``tensors``.

    ``config`` holds what PEFT's `adapter_config.json` would, None where none could be read; ``dialect`` names the trainer's way of
    writing; ``shards`` are the weight files by name, which the digest covers and the store keeps; ``copies`` names tensors that say
    what others of ``tensors`` say already.
    """

    tensors: tuple[AdapterTensor, ...]
    num_sent: int
    config: dict[str, object] | None
    dialect: str
    shards: tuple[str, ...]
    copies: tuple[str, ...] = ()
