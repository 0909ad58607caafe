"""The admin API from the other side: typed calls over HTTP. Knows no terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ValidationError

from graftwork_adapters.keys import RowTypeName
from graftwork_platform.admin.schemas import (
    AdapterOut,
    CompletedOut,
    Deleted,
    KeyOut,
    Listing,
    NewKeyOut,
    PartOut,
    Shown,
    TenantOut,
    UploadOut,
)
from graftwork_platform.row_types import WantedRowType
from graftwork_platform.settings import ClientSettings

Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item", bound=Shown)

_TIMEOUT = httpx2.Timeout(60.0, connect=5.0)
_SEND_ATTEMPTS = 3
_PAGE = 1000
_KEY_STEP = "Give the admin key with --admin-key or GRAFTWORK_ADMIN_KEY, or --data-dir with the server's data directory."


class CallFailed(Exception):
    """A call that did not succeed: what happened, and what to do next. Without a ``status`` no answer came."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        next_step: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.next_step = next_step
        self.status = status


class AdminClient:
    """Calls one server as its operator; a context manager. Making it and every method raise `CallFailed`."""

    def __init__(
        self,
        settings: ClientSettings,
        *,
        transport: httpx2.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        key = settings.admin_key or ""
        if not (key.isascii() and key.isprintable()):
            raise CallFailed("The admin key holds characters that no key has.", code="invalid_api_key", next_step=_KEY_STEP)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url = settings.url
        self.has_key = bool(key)
        self._sleep = sleep
        try:
            self._http = httpx2.Client(base_url=settings.url, headers=headers, timeout=_TIMEOUT, transport=transport)
        except httpx2.InvalidURL as error:
            raise self._unreachable(error) from error

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._http.close()

    def rotate_admin_key(self) -> NewKeyOut:
        """A new admin key; the one this client has is refused from then on."""
        return self._call(NewKeyOut, "POST", "/admin-key/rotate")

    def create_tenant(self, name: str, adapter_dtype: RowTypeName | None = None) -> TenantOut:
        """Make a tenant."""
        return self._call(TenantOut, "POST", "/tenants", body=_given(name=name, adapter_dtype=adapter_dtype))

    def change_tenant(self, tenant: str, adapter_dtype: RowTypeName | None) -> TenantOut:
        """Say of which type the rows of what a tenant uploads from now on are; None: the server's."""
        return self._call(TenantOut, "PATCH", _tenant(tenant), body={"adapter_dtype": adapter_dtype})

    def list_tenants(self) -> list[TenantOut]:
        """All tenants."""
        return list(self._pages(Listing[TenantOut], "/tenants"))

    def create_key(self, tenant: str, adapter: str | None) -> NewKeyOut:
        """Make a key; its text comes this once."""
        return self._call(NewKeyOut, "POST", f"{_tenant(tenant)}/keys", body={"adapter": adapter} if adapter else {})

    def list_keys(self, tenant: str) -> list[KeyOut]:
        """All keys of a tenant, revoked ones too."""
        return list(self._pages(Listing[KeyOut], f"{_tenant(tenant)}/keys"))

    def revoke_key(self, tenant: str, key_id: str) -> KeyOut:
        """Refuse a key from now on."""
        return self._call(KeyOut, "DELETE", f"{_tenant(tenant)}/keys/{quote(key_id, safe='')}")

    def list_adapters(self, tenant: str) -> list[AdapterOut]:
        """All adapters of a tenant."""
        return list(self._pages(Listing[AdapterOut], f"{_tenant(tenant)}/adapters"))

    def delete_adapter(self, tenant: str, name: str) -> Deleted:
        """Stop serving an adapter and all its versions."""
        return self._call(Deleted, "DELETE", f"{_tenant(tenant)}/adapters/{quote(name, safe='')}")

    def create_upload(
        self, tenant: str, name: str, files: list[dict[str, str | int]], adapter_dtype: WantedRowType | None = None
    ) -> UploadOut:
        """Promise the files of a new version."""
        body = _given(name=name, files=files, adapter_dtype=adapter_dtype)
        return self._call(UploadOut, "POST", f"{_tenant(tenant)}/uploads", body=body)

    def put_part(self, tenant: str, upload_id: str, part: PartOut, body: bytes) -> None:
        """Send one part; a broken connection is tried again, since sending a part twice does no harm."""
        path = f"{_tenant(tenant)}/uploads/{upload_id}/files/{quote(part.path)}"
        for attempt in range(1, _SEND_ATTEMPTS + 1):
            try:
                self._request("PUT", path, content=body, query={"part": str(part.part)})
                return
            except CallFailed as failed:
                transient = failed.status is None or failed.status >= 500
                if not transient or attempt == _SEND_ATTEMPTS:
                    raise
                self._sleep(0.5 * 2**attempt)

    def complete_upload(self, tenant: str, upload_id: str) -> CompletedOut:
        """Ask for the verdict on what was sent."""
        return self._call(CompletedOut, "POST", f"{_tenant(tenant)}/uploads/{upload_id}/complete")

    def get_upload(self, tenant: str, upload_id: str) -> UploadOut:
        """How an upload stands."""
        return self._call(UploadOut, "GET", f"{_tenant(tenant)}/uploads/{upload_id}")

    def is_ready(self) -> bool:
        """True if the server says that it can serve."""
        try:
            return self._http.get("/readyz").is_success
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error

    def check_key(self) -> None:
        """Returns if the admin key is good."""
        self._call(Listing[TenantOut], "GET", "/tenants", query={"limit": "1"})

    def _pages(self, kind: type[Listing[Item]], path: str) -> Iterator[Item]:
        query = {"limit": str(_PAGE)}
        while True:
            page = self._call(kind, "GET", path, query=query)
            yield from page.data
            if not page.has_more or page.last_id is None:
                return
            query["after"] = page.last_id

    def _call(
        self, kind: type[Model], method: str, path: str, *, body: object | None = None, query: dict[str, str] | None = None
    ) -> Model:
        content = None if body is None else json.dumps(body).encode()
        answer = self._request(method, path, content=content, query=query)
        try:
            return kind.model_validate_json(answer)
        except ValidationError as error:
            raise CallFailed(f"{self.url} does not answer as a graftwork server does.", next_step="Check --url.") from error

    def _request(self, method: str, path: str, *, content: bytes | None, query: dict[str, str] | None) -> bytes:
        headers = {"content-type": "application/octet-stream" if method == "PUT" else "application/json"}
        try:
            response = self._http.request(method, f"/admin/v1{path}", content=content, params=query, headers=headers)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._unreachable(error) from error
        if response.is_success:
            return response.content
        raise _failure(response)

    def _unreachable(self, error: Exception) -> CallFailed:
        step = "Start it with `graftwork serve`, or say where it is with --url or GRAFTWORK_URL."
        return CallFailed(f"No answer from {self.url}: {error or type(error).__name__}", code="unreachable", next_step=step)


def _given(**fields: object) -> dict[str, object]:
    """A body without what was not said: a server of before knows no such field."""
    return {name: value for name, value in fields.items() if value is not None}


def _tenant(name_or_id: str) -> str:
    return f"/tenants/{quote(name_or_id, safe='')}"


def _failure(response: httpx2.Response) -> CallFailed:
    try:
        error = response.json()["error"]
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code, param = f"The server answered {response.status_code}.", None, None
    step = None
    if response.status_code in (401, 403):
        step = _KEY_STEP
    elif response.status_code >= 500:
        step = "Look at the server's log."
    return CallFailed(message, code=code, param=param, next_step=step, status=response.status_code)
