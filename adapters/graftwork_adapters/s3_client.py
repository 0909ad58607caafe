"""Where an S3 store is and how it is spoken to: location, limits and the boto3 client. Sends no request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, PartialCredentialsError

from graftwork_adapters.errors import UnsupportedStore
from graftwork_adapters.s3_failures import failure_of
from graftwork_adapters.store import StoreConfig, is_key

if TYPE_CHECKING:  # the stubs are a development requirement
    from mypy_boto3_s3.client import S3Client

MIB = 1 << 20

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MAX_PREFIX_BYTES = 200  # with the longest key, below S3's 1024


@dataclass(frozen=True, slots=True)
class S3Limits:
    """Sizes in bytes, times in seconds.

    A call of the store ends ``deadline`` after its start, or later by the time its bytes take at ``slowest_rate``; a request
    whose answer could come later than that is not sent. S3 takes parts from 5 MiB (but for the last) to 5 GiB, and 10,000 of them.
    """

    multipart_threshold: int = 16 * MIB  # files up to this size are sent in one request
    part_bytes: int = 8 * MIB
    part_concurrency: int = 4
    page_size: int = 1000  # keys of one answer to a listing
    max_connections: int = 64
    connect_timeout: float = 5.0
    read_timeout: float = 20.0  # between two pieces of an answer
    deadline: float = 60.0
    slowest_rate: float = 1.0 * MIB  # bytes per second
    max_attempts: int = 6
    first_delay: float = 0.1
    longest_delay: float = 5.0


@dataclass(frozen=True, slots=True)
class S3Location:
    """``s3://BUCKET[/PREFIX]``; ``prefix`` is empty or ends in ``/``."""

    bucket: str
    prefix: str


def parse_location(url: str) -> S3Location:
    """Raises `UnsupportedStore` for what is not ``s3://BUCKET[/PREFIX]``."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.rstrip("/")
    if not _BUCKET.fullmatch(bucket):  # not repeated: people write credentials here
        raise UnsupportedStore(
            "the bucket in the store's URL is not the name of an S3 bucket; write s3://BUCKET or s3://BUCKET/PREFIX"
        )
    if prefix and not (is_key(prefix) and len(prefix.encode()) <= _MAX_PREFIX_BYTES):
        raise UnsupportedStore(f"the prefix in the store's URL is not a path of names, of at most {_MAX_PREFIX_BYTES} bytes in all")
    return S3Location(bucket, f"{prefix}/" if prefix else "")


def connect(config: StoreConfig, limits: S3Limits) -> S3Client:
    """A client that asks once, since retries are `s3_budget`'s. Thread-safe. Raises `UnsupportedStore`, or `StoreUnavailable`
    for half of a key pair.
    """
    _check_endpoint(config.s3_endpoint)
    if config.s3_ca_bundle is not None and not Path(config.s3_ca_bundle).is_file():
        raise UnsupportedStore("the CA bundle of the S3 endpoint is not a file that can be read")
    path_style = config.s3_path_style
    if path_style is None and config.s3_endpoint is not None:
        path_style = True
    options = Config(
        connect_timeout=limits.connect_timeout,
        read_timeout=limits.read_timeout,
        max_pool_connections=limits.max_connections,
        retries={"total_max_attempts": 1, "mode": "standard"},
        tcp_keepalive=True,
        # The blobs' own checksums are sent and checked; trailing ones are not understood by every server.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "auto" if path_style is None else "path" if path_style else "virtual"},
    )
    try:
        session = boto3.session.Session()
        return session.client(
            "s3",
            region_name=config.s3_region or session.region_name or "us-east-1",
            endpoint_url=config.s3_endpoint,
            verify=config.s3_ca_bundle,
            config=options,
        )
    except PartialCredentialsError as error:
        raise failure_of(error, "").error from error
    except (BotoCoreError, ValueError) as error:
        raise UnsupportedStore(f"the configuration of the S3 store cannot be used: {error}") from error


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        is_right = False
    if not is_right or "@" in endpoint or "?" in endpoint or "#" in endpoint:
        raise UnsupportedStore("the S3 endpoint is not of the form http://HOST[:PORT] or https://HOST[:PORT]")
