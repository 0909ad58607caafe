"""The revisions make exactly the models' tables on both databases, go down and up with data, and leave a newer database alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import CheckConstraint, Connection, MetaData, Table, create_engine, inspect, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from dev_servers.postgres import PostgresServer
from graftwork_migrations import runner
from graftwork_migrations.__main__ import main
from graftwork_platform.db import Database
from graftwork_platform.db_url import UnsupportedDatabase
from graftwork_platform.ids import day_of, uuid7
from graftwork_platform.models import Adapter, AdapterVersion, ApiKey, Base, BlobSweep, SecretFingerprint, Tenant, Upload, Usage

SQLITE_ONLY = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of a database without tables; SQLite's is not even there."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/deep/graftwork.db"
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    made = server.new_database()
    yield made
    server.drop_database(made)


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    with create_engine(url, poolclass=NullPool).begin() as connection:
        yield connection


def tables(url: str) -> set[str]:
    with connected(url) as connection:
        return set(inspect(connection).get_table_names())


def contents(url: str) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table."""
    found = MetaData()
    with connected(url) as connection:
        found.reflect(connection)
        return {
            name: sorted((dict(row._mapping) for row in connection.execute(select(table))), key=repr)
            for name, table in found.tables.items()
            if name != "alembic_version"
        }


def fill(url: str) -> None:
    """A row or more in every table."""
    tenant, adapter, version, key = (UUID(int=n) for n in range(1, 5))
    made: list[Any] = [Tenant(id=tenant, name="acme", row_type="int8", created_at=1)]
    made += [Adapter(id=adapter, tenant_id=tenant, name="support", next_version=2, created_at=2)]
    digest = "d" * 64
    made += [
        AdapterVersion(
            id=version,
            tenant_id=tenant,
            adapter_id=adapter,
            number=1,
            digest=digest,
            manifest_sha256="m" * 64,
            state="ready",
            report=[{"check": "größe", "result": None}],
            row_type="e4m3",
            facts={"traits": {"vocab_size": 7}},
            created_at=3,
            ready_at=2**40,
        ),
        ApiKey(
            id=key,
            tenant_id=tenant,
            is_admin=False,
            public_id="a",
            key_hmac=b"\0\xff" * 16,
            default_adapter_id=adapter,
            created_at=4,
        ),
        ApiKey(id=UUID(int=5), is_admin=True, public_id="b", key_hmac=bytes(32), created_at=4, revoked_at=5),
        Upload(
            id=UUID(int=6),
            tenant_id=tenant,
            adapter_name="support",
            files=[{"path": "a\u0000b", "size": 1}],
            part_bytes=8,
            state="ready",
            version_id=version,
            created_at=5,
            expires_at=6,
        ),
        SecretFingerprint(name="pepper", fingerprint=b"f" * 32),
        BlobSweep(digest=digest, token=UUID(int=7)),
    ]
    for seq, seconds in enumerate((1_700_000_000, 1_700_090_000), 1):
        request = uuid7(lambda at=seconds: at)
        made += [
            Usage(
                day=day_of(request),
                request_id=request,
                seq=seq,
                tenant_id=tenant,
                key_id=key,
                model="support",
                version_id=version,
                prompt_tokens=2**33,
                cached_tokens=1,
                output_tokens=2,
                status="completed",
                created_at=seconds * 1000,
            )
        ]
    with closing(Database(url)) as database, database.write() as session:
        for row in made:
            session.add(row)
            session.flush()


def test_the_newest_revision_equals_the_models(url: str) -> None:
    runner.upgrade(url)
    with connected(url) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []


@SQLITE_ONLY
def test_sqlite_checks_what_the_models_check(url: str) -> None:
    runner.upgrade(url)
    with connected(url) as connection:  # autogenerate does not look at these
        for table in Base.metadata.sorted_tables:
            found = {(c["name"], c["sqltext"]) for c in inspect(connection).get_check_constraints(table.name)}
            wanted = {(str(c.name), str(c.sqltext)) for c in table.constraints if isinstance(c, CheckConstraint)}
            assert found == wanted


def test_postgresql_has_what_the_models_would_make_there(postgres_server: PostgresServer) -> None:
    """Columns, constraints and indexes, in the server's own words."""
    questions = (
        "SELECT table_name, column_name, data_type, character_maximum_length, is_nullable, column_default "
        "FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> 'alembic_version'",
        "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text <> 'alembic_version'",
        "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' AND tablename <> 'alembic_version'",
    )
    answers = []
    for make in (runner.upgrade, _create_all):
        made = postgres_server.new_database()
        make(made)
        with connected(made) as connection:
            answers.append([sorted(map(tuple, connection.execute(text(question)))) for question in questions])
        postgres_server.drop_database(made)
    assert answers[0] == answers[1]
    assert all(answers[0])


def _create_all(url: str) -> None:
    with connected(url) as connection:
        Base.metadata.create_all(connection)


def test_both_databases_constrain_alike(postgres_server: PostgresServer, tmp_path: Path) -> None:
    shapes = []
    urls = [f"sqlite:///{tmp_path}/graftwork.db", postgres_server.new_database()]
    for url in urls:
        runner.upgrade(url)
        with connected(url) as connection:
            looked = inspect(connection)
            shapes.append(
                {name: _shape(Table(name, MetaData(), autoload_with=connection), looked) for name in looked.get_table_names()}
            )
    postgres_server.drop_database(urls[1])
    assert shapes[0] == shapes[1]


def _shape(table: Table, looked: Any) -> dict[str, Any]:
    unique = {tuple(sorted(c["column_names"])) for c in looked.get_unique_constraints(table.name)}
    return {
        "columns": {(c.name, c.nullable) for c in table.columns},
        "key": [c.name for c in table.primary_key],
        "foreign": {(tuple(f.column_keys), f.referred_table.name, str(f.name)) for f in table.foreign_key_constraints},
        "unique": unique,
        "checks": {c["name"] for c in looked.get_check_constraints(table.name)},
        "indexes": {  # PostgreSQL lists those of its unique constraints too
            (i["name"], tuple(i["column_names"]), bool(i["unique"]))
            for i in looked.get_indexes(table.name)
            if "duplicates_constraint" not in i
        },
    }


def test_every_revision_goes_down_and_up_again_with_data(url: str) -> None:
    runner.upgrade(url)
    fill(url)
    runner.upgrade(url)  # which changes nothing
    full = contents(url)
    assert all(full.values()), "a table has no row to lose"
    steps = [script.revision for script in runner._scripts().walk_revisions()]  # newest first
    for newer, older in zip(steps, [*steps[1:], runner.BASE], strict=True):
        before = contents(url)
        runner.downgrade(url, older)
        kept = contents(url)
        for name, rows in kept.items():
            assert rows == _columns(before[name], rows), f"{newer} → {older} changed {name}"
        runner.upgrade(url, newer)
        assert runner.current(url) == newer
        for name, rows in contents(url).items():
            if older != runner.BASE and name in kept:
                assert _columns(rows, kept[name]) == kept[name], f"{older} → {newer} changed {name}"
        runner.downgrade(url, older)
    assert runner.current(url) is None
    assert tables(url) == {"alembic_version"}
    runner.upgrade(url)
    fill(url)


def _columns(rows: list[dict[str, Any]], like: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = like[0].keys() if like else ()
    return sorted(({name: row[name] for name in names} for row in rows), key=repr)


def test_a_database_of_the_first_release_keeps_its_rows_and_is_claimed_later(url: str) -> None:
    runner.upgrade(url, "0001")
    with connected(url) as connection:
        connection.execute(text("INSERT INTO tenants (id, name, created_at) VALUES ('" + UUID(int=1).hex + "', 'acme', 1)"))
    runner.upgrade(url)
    with closing(Database(url)) as database, database.read() as session:
        assert session.scalars(select(Tenant.id)).all() == [UUID(int=1)]
        assert session.scalars(select(SecretFingerprint)).all() == []


def test_a_newer_database_is_left_alone(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    runner.upgrade(url)
    with connected(url) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(runner.NewerDatabase, match="9999"):
        runner.upgrade(url)
    with pytest.raises(runner.NewerDatabase, match="9999"):
        runner.downgrade(url, runner.BASE)
    assert main(["upgrade", "--database-url", url]) == 2
    assert "newer" in capsys.readouterr().err
    assert runner.current(url) == "9999"


def test_a_step_that_fails_leaves_nothing_half_made(url: str) -> None:
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir()
    with connected(url) as connection:
        connection.execute(text("CREATE TABLE uploads (x INTEGER)"))
    with pytest.raises(runner.UnusableDatabase, match=r"uploads.*a database of its own"):
        runner.upgrade(url)
    assert tables(url) == {"uploads"}


def test_servers_that_start_together_migrate_once(url: str) -> None:
    command = [sys.executable, "-m", "graftwork_migrations", "upgrade", "--database-url", "-"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for process in running:
        process.stdin.write(f"{url}\n")
        process.stdin.close()
    assert [(process.wait(300), process.stdout.read()) for process in running] == [(0, "")] * 2
    for process in running:
        process.stdout.close()
    assert runner.current(url) == runner.head()


def test_the_command_says_where_a_database_is_and_moves_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def current() -> str:
        assert main(["current", "--database-url", url]) == 0
        return capsys.readouterr().out

    assert current() == f"{runner.BASE} {runner.head()}\n"
    assert main(["upgrade", "--database-url", url]) == 0
    assert current() == f"{runner.head()} {runner.head()}\n"
    assert main(["downgrade", "--database-url", url, "--revision", runner.BASE]) == 0
    assert current() == f"{runner.BASE} {runner.head()}\n"
    assert main(["upgrade", "--database-url", "mysql://h/d"]) == 2


def test_a_database_that_cannot_be_reached_is_told_with_a_next_step_and_no_password(
    postgres_server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    port, password = postgres_server.port, postgres_server.password
    for url, words in (
        (f"postgresql://postgres:s3cret@127.0.0.1:{port}/postgres", "password of --database-url"),
        (f"postgresql://nobody:s3cret@127.0.0.1:{port}/postgres", "password of --database-url"),
        (f"postgresql://postgres:{password}@127.0.0.1:{port}/missing", "createdb missing"),
        ("postgres://postgres:s3cret@127.0.0.1:1/d", "does not answer"),
        ("postgresql://postgres:s3cret@no-such-host.invalid/d", "does not answer"),
    ):
        for command in ("upgrade", "current"):
            assert main([command, "--database-url", url]) == 2
            told = capsys.readouterr().err
            assert words in told
            assert "s3cret" not in told
            assert password not in told
            assert told.count("\n") == 1, "one line, no traceback"


def refusal(url: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["upgrade", "--database-url", url]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1, "one line, no traceback"
    return told


def test_a_role_that_does_not_own_the_database_is_told_how_it_will(
    postgres_server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    made, role = postgres_server.new_database(), f"r{uuid7().hex}"
    with connected(made) as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 's3cret'"))
    told = refusal(make_url(made).set(username=role, password="s3cret").render_as_string(hide_password=False), capsys)
    database = make_url(made).database
    assert f"ALTER DATABASE {database} OWNER TO {role}" in told
    with connected(made) as connection:
        connection.execute(text(f"ALTER DATABASE {database} OWNER TO {role}"))
    runner.upgrade(make_url(made).set(username=role, password="s3cret").render_as_string(hide_password=False))
    postgres_server.drop_database(made)


def test_files_that_cannot_be_the_database_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.db").write_text("no database " * 500)
    assert "no SQLite database" in refusal(f"sqlite:///{tmp_path}/text.db", capsys)
    (tmp_path / "folder.db").mkdir()
    assert "that file" in refusal(f"sqlite:///{tmp_path}/folder.db", capsys)
    assert "text.db" in refusal(f"sqlite:///{tmp_path}/text.db/below/graftwork.db", capsys)
    runner.upgrade(f"sqlite:///{tmp_path}/good.db")
    assert main(["downgrade", "--database-url", f"sqlite:///{tmp_path}/good.db", "--revision", "0999"]) == 2
    assert "0999" in capsys.readouterr().err


def test_a_full_disk_is_told_with_a_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(connection: Connection) -> None:
        connection.execute(text("PRAGMA max_page_count=8"))  # SQLite's answer is the same

    monkeypatch.setattr(runner, "_refuse_newer", full)
    assert "Make room" in refusal(f"sqlite:///{tmp_path}/graftwork.db", capsys)


def test_other_databases_are_refused() -> None:
    with pytest.raises(UnsupportedDatabase):
        runner.upgrade("sqlite://")
