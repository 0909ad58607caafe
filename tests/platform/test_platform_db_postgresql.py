"""PostgreSQL under a `Database`: several writers at once, races that end as they would alone, a server that comes and goes."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import func, insert, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from dev_servers.postgres import PostgresServer
from graftwork_adapters.report import Report
from graftwork_platform import db_postgresql
from graftwork_platform.db import Database, DatabaseUnavailable
from graftwork_platform.db_postgresql import Turn, take_turn
from graftwork_platform.db_url import UnsupportedDatabase, check_url
from graftwork_platform.doctor import examine_data
from graftwork_platform.errors import Conflict, NotFound
from graftwork_platform.ids import uuid7
from graftwork_platform.keys.ring import KeyRing
from graftwork_platform.keys.service import Keys
from graftwork_platform.models import Tenant, UsageStatus
from graftwork_platform.secrets import BadSecret, Secrets, load_or_create
from graftwork_platform.serve.command import CannotServe, _claim_database, _lock_file_of_database, _migrate
from graftwork_platform.settings import GivenSecrets, Settings, given_secrets
from graftwork_platform.tenants import Tenants
from graftwork_platform.usage import UsageRow, insert_usage, list_usage

SECRETS = Secrets(pepper=b"p" * 32, cache_salt=b"s" * 32)


@pytest.fixture
def database(postgres_url: str) -> Iterator[Database]:
    with closing(Database(postgres_url)) as opened:
        yield opened


def names(database: Database) -> list[str]:
    with database.read() as session:
        return list(session.scalars(select(Tenant.name).order_by(Tenant.name)))


def add(session: Session, name: str) -> None:
    session.add(Tenant(id=uuid7(), name=name, created_at=0))


def test_a_reader_sees_one_snapshot_and_cannot_write(database: Database) -> None:
    with database.read() as reading:
        count = select(func.count()).select_from(Tenant)
        assert reading.scalar(count) == 0
        database.write_now(lambda session: add(session, "late"))
        assert reading.scalar(count) == 0
    assert names(database) == ["late"]
    with pytest.raises(DBAPIError, match="read-only"), database.read() as session:
        session.execute(insert(Tenant).values(id=uuid7(), name="a", created_at=0))


def test_writers_write_at_the_same_time(database: Database) -> None:
    both = threading.Barrier(2, timeout=60)

    async def main() -> None:
        def work(name: str) -> Callable[[Session], None]:
            def write(session: Session) -> None:
                add(session, name)
                session.flush()
                both.wait()

            return write

        await asyncio.gather(*(database.run_write(work(name)) for name in "ab"))

    asyncio.run(main())
    assert names(database) == ["a", "b"]


def test_work_that_lost_a_race_is_done_again(postgres_url: str, database: Database) -> None:
    """A deadlock: each holds what the other wants next. Alone, both would end; so both do."""
    with database.write() as session:
        add(session, "a")
        add(session, "b")
    tries: list[str] = []
    first = threading.Barrier(2, timeout=60)

    def work(names: str) -> Callable[[Session], None]:
        def write(session: Session) -> None:
            tries.append(names)
            for name in names:
                session.execute(update(Tenant).where(Tenant.name == name).values(created_at=Tenant.created_at + 1))
                if tries.count(names) == 1 and name == names[0]:
                    first.wait()

        return write

    async def main() -> None:
        await asyncio.gather(database.run_write(work("ab")), database.run_write(work("ba")))

    asyncio.run(main())
    assert len(tries) > 2, "nobody lost"
    with database.read() as session:
        assert session.scalars(select(Tenant.created_at)).all() == [2, 2]


def test_a_lost_race_that_nothing_can_win_ends(database: Database) -> None:
    database.write_now(lambda session: add(session, "taken"))
    with pytest.raises(IntegrityError):
        database.write_now(lambda session: add(session, "taken"))


def test_one_of_many_gets_a_name_and_the_others_are_told_so(postgres_url: str) -> None:
    async def main() -> list[Any]:
        with closing(Database(postgres_url)) as one, closing(Database(postgres_url)) as two:
            makers = [Tenants(each, KeyRing(SECRETS)).create("acme") for _ in range(4) for each in (one, two)]
            return await asyncio.gather(*makers, return_exceptions=True)

    answers = asyncio.run(main())
    refused = [answer for answer in answers if isinstance(answer, Conflict)]
    assert [type(answer) for answer in answers if answer not in refused] == [Tenant]
    assert {error.code for error in refused} == {"tenant_exists"}


def test_texts_that_no_database_holds_name_nothing(postgres_url: str) -> None:
    async def main() -> None:
        with closing(Database(postgres_url)) as database:
            for name in ("a\0b", "\ud800", "ü"):
                with pytest.raises(NotFound):
                    await Tenants(database, KeyRing(SECRETS)).get(name)

    asyncio.run(main())


def usage(tenant: UUID, key: UUID, *, days_ago: int = 0) -> UsageRow:
    return UsageRow(uuid7(lambda: time.time() - days_ago * 86_400), None, tenant, key, "m", None, 1, 0, 1, UsageStatus.COMPLETED, 0)


def test_a_cursor_never_passes_a_row_that_is_committed_late(database: Database) -> None:
    """Numbers are dealt out in the order of commits, also while a slow writer holds its number back."""

    async def main() -> None:
        tenant = await Tenants(database, KeyRing(SECRETS)).create("acme")
        key = (await Keys(database, KeyRing(SECRETS), SECRETS).create(tenant.id, adapter=None))[0].id
        started, seen, wrote = threading.Event(), [], [0]

        def slow(session: Session) -> None:
            insert_usage(session, [usage(tenant.id, key, days_ago=1)])  # of another day, where no index is unique without it
            started.set()
            time.sleep(0.1)

        async def follow() -> None:
            after = None
            while len(seen) < 61:
                page = await list_usage(database, tenant_id=None, after=after, limit=7)
                seen.extend(row.seq for row in page.rows)
                after = f"req_{page.rows[-1].request_id.hex}" if page.rows else after

        async def write(count: int) -> None:
            for n in range(count):
                rows = [usage(tenant.id, key, days_ago=n % 3) for _ in range(2)]
                await database.run_write(lambda session, rows=rows: insert_usage(session, rows))
                wrote[0] += 2

        writing = asyncio.create_task(database.run_write(slow))
        await asyncio.to_thread(started.wait)
        await asyncio.wait_for(asyncio.gather(writing, write(15), write(15), follow()), 60)
        assert seen == list(range(1, 62))

    asyncio.run(main())


def test_turns_exclude_each_other_to_the_end_of_the_transaction(database: Database) -> None:
    order: list[str] = []
    inside = threading.Event()

    def first(session: Session) -> None:
        take_turn(session, Turn.CLAIM_SECRETS)
        inside.set()
        time.sleep(0.1)
        order.append("first")

    def second(session: Session) -> None:
        take_turn(session, Turn.CLAIM_SECRETS)
        order.append("second")

    async def main() -> None:
        one = asyncio.create_task(database.run_write(first))
        await asyncio.to_thread(inside.wait)
        await asyncio.gather(one, database.run_write(second))

    asyncio.run(main())
    assert order == ["first", "second"]


def test_a_server_that_was_away_is_used_again_when_it_is_back(
    postgres_url: str, line: Any, caplog: pytest.LogCaptureFixture, postgres_server: PostgresServer
) -> None:
    url = make_url(postgres_url).set(port=line.port).render_as_string(hide_password=False)
    with closing(Database(url)) as database:
        database.write_now(lambda session: add(session, "before"))
        assert names(database) == ["before"]
        line.cut()
        for work in (lambda: names(database), lambda: database.write_now(lambda session: add(session, "meanwhile"))):
            with pytest.raises(DatabaseUnavailable) as refused:
                work()
            assert (refused.value.status, refused.value.code) == (503, "database_unavailable")
            assert "127.0.0.1" not in str(refused.value), "which is for the log"
        line.mend()
        database.write_now(lambda session: add(session, "after"))
        assert names(database) == ["after", "before"]
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "does not answer" in said
    assert postgres_server.password not in said


def test_connections_that_the_server_ended_are_replaced(postgres_url: str) -> None:
    with closing(Database(postgres_url)) as database, closing(Database(postgres_url)) as other:
        for turn in "ab":
            database.write_now(lambda session, turn=turn: add(session, turn))
            assert turn in names(database)
            with other.write() as session:
                others = "pid <> pg_backend_pid() AND datname = current_database()"
                ended = session.scalars(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")).all()
            assert len(ended) >= 2


def test_a_server_that_is_too_old_is_refused(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db_postgresql, "_OLDEST", 99)
    with closing(Database(postgres_url)) as database, pytest.raises(UnsupportedDatabase, match="99 or newer"):
        names(database)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_every_spelling_of_postgresql_is_one_driver(scheme: str) -> None:
    url = check_url(f"{scheme}://u:p%40ss@h:5433/d?sslmode=require")
    assert (url.drivername, url.password, url.port) == ("postgresql+psycopg", "p@ss", 5433)


def test_settings_do_not_show_the_password(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, model_dir=tmp_path, database_url="postgresql://u:s3cret@h/d")
    assert "s3cret" not in repr(settings)


def test_the_password_is_on_no_command_line(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    run = subprocess.run

    def watched(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", watched)
    url = postgres_server.new_database()
    _migrate(url)
    settings = Settings(data_dir=tmp_path, model_dir=tmp_path, database_url=url)
    report = Report()
    examine_data(report, settings)
    (found,) = [finding for finding in report.as_json() if finding["check"] == "database"]
    assert found["result"] == "pass"
    examine_data(failed := Report(), replace(settings, database_url=url.replace("postgres:", "postgres:wrong", 1)))
    (found,) = [finding for finding in failed.as_json() if finding["check"] == "database"]
    assert found["result"] == "fail"
    assert "password" in str(found["message"])
    assert postgres_server.password not in str([report.as_json(), failed.as_json(), commands])
    assert len(commands) >= 3
    postgres_server.drop_database(url)


def test_a_database_that_is_not_there_keeps_the_server_from_starting_with_a_next_step() -> None:
    with pytest.raises(CannotServe, match="does not answer") as refused:
        _migrate("postgresql://u:s3cret@127.0.0.1:1/d")
    assert "s3cret" not in str(refused.value)
    assert "Traceback" not in str(refused.value)


@pytest.mark.parametrize("way", ["itself", "link"])
def test_one_sqlite_file_has_one_server_whatever_its_data_directory(tmp_path: Path, way: str) -> None:
    file = tmp_path / "shared.db"
    named = file
    if way == "link":
        named = tmp_path / "link.db"
        named.symlink_to(file)
    with ExitStack() as first:
        _lock_file_of_database(first, f"sqlite:///{file}")
        with pytest.raises(CannotServe, match="PostgreSQL"), ExitStack() as second:
            _lock_file_of_database(second, f"sqlite:///{named}")
    with ExitStack() as later:
        _lock_file_of_database(later, f"sqlite:///{named}")


def test_a_second_server_needs_the_first_ones_secrets(data_settings: Settings, tmp_path: Path) -> None:
    _claim_database(data_settings)
    _claim_database(data_settings)
    other = replace(data_settings, database_url=data_settings.database, secrets_path=tmp_path / "others")
    with pytest.raises(CannotServe, match="--secrets-dir"):
        _claim_database(other)
    for name in ("pepper", "cache-salt"):
        (tmp_path / "others" / name).write_bytes((data_settings.secrets_dir / name).read_bytes())
    _claim_database(other)


def test_secrets_are_given_by_the_environment(tmp_path: Path) -> None:
    given = given_secrets({"GRAFTWORK_PEPPER": "61" * 32 + "\n", "GRAFTWORK_CACHE_SALT": "62" * 32})
    assert load_or_create(tmp_path / "secrets", given) == Secrets(pepper=b"a" * 32, cache_salt=b"b" * 32)
    assert not (tmp_path / "secrets").exists()
    assert "6161" not in repr(given)
    assert given_secrets({"GRAFTWORK_PEPPER": ""}) == GivenSecrets()
    for wrong in ("61" * 31, "no hex"):
        with pytest.raises(BadSecret, match=r"GRAFTWORK_PEPPER.*openssl rand") as refused:
            load_or_create(tmp_path, GivenSecrets(pepper=wrong))
        assert wrong not in str(refused.value)
        assert "backup" not in str(refused.value), "there is none of a variable"
