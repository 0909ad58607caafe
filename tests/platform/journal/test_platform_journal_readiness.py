"""What an operator sees of a journal that cannot be written, and that recovery runs in the background of a whole application."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass, field
from unittest.mock import MagicMock

import pytest
from journal_bench import Engine, engine_ids_of, make_row
from starlette.testclient import TestClient

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.stores import open_store
from graftwork_platform.app import create_app
from graftwork_platform.context import Services, build_services
from graftwork_platform.journal.records import MAGIC, Open, encode_record
from graftwork_platform.journal.segments import JournalFolder
from graftwork_platform.settings import Settings


@dataclass
class LivingEngine(Engine):
    """An engine as an application holds it."""

    healthy: bool = True
    info: None = None
    stats: dict[str, float] = field(default_factory=dict)

    async def __aenter__(self) -> LivingEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


def application(settings: Settings, spec: BaseSpec, engine: LivingEngine) -> tuple[Services, TestClient]:
    services = build_services(settings, spec, open_store(settings.store))
    return services, TestClient(create_app(services, engine, MagicMock()))


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_a_journal_that_cannot_be_written_makes_the_server_unready_until_it_can(
    data_settings: Settings, bare_spec: BaseSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, client = application(data_settings, bare_spec, LivingEngine())

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with client:
        assert client.get("/readyz").status_code == 200
        assert "graftwork_usage_journal_failed 0.0" in client.get("/metrics").text
        with monkeypatch.context() as patch:
            patch.setattr("graftwork_platform.journal.segments.os.write", full)
            services.usage._fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            answer = client.get("/readyz")
            assert (answer.status_code, answer.json()) == (
                503,
                {"status": "the usage journal cannot be written: No space left on device"},
            )
            shown = client.get("/metrics").text
        assert "graftwork_usage_journal_failed 1.0" in shown
        for name in ("journal_bytes", "unwritten_rows", "oldest_unwritten_seconds", "running_requests"):
            assert f"\ngraftwork_usage_{name} " in shown
        deadline = time.monotonic() + 60
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_an_application_recovers_what_an_earlier_one_left(data_settings: Settings, bare_spec: BaseSpec) -> None:
    row = make_row()
    folder = JournalFolder.create(data_settings.data_dir / "journal")
    folder.start_segment(MAGIC + encode_record(Open(row, tuple(engine_ids_of(row))))).close()
    folder.release()
    engine = LivingEngine(counts={engine_ids_of(row)[0]: 3})
    _, client = application(data_settings, bare_spec, engine)
    with client:
        deadline = time.monotonic() + 60
        while folder.path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert engine.settled == set(engine_ids_of(row))
