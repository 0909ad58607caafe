"""One file to S3 under a key that must be new, in one request or in parts. Leaves no parts behind when it fails."""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import os
import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from graftwork_adapters.errors import InvalidKey, StoreError
from graftwork_adapters.s3_budget import Budget
from graftwork_adapters.s3_client import S3Limits
from graftwork_adapters.s3_download import SHA256_METADATA, local_disk
from graftwork_adapters.s3_failures import Clash, code_of, status_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

_log = logging.getLogger(__name__)

_WRITER_METADATA = "writer"
_MAX_PARTS = 10_000


class Upload:
    """One call of ``put_if_absent``.

    When an answer is lost, the next attempt finds its own blob in the way. So every call marks what it writes with a name of
    its own, and looks at that mark before it says who wrote: of any number of writers, with the same bytes or not, at most one
    is told that it was the one.
    """

    def __init__(self, client: S3Client, limits: S3Limits, budget: Budget, bucket: str, name: str) -> None:
        self._client = client
        self._limits = limits
        self._budget = budget
        self._bucket = bucket
        self._name = name
        self._writer = uuid.uuid4().hex

    def send(self, file: io.BufferedReader, key: str) -> bool:
        """The file's bytes under the key; true if this call wrote them. Raises `StoreError`; ``key`` is for its text."""
        with local_disk():
            num_bytes = os.fstat(file.fileno()).st_size
            sha256 = hashlib.file_digest(file, "sha256").digest()
        self._budget.extend(num_bytes)
        if num_bytes <= self._limits.multipart_threshold:
            return self._budget.run("put", key, lambda: self._send_whole(file.fileno(), num_bytes, sha256))
        if self._budget.run("look", key, self._is_ours) is not None:  # before gigabytes are sent in vain
            return False
        return self._budget.run("put in parts", key, lambda: self._send_parts(file.fileno(), num_bytes, sha256, key))

    def _send_whole(self, descriptor: int, num_bytes: int, sha256: bytes) -> bool:
        def put() -> None:
            self._client.put_object(
                Bucket=self._bucket,
                Key=self._name,
                Body=_Body(_read(descriptor, 0, num_bytes), self._budget),
                IfNoneMatch="*",
                ChecksumSHA256=base64.b64encode(sha256).decode(),
                Metadata=self._metadata(sha256),
            )

        try:
            return self._written_by(put)
        except _MustStartAgain as error:
            raise Clash("the key was taken, and then it was not") from error

    def _send_parts(self, descriptor: int, num_bytes: int, sha256: bytes, key: str) -> bool:
        created = self._budget.run(
            "create multipart",
            key,
            lambda: self._client.create_multipart_upload(
                Bucket=self._bucket, Key=self._name, ChecksumAlgorithm="SHA256", Metadata=self._metadata(sha256)
            ),
        )
        upload_id, is_ours = created["UploadId"], False
        try:
            parts = self._send_each(descriptor, num_bytes, upload_id, key)

            def complete() -> None:
                self._client.complete_multipart_upload(
                    Bucket=self._bucket, Key=self._name, UploadId=upload_id, IfNoneMatch="*", MultipartUpload={"Parts": parts}
                )

            try:
                is_ours = self._budget.run("complete multipart", key, lambda: self._written_by(complete))
            except _MustStartAgain as error:
                raise Clash("another request came between the parts and their completion") from error
        finally:
            if not is_ours:
                self._abort(upload_id, key)
        return is_ours

    def _send_each(self, descriptor: int, num_bytes: int, upload_id: str, key: str) -> list[CompletedPartTypeDef]:
        part_bytes = max(self._limits.part_bytes, -(-num_bytes // _MAX_PARTS))

        def send(index: int) -> CompletedPartTypeDef:
            start = index * part_bytes
            data = _read(descriptor, start, min(part_bytes, num_bytes - start))
            checksum = base64.b64encode(hashlib.sha256(data).digest()).decode()
            answer = self._budget.run(
                f"part {index + 1}",
                key,
                lambda: self._client.upload_part(
                    Bucket=self._bucket,
                    Key=self._name,
                    UploadId=upload_id,
                    PartNumber=index + 1,
                    Body=_Body(data, self._budget),
                    ChecksumSHA256=checksum,
                ),
            )
            return {"PartNumber": index + 1, "ETag": answer["ETag"], "ChecksumSHA256": checksum}

        num_parts = -(-num_bytes // part_bytes)
        with ThreadPoolExecutor(self._limits.part_concurrency, thread_name_prefix="s3-part") as threads:
            parts = [threads.submit(send, index) for index in range(num_parts)]
            done, _ = wait(parts, return_when=FIRST_EXCEPTION)
            failed = next((part for part in done if part.exception() is not None), None)
            if failed is not None:
                self._budget.cut()
                threads.shutdown(cancel_futures=True)
                failed.result()
        return [part.result() for part in parts]

    def _written_by(self, request: Callable[[], None]) -> bool:
        """True if the request, or an earlier one of this call whose answer was lost, made the blob; false if it was there."""
        try:
            request()
        except ClientError as error:
            if status_of(error) not in (409, 412) and code_of(error) != "NoSuchUpload":
                raise
            is_ours = self._is_ours()
            if is_ours is None:
                self._check_not_a_prefix()
                raise _MustStartAgain from error
            return is_ours
        return True

    def _is_ours(self) -> bool | None:
        """Whether this call wrote the blob that is there; None if there is none."""
        try:
            found = self._client.head_object(Bucket=self._bucket, Key=self._name)
        except ClientError as error:
            if status_of(error) == 404:
                return None
            raise
        return found["Metadata"].get(_WRITER_METADATA) == self._writer

    def _check_not_a_prefix(self) -> None:
        """Servers that keep keys as paths of a file system say that a prefix of other keys is there, though it is no blob."""
        below = self._client.list_objects_v2(Bucket=self._bucket, Prefix=f"{self._name}/", MaxKeys=1)
        if below.get("Contents"):
            raise InvalidKey("a key cannot be a prefix of other keys")

    def _abort(self, upload_id: str, key: str) -> None:
        try:
            Budget(self._limits).run(
                "abort multipart",
                key,
                lambda: self._client.abort_multipart_upload(Bucket=self._bucket, Key=self._name, UploadId=upload_id),
            )
        except StoreError:
            _log.warning("parts of %s may be left in the bucket; a lifecycle rule removes those of unfinished uploads", key)

    def _metadata(self, sha256: bytes) -> dict[str, str]:
        return {SHA256_METADATA: sha256.hex(), _WRITER_METADATA: self._writer}


class _MustStartAgain(Exception):
    """The key is neither free nor taken, or the upload is gone: the parts that were sent are of no more use."""


class _Body(io.BytesIO):
    """Bytes to send, which break off when the call's time is over: a slow reader at the other end is never silent."""

    def __init__(self, data: bytes, budget: Budget) -> None:
        super().__init__(data)
        self._budget = budget

    def read(self, size: int | None = -1, /) -> bytes:
        self._budget.check()
        return super().read(size)


def _read(descriptor: int, start: int, num_bytes: int) -> bytes:
    """Exactly these bytes of a file."""
    with local_disk():
        data = os.pread(descriptor, num_bytes, start)
        if len(data) != num_bytes:
            raise OSError("the file changed while it was sent")
    return data
