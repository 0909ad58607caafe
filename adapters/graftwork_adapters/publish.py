"""An uploaded folder to findings, digest and packed form, in one process. Runs where `publisher` has set limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.digest import adapter_digest
from graftwork_adapters.errors import AdapterTooLarge, InvalidSafetensors, PatternTooSlow
from graftwork_adapters.keys import AdapterDigest
from graftwork_adapters.lora_tensors import SERVED_DTYPES, LoraPair, match_tensors
from graftwork_adapters.pack import fold_scale, longest_row_bytes, pack
from graftwork_adapters.packed import PackedIndex, write_packed
from graftwork_adapters.page_table import PageTable, page_size, plan_pages, row_numbers
from graftwork_adapters.peft_config import PeftConfig, read_peft_config, report_slow_pattern
from graftwork_adapters.publish_job import MEMORY_CHECK, Limits, PublishJob, PublishResult
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import SafetensorsHeader, read_header, shown
from graftwork_adapters.tensor_values import BF16_MAX, Matrix, read_fp32
from graftwork_adapters.upload_files import CONFIG_FILE, WEIGHTS_FILE, UploadFiles, list_upload


@dataclass(frozen=True, slots=True)
class Validation:
    """What was found in an upload. ``digest`` is set and ``pairs`` are complete exactly if ``report.ok``."""

    report: Report
    files: UploadFiles
    pairs: tuple[LoraPair, ...] = ()
    digest: AdapterDigest | None = None


def validate(upload_dir: Path, spec: BaseSpec, limits: Limits) -> Validation:
    """Check an uploaded PEFT folder against a base.

    Checks that do not depend on each other all run, so that one report names everything there is to mend. Never raises on account
    of the folder's contents, except `OSError` where the disk fails.
    """
    report = Report()
    files = list_upload(upload_dir, limits, report)
    config = header = None
    if files.has_config:
        config = read_peft_config(upload_dir / CONFIG_FILE, report, limits.max_config_bytes, limits.pattern_seconds)
    if config is not None:
        _check_base_name(config, spec, limits, report)
    if files.has_weights:
        header = _read_weights_header(upload_dir / WEIGHTS_FILE, limits, report)
    if header is None:
        return Validation(report, files)
    pairs = _match(header, config, spec, limits, report)
    _check_values(upload_dir / WEIGHTS_FILE, header, pairs, report)
    if not report.ok:
        return Validation(report, files, pairs)
    _summarise(upload_dir, header, pairs, files, report)
    return Validation(report, files, pairs, adapter_digest(upload_dir, header, pairs, files.tokenizer))


def publish(job: PublishJob) -> PublishResult:
    """Validate an upload and write its packed form to ``job.out_path``, whole or not at all."""
    validation = validate(job.upload_dir, job.spec, job.limits)
    report, digest = validation.report, validation.digest
    if digest is not None and job.expected_digest not in (None, digest):
        report.fail("digest", None, f"the upload's content is {digest}, expected was {job.expected_digest}")
    if digest is None or not report.ok:
        return PublishResult(ok=False, report=report)
    index, rows = pack(job.upload_dir / WEIGHTS_FILE, validation.pairs, job.spec, digest, job.row_type)
    _check_memory(index, job, report)
    if not report.ok:
        return PublishResult(ok=False, report=report)
    write_packed(job.partial_path, index, rows)
    job.partial_path.replace(job.out_path)
    report.passed("packed", f"{index.num_bytes} bytes of {job.row_type} rows")
    return PublishResult(
        ok=True,
        report=report,
        digest=digest,
        packed_key=index.key,
        num_bytes=index.num_bytes,
        max_rank=max(pair.rank for pair in validation.pairs),
        files=validation.files.stored,
    )


def _read_weights_header(path: Path, limits: Limits, report: Report) -> SafetensorsHeader | None:
    try:
        header = read_header(path, limits.max_header_bytes)
    except InvalidSafetensors as error:
        problems = [(f"{path.name}: {tensor}" if tensor else path.name, what) for tensor, what in error.problems]
        report.fail_each("header", problems, "upload the file again, or save the adapter again with PEFT")
        return None
    report.passed("header", f"{len(header.tensors)} tensors cover the file exactly", path.name)
    return header


def _match(
    header: SafetensorsHeader, config: PeftConfig | None, spec: BaseSpec, limits: Limits, report: Report
) -> tuple[LoraPair, ...]:
    """`match_tensors`; where the config's patterns take too long, that is a finding and the tensors are checked without it."""
    attempt = Report()
    try:
        pairs = match_tensors(header, config, spec, limits, attempt)
    except PatternTooSlow as error:
        report_slow_pattern(error, report)
        return match_tensors(header, None, spec, limits, report)
    report.findings += attempt.findings
    return pairs


def _check_memory(index: PackedIndex, job: PublishJob, report: Report) -> None:
    """Refuse what the server could never load, by the rules that its engine loads by."""
    memory = job.limits.memory
    if memory is None:
        return
    page_bytes = page_size(memory.page_bytes, longest_row_bytes(job.spec, job.row_type))
    table = PageTable(memory.pool_bytes // page_bytes, row_numbers(memory.pool_bytes), 1)
    try:
        table.check_fits("it", plan_pages(index.row_bytes, page_bytes), page_bytes)
    except AdapterTooLarge as error:
        report.fail(MEMORY_CHECK, None, str(error), "lower the rank, or raise the server's --adapter-memory")
    if index.num_bytes > memory.host_bytes:
        message = f"it needs {index.num_bytes} bytes of host memory, adapters may use {memory.host_bytes}"
        report.fail(MEMORY_CHECK, None, message, "lower the rank, or raise the server's --adapter-host-memory")


def _check_base_name(config: PeftConfig, spec: BaseSpec, limits: Limits, report: Report) -> None:
    named = (config.base_name or "").rstrip("/")
    if named and named.rpartition("/")[2] == spec.name.rpartition("/")[2]:
        return
    message = f"is {shown(named) or 'not set'}; this server's base is {spec.name}"
    if limits.require_base_name:
        report.fail("base", "base_model_name_or_path", message, "train on this base, or correct the name")
    elif named:
        report.warn("base", "base_model_name_or_path", message, "make sure that the adapter was trained on this base")


def _check_values(weights: Path, header: SafetensorsHeader, pairs: Sequence[LoraPair], report: Report) -> None:
    """Every value must be finite, also after scaling; the tensors of a pair that failed before are looked at too."""
    problems: list[tuple[str | None, str]] = []
    largest: dict[str, Matrix] = {}  # magnitude of each finite tensor, [1]
    for entry in header.tensors:
        if entry.dtype not in SERVED_DTYPES:
            continue
        values = read_fp32(weights, entry)
        num_bad = int(np.count_nonzero(~np.isfinite(values)))
        if num_bad:
            problems.append((shown(entry.name), f"holds {num_bad} values that are NaN or infinite"))
        else:
            largest[entry.name] = np.array([max(values.max(initial=0), -values.min(initial=0))], dtype=np.float32)
    for pair in pairs:
        for entry, scale in ((pair.a, 1.0), (pair.b, pair.scale)):
            with np.errstate(over="ignore"):
                if entry.name in largest and np.abs(fold_scale(largest[entry.name], scale)) > BF16_MAX:
                    problems.append((shown(entry.name), f"holds values too large for bfloat16 (its scale is {scale:g})"))
    report.fail_each("values", problems, "train again with a lower learning rate; do not save after a diverged step")
    unscaled = [pair.site.module for pair in pairs if not np.float32(pair.scale)]
    if unscaled:
        names = ", ".join(unscaled[:5]) + (", …" if len(unscaled) > 5 else "")
        message = f"{len(unscaled)} of {len(pairs)} modules have a scale of 0 and change nothing: {names}"
        report.warn("values", "lora_alpha", message, "set lora_alpha and alpha_pattern to what the adapter was trained with")
    zero = [pair.b.name for pair in pairs if pair.b.name in largest and not largest[pair.b.name].any()]
    if zero:
        names = ", ".join(shown(name) for name in zero[:5]) + (", …" if len(zero) > 5 else "")
        report.warn("values", shown(zero[0]), f"{len(zero)} of {len(pairs)} lora_B are all zero and change nothing: {names}")


def _summarise(upload_dir: Path, header: SafetensorsHeader, pairs: Sequence[LoraPair], files: UploadFiles, report: Report) -> None:
    if files.tokenizer:
        message = "is kept with the adapter; prompts are still formatted and tokenized as the base's own files say"
        report.warn("tokenizer", ", ".join(files.tokenizer), message)
    ranks = sorted({pair.rank for pair in pairs})
    report.passed("tensors", f"applied {2 * len(pairs)} of {len(header.tensors)} tensors")
    report.passed("ranks", f"{len(pairs)} modules of rank {', '.join(map(str, ranks))}")
    report.passed("size", f"{sum((upload_dir / name).stat().st_size for name in files.stored)} bytes in {len(files.stored)} files")
