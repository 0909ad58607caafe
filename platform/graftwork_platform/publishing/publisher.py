"""Publishing in the background: validate and pack in a subprocess, store, then mark ready. Knows no HTTP and no tensors.

Any server that shares the database takes up what nobody publishes, under a lease, so a server that dies delays a verdict and never
loses it. Blobs are stored before the version is marked ready, so a ready version always has its bytes; a crash in between leaves
only blobs that the next attempt finds in place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Protocol
from uuid import UUID

from sqlalchemy.exc import SQLAlchemyError

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.errors import AdapterTooLarge, BlobCorrupt, StoreError, StoreUnavailable
from graftwork_adapters.keys import AdapterDigest, RowTypeName
from graftwork_adapters.publish_job import MEMORY_CHECK, Limits, PublishJob, PublishResult
from graftwork_adapters.report import Report
from graftwork_adapters.scratch import scratch_folder, sweep_scratch
from graftwork_adapters.upload_files import TOKENIZER_FILES
from graftwork_platform.catalog.facts import OwnText, VersionFacts
from graftwork_platform.db import Database, DatabaseUnavailable
from graftwork_platform.errors import BadRequest
from graftwork_platform.ids import show
from graftwork_platform.publishing import records
from graftwork_platform.publishing.blobs import Blobs
from graftwork_platform.publishing.incoming import Incoming
from graftwork_platform.publishing.leases import Leases, PublishTiming
from graftwork_platform.publishing.owner import StoreOwner
from graftwork_platform.publishing.quality import Measure
from graftwork_platform.publishing.quantised import QuantisedCheck
from graftwork_platform.publishing.records import Lease, LeaseLost, Passed
from graftwork_platform.publishing.store_threads import StoreThreads
from graftwork_platform.publishing.text_check import CheckText
from graftwork_platform.settings import PublishLimits, UploadLimits
from graftwork_platform.text.upload_text import TextJob, TextVerdict

_log = logging.getLogger(__name__)

_Fault = OSError | StoreError | SQLAlchemyError
"""What an upload is not to blame for; it may be gone at the next try."""

_FAULTS = (OSError, StoreError, SQLAlchemyError)

_OUTAGES = (StoreUnavailable, DatabaseUnavailable)
"""Of those, what passes without anybody's doing anything about this server."""


class RunPublish(Protocol):
    """`graftwork_adapters.publisher.run_publish`."""

    async def __call__(self, job: PublishJob, *, timeout_s: float, memory_bytes: int) -> PublishResult: ...


class Publisher:
    """This server's publishing subprocesses. Belongs to one event loop: `start`, then `close`. ``now`` is Unix time in seconds."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        incoming: Incoming,
        owner: StoreOwner,
        spec: BaseSpec,
        *,
        threads: StoreThreads,
        row_type: RowTypeName,
        base_dir: Path,
        scratch: Path,
        run_publish: RunPublish,
        check_text: CheckText,
        measure: Measure | None,
        reference_type: RowTypeName,
        limits: PublishLimits,
        upload_limits: UploadLimits,
        timing: PublishTiming,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._incoming = incoming
        self._owner = owner
        self._threads = threads
        self._spec = spec
        self._row_type: RowTypeName = row_type
        self._base_dir = base_dir
        self._scratch = scratch
        self._run_publish = run_publish
        self._check_text = check_text
        self._quantised = QuantisedCheck(blobs, self._run, measure, reference_type)
        self._limits = limits
        self._upload_limits = upload_limits
        self._timing = timing
        self._now = now
        self._leases = Leases(database, timing.lease, now)
        self._publishing = asyncio.Semaphore(limits.concurrency)
        self._rebuilding = asyncio.Semaphore(limits.concurrency)  # of its own: requests wait for these
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitted: set[UUID] = set()
        self._rebuilds: dict[tuple[AdapterDigest, RowTypeName, bool], asyncio.Task[None]] = {}
        self._outages: dict[UUID, float] = {}  # uploads that wait for the store or database, and since when on the monotonic clock

    async def start(self) -> None:
        """Sweep what a crash left here, then in the background, and from time to time again, what is left in the store, and take
        up publications that nobody runs. A store that hangs does not hold the start up.
        """
        await asyncio.to_thread(sweep_scratch, self._scratch)
        await asyncio.to_thread(self._incoming.sweep_local)
        self._spawn(_for_ever(self._take_up, self._timing.poll), "take up publications")
        self._spawn(_for_ever(self.sweep, self._timing.sweep), "sweep uploads")

    async def close(self) -> None:
        """Stop; running publications are given back, for another server or the next start."""
        tasks = [*self._tasks, *self._rebuilds.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _whatever_happens(self._leases.close)
        await asyncio.to_thread(self._incoming.close)

    def submit(self, upload_id: UUID) -> None:
        """Publish a completed upload in the background, unless another server does."""
        if upload_id not in self._submitted:
            self._submitted.add(upload_id)
            self._spawn(self._publish(upload_id), f"publish {show('up', upload_id)}")

    async def ensure_packed(self, digest: AdapterDigest, row_type: RowTypeName | None = None, *, replace: bool = False) -> None:
        """Build the packed form of ``digest`` again from its stored upload unless it is there; callers at once share one run.

        ``row_type``: which of its packed forms; None: the server's.

        With ``replace`` its bytes are looked at too, and it is replaced if they are wrong; right ones are never taken away. Two
        servers may do it at once: the same bytes are stored whole, and once. Raises `BlobNotFound` if the upload is gone too,
        `AdapterTooLarge` if this server's adapter memory can never hold it, `BlobCorrupt` if it is another one now or does not
        pass otherwise, or `StoreUnavailable`.
        """
        wanted = (digest, row_type or self._row_type, replace)
        task = self._rebuilds.get(wanted)
        if task is None:
            task = asyncio.create_task(self._rebuild(*wanted), name=f"rebuild {digest}")
            self._rebuilds[wanted] = task
            task.add_done_callback(lambda _: self._rebuilds.pop(wanted, None))
        await asyncio.shield(task)  # one caller's disconnect must not fail the others

    async def look_again(self, digest: AdapterDigest, row_type: RowTypeName | None) -> VersionFacts:
        """What the stored upload of ``digest`` is found to be today. Raises as `ensure_packed` does, and `OSError`."""
        async with self._rebuilding:
            with scratch_folder(self._scratch) as scratch:
                upload = scratch / "upload"
                result = await self._pack_stored(digest, row_type or self._row_type, upload, scratch / "packed.safetensors")
                looked = await self._text_of(result, upload)
                if looked is None:
                    raise _cannot_pack(digest, result.report)
                return VersionFacts(result.traits, looked.text)

    async def sweep(self) -> None:
        """Expire uploads that were never completed, and drop bytes that nothing needs any more."""
        await self._owner.confirm()
        now = self._millis()
        live = await self._database.run_write(lambda session: records.expire_uploads(session, now))
        await self._threads.run(self._incoming.sweep, live, now)
        await self._blobs.sweep()

    async def _take_up(self) -> None:
        for upload_id in await self._database.run_read(lambda session: records.unleased(session, self._millis())):
            self.submit(upload_id)

    async def _publish(self, upload_id: UUID) -> None:
        try:
            async with self._publishing:  # first, so that an upload which waits here can be taken up by another server
                lease = await self._leases.take(upload_id)
                if lease is not None:
                    await self._publish_leased(lease)
                    self._leases.ended(lease)
                else:  # another server has it; what was assembled here is of no use
                    await self._threads.run(self._incoming.release, upload_id)
        except DatabaseUnavailable as error:  # it is taken up again
            _log.warning("%s cannot be taken up: %s", show("up", upload_id), error)
        finally:
            self._submitted.discard(upload_id)

    async def _publish_leased(self, lease: Lease) -> None:
        try:
            await self._leases.keep(lease, self._attempt(lease))
        except LeaseLost as error:
            _log.warning("%s: another server has taken the publication over", error)
            self._outages.pop(lease.upload_id, None)
            await self._threads.run(self._incoming.release, lease.upload_id)
            return
        except _FAULTS as error:
            _tell(f"attempt {lease.attempt} to publish {show('up', lease.upload_id)} failed", error)
            if not await self._put_off(lease, error):
                return
        self._outages.pop(lease.upload_id, None)
        await _whatever_happens(lambda: self._threads.run(self._incoming.drop, lease.upload_id))

    async def _attempt(self, lease: Lease) -> None:
        """From parts to a verdict. Raises `LeaseLost`, or a fault that the upload is not to blame for."""
        if lease.attempt > self._limits.max_attempts:
            await self._fail(lease, _given_up(lease))
            return
        try:
            await self._owner.confirm()
            folder = await self._threads.run(self._incoming.folder, lease.upload_id, lease.files, lease.part_bytes)
        except BadRequest as error:  # parts were replaced or lost behind the completion
            await self._fail(lease, _failure("upload", error.message, "push it again"))
            return
        with scratch_folder(self._scratch) as scratch:
            packed, row_type = scratch / "packed.safetensors", lease.row_type or self._row_type
            job = PublishJob(folder, packed, self._spec, row_type, self._job_limits(), base_dir=self._base_dir)
            result = await self._run(job)
            looked = await self._text_of(result, folder) if result.ok else None
            if looked is None or result.digest is None:
                await self._fail(lease, result.report)
                return
            await self._blobs.store(lease, result, folder, packed)
            await self._quantised.look(job, result, looked.prompts)
        now, passed = self._millis(), Passed(result.digest, result.report, VersionFacts(result.traits, looked.text))
        await self._database.run_write(lambda session: records.finish(session, lease, passed, now))

    async def _text_of(self, result: PublishResult, folder: Path) -> TextVerdict | None:
        """Which of its text files are in force; None if they are refused. What was found joins the result's report."""
        names = tuple(name for name in result.files if name in TOKENIZER_FILES)
        if not names:
            return TextVerdict(Report(), OwnText())
        verdict = await self._check_text(TextJob(str(self._base_dir), str(folder), names, result.traits.vocab_size))
        result.report.add(verdict.report)
        return verdict if verdict.report.ok else None

    async def _put_off(self, lease: Lease, fault: _Fault) -> bool:
        """Leave the upload for another attempt, here or elsewhere; true if that was the last and the version failed."""
        report = _failure("store", _for_customers(fault), "push it again")
        pause = self._timing.retry_pause * 2 ** (lease.attempt - 1)
        is_outage = isinstance(fault, _OUTAGES)
        if is_outage:
            pause = max(pause, self._timing.outage_pause)
        is_free = is_outage and self._has_patience(lease.upload_id)
        try:
            if lease.attempt >= self._limits.max_attempts and not is_free:
                await self._fail(lease, report)
                return True
            until = self._millis() + int(pause * 1000)
            await self._database.run_write(lambda session: records.put_off(session, lease, report, until, counts=not is_free))
        except LeaseLost:
            pass
        except SQLAlchemyError as error:  # then the lease runs out
            _tell(f"{show('up', lease.upload_id)} could not be put off", error)
        return False

    def _has_patience(self, upload_id: UUID) -> bool:
        """True if what an outage delays has not been delayed by it for too long: then the attempt does not count."""
        now, limit = time.monotonic(), self._timing.outage
        self._outages = {waiting: since for waiting, since in self._outages.items() if now - since < 2 * limit}
        return now - self._outages.setdefault(upload_id, now) < limit

    async def _fail(self, lease: Lease, report: Report) -> None:
        now = self._millis()
        await self._database.run_write(lambda session: records.fail(session, lease, report, now))

    async def _rebuild(self, digest: AdapterDigest, row_type: RowTypeName, replace: bool) -> None:
        if await (self._blobs.has_intact_packed(digest, row_type) if replace else self._blobs.has_packed(digest, row_type)):
            return
        async with self._rebuilding:
            with scratch_folder(self._scratch) as scratch:
                packed = scratch / "packed.safetensors"
                result = await self._pack_stored(digest, row_type, scratch / "upload", packed)
                if result.packed_key is None:
                    raise AssertionError("a passed upload has a packed key")
                await self._blobs.store_packed(digest, result.packed_key, packed)

    async def _pack_stored(self, digest: AdapterDigest, row_type: RowTypeName, upload: Path, packed: Path) -> PublishResult:
        await self._blobs.fetch_upload(digest, upload)
        # The config is that of whoever sent this digest first, and may name another base than the asker's.
        limits = replace_fields(self._job_limits(), require_base_name=False)
        result = await self._run(PublishJob(upload, packed, self._spec, row_type, limits, digest, base_dir=self._base_dir))
        if not result.ok:
            raise _cannot_pack(digest, result.report)
        return result

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

    def _millis(self) -> int:
        return int(self._now() * 1000)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task %r ended", task.get_name(), exc_info=error)


async def _for_ever(work: Callable[[], Awaitable[None]], pause: float) -> None:
    while True:
        try:
            await _whatever_happens(work)
        except Exception:  # noqa: BLE001 — this loop supervises: what nobody foresaw must not end it for as long as the server runs
            _log.exception("work in the background failed for an unforeseen reason; it will be tried again")
        await asyncio.sleep(pause)


async def _whatever_happens(work: Callable[[], Awaitable[None]]) -> None:
    """A store or database that is away must not keep the rest from being served; what was to be done is done at another time."""
    try:
        await work()
    except _FAULTS as error:
        _tell("work in the background failed and will be tried again", error)


def _tell(what: str, fault: _Fault) -> None:
    """An outage in one line, since it says all and comes often; anything else with where it happened."""
    if isinstance(fault, _OUTAGES):
        _log.warning("%s: %s", what, fault)
    else:
        _log.error("%s", what, exc_info=fault)


def _failure(check: str, message: str, fix: str) -> Report:
    report = Report()
    report.fail(check, None, message, fix)
    return report


def _given_up(lease: Lease) -> Report:
    last = f"; last: {lease.last_fault}" if lease.last_fault else ""
    message = f"the server stopped or failed {lease.attempt - 1} times while it was validating this upload{last}"
    return _failure("process", message, "push it again")


def _cannot_pack(digest: AdapterDigest, report: Report) -> AdapterTooLarge | BlobCorrupt:
    failure = next((finding for finding in report.findings if finding.result == "fail"), None)
    if failure is not None and failure.check == MEMORY_CHECK:
        return AdapterTooLarge(f"adapter {digest} does not fit this server: {failure.message}; {failure.fix}")
    reason = "no reason was given" if failure is None else failure.message
    return BlobCorrupt(f"the stored upload {digest} cannot be packed: {reason}")


def _for_customers(fault: _Fault) -> str:
    """Without paths, and without SQL."""
    if isinstance(fault, SQLAlchemyError):
        return "the server could not store the adapter: its database failed"
    reason = fault.strerror or type(fault).__name__ if isinstance(fault, OSError) else fault
    return f"the server could not store the adapter: {reason}"
