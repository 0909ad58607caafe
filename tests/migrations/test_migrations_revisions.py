"""The revisions make exactly the models' tables, go down and up again with data, and leave a newer database alone."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import CheckConstraint, create_engine, inspect, select

from graftwork_migrations import runner
from graftwork_migrations.__main__ import main
from graftwork_platform.db import Database, UnsupportedDatabase
from graftwork_platform.models import Base, Tenant


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/deep/graftwork.db"


def file_of(url: str) -> str:
    return url.removeprefix("sqlite:///")


def test_the_newest_revision_equals_the_models(url: str) -> None:
    runner.upgrade(url)
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
        for table in Base.metadata.sorted_tables:  # autogenerate does not look at these
            found = {(c["name"], c["sqltext"]) for c in inspect(connection).get_check_constraints(table.name)}
            wanted = {(str(c.name), str(c.sqltext)) for c in table.constraints if isinstance(c, CheckConstraint)}
            assert found == wanted
    engine.dispose()


def test_down_and_up_again_with_data(url: str) -> None:
    runner.upgrade(url)
    database = Database(url)
    with database.write() as session:
        session.add(Tenant(id=UUID(int=1), name="acme", created_at=1))
    runner.upgrade(url)
    with database.read() as session:
        assert session.scalars(select(Tenant.name)).all() == ["acme"]
    database.close()
    runner.downgrade(url, runner.BASE)
    assert runner.current(url) is None
    with sqlite3.connect(file_of(url)) as connection:
        assert {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")} == {
            "alembic_version"
        }
    runner.upgrade(url)
    assert runner.current(url) == runner.head()


def test_a_newer_database_is_left_alone(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    runner.upgrade(url)
    with sqlite3.connect(file_of(url)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(runner.NewerDatabase, match="9999"):
        runner.upgrade(url)
    with pytest.raises(runner.NewerDatabase, match="9999"):
        runner.downgrade(url, runner.BASE)
    assert main(["upgrade", "--database-url", url]) == 2
    assert "newer" in capsys.readouterr().err
    assert runner.current(url) == "9999"


def test_a_step_that_fails_leaves_nothing_half_made(url: str) -> None:
    path = Path(file_of(url))
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE uploads (x INTEGER)")
    with pytest.raises(Exception, match="uploads"):
        runner.upgrade(url)
    with sqlite3.connect(path) as connection:
        assert [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")] == ["uploads"]


def test_the_command_says_where_a_database_is_and_moves_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def current() -> str:
        assert main(["current", "--database-url", url]) == 0
        return capsys.readouterr().out

    assert current() == f"{runner.BASE} {runner.head()}\n"
    assert main(["upgrade", "--database-url", url]) == 0
    assert current() == f"{runner.head()} {runner.head()}\n"
    assert main(["downgrade", "--database-url", url, "--revision", runner.BASE]) == 0
    assert current() == f"{runner.BASE} {runner.head()}\n"
    assert main(["upgrade", "--database-url", "postgresql://h/d"]) == 2


def test_the_command_runs_in_a_process_of_its_own_and_prints_nothing(url: str) -> None:
    arguments = [sys.executable, "-m", "graftwork_migrations", "upgrade", "--database-url", url]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert runner.current(url) == runner.head()


def test_other_databases_are_refused() -> None:
    with pytest.raises(UnsupportedDatabase):
        runner.upgrade("sqlite://")
