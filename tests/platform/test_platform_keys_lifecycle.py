"""API keys: made, verified in memory, expired, revoked at once; the admin key; what lies at rest."""

from __future__ import annotations

import asyncio
import base64
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select

from graftwork_platform.errors import Forbidden, Unauthorized
from graftwork_platform.keys.ring import KeyEntry, KeyRing
from graftwork_platform.keys.text import generate, key_hmac, public_id_of
from graftwork_platform.models import ApiKey
from graftwork_platform.secrets import BadSecret, Secrets, load_or_create

StartAdmin = Callable[..., AbstractContextManager[Any]]

SECRETS = Secrets(pepper=b"p" * 32, cache_salt=b"s" * 32)


def entry(text: str, *, tenant: UUID | None, expires_at: int | None = None, secrets: Secrets = SECRETS) -> KeyEntry:
    hashed = key_hmac(secrets.pepper, text)
    return KeyEntry(uuid4(), public_id_of(text) or "", hashed, tenant, "acme", None, expires_at)


def fill(ring: KeyRing, *entries: KeyEntry) -> None:
    with ring.reading() as read:
        read.replace_all(entries)


def test_a_key_has_a_public_half_and_256_bits_of_secret() -> None:
    new = generate(lambda count: bytes(range(count)))
    prefix, public_id, secret = new.text.split("-", 2)
    assert (prefix, public_id, public_id_of(new.text)) == ("gw", new.public_id, new.public_id)
    assert base64.urlsafe_b64decode(secret + "=") == bytes(range(32))
    assert new.text not in repr(new)
    assert generate().text != generate().text


def test_text_that_is_no_key_has_no_public_half() -> None:
    for text in ("", "gw", "gw-a", "gw--x", "gw-a-", "sk-a-b", "gw_a_b"):
        assert public_id_of(text) is None


def test_the_ring_knows_callers_by_their_whole_key() -> None:
    ring, tenant, new = KeyRing(SECRETS), uuid4(), generate()
    fill(ring, entry(new.text, tenant=tenant))
    caller = ring.authenticate(f"Bearer {new.text}")
    assert (caller.tenant_id, caller.tenant_name, caller.cache_salt) == (tenant, "acme", SECRETS.tenant_salt(tenant))
    assert ring.authenticate(f"bearer  {new.text} ") == caller
    secret = new.text.rsplit("-", 1)[1]
    wrong = [None, "", "Bearer", "Bearer ", new.text, f"Basic {new.text}", f"Bearer {new.text}x", f"Bearer {new.text[:-1]}"]
    wrong += [
        f"Bearer gw-{new.public_id}-{'A' * 43}",
        f"Bearer gw-{generate().public_id}-{secret}",
        "Bearer " + "x" * 300,
        "Bearer ключ",
    ]
    for header in wrong:
        with pytest.raises(Unauthorized) as refused:
            ring.authenticate(header)
        assert refused.value.code == "invalid_api_key"
        assert refused.value.status == 401


def test_salts_differ_between_tenants_and_between_servers() -> None:
    one, two = uuid4(), uuid4()
    other = Secrets(pepper=b"p" * 32, cache_salt=b"t" * 32)
    assert len({SECRETS.tenant_salt(one), SECRETS.tenant_salt(two), other.tenant_salt(one)}) == 3
    assert SECRETS.tenant_salt(one) == SECRETS.tenant_salt(one)
    assert "pppp" not in repr(SECRETS)


def test_a_key_works_until_the_millisecond_it_expires() -> None:
    clock, new = [10.0], generate()
    ring = KeyRing(SECRETS, now=lambda: clock[0])
    fill(ring, entry(new.text, tenant=uuid4(), expires_at=10_500))
    ring.authenticate(f"Bearer {new.text}")
    clock[0] = 10.5
    with pytest.raises(Unauthorized) as refused:
        ring.authenticate(f"Bearer {new.text}")
    assert refused.value.code == "key_expired"


def test_admin_keys_and_tenants_keys_do_not_stand_in_for_each_other() -> None:
    ring, admin, tenant = KeyRing(SECRETS), generate(), generate()
    fill(ring, entry(admin.text, tenant=None), entry(tenant.text, tenant=uuid4()))
    ring.authenticate_admin(f"Bearer {admin.text}")
    with pytest.raises(Forbidden):
        ring.authenticate(f"Bearer {admin.text}")
    with pytest.raises(Forbidden):
        ring.authenticate_admin(f"Bearer {tenant.text}")


def test_secrets_are_made_once_for_their_owner_alone_and_refused_when_cut(tmp_path: Path) -> None:
    made = load_or_create(tmp_path / "secrets")
    assert load_or_create(tmp_path / "secrets") == made
    assert made.pepper != made.cache_salt
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    for name in ("pepper", "cache-salt"):
        assert stat.S_IMODE((tmp_path / "secrets" / name).stat().st_mode) == 0o600
    for broken in ("", "abcd", "no hex at all"):
        (tmp_path / "secrets" / "pepper").write_text(broken)
        with pytest.raises(BadSecret, match="pepper"):
            load_or_create(tmp_path / "secrets")


def test_keys_are_shown_once_listed_redacted_and_kept_hashed(admin: Any) -> None:
    tenant = admin.tenant()
    answer = admin.call("POST", f"/tenants/{tenant}/keys", json={})
    assert answer.status_code == 201
    key = answer.json()
    assert admin.services.keyring.authenticate(f"Bearer {key['key']}").tenant_name == "acme"
    (listed,) = admin.call("GET", "/tenants/acme/keys").json()["data"]
    assert listed == {name: value for name, value in key.items() if name != "key"}
    secret = key["key"].split("-", 2)[2]
    assert secret not in str(listed)
    with admin.services.database.read() as session:
        (row,) = session.scalars(select(ApiKey).where(~ApiKey.is_admin))
    assert row.key_hmac == key_hmac(admin.services.secrets.pepper, key["key"])
    assert secret not in str({column.name: getattr(row, column.name) for column in ApiKey.__table__.columns})


def test_a_revoked_key_is_refused_from_the_answer_on_and_after_a_restart(start_admin: StartAdmin) -> None:
    with start_admin() as admin:
        tenant = admin.tenant()
        kept, gone = (admin.call("POST", f"/tenants/{tenant}/keys", json={}).json() for _ in range(2))
        revoked = admin.call("DELETE", f"/tenants/{tenant}/keys/{gone['id']}")
        with pytest.raises(Unauthorized):
            admin.services.keyring.authenticate(f"Bearer {gone['key']}")
        assert revoked.json()["revoked_at"] is not None
        assert admin.call("DELETE", f"/tenants/{tenant}/keys/{gone['id']}").json() == revoked.json()
        admin.services.keyring.authenticate(f"Bearer {kept['key']}")
        assert len(admin.call("GET", f"/tenants/{tenant}/keys").json()["data"]) == 2
    with start_admin() as admin:
        admin.services.keyring.authenticate(f"Bearer {kept['key']}")
        with pytest.raises(Unauthorized):
            admin.services.keyring.authenticate(f"Bearer {gone['key']}")


def test_a_client_that_hangs_up_during_a_revocation_does_not_save_the_key(admin: Any) -> None:
    tenant = admin.tenant()
    key = admin.call("POST", f"/tenants/{tenant}/keys", json={}).json()
    caller = admin.services.keyring.authenticate(f"Bearer {key['key']}")

    async def hang_up() -> None:
        task = asyncio.create_task(admin.services.keys.revoke(caller.tenant_id, caller.key_id))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    admin.run(hang_up)

    def refused() -> bool:
        try:
            admin.services.keyring.authenticate(f"Bearer {key['key']}")
        except Unauthorized:
            return True
        return False

    admin.until(refused)


def test_deleting_a_tenant_refuses_its_keys_at_once_and_keeps_its_name(admin: Any) -> None:
    tenant = admin.tenant()
    key = admin.call("POST", f"/tenants/{tenant}/keys", json={}).json()["key"]
    assert admin.call("DELETE", f"/tenants/{tenant}").json() == {"id": tenant, "object": "tenant.deleted", "deleted": True}
    with pytest.raises(Unauthorized):
        admin.services.keyring.authenticate(f"Bearer {key}")
    assert admin.call("GET", f"/tenants/{tenant}").status_code == 404
    assert admin.call("GET", "/tenants").json()["data"] == []
    assert admin.call("POST", "/tenants", json={"name": "acme"}).status_code == 409


def test_the_first_start_leaves_an_admin_key_and_later_ones_keep_it(start_admin: StartAdmin) -> None:
    with start_admin() as admin:
        file = admin.services.settings.admin_key_file
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        with admin.services.database.read() as session:
            (row,) = session.scalars(select(ApiKey).where(ApiKey.is_admin))
        assert row.key_hmac == key_hmac(admin.services.secrets.pepper, admin.key)
        key = admin.key
    with start_admin() as admin:
        assert admin.key == key
        assert admin.call("GET", "/tenants").status_code == 200


def test_keys_name_their_default_adapter_and_expiry(admin: Any) -> None:
    tenant = admin.tenant()
    assert admin.call("POST", f"/tenants/{tenant}/keys", json={"adapter": "support"}).json()["error"]["code"] == "adapter_not_found"
    admin.push(tenant)
    key = admin.call("POST", f"/tenants/{tenant}/keys", json={"adapter": "support", "expires_at": 4_000_000_000}).json()
    adapter = admin.call("GET", f"/tenants/{tenant}/adapters/support").json()
    assert (key["default_adapter_id"], key["expires_at"]) == (adapter["id"], 4_000_000_000)
    past = admin.call("POST", f"/tenants/{tenant}/keys", json={"expires_at": 1})
    assert (past.status_code, past.json()["error"]["param"]) == (400, "expires_at")


def test_a_key_cannot_default_to_an_adapter_that_was_only_refused(admin: Any) -> None:
    tenant = admin.tenant()
    admin.publish.fail = "rank 512 is over 256"
    admin.push(tenant)
    assert [(a["name"], a["version"]) for a in admin.call("GET", f"/tenants/{tenant}/adapters").json()["data"]] == [
        ("support", None)
    ]
    refused = admin.call("POST", f"/tenants/{tenant}/keys", json={"adapter": "support"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (404, "adapter", "version_not_found")
    assert "no ready version" in error["message"]
    assert admin.call("GET", f"/tenants/{tenant}/keys").json()["data"] == []
    admin.publish.fail = None
    admin.push(tenant)
    assert admin.call("POST", f"/tenants/{tenant}/keys", json={"adapter": "support"}).status_code == 201


def test_a_rotated_admin_key_replaces_the_old_one_at_once(start_admin: StartAdmin) -> None:
    with start_admin() as admin:
        file = admin.services.settings.admin_key_file
        new = admin.call("POST", "/admin-key/rotate").json()["key"]
        assert file.read_text().strip() == new
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert admin.call("GET", "/tenants").status_code == 401
        assert admin.call("GET", "/tenants", key=new).status_code == 200


def test_a_rotation_that_was_cut_short_is_finished_or_undone(start_admin: StartAdmin) -> None:
    with start_admin() as admin:
        file = admin.services.settings.admin_key_file
        valid = file.read_text()
    waiting = file.with_name("admin.key.next")
    waiting.write_text("gw-never-valid\n")
    with start_admin():
        assert not waiting.exists()
        assert file.read_text() == valid
    file.replace(waiting)
    with start_admin():
        assert not waiting.exists()
        assert file.read_text() == valid
