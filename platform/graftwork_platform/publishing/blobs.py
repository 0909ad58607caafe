"""Published blobs by digest: stored, found, fetched again, deleted when no version needs them. Knows no HTTP and no tenants."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import get_args
from uuid import UUID, uuid4

from graftwork_adapters.errors import BlobCorrupt, BlobNotFound, StoreError, StoreUnavailable
from graftwork_adapters.keys import AdapterDigest, PackedKey, RowTypeName, packed_key, packed_path, upload_prefix
from graftwork_adapters.packed import read_packed
from graftwork_adapters.publish_job import PublishResult
from graftwork_adapters.scratch import scratch_folder
from graftwork_adapters.store import ObjectStore
from graftwork_adapters.upload_files import TOKENIZER_FILES, is_stored_file
from graftwork_platform.db import Database
from graftwork_platform.publishing import blob_records, records
from graftwork_platform.publishing.records import Lease
from graftwork_platform.publishing.store_threads import StoreThreads

_log = logging.getLogger(__name__)

_SWEEP_SECONDS = 30.0  # after which a sweep begins no more deletions of a digest
_DEAD_SECONDS = 90.0  # after which a sweep's mark is void; the difference is for the deletion that it may be in
_LOOK_AGAIN = 0.2
_REPLACE_TRIES = 3  # other servers may find the same blob corrupt


class Blobs:
    """The blobs of one base. A ``row_type`` of None is the server's own.

    `blob_records` says why a publication and a sweep cannot harm each other.

    A sweep that was killed leaves its mark. Nobody compares clocks to find that out: whoever has seen the same mark for
    ``_DEAD_SECONDS`` on its own monotonic ``clock`` may take it away, and a sweep stops ``_SWEEP_SECONDS`` after it began, which
    was before anyone could see its mark. ``now`` is Unix time in seconds.
    """

    def __init__(
        self,
        database: Database,
        store: ObjectStore,
        base_id: str,
        row_type: RowTypeName,
        *,
        scratch: Path,
        threads: StoreThreads,
        delete_grace: float,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._store = store
        self._base_id = base_id
        self._row_type: RowTypeName = row_type
        self._scratch = scratch
        self._threads = threads
        self._delete_grace = delete_grace
        self._now = now
        self._clock = clock
        self._seen: dict[UUID, float] = {}  # other sweeps' tokens, and since when

    async def store(self, lease: Lease, result: PublishResult, folder: Path, packed: Path) -> None:
        """Store a passed upload's files and its packed form for the lease's version, whose digest is then known.

        Raises `LeaseLost`, `StoreError`, `OSError`.
        """
        if result.digest is None or result.packed_key is None:
            raise AssertionError("a passed upload has a digest and a packed key")
        digest, key = result.digest, result.packed_key
        await self._database.run_write(lambda session: records.claim(session, lease, digest))
        await self._no_sweep(digest)

        def put() -> None:
            for path in result.files:
                self._store.put_if_absent(upload_prefix(digest) + path, folder / path)
            self._put_packed(key, packed)

        await self._threads.run(put)

    async def store_packed(self, digest: AdapterDigest, key: PackedKey, packed: Path) -> None:
        """Store the packed form of a digest that some version has, or had a moment ago."""
        await self._threads.run(self._put_packed, key, packed)
        before = self._before()
        if not await self._database.run_read(lambda session: blob_records.is_needed(session, digest, before)):
            await self._sweep(digest, (), before, None)  # its last version was swept meanwhile

    async def drop_packed(self, digest: AdapterDigest, row_type: RowTypeName) -> None:
        """Delete one packed form of ``digest`` unless a version has it. One that is needed a moment later is built again."""
        kept = {row_type, None} if row_type == self._row_type else {row_type}
        if not await self._database.run_read(lambda session: blob_records.is_row_type_needed(session, digest, kept)):
            await self._threads.run(self._store.delete, packed_path(self._packed_key(digest, row_type)))

    async def has_packed(self, digest: AdapterDigest, row_type: RowTypeName | None = None) -> bool:
        """True if the packed form is in the store. Raises `StoreError`."""
        return await self._threads.run(self._store.exists, packed_path(self._packed_key(digest, row_type)))

    async def has_intact_packed(self, digest: AdapterDigest, row_type: RowTypeName | None = None) -> bool:
        """The same, and every byte of it is right: it is fetched and read. Raises `StoreError`, `OSError`."""
        return await self._threads.run(self._is_intact, self._packed_key(digest, row_type))

    async def is_stored(self, digest: AdapterDigest, row_type: RowTypeName | None = None) -> bool:
        """True if the upload and its packed form, intact, are in the store; false also for a store that does not answer."""

        def look() -> bool:
            try:
                packed = self._is_intact(self._packed_key(digest, row_type))
                return packed and next(self._store.list_keys(upload_prefix(digest)), None) is not None
            except (StoreError, OSError):
                return False

        return await self._threads.run(look)

    async def fetch_upload(self, digest: AdapterDigest, folder: Path) -> None:
        """Write those of the upload's files that its digest covers into ``folder``. Raises `BlobNotFound`, `StoreUnavailable`.

        Earlier versions stored others too, of every upload with this digest.
        """

        await self._threads.run(self._fetch_upload, digest, folder, is_stored_file)

    async def fetch_text(self, digest: AdapterDigest, folder: Path) -> None:
        """The same for its text files alone: tokenizer, chat template, generation config."""
        await self._threads.run(self._fetch_upload, digest, folder, TOKENIZER_FILES.__contains__)

    def _fetch_upload(self, digest: AdapterDigest, folder: Path, wanted: Callable[[str], bool]) -> None:
        prefix = upload_prefix(digest)
        names = [name for key in self._store.list_keys(prefix) if wanted(name := key.removeprefix(prefix))]
        if not names:
            raise BlobNotFound(f"the store has no such files of the upload {digest}")
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            self._store.fetch(prefix + name, folder / name)

    async def sweep(self) -> None:
        """Delete blobs that no version has needed for ``delete_grace`` seconds."""
        before = self._before()
        marks = await self._database.run_read(blob_records.sweeps)
        self._seen = {token: self._seen.get(token, self._clock()) for token in marks.values()}
        dead = {digest: token for digest, token in marks.items() if self._clock() - self._seen[token] > _DEAD_SECONDS}
        orphans = await self._database.run_read(lambda session: blob_records.orphans(session, before))
        for digest in orphans.keys() | dead.keys():
            await self._sweep(digest, orphans.get(digest, ()), before, dead.get(digest))

    async def _sweep(self, digest: AdapterDigest, versions: Collection[UUID], before: int, dead: UUID | None) -> None:
        token, started = uuid4(), self._clock()
        if not await self._database.run_write(lambda session: blob_records.begin_sweep(session, digest, token, dead)):
            return
        done = True
        if not await self._database.run_read(lambda session: blob_records.is_needed(session, digest, before)):
            try:  # if this is cancelled, the thread goes on: then the mark stays until it is void
                done = await self._threads.run(self._delete, digest, started + _SWEEP_SECONDS)
            except StoreError:
                _log.exception("the blobs of %s could not be deleted; the next sweep tries again", digest)
                done = False
        # Only versions that were closed before the mark: one that has failed since may have left blobs behind.
        await self._end_sweep(digest, token, versions if done else ())

    async def _end_sweep(self, digest: AdapterDigest, token: UUID, closed: Collection[UUID]) -> None:
        await self._database.run_write(lambda session: blob_records.end_sweep(session, digest, token, closed))

    async def _no_sweep(self, digest: AdapterDigest) -> None:
        """Wait until no sweep can be deleting blobs of ``digest``. The caller has claimed it, so that none can begin."""
        first_seen: dict[UUID, float] = {}
        while (token := await self._database.run_read(lambda session: blob_records.sweep_of(session, digest))) is not None:
            if self._clock() - first_seen.setdefault(token, self._clock()) > _DEAD_SECONDS:
                await self._end_sweep(digest, token, ())
            await asyncio.sleep(_LOOK_AGAIN)

    def _delete(self, digest: AdapterDigest, deadline: float) -> bool:
        """True if all is gone, whatever row type it was packed for; false if the time was over before."""
        packed = [packed_path(packed_key(digest, self._base_id, row_type)) for row_type in get_args(RowTypeName)]
        for key in [*packed, *self._store.list_keys(upload_prefix(digest))]:
            if self._clock() > deadline:
                return False
            self._store.delete(key)
        return True

    def _put_packed(self, key: PackedKey, packed: Path) -> None:
        """Store a packed form that was just made. One that is there already stays unless its bytes are wrong."""
        for _ in range(_REPLACE_TRIES):
            if self._store.put_if_absent(packed_path(key), packed) or self._is_intact(key):
                return
            _log.warning("the stored packed form %s is corrupt; it is replaced", key)
            self._store.delete(packed_path(key))
        raise StoreUnavailable("the object store does not keep a packed form as it was written")

    def _is_intact(self, key: PackedKey) -> bool:
        with scratch_folder(self._scratch) as scratch:
            try:
                self._store.fetch(packed_path(key), scratch / "packed")
                read_packed(scratch / "packed", key)
            except (BlobNotFound, BlobCorrupt):
                return False
        return True

    def _packed_key(self, digest: AdapterDigest, row_type: RowTypeName | None) -> PackedKey:
        return packed_key(digest, self._base_id, row_type or self._row_type)

    def _before(self) -> int:
        return int((self._now() - self._delete_grace) * 1000)
