"""A proxy between a store and the S3 server that answers as broken servers and networks do."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config

from graftwork_adapters.s3_client import MIB, S3Limits, connect
from graftwork_adapters.s3_store import S3Store
from graftwork_adapters.store import StoreConfig

Answer = tuple[int, list[tuple[str, str]], bytes]  # status, headers, body

LIMITS = S3Limits(
    multipart_threshold=5 * MIB,
    part_bytes=5 * MIB,
    connect_timeout=20,
    read_timeout=20,
    deadline=90,
    first_delay=0.01,
    longest_delay=0.05,
    max_attempts=4,
)
"""For calls that pass in the end: no limit of time that a machine which stalls could meet."""
HASTY = replace(LIMITS, connect_timeout=5, read_timeout=0.3, deadline=1.0, slowest_rate=100 * MIB)


@dataclass
class Fault:
    """What happens to the next ``times`` requests of this method whose target holds ``part``; ``at`` is a byte of the body.

    Kinds: an HTTP status, ``reset`` (before the server sees it), ``lost`` (after), ``hang``, ``cut``, ``damage``, ``drip``
    (a byte at a time), ``whole`` (the range is ignored), ``garble`` (what is sent to the server).
    """

    kind: int | str
    method: str = ""
    part: str = ""
    times: int = 1
    at: int = 0

    def strike(self) -> None:
        """What else happens at that moment."""


@dataclass
class Proxy:
    endpoint: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)  # method; target, or for a GET of a range the range
    released: threading.Event = field(default_factory=threading.Event)
    whole: Answer | None = None
    mute: bool = False  # a hang holds back the whole answer

    def fault_for(self, method: str, target: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and method.startswith(fault.method) and fault.part in target:
                fault.times -= 1
                fault.strike()
                return fault
        return None

    def methods(self) -> list[str]:
        return [method for method, _ in self.requests]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def relay(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        proxy.requests.append((self.command, self.headers.get("Range", self.path)))
        fault = proxy.fault_for(self.command, self.path)
        kind = None if fault is None else fault.kind
        if kind == "garble":
            body, fault = bytes([body[0] ^ 1]) + body[1:], None
        if isinstance(kind, int):
            code = {403: b"AccessDenied", 409: b"ConditionalRequestConflict", 503: b"SlowDown"}.get(kind, b"Odd")
            self.answer((kind, [], b"<Error><Code>%s</Code></Error>" % code))
        elif kind == "reset":
            self.reset()
        elif kind == "hang" and proxy.mute:
            proxy.released.wait()
        elif kind == "whole":
            assert proxy.whole is not None
            self.answer(proxy.whole)
        else:
            answer = self.forward(body)
            if self.command == "GET" and "Range" not in self.headers:
                proxy.whole = answer
            if kind == "lost":
                self.reset()
            elif fault is None:
                self.answer(answer)
            else:
                self.spoil(answer, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = relay

    def forward(self, body: bytes) -> Answer:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection"):
                connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        headers = [pair for pair in response.getheaders() if pair[0].lower() not in ("connection", "transfer-encoding")]
        content = response.read()
        connection.close()
        return response.status, headers, content

    def answer(self, answer: Answer) -> None:
        self.begin(answer)
        self.wfile.write(b"" if self.command == "HEAD" else answer[2])

    def begin(self, answer: Answer) -> None:
        status, headers, body = answer
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()

    def spoil(self, answer: Answer, fault: Fault) -> None:
        """Sends a part of the body as it is and the rest as the fault says."""
        self.begin(answer)
        body, released = answer[2], self.server.proxy.released
        at = fault.at if fault.at >= 0 else len(body) + fault.at
        self.wfile.write(body[:at])
        if fault.kind == "damage":
            self.wfile.write(bytes([body[at] ^ 1]) + body[at + 1 :])
        elif fault.kind == "hang":
            released.wait()
        elif fault.kind == "drip":
            for byte in body[at:]:
                self.wfile.write(bytes([byte]))
                if released.wait(0.05):
                    break
        self.close_connection = fault.kind != "damage"

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def handle(self) -> None:
        with suppress(OSError):  # the client has gone
            super().handle()

    def log_message(self, *arguments: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.proxy, self.upstream = Proxy(), urlsplit(upstream).netloc

    def shutdown_request(self, request: Any) -> None:
        self.close_request(request)  # without the polite end that comes before it by default, so a reset is one


@pytest.fixture(scope="session")
def proxy_server(s3_server) -> Iterator[Server]:
    with Server(s3_server.endpoint) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(proxy_server) -> Iterator[Proxy]:
    """The proxy, without faults and with no request seen so far."""
    proxy_server.proxy = Proxy(f"http://127.0.0.1:{proxy_server.server_port}")
    yield proxy_server.proxy
    proxy_server.proxy.released.set()


@pytest.fixture(scope="session")
def client_of(s3_server) -> Callable[[str, S3Limits], Any]:
    """Clients by server and limits: one takes a while to make."""
    return cache(lambda endpoint, limits: connect(StoreConfig("s3://any", s3_endpoint=endpoint), limits))


@pytest.fixture
def store(s3_config, client_of) -> S3Store:
    """Straight to the server."""
    return S3Store(s3_config, LIMITS, client_of(s3_config.s3_endpoint, LIMITS))


@pytest.fixture
def through(s3_config, proxy, client_of) -> Callable[..., S3Store]:
    """The same store by way of the proxy."""
    config = replace(s3_config, s3_endpoint=proxy.endpoint)
    return lambda limits=LIMITS: S3Store(config, limits, client_of(proxy.endpoint, limits))


@pytest.fixture(scope="session")
def s3(s3_server) -> Any:
    """A plain client, for looking at the bucket."""
    return boto3.client(
        "s3", endpoint_url=s3_server.endpoint, region_name="us-east-1", config=Config(s3={"addressing_style": "path"})
    )


@pytest.fixture
def unfinished(s3, s3_server) -> Callable[[], list[str]]:
    """Multipart uploads that someone began and nobody ended."""
    return lambda: [upload["Key"] for upload in s3.list_multipart_uploads(Bucket=s3_server.bucket).get("Uploads", [])]


@pytest.fixture
def fault() -> type[Fault]:
    return Fault


@pytest.fixture
def limits() -> S3Limits:
    return LIMITS


@pytest.fixture
def hasty() -> S3Limits:
    """For servers that do not answer: a call ends within a second."""
    return HASTY
