"""The routes below ``/admin/v1``. They hold the caller and the tenant, never a database session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from graftwork_platform.admin.schemas import (
    AdapterOut,
    CompletedOut,
    Deleted,
    KeyCreate,
    KeyOut,
    Listing,
    NewKeyOut,
    TenantChange,
    TenantCreate,
    TenantOut,
    UploadCreate,
    UploadOut,
    UsageOut,
    VersionOut,
    adapter_out,
    completed_out,
    key_out,
    listing,
    tenant_out,
    upload_out,
    usage_out,
    version_out,
)
from graftwork_platform.context import Services
from graftwork_platform.errors import BadRequest, NotFound
from graftwork_platform.ids import Prefix, parse, show
from graftwork_platform.keys.ring import KeyRing
from graftwork_platform.models import Tenant, UploadState
from graftwork_platform.publishing.manifest import FileEntry
from graftwork_platform.usage import list_usage

Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[str | None, Query()]

_PAGE = 100


def admin_router(services: Services) -> APIRouter:
    """All admin routes. Each demands the admin key before the body is read."""
    guarded = _guarded_by(services.keyring)
    router = APIRouter(prefix="/admin/v1")
    for make in (_admin_key, _tenants, _keys, _adapters, _uploads, _usage):
        router.include_router(make(services, guarded))
    return router


def _guarded_by(keyring: KeyRing) -> type[APIRoute]:
    """Routes that authenticate first. A dependency would be too late: FastAPI reads and parses the body before those."""

    class Guarded(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
            handle = super().get_route_handler()

            async def authenticate_then_handle(request: Request) -> Response:
                await keyring.admit_admin(request.headers.get("authorization"))
                if request.scope["path"].endswith("\n"):  # the router's patterns would take it for the name without it
                    raise BadRequest("A path does not end in a line break.", code="invalid_path")
                return await handle(request)

            return authenticate_then_handle

    return Guarded


def _tenant_of(services: Services) -> Callable[[str], Awaitable[Tenant]]:
    async def tenant_of(tenant: str) -> Tenant:
        return await services.tenants.get(tenant)

    return tenant_of


def _admin_key(services: Services, guarded: type[APIRoute]) -> APIRouter:
    router = APIRouter(route_class=guarded)

    @router.post("/admin-key/rotate", status_code=201)
    async def rotate() -> NewKeyOut:
        row, new = await services.keys.rotate_admin(services.settings.admin_key_file)
        return NewKeyOut(**key_out(row).model_dump(), key=new.text)

    return router


def _tenants(services: Services, guarded: type[APIRoute]) -> APIRouter:
    router = APIRouter(route_class=guarded)
    tenant_of = _tenant_of(services)

    @router.post("/tenants", status_code=201)
    async def create(body: TenantCreate) -> TenantOut:
        return tenant_out(await services.tenants.create(body.name, row_type=body.adapter_dtype))

    @router.get("/tenants")
    async def list_all(after: After = None, limit: Limit = _PAGE) -> Listing[TenantOut]:
        page = await services.tenants.list(after=_cursor("tn", after), limit=limit)
        return listing(page, tenant_out)

    @router.get("/tenants/{tenant}")
    async def get(owner: Tenant = Depends(tenant_of)) -> TenantOut:
        return tenant_out(owner)

    @router.patch("/tenants/{tenant}")
    async def change(body: TenantChange, owner: Tenant = Depends(tenant_of)) -> TenantOut:
        return tenant_out(await services.tenants.set_row_type(owner.id, body.adapter_dtype))

    @router.delete("/tenants/{tenant}")
    async def delete(owner: Tenant = Depends(tenant_of)) -> Deleted:
        await services.tenants.delete(owner.id)
        return Deleted(id=show("tn", owner.id), object="tenant.deleted")

    return router


def _keys(services: Services, guarded: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/tenants/{tenant}/keys", route_class=guarded)
    tenant_of = _tenant_of(services)

    @router.post("", status_code=201)
    async def create(body: KeyCreate, owner: Tenant = Depends(tenant_of)) -> NewKeyOut:
        expires_at = None if body.expires_at is None else body.expires_at * 1000
        row, new = await services.keys.create(owner.id, adapter=body.adapter, expires_at=expires_at)
        return NewKeyOut(**key_out(row).model_dump(), key=new.text)

    @router.get("")
    async def list_all(owner: Tenant = Depends(tenant_of), after: After = None, limit: Limit = _PAGE) -> Listing[KeyOut]:
        page = await services.keys.list(owner.id, after=_cursor("key", after), limit=limit)
        return listing(page, key_out)

    @router.delete("/{key_id}")
    async def revoke(key_id: str, owner: Tenant = Depends(tenant_of)) -> KeyOut:
        return key_out(await services.keys.revoke(owner.id, _path_id("key", key_id, "key_not_found")))

    return router


def _adapters(services: Services, guarded: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/tenants/{tenant}/adapters", route_class=guarded)
    tenant_of, catalog = _tenant_of(services), services.catalog

    @router.get("")
    async def list_all(owner: Tenant = Depends(tenant_of), after: After = None, limit: Limit = _PAGE) -> Listing[AdapterOut]:
        page = await catalog.list_adapters(owner.id, after=_cursor("ad", after), limit=limit)
        return listing(page, adapter_out)

    @router.get("/{name}")
    async def get(name: str, owner: Tenant = Depends(tenant_of)) -> AdapterOut:
        return adapter_out(await catalog.get_adapter(owner.id, name))

    @router.delete("/{name}")
    async def delete(name: str, owner: Tenant = Depends(tenant_of)) -> Deleted:
        deleted = await catalog.delete_adapter(owner.id, name)
        return Deleted(id=show("ad", deleted.id), object="adapter.deleted")

    @router.get("/{name}/versions")
    async def versions(
        name: str, owner: Tenant = Depends(tenant_of), after: After = None, limit: Limit = _PAGE
    ) -> Listing[VersionOut]:
        page = await catalog.list_versions(owner.id, name, after=_cursor("av", after), limit=limit)
        return listing(page, version_out)

    @router.get("/{name}/versions/{version}")
    async def version(name: str, version: str, owner: Tenant = Depends(tenant_of)) -> VersionOut:
        return version_out(await catalog.get_version(owner.id, name, version))

    return router


def _uploads(services: Services, guarded: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/tenants/{tenant}/uploads", route_class=guarded)
    tenant_of, uploads = _tenant_of(services), services.uploads

    @router.post("", status_code=201)
    async def create(body: UploadCreate, owner: Tenant = Depends(tenant_of)) -> UploadOut:
        files = [FileEntry(file.path, file.size, file.sha256) for file in body.files]
        return upload_out(await uploads.create(owner.id, body.name, files, row_type=body.adapter_dtype))

    @router.get("/{upload_id}")
    async def get(upload_id: str, owner: Tenant = Depends(tenant_of)) -> UploadOut:
        return upload_out(await uploads.get(owner.id, _path_id("up", upload_id, "upload_not_found")))

    @router.put("/{upload_id}/files/{path:path}", status_code=204)
    async def put_part(
        request: Request, upload_id: str, path: str, part: Annotated[int, Query()] = 1, owner: Tenant = Depends(tenant_of)
    ) -> None:
        key = _path_id("up", upload_id, "upload_not_found")
        try:
            await uploads.put_part(owner.id, key, path, part, request.stream())
        except ClientDisconnect as error:
            raise BadRequest("The body ended early.", code="part_size") from error

    @router.post("/{upload_id}/complete")
    async def complete(response: Response, upload_id: str, owner: Tenant = Depends(tenant_of)) -> CompletedOut:
        view = await uploads.complete(owner.id, _path_id("up", upload_id, "upload_not_found"))
        response.status_code = 202 if view.upload.state == UploadState.VALIDATING else 200  # 200: the verdict is there
        return completed_out(view)

    return router


def _usage(services: Services, guarded: type[APIRoute]) -> APIRouter:
    router = APIRouter(route_class=guarded)

    @router.get("/usage")
    async def usage(tenant: str | None = None, after: After = None, limit: Limit = _PAGE) -> Listing[UsageOut]:
        owner = await services.tenants.get(tenant) if tenant is not None else None
        page = await list_usage(services.database, tenant_id=owner.id if owner else None, after=after, limit=limit)
        return listing(page, usage_out)

    return router


def _cursor(prefix: Prefix, after: str | None) -> UUID | None:
    if after is None:
        return None
    key = parse(prefix, after)
    if key is None:
        raise BadRequest(f"`after` is an id that begins with `{prefix}_`.", param="after")
    return key


def _path_id(prefix: Prefix, text: str, code: str) -> UUID:
    key = parse(prefix, text)
    if key is None:
        raise NotFound(f"No {code.removesuffix('_not_found')} `{text}` in this tenant.", code=code)
    return key
