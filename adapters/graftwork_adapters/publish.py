"""An uploaded folder to findings, digest and packed form, in one process. Runs where `publisher` has set limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from graftwork_adapters.adapter_content import AdapterContent
from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.base_weights import BaseWeights
from graftwork_adapters.content_reader import check_all_applied, check_without_config, read_content
from graftwork_adapters.dialect_mlx import is_mlx_config
from graftwork_adapters.digest import adapter_digest
from graftwork_adapters.dora import output_scales
from graftwork_adapters.errors import AdapterTooLarge, BlobCorrupt, PatternTooSlow
from graftwork_adapters.keys import AdapterDigest
from graftwork_adapters.module_tensors import Matching, ShapeChecks
from graftwork_adapters.pack import longest_row_bytes, pack
from graftwork_adapters.packed import WHOLE_ELEMENT_BYTES, PackedIndex, write_packed
from graftwork_adapters.page_table import PageTable, page_size, plan_pages, row_numbers
from graftwork_adapters.peft_config import PeftConfig, read_peft_config, report_slow_pattern
from graftwork_adapters.publish_job import MEMORY_CHECK, AdapterTraits, Limits, PublishJob, PublishResult
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.summary import report_content, report_wholes
from graftwork_adapters.tensor_source import UploadTensors
from graftwork_adapters.upload_files import WEIGHTS_FILE, UploadFiles, list_upload
from graftwork_adapters.upload_tensors import read_upload, read_upload_config
from graftwork_adapters.value_checks import check_values
from graftwork_adapters.whole_checks import check_wholes, held_bytes, weight_sites, whole_shapes


@dataclass(frozen=True, slots=True)
class Validation:
    """What was found in an upload. ``digest`` is set and ``content`` is complete exactly if ``report.ok``."""

    report: Report
    files: UploadFiles
    content: AdapterContent = field(default_factory=AdapterContent)
    digest: AdapterDigest | None = None


def validate(upload_dir: Path, base_dir: Path, spec: BaseSpec, limits: Limits) -> Validation:
    """Check an uploaded folder against a base, whose own tensors lie in ``base_dir``.

    Checks that do not depend on each other all run, so that one report names everything there is to mend. Never raises on account
    of the upload's contents, except `OSError` where the disk fails.
    """
    report = Report()
    files = list_upload(upload_dir, limits, report)
    sent_config = read_upload_config(upload_dir, files, limits, report)
    upload = read_upload(upload_dir, files, sent_config, spec, limits, report)
    raw = upload.config if upload is not None else None if sent_config is None or is_mlx_config(sent_config) else sent_config
    config = None if raw is None else read_peft_config(raw, report, limits.pattern_seconds)
    if config is not None:
        _check_base_name(config, spec, limits, report)
    if upload is None:
        return Validation(report, files)
    content = _read_content(upload, config, BaseWeights(base_dir, spec), spec, limits, report)
    check_values(upload, content, report)
    if report.ok:
        check_all_applied(upload, content, report)
    if not report.ok:
        return Validation(report, files, content)
    report_content(upload_dir, upload, content, files, report)
    return Validation(report, files, content, adapter_digest(upload_dir, upload, content, files.tokenizer))


def publish(job: PublishJob) -> PublishResult:
    """Validate an upload and write its packed form to ``job.out_path``, whole or not at all."""
    validation = validate(job.upload_dir, job.base_dir, job.spec, job.limits)
    report, digest, content = validation.report, validation.digest, validation.content
    if digest is not None and job.expected_digest not in (None, digest):
        report.fail(
            "digest", WEIGHTS_FILE, f"the upload's content is {digest}, expected was {job.expected_digest}", "send the same files"
        )
    if digest is None or not report.ok:
        return PublishResult(ok=False, report=report)
    base = BaseWeights(job.base_dir, job.spec)
    scales = output_scales(content, base, report)
    if not report.ok:
        return PublishResult(ok=False, report=report)
    index, rows = pack(content, scales, base, job.spec, digest, job.row_type)
    _check_servable(index, job.spec, report)
    _check_memory(index, job, report)
    if not report.ok:
        return PublishResult(ok=False, report=report)
    write_packed(job.partial_path, index, rows)
    job.partial_path.replace(job.out_path)
    report.passed("packed", f"{index.num_row_bytes} bytes of {job.row_type} rows")
    report_wholes(index, job.spec, report)
    return PublishResult(
        ok=True,
        report=report,
        digest=digest,
        packed_key=index.key,
        num_bytes=index.num_bytes,
        max_rank=max((site.rank for site in index.sites), default=0),
        files=validation.files.stored,
        traits=AdapterTraits(content.invocation_token_ids, content.vocab_size, index.num_whole_bytes),
    )


def _read_content(
    upload: UploadTensors, config: PeftConfig | None, base: BaseWeights, spec: BaseSpec, limits: Limits, report: Report
) -> AdapterContent:
    """`read_content`; where the config is of no use or its patterns take too long, the tensors' names are checked without it."""
    if config is not None:
        attempt = Report()
        try:
            content = read_content(upload, Matching(spec, limits, attempt, config, base))
        except PatternTooSlow as error:
            report_slow_pattern(error, report)
        else:
            report.add(attempt)
            return content
    check_without_config(upload.tensors, ShapeChecks(spec, limits, report))
    return AdapterContent()


def _check_servable(index: PackedIndex, spec: BaseSpec, report: Report) -> None:
    """Refuse what the engine would refuse to load, by its own check: it would be ready here and fail at every request."""
    try:
        check_wholes(index, whole_shapes(spec), weight_sites(spec))
    except BlobCorrupt as error:
        fix = "this is a fault of the server, not of the adapter: report it with the adapter's config"
        report.fail("packed", WEIGHTS_FILE, str(error), fix)


def _check_memory(index: PackedIndex, job: PublishJob, report: Report) -> None:
    """Refuse what the server could never load, by the rules that its engine loads by."""
    memory = job.limits.memory
    if memory is None:
        return
    page_bytes = page_size(memory.page_bytes, longest_row_bytes(job.spec))
    table = PageTable(memory.pool_bytes // page_bytes, row_numbers(memory.pool_bytes), 1)
    try:
        table.check_fits("it", plan_pages(index.row_bytes, page_bytes), page_bytes)
    except AdapterTooLarge as error:
        report.fail(MEMORY_CHECK, WEIGHTS_FILE, str(error), "lower the rank, or raise the server's --adapter-memory")
    held = sum(held_bytes(whole, WHOLE_ELEMENT_BYTES[memory.compute_type]) for whole in index.wholes)
    if memory.whole_bytes is not None and held > memory.whole_bytes:
        message = f"it brings {held} bytes of whole matrices, adapters may use {memory.whole_bytes}"
        fix = "train fewer modules whole (modules_to_save), or raise the server's --adapter-whole-memory"
        report.fail(MEMORY_CHECK, WEIGHTS_FILE, message, fix)
    if index.num_bytes > memory.host_bytes:
        message = f"it needs {index.num_bytes} bytes of host memory, adapters may use {memory.host_bytes}"
        report.fail(MEMORY_CHECK, WEIGHTS_FILE, message, "lower the rank, or raise the server's --adapter-host-memory")


def _check_base_name(config: PeftConfig, spec: BaseSpec, limits: Limits, report: Report) -> None:
    named = (config.base_name or "").rstrip("/")
    if named and named.rpartition("/")[2] == spec.name.rpartition("/")[2]:
        return
    message = f"is {shown(named) if named else 'not set'}; this server's base is {spec.name}"
    if limits.require_base_name:
        report.fail("base", "base_model_name_or_path", message, "train on this base, or correct the name")
    elif named:
        report.warn("base", "base_model_name_or_path", message, "make sure that the adapter was trained on this base")
