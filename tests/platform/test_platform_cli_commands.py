"""The command line against a real server on loopback: every command, as text and as JSON, and what it says when it fails."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from typer.testing import CliRunner

from graftwork_adapters.report import Report
from graftwork_platform.admin.client import AdminClient, CallFailed
from graftwork_platform.cli import app, main
from graftwork_platform.doctor import examine_data
from graftwork_platform.secrets import load_or_create
from graftwork_platform.serve.data_dir import holder, locked
from graftwork_platform.settings import ClientSettings, Settings, client_settings

StartAdmin = Callable[..., AbstractContextManager[Any]]


@contextmanager
def serving(admin: Any) -> Iterator[str]:
    """The application on a free port of loopback, on the loop where its services live; its URL."""
    application = Starlette(routes=[Route("/readyz", lambda _: PlainTextResponse("ready")), Mount("/", admin.client.app)])
    server = uvicorn.Server(uvicorn.Config(application, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    served = admin.client.portal.start_task_soon(server._serve)
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        served.result()


@pytest.fixture
def online(start_admin: StartAdmin) -> Iterator[Any]:
    """A running server's command line: ``online.cli(…)`` and ``online.json(…)``."""
    with start_admin() as admin, serving(admin) as url:
        yield Terminal(admin, url)


class Terminal:
    """Runs commands with the environment of an operator."""

    def __init__(self, admin: Any, url: str) -> None:
        self.admin = admin
        self.environment = {"GRAFTWORK_URL": url, "GRAFTWORK_ADMIN_KEY": admin.key, "COLUMNS": "250"}

    def cli(self, *arguments: str, code: int = 0, **environment: str) -> Any:
        done = CliRunner().invoke(app, arguments, env={**self.environment, **environment})
        assert done.exit_code == code, (done.output, done.exception)
        return done

    def json(self, *arguments: str, code: int = 0, **environment: str) -> Any:
        return json.loads(self.cli(*arguments, "--json", code=code, **environment).stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What PEFT might have saved, and a hidden folder beside it."""
    saved = tmp_path / "saved"
    (saved / ".cache").mkdir(parents=True)
    (saved / "adapter_config.json").write_text("{}")
    (saved / "adapter_model.safetensors").write_bytes(bytes(3000))
    (saved / ".cache" / "junk").write_text("junk")
    (saved / "card").mkdir()
    (saved / "card" / "read me.md").write_text("")
    return saved


def test_a_tenant_its_adapter_and_its_key(online: Any, folder: Path) -> None:
    tenant = online.json("tenants", "create", "acme")
    assert [t["name"] for t in online.json("tenants", "list")["data"]] == ["acme"]
    pushed = online.json("adapters", "push", str(folder), "--tenant", "acme", "--name", "support")
    assert (pushed["version"], pushed["state"], len(pushed["digest"])) == ("v1", "ready", 64)
    assert pushed["report"][0]["result"] == "pass"
    assert online.json("adapters", "push", str(folder), "--tenant", tenant["id"], "--name", "support")["version"] == "v1"
    key = online.json("keys", "create", "--tenant", "acme", "--adapter", "support")
    caller = online.admin.services.keyring.authenticate(f"Bearer {key['key']}")
    assert caller.default_adapter_id is not None
    assert [k["id"] for k in online.json("keys", "list", "--tenant", "acme")["data"]] == [key["id"]]
    assert online.json("keys", "revoke", key["id"], "--tenant", "acme")["revoked_at"] is not None
    assert [a["name"] for a in online.json("adapters", "list", "--tenant", "acme")["data"]] == ["support"]
    assert online.json("adapters", "delete", "support", "--tenant", "acme")["deleted"] is True
    assert online.json("adapters", "list", "--tenant", "acme")["data"] == []


def test_the_same_for_people(online: Any, folder: Path) -> None:
    assert "acme is tn_" in online.cli("tenants", "create", "acme").stdout
    assert "acme" in online.cli("tenants", "list").stdout
    pushed = online.cli("adapters", "push", str(folder), "--tenant", "acme", "--name", "support").stdout
    assert "applied 2 of 2 tensors" in pushed
    assert "support@v1 is ready." in pushed
    key = online.cli("keys", "create", "--tenant", "acme").stdout.splitlines()[0]
    online.admin.services.keyring.authenticate(f"Bearer {key}")
    listed = online.cli("keys", "list", "--tenant", "acme").stdout
    assert key not in listed
    assert key.split("-")[1] in listed
    assert "support" in online.cli("adapters", "list", "--tenant", "acme").stdout
    key_id = online.json("keys", "list", "--tenant", "acme")["data"][0]["id"]
    assert "revoked" in online.cli("keys", "revoke", key_id, "--tenant", "acme").stdout
    assert "deleted" in online.cli("adapters", "delete", "support", "--tenant", "acme").stdout


def test_a_refused_adapter_prints_its_report_and_exits_with_1(online: Any, folder: Path) -> None:
    online.cli("tenants", "create", "acme")
    online.admin.publish.fail = "rank [512] is over [256]"
    refused = online.json("adapters", "push", str(folder), "--tenant", "acme", "--name", "support", code=1)
    assert (refused["state"], refused["version"], refused["digest"]) == ("failed", None, None)
    assert refused["report"][0]["message"] == "rank [512] is over [256]"
    text = online.cli("adapters", "push", str(folder), "--tenant", "acme", "--name", "support", code=1).stdout
    assert "rank [512] is over [256]" in text
    assert "train it again" in text
    assert "support was refused; no version was published." in text


def test_a_verdict_that_does_not_come_in_time_is_told(online: Any, folder: Path) -> None:
    online.cli("tenants", "create", "acme")
    online.admin.publish.blocked = True
    arguments = ("adapters", "push", str(folder), "--tenant", "acme", "--name", "support", "--timeout", "0.2")
    assert online.json(*arguments, code=1)["error"]["code"] == "timeout"
    online.admin.publish.blocked = False


def test_mistakes_are_told_with_the_next_step(online: Any, folder: Path, tmp_path: Path) -> None:
    online.cli("tenants", "create", "acme")
    assert "exists" in online.cli("tenants", "create", "acme", code=1).stderr
    assert online.json("keys", "create", "--tenant", "nobody", code=1)["error"]["code"] == "tenant_not_found"
    wrong_key = online.cli("tenants", "list", code=1, GRAFTWORK_ADMIN_KEY="gw-a-b").stderr
    assert "GRAFTWORK_ADMIN_KEY" in wrong_key
    assert "admin key" in online.cli("tenants", "list", code=1, GRAFTWORK_ADMIN_KEY="").stderr
    nobody = online.json("tenants", "list", code=1, GRAFTWORK_URL="http://127.0.0.1:1")["error"]
    assert nobody["code"] == "unreachable"
    assert "graftwork serve" in nobody["fix"]
    assert online.json("tenants", "list", "--url", "nonsense", code=1)["error"]["code"] == "unreachable"
    empty = tmp_path / "empty"
    empty.mkdir()
    for place, code in ((empty, "empty_folder"), (tmp_path / "absent", "not_a_folder")):
        assert online.json("adapters", "push", str(place), "--tenant", "acme", "--name", "a", code=1)["error"]["code"] == code
    for url in ("http://h:x", "http://[x", "http://127.0.0.1:99999999"):
        assert online.json("tenants", "list", "--url", url, code=1)["error"]["code"] == "unreachable"
    reserved = online.json("adapters", "push", str(folder), "--tenant", "acme", "--name", "default", code=1)["error"]
    assert (reserved["code"], reserved["param"]) == ("reserved_name", "name")
    online.cli("keys", "create", code=2)


def test_a_key_that_no_header_can_carry_is_told(online: Any, tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_bytes("schlüssel".encode("latin-1"))
    for arguments in (("--admin-key", "schlüssel"), ("--admin-key", "a\nb"), ("--data-dir", str(tmp_path))):
        error = online.json("tenants", "list", *arguments, code=1)["error"]
        assert error["code"] == "invalid_api_key"
        assert "--admin-key" in error["fix"]
        assert "Error: The admin key" in online.cli("tenants", "list", *arguments, code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["keys", "create"], "--tenant"),
        (["tenants", "burn"], "burn"),
        (["tenants", "list", "--nonsense"], "--nonsense"),
        (["adapters", "push", "x", "--tenant", "t", "--name", "n", "--timeout", "soon"], "--timeout"),
    ],
)
def test_a_senseless_command_line_is_told_as_json_where_json_is_asked_for(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for extra in (["--json"], []):
        monkeypatch.setattr(sys, "argv", ["graftwork", *arguments, *extra])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        said = capsys.readouterr()
        if extra:
            assert said.err == ""
            assert named in json.loads(said.out)["error"]["message"]
        else:
            assert said.out == ""
            assert "Error" in said.err


def test_json_keeps_the_exit_statuses(online: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in online.environment.items():
        monkeypatch.setenv(name, value)
    for code in (0, 1):  # the second time the name is taken
        monkeypatch.setattr(sys, "argv", ["graftwork", "tenants", "create", "acme", "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code
        assert ("error" in json.loads(capsys.readouterr().out)) == bool(code)


def test_flags_and_the_data_directory_win_over_the_environment(tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_text("from-file\n")
    environ = {"GRAFTWORK_URL": "http://env/", "GRAFTWORK_ADMIN_KEY": "from-env"}

    def chosen(**flags: Any) -> ClientSettings:
        return client_settings(**{"url": None, "admin_key": None, "data_dir": tmp_path, "environ": environ, **flags})

    assert chosen() == ClientSettings("http://env", "from-file")
    assert chosen(data_dir=None) == chosen(data_dir=tmp_path / "absent") == ClientSettings("http://env", "from-env")
    assert chosen(url="http://flag", admin_key="from-flag") == ClientSettings("http://flag", "from-flag")
    assert chosen(environ={}) == ClientSettings("http://127.0.0.1:8000", "from-file")
    assert chosen(environ={}, data_dir=None).admin_key is None


def test_a_broken_connection_is_tried_again_and_a_refusal_is_not() -> None:
    from graftwork_platform.admin.schemas import PartOut

    calls: list[bytes] = []
    outcomes: list[httpx2.Response | Exception] = [httpx2.ConnectError("broken"), httpx2.Response(502), httpx2.Response(204)]

    def answer(request: httpx2.Request) -> httpx2.Response:
        calls.append(request.url.raw_path)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    part = PartOut(path="a b", part=3, offset=0, size=1)
    with AdminClient(ClientSettings("http://h", "k"), transport=httpx2.MockTransport(answer), sleep=lambda _: None) as client:
        client.put_part("t/1", "up_1", part, b"x")
        assert calls == [b"/admin/v1/tenants/t%2F1/uploads/up_1/files/a%20b?part=3"] * 3
        outcomes.append(httpx2.Response(400, json={"error": {"message": "m", "code": "c", "param": None, "type": "t"}}))
        with pytest.raises(CallFailed, match="m") as failed:
            client.put_part("t", "up_1", part, b"x")
        assert (failed.value.code, failed.value.status) == ("c", 400)
        outcomes.extend(httpx2.Response(503, text="<html>") for _ in range(3))
        with pytest.raises(CallFailed, match="503"):
            client.put_part("t", "up_1", part, b"x")
        outcomes.append(httpx2.Response(200, text="hello"))
        with pytest.raises(CallFailed, match="does not answer as a graftwork server does"):
            client.list_tenants()


def test_doctor_finds_a_healthy_server_healthy(online: Any) -> None:
    data_dir = str(online.admin.services.settings.data_dir)
    with locked(online.admin.services.settings.lock_file):
        found = online.json("doctor", "--data-dir", data_dir, "--database-url", online.admin.services.settings.database)
    assert found["ok"] is True
    results = {(check["check"], check["result"]) for check in found["checks"]}
    software = ("python", "torch", "compiler", "kernels")
    checks = (*software, "data directory", "lock", "secrets", "database", "object store", "server", "admin key")
    assert {(name, "pass") for name in checks} == results
    assert "held by the server" in next(c["message"] for c in found["checks"] if c["check"] == "lock")
    assert "pass" in online.cli("doctor").stdout


@pytest.mark.parametrize("pins", [["linear"], ["linear=cpu", "linear=reference"], ["attention=cpu"], ["linear=gpu"]])
def test_kernel_pins_that_make_no_sense_are_refused(pins: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    flags = [word for pin in pins for word in ("--kernel", pin)]
    command = [sys.executable, "-m", "graftwork_platform.cli", "serve", "--model", str(tmp_path), "--data-dir", str(tmp_path / "d")]
    done = subprocess.run([*command, *flags, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    says = json.loads(done.stdout)["error"]["message"]
    assert re.search(r"OPERATOR=NAME|pinned twice|there are all, linear|there are reference, cpu", says)
    assert not (tmp_path / "d").exists()


def test_doctor_says_what_is_wrong_and_what_to_do(online: Any) -> None:
    found = online.json("doctor", code=1, GRAFTWORK_URL="http://127.0.0.1:1")
    assert [(c["check"], c["result"]) for c in found["checks"] if c["result"] != "pass"] == [
        ("data directory", "warn"),
        ("server", "fail"),
    ]
    wrong_key = online.json("doctor", code=1, GRAFTWORK_ADMIN_KEY="gw-a-b")
    assert wrong_key["checks"][-1]["check"] == "admin key"
    assert all(c["fix"] for c in [*found["checks"], *wrong_key["checks"]] if c["result"] != "pass")


def test_doctor_finds_the_second_server_on_a_shared_database_healthy(online: Any, s3_server: Any, tmp_path: Path) -> None:
    """PostgreSQL, S3, secrets in a folder of their own, and no admin.key: that is with the first server."""
    from graftwork_migrations import runner

    data_dir, secrets = tmp_path / "second", tmp_path / "secrets"
    data_dir.mkdir()
    load_or_create(secrets)
    flags = ("--data-dir", str(data_dir), "--secrets-dir", str(secrets))
    store = ("--object-store", f"s3://{s3_server.bucket}/doctor", "--s3-endpoint", s3_server.endpoint)
    database = online.admin.services.settings.database
    runner.upgrade(database)
    found = online.json("doctor", *flags, *store, "--database-url", database)
    assert {check["result"] for check in found["checks"]} == {"pass"}
    (seen,) = [check["field"] for check in found["checks"] if check["check"] == "object store"]
    assert seen.startswith("s3://")
    given = {"GRAFTWORK_PEPPER": "ab" * 32, "GRAFTWORK_CACHE_SALT": "cd" * 32, "GRAFTWORK_DATABASE_URL": database}
    found = online.json("doctor", "--data-dir", str(data_dir), *store, **given)
    assert {check["result"] for check in found["checks"]} == {"pass"}
    wrong = online.json("doctor", "--data-dir", str(data_dir), *store, code=1, **{**given, "GRAFTWORK_PEPPER": "abc"})
    assert [(c["check"], c["field"]) for c in wrong["checks"] if c["result"] == "fail"] == [("secrets", "GRAFTWORK_PEPPER")]
    useless = online.json("doctor", "--data-dir", str(data_dir), "--s3-region", "x", code=1)
    assert "--object-store s3://" in useless["error"]["message"]
    assert list(data_dir.iterdir()) == []


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_missing_admin_key_is_a_fault_of_the_first_server_alone(kind: str, tmp_path: Path) -> None:
    url = "" if kind == "sqlite" else "postgresql://u:p@127.0.0.1:1/d"
    settings = Settings(data_dir=tmp_path, model_dir=tmp_path, database_url=url)
    results = []
    for has_admin_key in (False, True):
        examine_data(report := Report(), settings, has_admin_key=has_admin_key)
        results += [f.result for f in report.findings if f.field == str(settings.admin_key_file)]
    assert results == ["fail" if kind == "sqlite" else "warn", "pass"]


def test_a_server_that_starts_while_doctor_looks_gets_the_lock(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, model_dir=tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    settings.lock_file.write_text(f"{ended.pid}\n")

    class Starting(Report):
        def passed(self, check: str, message: str, where: str | None = None) -> None:
            super().passed(check, message, where)
            if check == "lock":
                assert settings.lock_file.read_text() == f"{ended.pid}\n"
                with locked(settings.lock_file):
                    assert holder(settings.lock_file) == os.getpid()

    examine_data(report := Starting(), settings)
    assert [f.message for f in report.findings if f.check == "lock"] == ["no server is running on this data directory"]


@pytest.mark.parametrize("store", ["folder", "file:///srv/objects", None])
@pytest.mark.parametrize("flag", ["--s3-endpoint", "--s3-region", "--s3-ca-bundle", "--s3-path-style"])
def test_s3_settings_without_an_s3_store_are_refused_and_not_ignored(store: str | None, flag: str, tmp_path: Path) -> None:
    value = () if flag == "--s3-path-style" else ("http://127.0.0.1:1",)
    named = () if store is None else ("--object-store", store)
    arguments = ["serve", "--model", str(tmp_path), "--data-dir", str(tmp_path / "data"), *named, flag, *value, "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["message"] == "S3 settings are of use with --object-store s3://BUCKET/PREFIX only"
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_doctor_reads_a_data_directory_that_is_not_in_order(data_settings: Settings, tmp_path: Path) -> None:
    def problems(settings: Settings) -> dict[str, str]:
        report = Report()
        examine_data(report, settings)
        assert all(f.fix for f in report.findings if f.result != "pass")
        return {f.check: f.result for f in report.findings if f.result != "pass"}

    absent = Settings(data_dir=tmp_path / "absent", model_dir=tmp_path)
    assert problems(absent) == {"data directory": "fail"}
    (data_settings.data_dir / "graftwork.db").unlink()
    assert problems(data_settings) == {"secrets": "fail", "database": "fail", "object store": "fail"}
    data_settings.admin_key_file.write_text("x")
    data_settings.admin_key_file.chmod(0o644)
    (data_settings.data_dir / "graftwork.db").write_bytes(b"no database" * 1000)
    Path(data_settings.store.url).mkdir()
    data_settings.secrets_dir.mkdir()
    for name in ("pepper", "cache-salt"):
        (data_settings.secrets_dir / name).write_text("x")
        (data_settings.secrets_dir / name).chmod(0o600)
    assert problems(data_settings) == {"secrets": "warn", "database": "fail"}
    (data_settings.data_dir / "graftwork.db").write_bytes(b"")
    data_settings.admin_key_file.chmod(stat.S_IRUSR)
    assert problems(data_settings) == {"database": "warn"}
