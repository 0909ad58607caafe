"""From an uploaded folder's files to its tensors by PEFT's names, whichever trainer wrote them. Front door of the dialects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.base_weights import is_copy
from graftwork_adapters.dialect import Reader, Sent
from graftwork_adapters.dialect_megatron import is_megatron_name, read_megatron
from graftwork_adapters.dialect_mlx import is_mlx_config, is_mlx_name, read_mlx
from graftwork_adapters.dialect_peft import read_peft
from graftwork_adapters.dialect_torchtune import is_torchtune_name, read_torchtune
from graftwork_adapters.fused import split_fused
from graftwork_adapters.publish_job import Limits
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.tensor_source import AdapterTensor, UploadTensors
from graftwork_adapters.tensor_values import SERVED_DTYPES, count_beyond_fp32, map_values
from graftwork_adapters.upload_files import CONFIG_FILE, MLX_WEIGHTS_FILE, UploadFiles
from graftwork_adapters.upload_json import read_json_object
from graftwork_adapters.upload_shards import SentTensor, read_shards

_EMPTY_FIX = (
    "gather the weights before saving: DeepSpeed ZeRO-3 (stage3_gather_16bit_weights_on_model_save) and FSDP leave a process with "
    "empty ones"
)


def read_upload_config(upload_dir: Path, files: UploadFiles, limits: Limits, report: Report) -> dict[str, object] | None:
    """The upload's config as it was sent; None where there is none, or after a finding that it cannot be read."""
    return read_json_object(upload_dir / CONFIG_FILE, report, "config", limits.max_config_bytes) if files.has_config else None


def read_upload(
    upload_dir: Path, files: UploadFiles, config: dict[str, object] | None, spec: BaseSpec, limits: Limits, report: Report
) -> UploadTensors | None:
    """Name the upload's tensors as PEFT would, adding a finding for every one that is not understood.

    None where the weights cannot be read at all. Without a usable ``config`` the tensors are named all the same, and the result has
    none.
    """
    sent = read_shards(upload_dir, files, limits, report)
    if sent is None:
        return None
    dialect, reader = _recognise(sent, config, files)
    outputs = {site.module: site.out_features for site in spec.sites}
    read = reader(Sent(sent, config, spec, outputs), report)
    tensors, copies = _without_duplicates(split_fused(read.tensors, spec, report), report)
    _check_types(sent, report)
    if not sent:
        message = "the weights hold no LoRA tensors, so nothing would be applied"
        report.fail("tensors", files.weights[0], message, "save the adapter itself, of the model that PEFT wrapped, after training")
    return UploadTensors(tuple(tensors), len(sent), read.config, dialect, files.weights, tuple(copies))


def _recognise(sent: Sequence[SentTensor], config: dict[str, object] | None, files: UploadFiles) -> tuple[str, Reader]:
    """Whose names these are. One name that only one trainer gives decides; names of two are then unknown to either."""
    names = [tensor.name for tensor in sent]
    if files.weights == (MLX_WEIGHTS_FILE,) or any(map(is_mlx_name, names)) or (config is not None and is_mlx_config(config)):
        return "mlx", read_mlx
    if any(map(is_megatron_name, names)):
        return "megatron", read_megatron
    if any(map(is_torchtune_name, names)):
        return "torchtune", read_torchtune
    return "peft", read_peft


def _without_duplicates(tensors: Sequence[AdapterTensor], report: Report) -> tuple[list[AdapterTensor], list[str]]:
    """The first of each meaning, and the names of those that say the same once more; a finding for every other.

    PEFT writes a module that is saved whole twice where it saves the embeddings as well, and its bias where it saves all biases.
    """
    first: dict[tuple[str, str], AdapterTensor] = {}
    kept: list[AdapterTensor] = []
    copies: dict[str, None] = {}
    problems: dict[str, str] = {}
    for tensor in tensors:
        other = tensor if tensor.part == "expert" else first.setdefault((tensor.module, tensor.part), tensor)
        if other is tensor:
            kept.append(tensor)
        elif (
            tensor.part in ("weight", "bias")
            and tensor.source.dtype == other.source.dtype in SERVED_DTYPES
            and is_copy(tensor.source, other.source)
        ):
            copies[tensor.source.sent_as] = None
        else:
            problems[shown(tensor.source.sent_as)] = f"means the same tensor as {shown(other.source.sent_as)}"
    report.fail_each("tensors", list(problems.items()), "save the adapter with PEFT's save_pretrained")
    return kept, list(copies)


def _check_types(sent: Sequence[SentTensor], report: Report) -> None:
    """A finding for each tensor that has no values, or whose values cannot be read, or not all of them, as fp32."""
    unserved: list[tuple[str | None, str]] = []
    empty: list[tuple[str | None, str]] = []
    beyond: list[tuple[str | None, str]] = []
    for tensor in sent:
        dtype = tensor.entry.dtype
        if 0 in tensor.entry.shape:
            empty.append((shown(tensor.name), f"is empty: its shape is {list(tensor.entry.shape)}"))
        if dtype not in SERVED_DTYPES:
            unserved.append((shown(tensor.name), f"has dtype {dtype}; served are {', '.join(SERVED_DTYPES)}"))
        elif dtype == "F64" and (count := count_beyond_fp32(map_values(tensor.path, tensor.entry))):
            beyond.append((shown(tensor.name), f"holds {count} values beyond the range of fp32"))
    report.fail_each("shapes", empty, _EMPTY_FIX)
    report.fail_each("shapes", unserved, "save the adapter in one of these types")
    report.fail_each("values", beyond, "train again with a lower learning rate; do not save after a diverged step")
