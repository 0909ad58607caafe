"""Publishing in the background: validate and pack in a subprocess, store, then mark ready. Knows no HTTP and no tensors.

Blobs are stored before the version is marked ready, so a ready version always has its bytes; a crash in between leaves only blobs
that the next attempt finds in place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Protocol
from uuid import UUID

from sqlalchemy.exc import SQLAlchemyError

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.errors import AdapterTooLarge, BlobCorrupt, BlobNotFound, StoreError
from graftwork_adapters.keys import AdapterDigest, RowTypeName, packed_key, packed_path, upload_prefix
from graftwork_adapters.publish_job import MEMORY_CHECK, Limits, PublishJob, PublishResult
from graftwork_adapters.report import Report
from graftwork_adapters.scratch import scratch_folder, sweep_scratch
from graftwork_adapters.store import ObjectStore
from graftwork_platform.db import Database
from graftwork_platform.ids import show
from graftwork_platform.publishing import records
from graftwork_platform.publishing.incoming import Incoming
from graftwork_platform.settings import PublishLimits, UploadLimits

_log = logging.getLogger(__name__)

_SWEEP_EVERY = 600.0  # seconds


class RunPublish(Protocol):
    """`graftwork_adapters.publisher.run_publish`."""

    async def __call__(self, job: PublishJob, *, timeout_s: float, memory_bytes: int) -> PublishResult: ...


class Publisher:
    """Owns the publishing subprocesses. Belongs to one event loop: `start`, then `close`.

    ``now`` is Unix time in seconds. Deleted versions keep their blobs for ``delete_grace`` seconds, in which requests that had
    resolved them can still end.
    """

    def __init__(
        self,
        database: Database,
        store: ObjectStore,
        incoming: Incoming,
        spec: BaseSpec,
        *,
        row_type: RowTypeName,
        scratch: Path,
        run_publish: RunPublish,
        limits: PublishLimits,
        upload_limits: UploadLimits,
        delete_grace: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._store = store
        self._incoming = incoming
        self._spec = spec
        self._row_type: RowTypeName = row_type
        self._scratch = scratch
        self._run_publish = run_publish
        self._limits = limits
        self._upload_limits = upload_limits
        self._delete_grace = delete_grace
        self._now = now
        self._publishing = asyncio.Semaphore(limits.concurrency)
        self._rebuilding = asyncio.Semaphore(limits.concurrency)  # of its own: requests wait for these
        self._blobs = asyncio.Lock()  # a sweep must not delete what a publication just found in place
        self._tasks: set[asyncio.Task[None]] = set()
        self._rebuilds: dict[AdapterDigest, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Sweep what a crash left, take up unfinished publications again, and go on sweeping from time to time."""
        await asyncio.to_thread(sweep_scratch, self._scratch)
        await self._try_sweep()
        for upload_id in await self._database.run_read(records.unfinished):
            self.submit(upload_id)
        self._spawn(self._sweep_for_ever(), "sweep uploads")

    async def close(self) -> None:
        """Stop; running publications are taken up again at the next start."""
        tasks = [*self._tasks, *self._rebuilds.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, upload_id: UUID) -> None:
        """Publish a completed upload in the background."""
        self._spawn(self._publish(upload_id), f"publish {show('up', upload_id)}")

    async def is_stored(self, digest: AdapterDigest) -> bool:
        """True if both the upload and its packed form are in the store; false also for a store that does not answer."""
        path = packed_path(packed_key(digest, self._spec.base_id, self._row_type))

        def look() -> bool:
            try:
                return self._store.exists(path) and next(self._store.list_keys(upload_prefix(digest)), None) is not None
            except StoreError:
                return False

        return await asyncio.to_thread(look)

    async def ensure_packed(self, digest: AdapterDigest) -> None:
        """Build the packed form of ``digest`` again from its stored upload unless it is there; callers at once share one run.

        Raises `BlobNotFound` if the upload is gone too, `AdapterTooLarge` if this server's adapter memory can never hold it,
        `BlobCorrupt` if it is another one now or does not pass otherwise, or `StoreUnavailable`.
        """
        task = self._rebuilds.get(digest)
        if task is None:
            task = asyncio.create_task(self._rebuild(digest), name=f"rebuild {digest}")
            self._rebuilds[digest] = task
            task.add_done_callback(lambda _: self._rebuilds.pop(digest, None))
        await asyncio.shield(task)  # one caller's disconnect must not fail the others

    async def sweep(self) -> None:
        """Expire uploads that were never completed, and drop bytes that nothing needs any more."""
        now = int(self._now() * 1000)
        live = await self._database.run_write(lambda session: records.expire_uploads(session, now))
        await asyncio.to_thread(self._incoming.sweep, live, now)
        async with self._blobs:
            before = now - int(self._delete_grace * 1000)
            orphans = await self._database.run_read(lambda session: records.orphaned_digests(session, before))
            await asyncio.to_thread(self._delete_blobs, orphans)
            await self._database.run_write(lambda session: records.mark_deleted(session, before))

    async def _publish(self, upload_id: UUID) -> None:
        async with self._publishing:
            version_id, attempts = await self._database.run_write(lambda session: records.begin_attempt(session, upload_id))
            if attempts > self._limits.max_attempts:
                stopped = _failure(
                    "process", f"the server stopped {attempts - 1} times while it was validating this upload", "push it again"
                )
                await self._fail(upload_id, version_id, stopped)
                return
            with scratch_folder(self._scratch) as scratch:
                packed = scratch / "packed.safetensors"
                try:
                    result = await self._run(
                        PublishJob(self._incoming.files(upload_id), packed, self._spec, self._row_type, self._job_limits())
                    )
                    if result.ok:
                        await self._store_and_finish(upload_id, version_id, result, packed)
                    else:
                        await self._fail(upload_id, version_id, result.report)
                except (OSError, StoreError) as error:
                    _log.exception("publishing %s failed", show("up", upload_id))
                    await self._fail(upload_id, version_id, _failure("store", _without_paths(error), "push it again"))

    async def _store_and_finish(self, upload_id: UUID, version_id: UUID, result: PublishResult, packed: Path) -> None:
        async with self._blobs:
            await asyncio.to_thread(self._put, self._incoming.files(upload_id), result, packed)
            now = int(self._now() * 1000)
            await self._database.run_write(lambda session: records.finish(session, upload_id, version_id, result, now))
        await asyncio.to_thread(self._incoming.drop, upload_id)

    async def _fail(self, upload_id: UUID, version_id: UUID, report: Report) -> None:
        await self._database.run_write(lambda session: records.fail(session, upload_id, version_id, report))
        await asyncio.to_thread(self._incoming.drop, upload_id)

    async def _rebuild(self, digest: AdapterDigest) -> None:
        if await asyncio.to_thread(self._store.exists, packed_path(packed_key(digest, self._spec.base_id, self._row_type))):
            return
        async with self._rebuilding:
            with scratch_folder(self._scratch) as scratch:
                upload, packed = scratch / "upload", scratch / "packed.safetensors"
                await asyncio.to_thread(self._fetch_upload, digest, upload)
                result = await self._run(PublishJob(upload, packed, self._spec, self._row_type, self._job_limits(), digest))
                if not result.ok or result.packed_key is None:
                    raise _cannot_pack(digest, result.report)
                await asyncio.to_thread(self._store.put_if_absent, packed_path(result.packed_key), packed)

    async def _run(self, job: PublishJob) -> PublishResult:
        return await self._run_publish(job, timeout_s=self._limits.timeout, memory_bytes=self._limits.memory_bytes)

    def _job_limits(self) -> Limits:
        return Limits(
            max_rank=self._limits.max_rank,
            max_upload_bytes=self._upload_limits.max_bytes,
            max_files=self._upload_limits.max_files,
            require_base_name=self._limits.require_base_name,
            memory=self._limits.memory,
        )

    def _put(self, folder: Path, result: PublishResult, packed: Path) -> None:
        if result.digest is None or result.packed_key is None:
            raise AssertionError("a passed upload has a digest and a packed key")
        for path in result.files:
            self._store.put_if_absent(upload_prefix(result.digest) + path, folder / path)
        self._store.put_if_absent(packed_path(result.packed_key), packed)

    def _fetch_upload(self, digest: AdapterDigest, folder: Path) -> None:
        keys = list(self._store.list_keys(upload_prefix(digest)))
        if not keys:
            raise BlobNotFound(f"the store has no upload {digest}")
        for key in keys:
            dest = folder / key.removeprefix(upload_prefix(digest))
            dest.parent.mkdir(parents=True, exist_ok=True)
            self._store.fetch(key, dest)

    def _delete_blobs(self, digests: list[AdapterDigest]) -> None:
        for digest in digests:
            self._store.delete(packed_path(packed_key(digest, self._spec.base_id, self._row_type)))
            for key in list(self._store.list_keys(upload_prefix(digest))):
                self._store.delete(key)

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_EVERY)
            await self._try_sweep()

    async def _try_sweep(self) -> None:
        try:
            await self.sweep()
        except (OSError, StoreError, SQLAlchemyError):  # a store that is away must not keep the rest from being served
            _log.exception("the sweep failed; it will be tried again")

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task %r ended", task.get_name(), exc_info=error)


def _failure(check: str, message: str, fix: str) -> Report:
    report = Report()
    report.fail(check, None, message, fix)
    return report


def _cannot_pack(digest: AdapterDigest, report: Report) -> AdapterTooLarge | BlobCorrupt:
    failure = next((finding for finding in report.findings if finding.result == "fail"), None)
    if failure is not None and failure.check == MEMORY_CHECK:
        return AdapterTooLarge(f"adapter {digest} does not fit this server: {failure.message}; {failure.fix}")
    reason = "no reason was given" if failure is None else failure.message
    return BlobCorrupt(f"the stored upload {digest} cannot be packed: {reason}")


def _without_paths(error: OSError | StoreError) -> str:
    reason = error.strerror or type(error).__name__ if isinstance(error, OSError) else error
    return f"the server could not store the adapter: {reason}"
