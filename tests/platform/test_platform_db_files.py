"""Where the database and the secrets lie, whatever the data directory is called, and who may read them."""

from __future__ import annotations

import os
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from graftwork_migrations.__main__ import main as migrate
from graftwork_migrations.runner import upgrade
from graftwork_platform.db import Database
from graftwork_platform.db_url import UnsupportedDatabase, check_url, sqlite_path
from graftwork_platform.ids import uuid7
from graftwork_platform.models import Tenant
from graftwork_platform.serve.command import CannotServe, _migrate
from graftwork_platform.settings import Settings


def test_the_database_file_lies_in_the_data_directory(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, model_dir=tmp_path / "base")
    assert sqlite_path(check_url(settings.database)) == tmp_path / "graftwork.db"
    assert settings.base_name == "base"


def test_secrets_lie_in_the_data_directory_or_where_they_are_said_to(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, model_dir=tmp_path)
    assert settings.secrets_dir == tmp_path / "secrets"
    assert replace(settings, secrets_path=tmp_path / "mounted").secrets_dir == tmp_path / "mounted"


@pytest.mark.parametrize("name", ["t 5?#x%20", "%3F", "Größe ü", "a:b@c", "a+b&c=d", "file:x?mode=memory"])
def test_a_data_directory_may_have_any_name(tmp_path: Path, name: str) -> None:
    settings = Settings(data_dir=tmp_path / name, model_dir=tmp_path)
    assert migrate(["upgrade", "--database-url", settings.database]) == 0
    database = Database(settings.database)
    with database.write() as session:
        session.add(Tenant(id=uuid7(), name="a", created_at=0))
    database.close()
    file = tmp_path / name / "graftwork.db"
    assert sqlite_path(check_url(settings.database)) == file
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT name FROM tenants").fetchall() == [("a",)]
    connection.close()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_question_mark_that_is_not_escaped_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedDatabase, match="%3F"):
        upgrade(f"sqlite:///{tmp_path}/a?b/graftwork.db")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_keeps_the_server_from_starting_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "graftwork.db").write_text("no database " * 500)
    with pytest.raises(CannotServe, match="no SQLite database") as refused:
        _migrate(f"sqlite:///{tmp_path}/graftwork.db")
    assert "\n" not in str(refused.value)
    assert "Traceback" not in str(refused.value)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_database_files_are_their_owners_alone(tmp_path: Path, umask: int) -> None:
    settings = Settings(data_dir=tmp_path, model_dir=tmp_path)
    before = os.umask(umask)
    try:
        upgrade(settings.database)
        database = Database(settings.database)
        with database.write() as session:
            session.add(Tenant(id=uuid7(), name="a", created_at=0))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        database.close()
    finally:
        os.umask(before)
    assert modes == {"graftwork.db": 0o600, "graftwork.db-wal": 0o600, "graftwork.db-shm": 0o600}
