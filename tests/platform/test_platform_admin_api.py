"""The admin API as a whole: who may call it, isolation between tenants, lists, errors in one shape, and model names."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Route
from starlette.testclient import TestClient

from graftwork_platform.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    ModelNotFound,
    NotFound,
    PayloadTooLarge,
    PlatformError,
    RateLimited,
    ServiceUnavailable,
    Unauthorized,
    install_error_handlers,
)
from graftwork_platform.ids import parse


def routes(admin: Any) -> list[tuple[str, str]]:
    """(method, path) of every admin route, as the application lists them in its schema."""
    schema = admin.client.app.openapi()
    return [(method.upper(), path) for path, methods in schema["paths"].items() for method in methods]


def error_of(answer: Any) -> Any:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_the_routes_are_those_of_the_contract(admin: Any) -> None:
    tenant = "/admin/v1/tenants/{tenant}"
    assert sorted(routes(admin)) == sorted(
        [
            ("POST", "/admin/v1/admin-key/rotate"),
            ("POST", "/admin/v1/tenants"),
            ("GET", "/admin/v1/tenants"),
            ("GET", tenant),
            ("DELETE", tenant),
            ("PATCH", tenant),
            ("POST", f"{tenant}/keys"),
            ("GET", f"{tenant}/keys"),
            ("DELETE", f"{tenant}/keys/{{key_id}}"),
            ("GET", f"{tenant}/adapters"),
            ("GET", f"{tenant}/adapters/{{name}}"),
            ("DELETE", f"{tenant}/adapters/{{name}}"),
            ("GET", f"{tenant}/adapters/{{name}}/versions"),
            ("GET", f"{tenant}/adapters/{{name}}/versions/{{version}}"),
            ("POST", f"{tenant}/uploads"),
            ("GET", f"{tenant}/uploads/{{upload_id}}"),
            ("PUT", f"{tenant}/uploads/{{upload_id}}/files/{{path}}"),
            ("POST", f"{tenant}/uploads/{{upload_id}}/complete"),
            ("GET", "/admin/v1/usage"),
        ]
    )


def test_every_route_asks_for_the_admin_key_before_it_reads_the_body(admin: Any) -> None:
    tenant_key = admin.call("POST", f"/tenants/{admin.tenant()}/keys", json={}).json()["key"]
    for method, path in routes(admin):
        path = path.removeprefix("/admin/v1")
        for key, status, code in (
            (None, 401, "invalid_api_key"),
            ("gw-x-y", 401, "invalid_api_key"),
            (tenant_key, 403, "scope_missing"),
        ):
            answer = admin.call(method, path, key=key, content=b"{not json")
            assert (method, path, answer.status_code, error_of(answer)["code"]) == (method, path, status, code)


def test_another_tenants_ids_are_answered_like_unknown_ones(admin: Any) -> None:
    mine, theirs = admin.tenant("mine"), admin.tenant("theirs")
    upload = admin.push(theirs)
    key = admin.call("POST", f"/tenants/{theirs}/keys", json={}).json()
    names = {"tenant": mine, "key_id": key["id"], "upload_id": upload["id"], "name": "support", "version": upload["version"]["id"]}
    unknown = {"key_id": "key_" + "0" * 32, "upload_id": "up_" + "0" * 32, "name": "nobody", "version": "av_" + "0" * 32}
    walked = 0
    for method, path in routes(admin):
        if not any("{" + name + "}" in path for name in ("key_id", "upload_id", "name")):
            continue
        walked += 1
        foreign = admin.call(method, path.removeprefix("/admin/v1").format(**names, path="adapter_config.json"), content=b"{}")
        missing = admin.call(method, path.removeprefix("/admin/v1").format(**{**names, **unknown}, path="x"), content=b"{}")
        assert (method, path, foreign.status_code, missing.status_code) == (method, path, 404, 404)
        assert error_of(foreign)["code"] == error_of(missing)["code"]
        texts = [error_of(answer)["message"] for answer in (foreign, missing)]
        for value in (*names.values(), *unknown.values()):
            texts = [text.replace(value, "?") for text in texts]
        assert texts[0] == texts[1]
    assert walked == 8
    assert admin.services.keyring.authenticate(f"Bearer {key['key']}").tenant_name == "theirs"
    for path in ("keys", "adapters"):
        assert admin.call("GET", f"/tenants/{mine}/{path}").json()["data"] == []
    for path in ("keys", "adapters", "uploads", "adapters/support/versions"):
        method = "POST" if path == "uploads" else "GET"
        answer = admin.call(method, f"/tenants/nobody/{path}", json={"name": "a", "files": []})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "tenant_not_found")


def test_malformed_ids_are_not_found(admin: Any) -> None:
    tenant = admin.tenant()
    for path in ("keys/x", "keys/tn_" + "0" * 32, "keys/key_" + "A" * 32):
        assert admin.call("DELETE", f"/tenants/{tenant}/{path}").status_code == 404
    assert admin.call("GET", f"/tenants/{tenant}/uploads/up_1").status_code == 404
    assert admin.call("GET", f"/tenants/tn_{'0' * 31}").status_code == 404
    assert admin.call("DELETE", f"/tenants/{tenant}/keys/key_{'0' * 31}%0a").status_code == 400


def test_tenants_are_found_by_name_and_id_and_made_once(admin: Any) -> None:
    made = admin.call("POST", "/tenants", json={"name": "acme"})
    assert made.status_code == 201
    assert parse("tn", made.json()["id"]) is not None
    assert admin.call("GET", "/tenants/acme").json() == admin.call("GET", f"/tenants/{made.json()['id']}").json() == made.json()
    again = admin.call("POST", "/tenants", json={"name": "acme"})
    assert (again.status_code, error_of(again)["param"], again.headers["x-should-retry"]) == (409, "name", "false")
    for name in ("", "Acme", "a b", "a@b", "a/b", "-a", "x" * 65, "tn_a", "a\n"):
        refused = admin.call("POST", "/tenants", json={"name": name})
        assert (name, refused.status_code, error_of(refused)["param"]) == (name, 400, "name")


def test_bodies_are_checked_field_by_field(admin: Any) -> None:
    for body, param in (({}, "name"), ({"name": 1}, "name"), ({"name": "a", "x": 1}, "x"), ([], None), (None, None)):
        answer = admin.call("POST", "/tenants", json=body)
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    broken = admin.call("POST", "/tenants", content=b"{")
    assert (broken.status_code, error_of(broken)["param"]) == (400, None)


def test_lists_go_on_behind_their_last_id(admin: Any) -> None:
    ids = [admin.tenant(f"t{i}") for i in range(5)]
    assert admin.call("GET", "/tenants").json()["has_more"] is False
    seen: list[str] = []
    page = admin.call("GET", "/tenants", params={"limit": 2}).json()
    while True:
        assert page["object"] == "list"
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        seen += [tenant["id"] for tenant in page["data"]]
        if not page["has_more"]:
            break
        page = admin.call("GET", "/tenants", params={"limit": 2, "after": page["last_id"]}).json()
    assert sorted(seen) == sorted(ids)
    assert len(seen) == 5
    empty = admin.call("GET", f"/tenants/{ids[0]}/keys").json()
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    for query in ({"limit": 0}, {"limit": 1001}, {"limit": "x"}, {"after": "x"}, {"after": "key_" + "0" * 32}):
        answer = admin.call("GET", "/tenants", params=query)
        assert (answer.status_code, error_of(answer)["param"]) == (400, next(iter(query)))


def test_model_names_mean_what_the_tenant_published(admin: Any) -> None:
    mine, theirs = (parse("tn", admin.tenant(name)) for name in ("mine", "theirs"))
    first, second = admin.push("mine", b"one")["version"], admin.push("mine", b"two")["version"]
    admin.push("theirs", b"three", "private")
    adapter_id = parse("ad", admin.call("GET", "/tenants/mine/adapters/support").json()["id"])

    def resolve(model: str, default: Any = None, tenant: Any = mine) -> Any:
        return admin.run(admin.services.catalog.resolve, tenant, model, default)

    assert (resolve("tiny-base").digest, resolve("tiny-base").public_name) == (None, "tiny-base")
    assert resolve("default").public_name == "tiny-base"
    newest = resolve("support")
    assert (newest.public_name, newest.version, newest.digest) == ("support", 2, second["digest"])
    assert newest.version_id == parse("av", second["id"])
    assert resolve("default", adapter_id) == newest
    pinned = resolve("support@v1")
    assert (pinned.public_name, pinned.version, pinned.digest) == ("support@v1", 1, first["digest"])
    unknown = [
        "",
        "Support",
        "support@v3",
        "support@v0",
        "support@v01",
        "support@2",
        "support@",
        "support@v1@v1",
        "a/b",
        "nobody",
        "private",
    ]
    unknown += ["default@v1", "tiny-base@v1", "support\n", "x" * 10_000]
    for model in unknown:
        with pytest.raises(ModelNotFound) as refused:
            resolve(model)
        assert refused.value.to_body() == ModelNotFound(model).to_body()
    for default in (parse("ad", admin.call("GET", "/tenants/theirs/adapters/private").json()["id"]),):
        with pytest.raises(ModelNotFound):
            resolve("default", default)
    assert [(m.name, m.version) for m in admin.run(admin.services.catalog.list_models, mine)] == [
        ("tiny-base", None),
        ("support", 2),
    ]
    assert [m.name for m in admin.run(admin.services.catalog.list_models, theirs)] == ["tiny-base", "private"]
    admin.call("DELETE", "/tenants/mine/adapters/support")
    for model, default in (("support", None), ("support@v1", None), ("default", adapter_id)):
        with pytest.raises(ModelNotFound):
            resolve(model, default)
    assert [m.name for m in admin.run(admin.services.catalog.list_models, mine)] == ["tiny-base"]


@pytest.mark.parametrize(
    ("error", "status", "type_", "code", "header"),
    [
        (BadRequest("m", param="p", code="c"), 400, "invalid_request_error", "c", None),
        (Unauthorized(), 401, "authentication_error", "invalid_api_key", ("www-authenticate", "Bearer")),
        (Forbidden("m"), 403, "permission_error", "scope_missing", None),
        (NotFound("m"), 404, "invalid_request_error", None, None),
        (ModelNotFound("m"), 404, "invalid_request_error", "model_not_found", None),
        (Conflict("m"), 409, "conflict_error", None, ("x-should-retry", "false")),
        (PayloadTooLarge("m"), 413, "invalid_request_error", "payload_too_large", None),
        (RateLimited("m", retry_after=7), 429, "rate_limit_error", "rate_limit_exceeded", ("retry-after", "7")),
        (ServiceUnavailable("m", code="c", retry_after=3), 503, "server_error", "c", ("retry-after", "3")),
        (PlatformError("m", status=500), 500, "server_error", None, None),
        (RuntimeError("internals"), 500, "server_error", None, None),
    ],
)
def test_errors_have_openais_shape(error: Exception, status: int, type_: str, code: str | None, header: Any) -> None:
    async def fail(_request: Any) -> None:
        raise error

    app = FastAPI(routes=[Route("/", fail)])
    install_error_handlers(app)
    answer = TestClient(app, raise_server_exceptions=False).get("/")
    body = error_of(answer)
    assert (answer.status_code, body["type"], body["code"]) == (status, type_, code)
    assert "internals" not in answer.text
    if header is not None:
        assert answer.headers[header[0]] == header[1]


def test_unknown_routes_and_methods_have_openais_shape(admin: Any) -> None:
    unknown = admin.call("GET", "/nothing")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "unknown_url")
    method = admin.call("PATCH", "/tenants")
    assert (method.status_code, error_of(method)["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"]
