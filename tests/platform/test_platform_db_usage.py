"""The database's promises (WAL, FULL, one writer, constraints) and usage rows: durable, once each, read behind a cursor."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, func, insert, select
from sqlalchemy.exc import IntegrityError, OperationalError

from graftwork_engine.client import EngineClient
from graftwork_platform.db import Database
from graftwork_platform.db_url import UnsupportedDatabase, check_url
from graftwork_platform.ids import day_of, parse, show, unix_millis, uuid7
from graftwork_platform.journal.ledger import JournalLimits
from graftwork_platform.journal.recovery import Recovery
from graftwork_platform.models import AdapterVersion, Base, Tenant, Usage, UsageStatus
from graftwork_platform.settings import Settings
from graftwork_platform.usage import UsageRow, UsageWriter

StartAdmin = Callable[..., AbstractContextManager[Any]]


@pytest.fixture
def database(data_settings: Settings) -> Iterator[Database]:
    opened = Database(data_settings.database)
    yield opened
    opened.close()


def owner(admin: Any, name: str = "acme") -> tuple[UUID, UUID]:
    """A tenant's id and a key's."""
    tenant = admin.tenant(name)
    key = admin.call("POST", f"/tenants/{tenant}/keys", json={}).json()
    ids = parse("tn", tenant), parse("key", key["id"])
    assert ids[0] is not None
    assert ids[1] is not None
    return ids[0], ids[1]


def row(tenant: UUID, key: UUID, **changes: Any) -> UsageRow:
    values: dict[str, Any] = {
        "request_id": uuid7(),
        "client_request_id": "mine",
        "tenant_id": tenant,
        "key_id": key,
        "model": "support",
        "version_id": None,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 7,
        "status": UsageStatus.COMPLETED,
        "created_at": 1_700_000_000_000,
    }
    return UsageRow(**{**values, **changes})


def record(admin: Any, *rows: UsageRow) -> None:
    """Hand rows to the journal, and wait until the database has them."""
    admin.run(admin.services.usage.record, *rows)
    admin.until(lambda: admin.services.usage.stats["unwritten_rows"] == 0)


def count_rows(admin: Any) -> int:
    """Rows that a connection of its own sees."""
    engine = create_engine(admin.services.database.url)
    with engine.connect() as connection:
        count = connection.scalar(select(func.count()).select_from(Usage))
    engine.dispose()
    return int(count or 0)


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_sqlite_is_set_as_the_contract_says(database: Database) -> None:
    for session_of, query_only in ((database.read, 1), (database.write, 0)):
        with session_of() as session:
            pragmas = {
                name: session.connection().exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys", "query_only", "busy_timeout")
            }
        assert pragmas == {
            "journal_mode": "wal",
            "synchronous": 2,
            "foreign_keys": 1,
            "query_only": query_only,
            "busy_timeout": 10_000,
        }


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_writers_hold_the_lock_from_the_start_and_readers_cannot_write(database: Database, data_settings: Settings) -> None:
    other = sqlite3.connect(data_settings.data_dir / "graftwork.db", timeout=0)
    with database.write() as session:
        session.scalar(select(func.count()).select_from(Tenant))
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
    other.execute("BEGIN IMMEDIATE")
    other.rollback()
    other.close()
    with pytest.raises(OperationalError, match="readonly"), database.read() as session:
        session.execute(insert(Tenant).values(id=uuid7(), name="a", created_at=0))


def test_a_block_that_raises_leaves_nothing_behind(database: Database) -> None:
    def write() -> None:
        with database.write() as session:
            session.add(Tenant(id=uuid7(), name="a", created_at=0))
            session.flush()
            raise KeyError

    with pytest.raises(KeyError):
        write()
    with database.read() as session:
        assert session.scalar(select(func.count()).select_from(Tenant)) == 0


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_writes_run_one_after_another_on_one_thread(database: Database) -> None:
    threads = set()

    def add_one(session: Any) -> None:
        threads.add(threading.get_ident())
        tenant = session.scalar(select(Tenant)) or Tenant(id=uuid7(), name="a", created_at=0)
        tenant.created_at += 1
        session.add(tenant)

    async def many() -> int:
        await asyncio.gather(*(database.run_write(add_one) for _ in range(50)))
        return await database.run_read(lambda session: session.scalars(select(Tenant.created_at)).one())

    assert asyncio.run(many()) == 50
    assert len(threads) == 1


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "mysql://u:secret@h/d",
        "postgresql+asyncpg://u:secret@h/d",
        "postgresql://u:secret@h",
        "postgresql://u:secret@h:port/d",
        "postgresql://u:se/secret@h/d?no=such",
        "postgresql://u:secret@h/d?nosuchoption=secret",
        "secret",
        "",
    ],
)
def test_other_databases_are_refused_without_showing_passwords(url: str) -> None:
    with pytest.raises(UnsupportedDatabase) as refused:
        check_url(url)
    assert "secret" not in str(refused.value)


def test_constraints_hold_whatever_code_does(admin: Any) -> None:
    one, two = owner(admin, "one"), owner(admin, "two")
    admin.push("two")
    with admin.services.database.read() as session:
        version = session.scalars(select(AdapterVersion)).one()

    def attempt(**changes: Any) -> None:
        values = {"day": day_of(uuid7()), "request_id": uuid7(), "seq": 1, "tenant_id": one[0], "key_id": one[1], "model": "m"}
        tokens = {"prompt_tokens": 2, "cached_tokens": 1, "output_tokens": 1, "status": "completed", "created_at": 0}
        with admin.services.database.write() as session:
            session.add(Usage(**{**values, **tokens, **changes}))
            session.flush()
            session.rollback()

    attempt()
    wrong: list[dict[str, Any]] = [{"key_id": two[1]}, {"version_id": version.id}, {"tenant_id": uuid7()}, {"status": "free"}]
    wrong += [{"cached_tokens": 3}, {"cached_tokens": -1}, {"output_tokens": -1}, {"prompt_tokens": -1, "cached_tokens": -1}]
    for changes in wrong:
        with pytest.raises(IntegrityError):
            attempt(**changes)
    with pytest.raises(IntegrityError), admin.services.database.write() as session:
        session.get_one(AdapterVersion, version.id).digest = None
    with pytest.raises(IntegrityError), admin.services.database.write() as session:
        session.get_one(AdapterVersion, version.id).state = "done"


def test_every_table_names_its_constraints() -> None:
    for table in Base.metadata.tables.values():
        for constraint in table.constraints:
            assert constraint.name
            assert len(str(constraint.name)) <= 63


def test_rows_that_wait_together_share_a_commit(admin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = owner(admin)
    commits = []
    write = admin.services.database.run_write

    async def counted(work: Any) -> Any:
        commits.append(1)
        return await write(work)

    monkeypatch.setattr(Database, "run_write", lambda _self, work: counted(work))
    record(admin, *(row(*ids) for _ in range(200)))
    assert count_rows(admin) == 200
    assert len(commits) <= 3


def test_a_row_is_written_once_however_often_it_is_handed_over(admin: Any) -> None:
    ids, again = owner(admin), uuid7()
    record(admin, *(row(*ids, request_id=again) for _ in range(5)))
    record(admin, row(*ids, request_id=again, output_tokens=999))
    (kept,) = admin.call("GET", "/usage").json()["data"]
    assert (kept["id"], kept["output_tokens"]) == (show("req", again), 7)


def test_one_bad_row_does_not_cost_its_neighbours_theirs_and_is_logged_whole(admin: Any, caplog: pytest.LogCaptureFixture) -> None:
    ids = owner(admin)
    bad = row(uuid7(), ids[1], model="of nobody")
    writer = UsageWriter(admin.services.database, retry_delays=(0.0,))
    admin.run(writer.write, [row(*ids), bad, *(row(*ids) for _ in range(5))])
    assert count_rows(admin) == 6
    assert writer.num_refused == 1
    [told] = [record.getMessage() for record in caplog.records if "refuses" in record.getMessage()]
    assert str(bad.request_id) in told
    assert "of nobody" in told


def test_a_database_that_is_away_is_waited_for(admin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = owner(admin)
    faults = [OperationalError("INSERT", {}, sqlite3.OperationalError("disk full")) for _ in range(20)]
    write = admin.services.database.run_write

    async def failing(work: Any) -> Any:
        if faults:
            raise faults.pop()
        return await write(work)

    monkeypatch.setattr(Database, "run_write", lambda _self, work: failing(work))
    admin.run(UsageWriter(admin.services.database, retry_delays=(0.0, 0.0)).write, [row(*ids)])
    assert count_rows(admin) == 1


def test_rows_handed_over_before_the_end_are_written_even_if_nobody_waits(start_admin: StartAdmin) -> None:
    with start_admin() as admin:
        ids = owner(admin)

        async def hand_over_and_leave() -> None:
            tasks = [asyncio.create_task(admin.services.usage.record(row(*ids))) for _ in range(20)]
            await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()

        admin.run(hand_over_and_leave)
    assert count_rows(admin) == 20
    assert list((admin.services.settings.data_dir / "journal").iterdir()) == []


def test_rows_the_database_did_not_take_before_the_end_are_taken_at_the_next_start(
    start_admin: StartAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_self: object, _rows: object) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(UsageWriter, "write", away)
        with start_admin() as admin:
            patch.setattr(admin.services.usage, "_limits", JournalLimits(drain=0.01))
            ids = owner(admin)
            admin.run(admin.services.usage.record, row(*ids))
    assert count_rows(admin) == 0
    with start_admin() as admin:
        admin.run(Recovery(admin.services.usage, EngineClient("ipc://nobody")).recover)
        admin.until(lambda: count_rows(admin) == 1)


def test_the_cursor_misses_no_row_that_is_recorded_late(admin: Any) -> None:
    ids, other = owner(admin, "one"), owner(admin, "two")
    long_request = row(*ids, request_id=uuid7(lambda: time.time() - 3600))
    for _ in range(3):
        record(admin, row(*ids))
        record(admin, row(*other))
    page = admin.call("GET", "/usage", params={"tenant": "one", "limit": 2}).json()
    assert page["has_more"] is True
    record(admin, long_request)
    seen = page["data"]
    while page["has_more"]:
        page = admin.call("GET", "/usage", params={"tenant": "one", "limit": 2, "after": page["last_id"]}).json()
        seen += page["data"]
    assert len({item["id"] for item in seen}) == len(seen) == 4
    assert seen[-1]["id"] == show("req", long_request.request_id)
    assert {item["tenant"] for item in seen} == {show("tn", ids[0])}
    assert len(admin.call("GET", "/usage").json()["data"]) == 7


def test_a_usage_row_shows_what_the_contract_lists(admin: Any) -> None:
    ids = owner(admin)
    version = admin.push("acme")["version"]
    recorded = row(*ids, version_id=parse("av", version["id"]), status=UsageStatus.ABORTED)
    record(admin, recorded)
    (shown,) = admin.call("GET", "/usage", params={"tenant": "acme"}).json()["data"]
    assert shown == {
        "id": show("req", recorded.request_id),
        "object": "usage",
        "created": 1_700_000_000,
        "client_request_id": "mine",
        "tenant": show("tn", ids[0]),
        "key": show("key", ids[1]),
        "model": "support",
        "version": version["id"],
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 7,
        "status": "aborted",
    }


def test_a_foreign_or_unknown_cursor_is_refused(admin: Any) -> None:
    ids = owner(admin, "one")
    owner(admin, "two")
    mine = row(*ids)
    record(admin, mine)
    for tenant, after in (
        ("two", show("req", mine.request_id)),
        ("one", show("req", uuid7())),
        ("one", "x"),
        ("one", "tn_" + "0" * 32),
    ):
        answer = admin.call("GET", "/usage", params={"tenant": tenant, "after": after})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")
    assert admin.call("GET", "/usage", params={"tenant": "nobody"}).status_code == 404


def test_no_connection_is_held_between_units_of_work(admin: Any) -> None:
    """More callers than connections, none of which can be waiting for another: a pool of two serves them all."""

    async def many() -> None:
        tenants = admin.services.tenants
        await asyncio.gather(*(tenants.list(after=None, limit=1) for _ in range(64)), *(tenants.create(f"t{i}") for i in range(16)))

    admin.run(many)
    assert len(admin.call("GET", "/tenants").json()["data"]) == 16


@given(st.integers(0, (1 << 48) - 1), st.binary(min_size=10, max_size=10))
def test_uuid7_holds_its_time_and_version(millis: int, noise: bytes) -> None:
    key = uuid7(lambda: millis / 1000, lambda _: noise)
    assert (key.version, key.variant) == (7, "specified in RFC 4122")
    assert abs(unix_millis(key) - millis) <= 1
    assert parse("req", show("req", key)) == key
    assert parse("key", show("req", key)) is None


def test_ids_have_one_spelling() -> None:
    key = uuid7()
    for text in (
        key.hex,
        str(key),
        f"tn_{key}",
        f"tn_{key.hex}".upper(),
        "tn_" + "A" * 32,
        f"tn_{key.hex}0",
        f"tn_{key.hex[:-1]}",
        f"tn_{key.hex} ",
        "",
    ):
        assert parse("tn", text) is None
    assert day_of(uuid7(lambda: 86_399.999)).isoformat() == "1970-01-01"
    assert day_of(uuid7(lambda: 86_400.0)).isoformat() == "1970-01-02"
