"""What the log says of requests: each one at INFO, the probes of an orchestrator at DEBUG."""

from __future__ import annotations

import logging

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from graftwork_platform.observability import Metrics, RequestObserver


@pytest.mark.parametrize(
    ("path", "level"),
    [
        ("/livez", logging.DEBUG),
        ("/readyz", logging.DEBUG),
        ("/metrics", logging.DEBUG),
        ("/v1/models", logging.INFO),
        ("/metrics/x", logging.INFO),
    ],
)
def test_probes_are_logged_more_quietly_than_requests(path: str, level: int, caplog: pytest.LogCaptureFixture) -> None:
    client = TestClient(RequestObserver(PlainTextResponse("yes"), Metrics(dict)))
    with caplog.at_level(logging.DEBUG, "graftwork_platform.observability"):
        answer = client.get(path)
    [record] = [record for record in caplog.records if record.name == "graftwork_platform.observability"]
    assert record.levelno == level
    assert answer.headers["x-request-id"] in record.message
    assert path in record.message
