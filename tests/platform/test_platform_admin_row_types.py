"""Of which type adapter rows are: by upload, by tenant, by server; and what else there is to say of a version is kept with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from graftwork_adapters.keys import AdapterDigest, packed_key, packed_path, upload_prefix
from graftwork_adapters.publish_job import AdapterTraits
from graftwork_platform.catalog.facts import OwnText, VersionFacts, facts_from_json, facts_to_json
from graftwork_platform.errors import ServiceUnavailable
from graftwork_platform.ids import parse
from graftwork_platform.models import AdapterVersion

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}

StartAdmin = Callable[..., AbstractContextManager[Any]]


def upload(admin: Any, tenant: str, adapter_dtype: str | None = None, files: dict[str, bytes] = FILES) -> Any:
    """The version that an upload which asks for that row type became."""
    extra = {} if adapter_dtype is None else {"adapter_dtype": adapter_dtype}
    begun = admin.start_upload(tenant, files, **extra).json()
    admin.send_parts(tenant, begun, files)
    admin.call("POST", f"/tenants/{tenant}/uploads/{begun['id']}/complete")
    return admin.wait(tenant, begun["id"])["version"]


def resolve(admin: Any, tenant: str, name: str = "support") -> Any:
    return admin.run(admin.services.catalog.resolve, tenant_id(tenant), name)


def tenant_id(shown: str) -> UUID:
    found = parse("tn", shown)
    assert found is not None
    return found


def has_packed(admin: Any, digest: str, row_type: str) -> bool:
    key = packed_key(AdapterDigest(digest), admin.services.spec.base_id, row_type)  # type: ignore[arg-type]
    return bool(admin.services.store.exists(packed_path(key)))


def test_an_upload_stands_above_its_tenant_and_that_above_the_server(start_admin: StartAdmin) -> None:
    with start_admin(row_type="float32") as admin:
        tenant = admin.call("POST", "/tenants", json={"name": "acme", "adapter_dtype": "e4m3"}).json()
        assert tenant["adapter_dtype"] == "e4m3"
        asked, by_tenant = upload(admin, tenant["id"], "int8"), upload(admin, tenant["id"])
        changed = admin.call("PATCH", "/tenants/acme", json={"adapter_dtype": None}).json()
        assert changed == admin.call("GET", "/tenants/acme").json()
        assert changed["adapter_dtype"] is None
        by_server = upload(admin, tenant["id"])
        versions = [asked, by_tenant, by_server]
        assert [v["adapter_dtype"] for v in versions] == ["int8", "e4m3", None]
        assert [v["version"] for v in versions] == ["v1", "v2", "v3"], "the same files with another type are another version"
        assert len({v["digest"] for v in versions}) == 1
        assert [job.row_type for job in admin.publish.jobs] == ["int8", "e4m3", "float32"]
        for row_type in ("int8", "e4m3", "float32"):
            assert has_packed(admin, asked["digest"], row_type)
        assert not has_packed(admin, asked["digest"], "bfloat16")
        assert [resolve(admin, tenant["id"], f"support@v{n}").row_type for n in (1, 2, 3)] == ["int8", "e4m3", None]


def test_an_upload_can_ask_for_the_server_s_type_whatever_its_tenant_s_is(admin: Any) -> None:
    tenant = admin.call("POST", "/tenants", json={"name": "acme", "adapter_dtype": "int8"}).json()["id"]
    plain = upload(admin, tenant, "auto")
    assert (plain["adapter_dtype"], upload(admin, tenant)["adapter_dtype"]) == (None, "int8")
    assert [job.row_type for job in admin.publish.jobs] == ["bfloat16", "int8"]
    assert resolve(admin, tenant, f"support@{plain['version']}").row_type is None
    assert upload(admin, tenant, "auto")["version"] == "v3"
    assert upload(admin, tenant, "auto")["version"] == "v3", "the same again"


def test_the_same_files_for_the_same_type_are_the_same_version(admin: Any) -> None:
    tenant = admin.tenant()
    first = upload(admin, tenant, "int8")
    assert upload(admin, tenant, "int8")["id"] == first["id"]
    assert upload(admin, tenant, "int8", {**FILES, "README.md": b"of another manifest"})["id"] == first["id"]
    assert [job.row_type for job in admin.publish.jobs] == ["int8", "int8"]


@pytest.mark.parametrize("body", [{"adapter_dtype": "int4"}, {"adapter_dtype": 8}, {}])
def test_other_row_types_are_refused(admin: Any, body: dict[str, Any]) -> None:
    tenant = admin.tenant()
    assert admin.call("PATCH", f"/tenants/{tenant}", json=body).status_code == 400
    if body:
        assert admin.call("POST", "/tenants", json={"name": "globex", **body}).status_code == 400
        assert admin.start_upload(tenant, FILES, **body).status_code == 400


def test_a_deleted_tenant_cannot_be_changed(admin: Any) -> None:
    tenant = admin.tenant()
    admin.call("DELETE", f"/tenants/{tenant}")
    assert admin.call("PATCH", f"/tenants/{tenant}", json={"adapter_dtype": "int8"}).status_code == 404


def test_a_missing_packed_form_is_built_again_in_its_own_type(admin: Any) -> None:
    tenant = admin.tenant()
    digest = upload(admin, tenant, "int8")["digest"]
    key = packed_key(AdapterDigest(digest), admin.services.spec.base_id, "int8")
    admin.services.store.delete(packed_path(key))
    model = resolve(admin, tenant)
    admin.run(admin.services.publisher.ensure_packed, model.digest, model.row_type)
    assert has_packed(admin, digest, "int8")
    assert not has_packed(admin, digest, "bfloat16")


def test_traits_are_kept_with_the_version(admin: Any) -> None:
    admin.publish.traits = AdapterTraits(invocation_token_ids=(5, 6, 7), vocab_size=321, whole_bytes=1 << 33)
    tenant = admin.tenant()
    upload(admin, tenant)
    admin.publish.traits = AdapterTraits()
    upload(admin, tenant, files={**FILES, "adapter_model.safetensors": b"others"})
    assert resolve(admin, tenant, "support@v1").facts.traits == AdapterTraits((5, 6, 7), 321, 1 << 33)
    assert resolve(admin, tenant).facts == VersionFacts()
    assert resolve(admin, tenant, "tiny-base").facts == VersionFacts()


def forget_facts(admin: Any) -> None:
    """As if an older server had published all there is."""

    def work(session: Session) -> None:
        session.execute(update(AdapterVersion).values(facts=None))

    admin.run(admin.services.database.run_write, work)


def kept_facts(admin: Any) -> list[Any]:
    found = admin.run(admin.services.database.run_read, lambda session: list(session.scalars(select(AdapterVersion.facts))))
    return [None if facts is None else facts_from_json(facts) for facts in found]


CALLED = AdapterTraits(invocation_token_ids=(1,), vocab_size=9)


def test_a_version_of_an_older_server_is_looked_at_again_before_it_is_served(admin: Any) -> None:
    tenant = admin.tenant()
    admin.publish.traits = CALLED
    upload(admin, tenant, "int8")
    forget_facts(admin)
    assert resolve(admin, tenant).facts == VersionFacts(CALLED), "never a plain LoRA on a guess"
    job = admin.publish.jobs[-1]
    assert (job.row_type, job.expected_digest is None, job.limits.require_base_name) == ("int8", False, False)
    assert kept_facts(admin) == [VersionFacts(CALLED)]
    resolve(admin, tenant)
    assert len(admin.publish.jobs) == 2, "once"


def test_its_text_files_are_looked_at_too(admin: Any) -> None:
    tenant = admin.tenant()
    upload(admin, tenant, files={**FILES, "tokenizer.json": b"{}"})
    forget_facts(admin)
    admin.check.text = OwnText(tokenizer=True)
    assert resolve(admin, tenant).facts.text == OwnText(tokenizer=True)
    forget_facts(admin)
    admin.check.fail = "its tokens are too long"
    with pytest.raises(ServiceUnavailable, match="too long"):
        resolve(admin, tenant)
    assert kept_facts(admin) == [None]


def test_all_who_ask_for_it_at_once_wait_for_one_reading_and_no_longer_than_so(admin: Any) -> None:
    tenant = admin.tenant()
    upload(admin, tenant)
    forget_facts(admin)
    admin.publish.blocked = True
    reader, catalog = admin.services.facts, admin.services.catalog
    reader._wait = 0.05

    async def ask_all() -> list[Any]:
        asked = (catalog.resolve(tenant_id(tenant), "support") for _ in range(5))
        return list(await asyncio.gather(*asked, return_exceptions=True))

    refused = admin.run(ask_all)
    assert {type(error) for error in refused} == {ServiceUnavailable}
    assert "still being done" in refused[0].message
    assert refused[0].headers["retry-after"]
    assert len(admin.publish.jobs) == 2
    admin.publish.blocked, reader._wait = False, 60.0
    assert resolve(admin, tenant).facts == VersionFacts()
    assert len(admin.publish.jobs) == 2, "the reading went on"


def test_one_that_cannot_be_read_is_told_so_and_not_read_for_every_request(admin: Any) -> None:
    tenant = admin.tenant()
    digest = upload(admin, tenant)["digest"]
    forget_facts(admin)
    admin.publish.fail = "of another base"
    for _ in range(3):
        with pytest.raises(ServiceUnavailable, match="of another base"):
            resolve(admin, tenant)
    assert len(admin.publish.jobs) == 2
    admin.publish.fail, admin.services.facts._failed = None, {}
    assert resolve(admin, tenant).facts == VersionFacts()
    forget_facts(admin)
    for key in list(admin.services.store.list_keys(upload_prefix(AdapterDigest(digest)))):
        admin.services.store.delete(key)
    with pytest.raises(ServiceUnavailable):
        resolve(admin, tenant)


def test_the_files_of_a_version_of_an_older_server_are_looked_at_again(admin: Any) -> None:
    tenant = admin.tenant()
    first = upload(admin, tenant)
    forget_facts(admin)
    assert upload(admin, tenant)["id"] == first["id"], "nothing else was found"
    assert len(admin.publish.jobs) == 2
    assert upload(admin, tenant)["id"] == first["id"]
    assert len(admin.publish.jobs) == 2, "now it is known what there is to find"
    forget_facts(admin)
    admin.publish.traits = CALLED
    assert upload(admin, tenant)["id"] == first["id"]
    assert kept_facts(admin) == [VersionFacts(CALLED)]


def test_facts_survive_their_json() -> None:
    facts = VersionFacts(AdapterTraits((1, 2), 3, 4), OwnText(True, True, (5, 6)))
    assert facts_from_json(facts_to_json(facts)) == facts
    assert facts_from_json({}) == VersionFacts()
    assert facts_from_json({"traits": {"vocab_size": 7}, "of_a_newer_server": 1}).traits == AdapterTraits(vocab_size=7)
