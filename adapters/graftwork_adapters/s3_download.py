"""One blob from S3 into a file: goes on where an answer broke off, and checks what has come. Retries are its caller's."""

from __future__ import annotations

import base64
import binascii
import hashlib
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, cast

from botocore.exceptions import ClientError

from graftwork_adapters.errors import StoreUnavailable
from graftwork_adapters.s3_budget import Budget
from graftwork_adapters.s3_failures import Clash, Damaged, Interrupted, status_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef
    from urllib3.response import BaseHTTPResponse

_PIECE_BYTES = 1 << 18

SHA256_METADATA = "sha256"
"""Where `put_if_absent` leaves the hex SHA-256 of the whole blob: S3's own checksums of large ones are per part."""


class Download:
    """A blob on its way into ``file``. Every `attempt` goes on from the last byte that came, of the same version of the blob."""

    def __init__(self, client: S3Client, bucket: str, name: str, file: IO[bytes], budget: Budget) -> None:
        self._client = client
        self._bucket = bucket
        self._name = name
        self._file = file
        self._budget = budget
        self._etag: str | None = None
        self._num_bytes = 0
        self._offset = 0
        self._sha256: str | None = None  # as stored; None if the store has none
        self._hash = hashlib.sha256()

    def attempt(self) -> None:
        """Raises what a request can, `Interrupted` for an answer that ends early and `Damaged` for the wrong bytes."""
        response = self._rest() if self._offset else self._whole()
        body = response["Body"]
        # Entering the body gives the connection's own reader, which hands out what has come without waiting for more: however
        # slowly bytes drip, the deadline is looked at.
        with body as entered:
            read1 = cast("BaseHTTPResponse", entered).read1
            while self._offset < self._num_bytes:
                piece = read1(_PIECE_BYTES)
                if not piece:
                    raise Interrupted(f"{self._offset} of {self._num_bytes} bytes came")
                self._take(piece)
                self._budget.check()
            read1(1)  # the end of the answer, which gives the connection back to the pool
        if self._sha256 is not None and self._hash.hexdigest() != self._sha256:
            self._start_again()
            raise Damaged(f"SHA-256 is not {self._sha256}")

    def _whole(self) -> GetObjectOutputTypeDef:
        self._start_again()
        response = self._client.get_object(Bucket=self._bucket, Key=self._name, ChecksumMode="ENABLED")
        self._etag, self._num_bytes = response["ETag"], response["ContentLength"]
        self._sha256 = response["Metadata"].get(SHA256_METADATA) or _plain_sha256(response.get("ChecksumSHA256"))
        self._budget.extend(self._num_bytes)
        return response

    def _rest(self) -> GetObjectOutputTypeDef:
        etag, wanted = cast(str, self._etag), f"bytes {self._offset}-{self._num_bytes - 1}/{self._num_bytes}"
        try:
            response = self._client.get_object(Bucket=self._bucket, Key=self._name, Range=f"bytes={self._offset}-", IfMatch=etag)
        except ClientError as error:
            if status_of(error) in (412, 416):
                self._start_again()
                raise Clash("the blob is no longer the one whose first bytes came") from error
            raise
        if response.get("ContentRange") != wanted:
            response["Body"].close()
            self._start_again()
            raise Interrupted(f"the answer is {response.get('ContentRange')}, not {wanted}")
        return response

    def _take(self, piece: bytes) -> None:
        piece = piece[: self._num_bytes - self._offset]
        with local_disk():
            self._file.write(piece)
        self._hash.update(piece)
        self._offset += len(piece)

    def _start_again(self) -> None:
        with local_disk():
            self._file.seek(0)
            self._file.truncate()
        self._offset, self._hash = 0, hashlib.sha256()


@contextmanager
def local_disk() -> Iterator[None]:
    """Makes an `OSError` of this machine's disk a `StoreUnavailable` that says so."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StoreUnavailable(f"this server's disk fails: {reason}", fix="free space, or fix the folder's owner") from error


def _plain_sha256(checksum: str | None) -> str | None:
    """Hex of S3's base64; None for a checksum of parts' checksums, which has a number behind it."""
    try:
        return None if checksum is None or "-" in checksum else base64.b64decode(checksum, validate=True).hex()
    except binascii.Error:
        return None
