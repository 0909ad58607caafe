"""A PostgreSQL server that is frozen: who waits for it is told in time, its threads are free again, and a stop goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import select, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from graftwork_platform.db import Database, DatabaseUnavailable
from graftwork_platform.db_patience import Patience
from graftwork_platform.ids import uuid7
from graftwork_platform.models import Tenant

SOON_S = 2.5  # of a clock that stands still while the machine does; without a limit it would be seconds more, or for ever


@pytest.fixture
def database(postgres_url: str, line: Any) -> Iterator[Database]:
    """Behind a line that can be held, its connections open."""
    url = make_url(postgres_url).set(port=line.port).render_as_string(hide_password=False)
    with closing(Database(url)) as opened:
        asyncio.run(use_all(opened))
        yield opened
        line.mend()


async def use_all(database: Database) -> None:
    all_of_them = threading.Barrier(6, timeout=60)

    def look(session: Session) -> None:
        session.execute(select(1))
        all_of_them.wait()

    await asyncio.gather(*(database.run_read(look) for _ in range(4)), *(database.run_write(look) for _ in range(2)))


def names(session: Session) -> list[str]:
    return list(session.scalars(select(Tenant.name)))


def add(session: Session, name: str) -> None:
    session.add(Tenant(id=uuid7(), name=name, created_at=0))


def test_a_frozen_server_is_given_up_in_time_by_callers_and_by_threads(
    database: Database, line: Any, steady_clock: Callable[[], float]
) -> None:
    async def main() -> None:
        line.hold()
        began = steady_clock()
        waiting = [database.run_read(names, within=0.3) for _ in range(12)]  # more than there are threads
        waiting += [database.run_write(names, within=0.3) for _ in range(3)]
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(answer) for answer in answers] == [DatabaseUnavailable] * 15
        assert {answer.code for answer in answers if isinstance(answer, DatabaseUnavailable)} == {"database_unavailable"}
        assert steady_clock() - began < SOON_S
        for threads in (database._reader_threads, database._writer_threads):
            free = [threads.submit(time.sleep, 0.05) for _ in range(4)]
            await asyncio.to_thread(lambda free=free: [each.result(timeout=60) for each in free])
        line.mend()
        assert await database.run_read(names) == []
        await database.run_write(lambda session: add(session, "after"))
        assert await database.run_read(names) == ["after"]

    asyncio.run(main())


def test_a_server_that_freezes_between_two_statements_is_given_up_too(
    database: Database, line: Any, steady_clock: Callable[[], float]
) -> None:
    def work(session: Session) -> None:
        session.execute(select(1))
        line.hold()
        session.execute(select(2))

    began = steady_clock()
    with pytest.raises(DatabaseUnavailable):
        asyncio.run(database.run_read(work, within=0.3))
    assert steady_clock() - began < SOON_S


def test_a_write_that_was_given_up_is_not_committed_later(database: Database) -> None:
    def late(session: Session) -> None:
        add(session, "late")
        session.flush()
        time.sleep(0.3)

    with pytest.raises(DatabaseUnavailable):
        asyncio.run(database.run_write(late, within=0.1))
    asyncio.run(database.run_write(lambda session: add(session, "next")))
    assert asyncio.run(database.run_read(names)) == ["next"]


def test_a_stop_does_not_wait_for_a_frozen_server(database: Database, line: Any, steady_clock: Callable[[], float]) -> None:
    async def main() -> None:
        line.hold()
        waiting = [asyncio.create_task(database.run_read(names, within=600.0)) for _ in range(6)]
        waiting += [asyncio.create_task(database.run_write(names, within=600.0)) for _ in range(3)]
        await asyncio.sleep(0.1)
        database.hurry(0.2)
        await asyncio.to_thread(database.close)
        assert {type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)} == {DatabaseUnavailable}

    began = steady_clock()
    asyncio.run(main())
    assert steady_clock() - began < SOON_S


def test_an_answer_that_is_slow_and_in_time_is_waited_for(database: Database) -> None:
    assert asyncio.run(database.run_read(lambda session: session.scalar(text("SELECT 7 FROM pg_sleep(0.4)")))) == 7


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_work_on_a_file_has_no_limit(database_url: str) -> None:
    """What was told to have failed could be done later, and the memory of the one process would not know."""
    with closing(Database(database_url)) as file:

        def slow(session: Session) -> None:
            time.sleep(0.7)
            add(session, "a")

        asyncio.run(file.run_write(slow, within=0.01))
        assert asyncio.run(file.run_read(names, within=0.0)) == ["a"]


def test_limits_nest_and_belong_to_their_thread() -> None:
    now = [0.0]
    patience = Patience(clock=lambda: now[0])

    def is_over() -> bool:
        try:
            patience.check()
        except psycopg.OperationalError:
            return True
        return False

    with patience.lasting(5.0):
        with patience.lasting(50.0):
            now[0] = 6.0
            assert is_over(), "an inner limit is no longer than the outer one"
        others: list[bool] = []
        thread = threading.Thread(target=lambda: others.append(is_over()))
        thread.start()
        thread.join()
        assert others == [False]
    assert not is_over()
    patience.end(1.0)
    patience.end(100.0)
    assert patience.left(30.0) == 1.0
    now[0] = 7.5
    assert is_over()


def test_commits_are_durable_whatever_the_server_is_configured_to(postgres_url: str) -> None:
    name = make_url(postgres_url).database
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = off')
    with closing(Database(postgres_url)) as database, database.write() as session:
        assert session.scalar(text("SHOW synchronous_commit")) == "on"


def test_an_absence_is_told_once_a_second_and_in_one_line(
    database: Database, line: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.cut()
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr("graftwork_platform.db._QUIET_S", 60.0)
        refused(database, 20)
        assert len(caplog.records) == 1
        patched.setattr("graftwork_platform.db._QUIET_S", 0.0)
        database._quiet_until = 0.0
        refused(database, 2)
        assert len(caplog.records) == 3
    for record in caplog.records:
        assert record.exc_info is None
        assert "\n" not in record.getMessage()


def refused(database: Database, times: int) -> None:
    for _ in range(times):
        with pytest.raises(DatabaseUnavailable):
            asyncio.run(database.run_read(names))
