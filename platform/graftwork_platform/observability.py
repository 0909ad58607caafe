"""What can be seen of a running server: the identity and fate of each request, and `/metrics`. Knows no routes' meaning."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from uuid import UUID

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftwork_platform.ids import show, uuid7
from graftwork_platform.usage import UsageRow

_log = logging.getLogger(__name__)

_MAX_CLIENT_ID_CHARS = 128
_MAX_READINGS = 256
_METRIC_NAME = re.compile(r"[a-z][a-z0-9_]{0,79}")
_NO_ROUTE = "unknown"
_PROBES = frozenset({"/livez", "/readyz", "/metrics"})  # asked every few seconds, and of no interest one by one
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


Stats = Callable[[], Mapping[str, float]]
"""A reading; names end in their unit, those of counters in ``_total``."""


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """A request as this server knows it. ``arrived`` is Unix time."""

    id: UUID
    arrived: float


def request_id_of(scope: Scope) -> RequestIdentity:
    """The identity that `RequestObserver` gave the request."""
    identity = scope["state"]["request_identity"]
    if not isinstance(identity, RequestIdentity):
        raise AssertionError("the request did not pass the observer")
    return identity


def client_request_id(scope: Scope) -> str | None:
    """The client's own ``X-Request-Id``, if it is printable ASCII of a reasonable length."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = str(value, "latin-1")[:_MAX_CLIENT_ID_CHARS]
            return text if text.isascii() and text.isprintable() and text else None
    return None


class Metrics:
    """This process's numbers. Labels are routes and statuses, never tenants or models, so their number is bounded."""

    def __init__(self, engine_stats: Stats, usage_stats: Stats = dict) -> None:
        """``engine_stats``: the engine's last reading of itself; ``usage_stats``: the usage journal's."""
        self._registry = CollectorRegistry()
        self._requests = Counter("graftwork_http_requests", "Requests answered.", ("route", "status"), registry=self._registry)
        self._seconds = Histogram(
            "graftwork_http_request_seconds",
            "From a request's arrival to the end of its answer.",
            ("route",),
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._generations = Counter(
            "graftwork_generations", "Requests handed to the engine, by how they ended.", ("status",), registry=self._registry
        )
        self._tokens = Counter(
            "graftwork_tokens", "Tokens in usage rows; cached ones are a part of the prompt's.", ("kind",), registry=self._registry
        )
        self._registry.register(_Readings("graftwork_engine", "As the engine last reported it.", engine_stats))
        self._registry.register(_Readings("graftwork_usage", "Of the usage journal.", usage_stats))

    def observe_answer(self, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def observe_usage(self, row: UsageRow) -> None:
        """Count a request that the engine was given."""
        self._generations.labels(row.status.value).inc()
        self._tokens.labels("prompt").inc(row.prompt_tokens)
        self._tokens.labels("cached").inc(row.cached_tokens)
        self._tokens.labels("output").inc(row.output_tokens)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class _Readings(Collector):
    """A part's readings of itself under ``prefix_…``; names that are none are left out."""

    def __init__(self, prefix: str, description: str, stats: Stats) -> None:
        self._prefix, self._description, self._stats = prefix, description, stats

    def collect(self) -> Iterable[Metric]:
        for name, value in sorted(self._stats().items())[:_MAX_READINGS]:
            if not _METRIC_NAME.fullmatch(name):
                continue
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(f"{self._prefix}_{name.removesuffix('_total')}", self._description, value=value)


class RequestObserver:
    """ASGI middleware: gives each request its identity, shows it in ``x-request-id``, and counts the answer.

    Plain ASGI, so that cancellation and back-pressure reach the routes as they are.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, now: Callable[[], float] = time.time) -> None:
        self._app = app
        self._metrics = metrics
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; anything but HTTP passes untouched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = RequestIdentity(uuid7(self._now), self._now())
        scope.setdefault("state", {})["request_identity"] = identity
        shown = show("req", identity.id)
        status = 499  # unless an answer begins, nobody was there to get one
        is_answered = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_answered
            if message["type"] == "http.response.body":
                await send(message)
                is_answered = not message.get("more_body", False)
                return
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", shown.encode())]
            await send(message)

        started = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if not is_answered:
                raise
            # Starlette answers 500 and raises again; let out, it would make the server close a connection that is in order.
            _log.exception("%s failed unexpectedly", shown)
        finally:
            seconds = time.perf_counter() - started
            self._metrics.observe_answer(_route_of(scope), status, seconds)
            level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
            _log.log(level, "%s %s %r %d %.3fs", shown, scope["method"], scope["path"], status, seconds)


def _route_of(scope: Scope) -> str:
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else _NO_ROUTE
