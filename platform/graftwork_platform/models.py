"""The tables. Constraints live here, in the database, so that no code path can get round them. Knows no queries.

Times are Unix milliseconds in UTC. Ids are UUIDv7. Nothing that usage rows point at is ever deleted: tenants and adapters are
marked, keys are revoked.
"""

from __future__ import annotations

import datetime
from enum import StrEnum
from uuid import UUID

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Findings = list[dict[str, str | None]]
"""A report as `graftwork_adapters.report.Report.as_json` makes it."""

VersionFacts = dict[str, object]
"""What a published version is beside its bytes, as `catalog.facts.VersionFacts` says it in JSON."""

Manifest = list[dict[str, str | int]]
"""The files of an upload: ``path``, ``size``, ``sha256``."""


class Base(DeclarativeBase):
    """Every table; names of constraints are fixed, so that migrations can speak of them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {int: BigInteger, str: Text, Findings: JSON, Manifest: JSON}  # noqa: RUF012 — SQLAlchemy's own form


class VersionState(StrEnum):
    """validating → ready | failed; ready → deleting → deleted."""

    VALIDATING = "validating"  # its publishing subprocess runs or will run
    READY = "ready"  # can be served
    FAILED = "failed"  # refused; the report says why
    DELETING = "deleting"  # its adapter was deleted; its bytes go when no request can still need them
    DELETED = "deleted"


class UploadState(StrEnum):
    """uploading → validating → ready | failed; uploading → expired."""

    UPLOADING = "uploading"  # parts are coming in
    VALIDATING = "validating"
    READY = "ready"  # `version_id` says which version it became
    FAILED = "failed"
    EXPIRED = "expired"  # never completed; its parts are gone


class UsageStatus(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    ABORTED = "aborted"  # the client went away
    FAILED = "failed"


def _one_of(column: str, values: type[StrEnum]) -> str:
    return f"{column} IN ({', '.join(repr(v.value) for v in values)})"


class Tenant(Base):
    """A customer. Its cache salt is made from ``id``, so the id is never reused. ``row_type``: of its adapters' rows; None: the
    server's.
    """

    __tablename__ = "tenants"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    row_type: Mapped[str | None] = mapped_column(String(16))
    created_at: Mapped[int]
    deleted_at: Mapped[int | None]


class ApiKey(Base):
    """A key at rest: its public half and an HMAC of the whole. Admin keys have no tenant."""

    __tablename__ = "api_keys"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(["tenant_id", "default_adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        CheckConstraint("is_admin = (tenant_id IS NULL)", name="admin_has_no_tenant"),
        CheckConstraint("default_adapter_id IS NULL OR tenant_id IS NOT NULL", name="default_needs_tenant"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id"))
    is_admin: Mapped[bool]
    public_id: Mapped[str] = mapped_column(String(32), unique=True)
    key_hmac: Mapped[bytes] = mapped_column(LargeBinary(32))
    default_adapter_id: Mapped[UUID | None]
    created_at: Mapped[int]
    expires_at: Mapped[int | None]
    revoked_at: Mapped[int | None]


class Adapter(Base):
    """A name inside a tenant. A deleted name keeps its row, so that its version numbers are never dealt out again."""

    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        UniqueConstraint("tenant_id", "id"),
        CheckConstraint("next_version > 0", name="next_version_positive"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(64))
    next_version: Mapped[int] = mapped_column(default=1)
    created_at: Mapped[int]
    deleted_at: Mapped[int | None]


class AdapterVersion(Base):
    """One publication of an adapter. Its number is known from `READY` on; number and digest then never change.

    Before that, a digest says that blobs of it may have been stored on this version's behalf. ``deleted_at`` is when nothing needed
    them any more, also of a version that failed behind its digest. ``row_type`` is the packed form's (None: the server's, whatever
    that is); ``facts`` is None for a version of an older server: it is not served before they have been found out.
    """

    __tablename__ = "adapter_versions"
    __table_args__ = (
        UniqueConstraint("adapter_id", "number"),
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        CheckConstraint(_one_of("state", VersionState), name="state_known"),
        CheckConstraint(
            "state IN ('validating', 'failed') OR (number IS NOT NULL AND digest IS NOT NULL)", name="ready_is_complete"
        ),
        CheckConstraint("number IS NULL OR number > 0", name="number_positive"),
        Index(None, "digest"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    adapter_id: Mapped[UUID]
    number: Mapped[int | None]
    digest: Mapped[str | None] = mapped_column(String(64))
    manifest_sha256: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    report: Mapped[Findings]
    row_type: Mapped[str | None] = mapped_column(String(16))
    facts: Mapped[VersionFacts | None] = mapped_column(JSON(none_as_null=True))
    attempts: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[int]
    ready_at: Mapped[int | None]
    deleted_at: Mapped[int | None]


class BlobSweep(Base):
    """A digest whose blobs are being deleted, and by which sweep."""

    __tablename__ = "blob_sweeps"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    token: Mapped[UUID]


class Upload(Base):
    """Files on their way to becoming a version. Which parts have arrived is read from the store, where they are.

    While it is `VALIDATING`, the publication that runs holds its lease: ``lease_holder`` until ``lease_until``, then anyone may
    take it.
    """

    __tablename__ = "uploads"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "version_id"], ["adapter_versions.tenant_id", "adapter_versions.id"]),
        CheckConstraint(_one_of("state", UploadState), name="state_known"),
        CheckConstraint("state NOT IN ('validating', 'ready') OR version_id IS NOT NULL", name="version_known"),
        Index(None, "state"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    adapter_name: Mapped[str] = mapped_column(String(64))
    files: Mapped[Manifest]
    part_bytes: Mapped[int]
    row_type: Mapped[str | None] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    version_id: Mapped[UUID | None]
    created_at: Mapped[int]
    expires_at: Mapped[int]
    lease_holder: Mapped[UUID | None]
    lease_until: Mapped[int] = mapped_column(default=0, server_default="0")


class Usage(Base):
    """What one request used, written once. ``seq`` is the order of recording, which a reader with a cursor follows."""

    __tablename__ = "usage"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "key_id"], ["api_keys.tenant_id", "api_keys.id"]),
        ForeignKeyConstraint(["tenant_id", "version_id"], ["adapter_versions.tenant_id", "adapter_versions.id"]),
        CheckConstraint(_one_of("status", UsageStatus), name="status_known"),
        CheckConstraint("prompt_tokens >= 0 AND output_tokens >= 0", name="tokens_not_negative"),
        CheckConstraint("cached_tokens BETWEEN 0 AND prompt_tokens", name="cached_within_prompt"),
        Index(None, "tenant_id", "seq"),
        Index("uq_usage_seq_day", "seq", "day", unique=True),  # `insert_usage` deals out each number once
    )

    day: Mapped[datetime.date] = mapped_column(primary_key=True)
    request_id: Mapped[UUID] = mapped_column(primary_key=True)
    seq: Mapped[int]
    client_request_id: Mapped[str | None]
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    key_id: Mapped[UUID]
    model: Mapped[str]
    version_id: Mapped[UUID | None]
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]
    status: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[int]


class SecretFingerprint(Base):
    """What belongs to this database from outside of it: its pepper's hash, and the id that its object stores carry."""

    __tablename__ = "secret_fingerprints"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    fingerprint: Mapped[bytes] = mapped_column(LargeBinary(32))
