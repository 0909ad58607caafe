"""What the admin API takes and gives, as JSON. Knows no database session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from graftwork_adapters.keys import RowTypeName
from graftwork_platform.catalog.catalog import AdapterSummary
from graftwork_platform.catalog.names import show_version
from graftwork_platform.ids import show
from graftwork_platform.keys.text import redact
from graftwork_platform.models import AdapterVersion, ApiKey, Tenant, Usage, VersionState
from graftwork_platform.paging import Page
from graftwork_platform.publishing.uploads import UploadView
from graftwork_platform.row_types import WantedRowType

Item = TypeVar("Item", bound="Shown")
Row = TypeVar("Row")


class Body(BaseModel):
    """A request's body: a field that is not known is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TenantCreate(Body):
    """``POST /admin/v1/tenants``. ``adapter_dtype``: of its adapters' rows; null: the server's."""

    name: str
    adapter_dtype: RowTypeName | None = None


class TenantChange(Body):
    """``PATCH /admin/v1/tenants/{tenant}``."""

    adapter_dtype: RowTypeName | None


class KeyCreate(Body):
    """``POST …/keys``. ``adapter`` becomes the key's ``default``; ``expires_at`` in Unix seconds."""

    adapter: str | None = None
    expires_at: int | None = Field(default=None, ge=0, le=1 << 40)


class FilePromise(Body):
    """One file of an upload: path, length in bytes and hex sha256."""

    path: str
    size: int
    sha256: str


class UploadCreate(Body):
    """``POST …/uploads``: which adapter, which files will follow, and of which type its rows are to be.

    ``adapter_dtype`` null: the tenant's; ``auto``: the server's.
    """

    name: str
    files: list[FilePromise]
    adapter_dtype: WantedRowType | None = None


class Shown(BaseModel):
    """Anything with an id. Times are in Unix seconds."""

    id: str
    created: int


class TenantOut(Shown):
    """A tenant."""

    object: Literal["tenant"] = "tenant"
    name: str
    adapter_dtype: str | None = None


class KeyOut(Shown):
    """A key, without its text."""

    object: Literal["api_key"] = "api_key"
    redacted: str
    default_adapter_id: str | None
    expires_at: int | None
    revoked_at: int | None


class NewKeyOut(KeyOut):
    """A key with its text, which is shown this once."""

    key: str


class VersionOut(Shown):
    """A version: ``version`` and ``digest`` are null until it is ready, ``report`` is empty until there is a verdict.

    ``adapter_dtype``: of its rows; null: the server's.
    """

    object: Literal["adapter.version"] = "adapter.version"
    version: str | None
    digest: str | None
    state: str
    adapter_dtype: str | None = None
    report: list[dict[str, str | None]]


class CompletedOut(VersionOut):
    """The version that an upload became. While its ``state`` is ``validating``, ask for ``upload`` again."""

    upload: str


class AdapterOut(Shown):
    """An adapter and its newest ready version, if it has one."""

    object: Literal["adapter"] = "adapter"
    name: str
    version: str | None
    digest: str | None


class PartOut(BaseModel):
    """Bytes that are still to be sent: ``PUT …/files/{path}?part={part}``."""

    path: str
    part: int
    offset: int
    size: int


class UploadOut(Shown):
    """An upload. ``parts`` lists what is missing; ``version`` is there once it is complete."""

    object: Literal["upload"] = "upload"
    name: str
    state: str
    expires_at: int
    parts: list[PartOut]
    version: VersionOut | None


class UsageOut(Shown):
    """What one request used; ``id`` is the server's request id, ``version`` a version's id (null: the base)."""

    object: Literal["usage"] = "usage"
    client_request_id: str | None
    tenant: str
    key: str
    model: str
    version: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    status: str


class Listing(BaseModel, Generic[Item]):
    """One page of a list; the next begins ``after`` its ``last_id``."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    """What was deleted."""

    id: str
    object: str
    deleted: Literal[True] = True


def listing(page: Page[Row], show_row: Callable[[Row], Item]) -> Listing[Item]:
    """A page of rows as JSON."""
    data = [show_row(row) for row in page.rows]
    return Listing(data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None, has_more=page.has_more)


def tenant_out(row: Tenant) -> TenantOut:
    """A tenant as JSON."""
    return TenantOut(id=show("tn", row.id), created=row.created_at // 1000, name=row.name, adapter_dtype=row.row_type)


def key_out(row: ApiKey) -> KeyOut:
    """A key as JSON, without its text."""
    return KeyOut(
        id=show("key", row.id),
        created=row.created_at // 1000,
        redacted=redact(row.public_id),
        default_adapter_id=show("ad", row.default_adapter_id) if row.default_adapter_id else None,
        expires_at=row.expires_at // 1000 if row.expires_at is not None else None,
        revoked_at=row.revoked_at // 1000 if row.revoked_at is not None else None,
    )


def version_out(row: AdapterVersion) -> VersionOut:
    """A version as JSON."""
    return VersionOut(
        id=show("av", row.id),
        created=row.created_at // 1000,
        version=show_version(row.number),
        digest=row.digest if row.number is not None else None,
        state=row.state,
        adapter_dtype=row.row_type,
        report=row.report if row.state != VersionState.VALIDATING else [],
    )


def adapter_out(summary: AdapterSummary) -> AdapterOut:
    """An adapter as JSON."""
    newest = summary.newest
    return AdapterOut(
        id=show("ad", summary.adapter.id),
        created=summary.adapter.created_at // 1000,
        name=summary.adapter.name,
        version=show_version(newest.number) if newest else None,
        digest=newest.digest if newest else None,
    )


def upload_out(view: UploadView) -> UploadOut:
    """An upload as JSON."""
    return UploadOut(
        id=show("up", view.upload.id),
        created=view.upload.created_at // 1000,
        name=view.upload.adapter_name,
        state=view.upload.state,
        expires_at=view.upload.expires_at // 1000,
        parts=[PartOut(path=p.path, part=p.number, offset=p.offset, size=p.size) for p in view.missing],
        version=version_out(view.version) if view.version else None,
    )


def completed_out(view: UploadView) -> CompletedOut:
    """A completed upload's version as JSON."""
    if view.version is None:
        raise AssertionError("a completed upload has a version")
    return CompletedOut(**version_out(view.version).model_dump(), upload=show("up", view.upload.id))


def usage_out(row: Usage) -> UsageOut:
    """A usage row as JSON."""
    return UsageOut(
        id=show("req", row.request_id),
        created=row.created_at // 1000,
        client_request_id=row.client_request_id,
        tenant=show("tn", row.tenant_id),
        key=show("key", row.key_id),
        model=row.model,
        version=show("av", row.version_id) if row.version_id else None,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        output_tokens=row.output_tokens,
        status=row.status,
    )
