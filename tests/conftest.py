"""Real servers for tests, started once a run and only if a test asks for them: PostgreSQL, and S3 by SeaweedFS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import uuid4

import pytest

from dev_servers import postgres, seaweedfs
from graftwork_adapters.store import StoreConfig

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
"""Read when OpenMP is loaded, for child processes too. Its own number makes a waiting thread hold a core that others want: tests on
few cores then take several times as long."""

os.environ.setdefault("TRITON_INTERPRET", "1")
"""Read when triton is imported. Without a GPU its kernels run in the interpreter; TRITON_INTERPRET=0 for tests on a GPU."""

pytest_plugins = ["compiled_kernels", "property_budget", "serving", "steady_clock"]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweedfs.S3Server]:
    """An S3 server with one bucket; its credentials are in the environment, where boto3 and child processes look."""
    with (
        seaweedfs.running(tmp_path_factory.mktemp("s3")) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def s3_config(s3_server: seaweedfs.S3Server) -> StoreConfig:
    """A store of its own for one test."""
    return StoreConfig(f"s3://{s3_server.bucket}/{uuid4().hex}", s3_endpoint=s3_server.endpoint)


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[postgres.PostgresServer]:
    """A PostgreSQL server; `new_database` makes databases on it."""
    with postgres.running(tmp_path_factory.mktemp("pg")) as server:
        yield server
