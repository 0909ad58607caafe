"""The object store in a bucket of S3, or of a server that speaks its language. Knows nothing of what the blobs hold.

Needs conditional writes (``If-None-Match``), which AWS has. SeaweedFS 4.48 has them too, but looks and completes an upload in
parts in two steps: writers that complete the same key at the same moment may both be told that they wrote, and the last one's
bytes stay. Keys name their contents, so those are the same bytes.

The bucket should have a lifecycle rule that removes unfinished multipart uploads: a process killed in the middle of one leaves
its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork_adapters.errors import BlobNotFound
from graftwork_adapters.s3_budget import Budget
from graftwork_adapters.s3_client import S3Limits, connect, parse_location
from graftwork_adapters.s3_download import Download, local_disk
from graftwork_adapters.s3_upload import Upload
from graftwork_adapters.store import StoreConfig, check_key, check_prefix, is_key

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef


CHECK_LIMITS = S3Limits(connect_timeout=3.0, read_timeout=4.0, deadline=10.0, max_attempts=3)
"""For someone who waits for the answer."""


DELETE_DEADLINE_S = 30.0
"""A deletion has no bytes to move."""


class S3Store:
    """An `ObjectStore` in ``s3://BUCKET[/PREFIX]``; any number of threads and processes may share it.

    Every method ends by its deadline (`S3Limits`), with `StoreUnavailable` if need be: requests are tried again after 408, 429,
    5xx, broken connections and short answers, never after 403 or 404. Opening asks the server nothing; `check` does.
    """

    def __init__(self, config: StoreConfig, limits: S3Limits | None = None, client: S3Client | None = None) -> None:
        """``client`` is one of `connect`'s for the same server, to be shared; by default a new one. Raises `UnsupportedStore`."""
        location = parse_location(config.url)
        self._bucket, self._prefix = location.bucket, location.prefix
        self._limits = limits or S3Limits()
        self._client = client or connect(config, self._limits)

    def check(self) -> None:
        """Raises `StoreError` unless the bucket is there and lets us list it; changes nothing."""
        bucket, prefix = self._bucket, self._prefix
        Budget(self._limits).run("check", prefix, lambda: self._client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1))

    def put_if_absent(self, key: str, source: Path) -> bool:
        """See `ObjectStore.put_if_absent`. Large files go in parts, several at once; those of an upload that fails are removed."""
        name = self._name(key)
        with local_disk():
            file = source.open("rb")
        with file:
            return Upload(self._client, self._limits, Budget(self._limits), self._bucket, name).send(file, key)

    def fetch(self, key: str, dest: Path) -> None:
        """See `ObjectStore.fetch`. Length and SHA-256 are checked; `BlobCorrupt` if the store keeps sending the wrong bytes."""
        name = self._name(key)
        budget = Budget(self._limits)
        with local_disk():
            file = dest.open("xb")
        is_whole = False
        try:
            with file:
                budget.run("get", key, Download(self._client, self._bucket, name, file, budget).attempt)
                with local_disk():
                    file.flush()
            is_whole = True
        finally:
            if not is_whole:
                with suppress(OSError):
                    dest.unlink()

    def exists(self, key: str) -> bool:
        """See `ObjectStore.exists`."""
        name = self._name(key)
        try:
            Budget(self._limits).run("head", key, lambda: self._client.head_object(Bucket=self._bucket, Key=name))
        except BlobNotFound:
            return False
        return True

    def list_keys(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_keys`. The deadline is each page's."""
        check_prefix(prefix)
        return self._sorted_keys(prefix)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`. Ends early: who deletes has told others for how long they must wait."""
        name = self._name(key)
        limits = replace(self._limits, deadline=min(self._limits.deadline, DELETE_DEADLINE_S))
        Budget(limits).run("delete", key, lambda: self._client.delete_object(Bucket=self._bucket, Key=name))

    def _name(self, key: str) -> str:
        check_key(key)
        return self._prefix + key

    def _sorted_keys(self, prefix: str) -> Iterator[str]:
        # All pages come first, since servers that keep keys as paths list "a/b" before "a-b".
        names = [name.removeprefix(self._prefix) for name in self._names(self._prefix + prefix)]
        yield from sorted(name for name in names if name.startswith(prefix) and is_key(name))

    def _names(self, prefix: str) -> Iterator[str]:
        token: str | None = None
        while True:
            page = Budget(self._limits).run("list", prefix, partial(self._page, prefix, token))
            yield from (item["Key"] for item in page.get("Contents", []))
            token = page.get("NextContinuationToken")
            if token is None:
                return

    def _page(self, prefix: str, token: str | None) -> ListObjectsV2OutputTypeDef:
        size = self._limits.page_size
        if token is None:
            return self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=size)
        return self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=size, ContinuationToken=token)
