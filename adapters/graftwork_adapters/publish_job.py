"""What is asked of a publishing process and what it answers, with their JSON form. Knows no tensors and starts no process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.keys import AdapterDigest, PackedKey, RowTypeName
from graftwork_adapters.report import Report

MEMORY_CHECK = "memory"
"""The check that refuses an adapter which the server's memory can never hold."""


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """The adapter memory of the server that is to serve an upload, in bytes: device pool, its page as configured, host cache.

    ``whole_bytes`` is for the matrices that adapters bring whole, which lie there in the type that the server computes in; None if
    nothing is known of it.
    """

    pool_bytes: int
    page_bytes: int
    host_bytes: int
    whole_bytes: int | None = None
    compute_type: Literal["bfloat16", "float32"] = "bfloat16"


@dataclass(frozen=True, slots=True)
class Limits:
    """How large an upload may be, and whether it must name the base it is served on.

    ``pattern_seconds`` of processor time is for all of the upload's regular expressions. ``memory`` is what the packed form must
    fit; None if nothing is known of it.
    """

    max_rank: int = 256
    max_upload_bytes: int = 1 << 30
    max_files: int = 64
    max_header_bytes: int = 16 << 20
    max_config_bytes: int = 1 << 20
    require_base_name: bool = False
    pattern_seconds: float = 3.0
    memory: ServingMemory | None = None


@dataclass(frozen=True, slots=True)
class PublishJob:
    """Validate ``upload_dir`` against ``spec`` and, if it passes, write its packed form to ``out_path``.

    Packing a stored upload again, for another base or row type, is the same job with ``expected_digest`` set: an upload whose
    content is another one then fails. ``base_dir`` is the base's own folder, of which ``spec`` tells: its tensors are read where a
    norm, a bias or a copy of them is asked for.
    """

    upload_dir: Path
    out_path: Path
    spec: BaseSpec
    row_type: RowTypeName
    limits: Limits = field(default_factory=Limits)
    expected_digest: AdapterDigest | None = None
    base_dir: Path = field(kw_only=True)

    @property
    def partial_path(self) -> Path:
        """Where the packed form lies until it is whole; beside ``out_path``."""
        return self.out_path.with_name(f"{self.out_path.name}.partial")


@dataclass(frozen=True, slots=True)
class AdapterTraits:
    """What whoever hands requests to the engine must know of an adapter version, beside its key.

    ``invocation_token_ids``: an activated LoRA's, active from the first token of their last occurrence in the prompt; empty: active
    from the start. ``vocab_size``: rows of its own embedding or head where they differ from the base's. ``whole_bytes``: bytes of
    its whole matrices, which lie in the second memory.
    """

    invocation_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    whole_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PublishResult:
    """The verdict on one upload.

    ``ok`` is `report.ok`; then ``digest`` and ``packed_key`` are set, ``out_path`` holds the packed form, and ``files`` names the
    files of the upload that belong into the store: those that the digest covers. ``num_bytes`` counts the packed rows and whole
    matrices, ``max_rank`` is the largest rank of any projection.
    """

    ok: bool
    report: Report
    digest: AdapterDigest | None = None
    packed_key: PackedKey | None = None
    num_bytes: int = 0
    max_rank: int = 0
    files: tuple[str, ...] = ()
    traits: AdapterTraits = AdapterTraits()


def encode_job(job: PublishJob) -> bytes:
    """The JSON form of ``job``."""
    return msgspec.json.encode(job, enc_hook=str)


def decode_job(data: bytes) -> PublishJob:
    """Read a job's JSON form; raises `msgspec.MsgspecError` unless it is one."""
    return msgspec.json.decode(data, type=PublishJob, dec_hook=_to_path)


def encode_result(result: PublishResult) -> bytes:
    """The JSON form of ``result``."""
    return msgspec.json.encode(result)


def decode_result(data: bytes) -> PublishResult:
    """Read a result's JSON form; raises `msgspec.MsgspecError` unless it is one."""
    return msgspec.json.decode(data, type=PublishResult)


def _to_path(kind: type, value: object) -> Path:
    if kind is not Path or not isinstance(value, str):
        raise TypeError(f"no JSON form for {kind}")
    return Path(value)
