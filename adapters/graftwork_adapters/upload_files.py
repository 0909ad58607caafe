"""What lies in an uploaded folder: which files are read, stored, ignored or refused, by name alone. Opens none of them."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from graftwork_adapters.publish_job import Limits
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"
MLX_WEIGHTS_FILE = "adapters.safetensors"

TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)
"""Files that say how text becomes tokens and where a reply ends; they are part of the digest."""

_USUAL_SUFFIXES = (".json", ".jinja", ".md", ".txt")
_USUAL_NAMES = frozenset({".gitattributes", "LICENSE", "NOTICE"})
_PICKLE_SUFFIXES = (".bin", ".ckpt", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth")
_SHARD = re.compile(r"adapter_model-\d{5}-of-\d{5}\.safetensors")
_MLX_CHECKPOINT = re.compile(r"\d{7,}_adapters\.safetensors")
_SAFE_NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._ ()+=-]{0,199}")


@dataclass(frozen=True, slots=True)
class UploadFiles:
    """The names of an upload's files that are stored, in order: those that its digest covers, and no others.

    Everyone who uploads the same digest shares what is stored, so a file that only one of them sent may not be among it.
    """

    stored: tuple[str, ...]

    @property
    def has_config(self) -> bool:
        """True if the adapter's config is among them."""
        return CONFIG_FILE in self.stored

    @property
    def has_weights(self) -> bool:
        """True if the adapter's weights are among them."""
        return bool(self.weights)

    @property
    def weights(self) -> tuple[str, ...]:
        """Those of them that hold tensors: one file, or all shards."""
        return tuple(name for name in self.stored if is_weights_file(name))

    @property
    def has_index(self) -> bool:
        """True if a file says which shard holds which tensor."""
        return INDEX_FILE in self.stored

    @property
    def tokenizer(self) -> tuple[str, ...]:
        """Those of them that enter the digest beside the config and the weights."""
        return tuple(name for name in self.stored if name in TOKENIZER_FILES)


def list_upload(folder: Path, limits: Limits, report: Report) -> UploadFiles:
    """Sort the folder's entries, adding a finding for each that is refused or ignored and for each needed file that is absent."""
    stored: list[str] = []
    num_files = total = 0
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    has_mlx = any(entry.name == MLX_WEIGHTS_FILE for entry in entries)
    for entry in entries:
        info = entry.stat(follow_symlinks=False)
        num_files += 1
        total += info.st_size
        if stat.S_ISREG(info.st_mode) and has_mlx and _MLX_CHECKPOINT.fullmatch(entry.name):
            message = f"ignored and not stored: it is a checkpoint of the training, and {MLX_WEIGHTS_FILE} is its end"
            report.warn("files", entry.name, message, f"to serve it, upload it alone as {MLX_WEIGHTS_FILE}")
            continue
        if _refuse(entry.name, info.st_mode, report):
            continue
        if is_stored_file(entry.name):
            stored.append(entry.name)
        elif not _is_usual(entry.name):
            kind = "a pickle, which is never opened" if entry.name.endswith(_PICKLE_SUFFIXES) else "not part of an adapter"
            report.warn("files", shown(entry.name), f"ignored and not stored: it is {kind}")
    if num_files > limits.max_files:
        message = f"{num_files} files, more than the {limits.max_files} allowed"
        report.fail("files", "files", message, "upload only the adapter's own files, without checkpoints and logs of its training")
    if total > limits.max_upload_bytes:
        message = f"{total} bytes, more than the {limits.max_upload_bytes} allowed"
        fix = "upload only the adapter's own files; train fewer modules whole (modules_to_save), or save in bfloat16"
        report.fail("files", "files", message, fix)
    files = UploadFiles(tuple(stored))
    if not files.has_config:
        report.fail("files", CONFIG_FILE, "is missing", "upload the folder that PEFT's save_pretrained wrote")
    _check_weights(files, report)
    return files


def _check_weights(files: UploadFiles, report: Report) -> None:
    """The weights are one file, or shards with an index; two sets of them would leave open which one is meant."""
    shards = [name for name in files.weights if _SHARD.fullmatch(name)]
    single = [name for name in files.weights if name not in shards]
    if not files.weights:
        report.fail("files", WEIGHTS_FILE, "is missing", "save the adapter with safe_serialization=True")
    elif single and (shards or files.has_index):
        other = shards[0] if shards else INDEX_FILE
        report.fail("files", other, f"is part of weights in several files, and {single[0]} is there as well", "upload only one set")
    elif len(single) > 1:
        report.fail("files", MLX_WEIGHTS_FILE, f"holds weights, and so does {WEIGHTS_FILE}", "upload only one of them")
    elif shards and not files.has_index:
        fix = "upload the index that was written beside the shards, or save the adapter as one file"
        report.fail("files", INDEX_FILE, f"is missing; without it {shards[0]} may not be all of the weights", fix)


def _refuse(name: str, mode: int, report: Report) -> bool:
    """True after a finding that this entry may not be in an upload at all."""
    where = shown(name)
    if stat.S_ISLNK(mode):
        report.fail("files", where, "is a symbolic link", "upload the file it points to")
    elif stat.S_ISDIR(mode):
        report.fail("files", where, "is a folder; an adapter's files lie side by side", "upload only the adapter's own folder")
    elif not stat.S_ISREG(mode):
        report.fail("files", where, "is not a regular file", "upload the file itself: pipes, sockets and devices are never read")
    elif not _SAFE_NAME.fullmatch(name):
        report.fail("files", where, "has a name that is not served", "use letters, digits, dots, dashes and underscores")
    elif name.endswith((".safetensors", ".safetensors.index.json")) and not is_stored_file(name):
        shards = f"its shards adapter_model-00001-of-0000n.safetensors with {INDEX_FILE}"
        fix = f"keep only {WEIGHTS_FILE}, or {shards}, or MLX's {MLX_WEIGHTS_FILE}"
        report.fail("files", where, "holds further weights, which would not be applied", fix)
    elif name.startswith("adapter_model") and name.endswith(_PICKLE_SUFFIXES):
        fix = "save the adapter with safe_serialization=True"
        report.fail("files", where, "is a pickle, which can run code when it is read; it was not opened", fix)
    else:
        return False
    return True


def is_stored_file(name: str) -> bool:
    """True for a file that enters the digest, or is read for what does."""
    return name in (CONFIG_FILE, INDEX_FILE) or name in TOKENIZER_FILES or is_weights_file(name)


def is_weights_file(name: str) -> bool:
    """True for a file that holds an adapter's tensors, or a shard of them."""
    return name in (WEIGHTS_FILE, MLX_WEIGHTS_FILE) or _SHARD.fullmatch(name) is not None


def _is_usual(name: str) -> bool:
    """True for a file that lies beside many adapters and does nothing, so that leaving it out needs no word."""
    return name in _USUAL_NAMES or name.endswith(_USUAL_SUFFIXES)
