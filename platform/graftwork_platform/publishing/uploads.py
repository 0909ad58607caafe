"""Uploads: promised, received part by part, completed into a version that waits for its verdict. Knows no HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from graftwork_adapters.errors import BlobNotFound, StoreError
from graftwork_adapters.keys import AdapterDigest
from graftwork_platform.catalog.catalog import newest_ready, row_type_of
from graftwork_platform.catalog.names import check_adapter_name
from graftwork_platform.db import Database
from graftwork_platform.errors import BadRequest, Conflict, NotFound, ServiceUnavailable
from graftwork_platform.ids import show, uuid7
from graftwork_platform.models import Adapter, AdapterVersion, Tenant, Upload, UploadState, VersionState
from graftwork_platform.publishing.blobs import Blobs
from graftwork_platform.publishing.incoming import Incoming
from graftwork_platform.publishing.manifest import (
    FileEntry,
    Part,
    check_manifest,
    check_path,
    from_json,
    manifest_sha256,
    parts_of,
    to_json,
)
from graftwork_platform.publishing.publisher import Publisher
from graftwork_platform.publishing.store_threads import StoreThreads
from graftwork_platform.row_types import SERVERS, WantedRowType
from graftwork_platform.settings import UploadLimits

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UploadView:
    """An upload as its owner sees it: ``missing`` parts are still to be sent; ``version`` once it is complete."""

    upload: Upload
    missing: Sequence[Part]
    version: AdapterVersion | None


class Uploads:
    """All tenants' uploads; every question is asked inside one tenant."""

    def __init__(
        self,
        database: Database,
        incoming: Incoming,
        blobs: Blobs,
        publisher: Publisher,
        threads: StoreThreads,
        limits: UploadLimits,
        *,
        base_name: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._incoming = incoming
        self._blobs = blobs
        self._publisher = publisher
        self._threads = threads
        self._limits = limits
        self._base_name = base_name
        self._now = now
        self._completing: set[UUID] = set()

    async def create(
        self, tenant_id: UUID, name: str, files: Sequence[FileEntry], *, row_type: WantedRowType | None = None
    ) -> UploadView:
        """Promise files for a version of adapter ``name``, whose rows are to be of ``row_type`` (None: the tenant's).

        Raises `BadRequest`, `PayloadTooLarge`.
        """
        check_adapter_name(name, self._base_name)
        check_manifest(files, self._limits)
        millis = self._millis()
        upload = Upload(
            id=uuid7(self._now),
            tenant_id=tenant_id,
            adapter_name=name,
            files=to_json(files),
            part_bytes=self._limits.part_bytes,
            row_type=row_type,
            state=UploadState.UPLOADING,
            version_id=None,
            created_at=millis,
            expires_at=millis + int(self._limits.expires_after * 1000),
        )
        await self._database.run_write(lambda session: session.add(upload))
        return UploadView(upload, [part for file in files for part in parts_of(file, upload.part_bytes)], None)

    async def get(self, tenant_id: UUID, upload_id: UUID) -> UploadView:
        """Raises `NotFound`, `ServiceUnavailable`."""
        upload, version = await self._load(tenant_id, upload_id)
        if upload.state != UploadState.UPLOADING:
            return UploadView(upload, (), version)
        files = from_json(upload.files)
        try:
            here = await self._threads.run(self._incoming.received, upload.id, files, upload.part_bytes)
        except StoreError as error:
            raise _storage_unavailable(error) from error
        missing = [p for file in files for p in parts_of(file, upload.part_bytes) if (p.path, p.number) not in here]
        return UploadView(upload, missing, None)

    async def put_part(self, tenant_id: UUID, upload_id: UUID, path: str, number: int, body: AsyncIterator[bytes]) -> None:
        """Receive one part; again replaces it.

        Raises `NotFound`, `BadRequest`, `Conflict` once the upload is complete, or `ServiceUnavailable`.
        """
        check_path(path, "path")
        upload, _ = await self._load(tenant_id, upload_id)
        if upload.state != UploadState.UPLOADING:
            raise Conflict(f"Upload {show('up', upload_id)} is {upload.state} and takes no more parts.", code="upload_closed")
        files = from_json(upload.files)
        file = next((file for file in files if file.path == path), None)
        if file is None:
            raise NotFound(f"Upload {show('up', upload_id)} has no file `{path}`.", code="file_not_found")
        parts = parts_of(file, upload.part_bytes)
        if not 1 <= number <= len(parts):
            raise BadRequest(f"`{path}` has parts 1 to {len(parts)}, not {number}.", param="part")
        try:
            key = await self._incoming.receive(upload_id, files, parts[number - 1], body)
        except (OSError, StoreError) as error:
            raise _storage_unavailable(error) from error
        await self._check_in_time(tenant_id, upload_id, key)

    async def complete(self, tenant_id: UUID, upload_id: UUID) -> UploadView:
        """Check that all bytes are here and hand them to the publisher; once complete, completing again changes nothing.

        The latest version's own files again are that version, at once. Raises `NotFound`, `BadRequest` for missing or wrong bytes,
        `Conflict` for an upload that expired or is just being completed.
        """
        upload, version = await self._load(tenant_id, upload_id)
        if upload.state == UploadState.EXPIRED:
            raise Conflict(f"Upload {show('up', upload_id)} has expired; start a new one.", code="upload_expired")
        if upload.state != UploadState.UPLOADING:
            return UploadView(upload, (), version)
        if upload_id in self._completing:
            raise Conflict(f"Upload {show('up', upload_id)} is being completed.", code="upload_busy")
        self._completing.add(upload_id)
        try:
            await self._complete(upload)
        finally:
            self._completing.discard(upload_id)
        return await self.complete(tenant_id, upload_id)  # as it is now, be it another server's doing

    async def _complete(self, upload: Upload) -> None:
        files = from_json(upload.files)
        try:
            await self._threads.run(self._incoming.assemble, upload.id, files, upload.part_bytes)
        except BlobNotFound as error:
            raise Conflict(f"A part of upload {show('up', upload.id)} is being sent again.", code="upload_busy") from error
        except (OSError, StoreError) as error:
            raise _storage_unavailable(error) from error
        manifest = manifest_sha256(files)
        same = await self._same_as_latest(upload, manifest)

        def work(session: Session) -> UploadState:
            row = session.get_one(Upload, upload.id, with_for_update=True)
            if row.state == UploadState.UPLOADING:  # else a sweep came first, or another server
                adapter = self._locked_adapter(session, row)
                newest = newest_ready(session, adapter.id)
                row.version_id = same if newest and newest.id == same else self._new_version(session, adapter, row, manifest).id
                row.state = UploadState.READY if row.version_id == same else UploadState.VALIDATING
            return UploadState(row.state)

        if await self._database.run_write(work) == UploadState.VALIDATING:
            self._publisher.submit(upload.id)
            return
        try:
            await self._threads.run(self._incoming.drop, upload.id)
        except StoreError:
            _log.exception("the parts of %s could not be dropped; a sweep will do it", show("up", upload.id))

    async def _same_as_latest(self, upload: Upload, manifest: str) -> UUID | None:
        """The newest version's id if it was made of exactly these files for the same row type, and can still be served.

        Of a version without facts nobody knows what would be found today, so its files are looked at again.
        """

        def work(session: Session) -> AdapterVersion | None:
            query = select(Adapter.id).where(Adapter.tenant_id == upload.tenant_id, Adapter.name == upload.adapter_name)
            adapter_id = session.scalar(query)
            newest = newest_ready(session, adapter_id) if adapter_id else None
            if newest is None or newest.manifest_sha256 != manifest or newest.facts is None:
                return None
            return newest if newest.row_type == _wanted_row_type(session, upload) else None

        newest = await self._database.run_read(work)
        if newest is None or newest.digest is None:
            return None
        if not await self._blobs.is_stored(AdapterDigest(newest.digest), row_type_of(newest.row_type)):
            return None  # publishing them again heals it
        return newest.id

    def _locked_adapter(self, session: Session, upload: Upload) -> Adapter:
        """The upload's adapter, made unless it is there; deleted or not."""
        adapter = _adapter(session, upload.tenant_id, upload.adapter_name)
        if adapter is not None:
            return adapter
        adapter = Adapter(
            id=uuid7(self._now),
            tenant_id=upload.tenant_id,
            name=upload.adapter_name,
            next_version=1,
            created_at=self._millis(),
        )
        session.add(adapter)
        session.flush()  # if another server makes it at the same time, all this is done again and finds it
        return adapter

    def _new_version(self, session: Session, adapter: Adapter, upload: Upload, manifest: str) -> AdapterVersion:
        adapter.deleted_at = None
        version = AdapterVersion(
            id=uuid7(self._now),
            tenant_id=adapter.tenant_id,
            adapter_id=adapter.id,
            manifest_sha256=manifest,
            state=VersionState.VALIDATING,
            report=[],
            row_type=_wanted_row_type(session, upload),
            attempts=0,
            created_at=self._millis(),
        )
        session.add(version)
        session.flush()
        return version

    async def _check_in_time(self, tenant_id: UUID, upload_id: UUID, key: str) -> None:
        """Take a part back that came behind the upload's end. While it is validated all parts stay: this one may be in use."""
        upload, _ = await self._load(tenant_id, upload_id)
        if upload.state == UploadState.UPLOADING:
            return
        if upload.state != UploadState.VALIDATING:
            try:
                await self._threads.run(self._incoming.forget, key)
            except StoreError:
                _log.exception("%s could not be deleted; a sweep will do it", key)
        raise Conflict(f"Upload {show('up', upload_id)} takes no more parts.", code="upload_closed")

    async def _load(self, tenant_id: UUID, upload_id: UUID) -> tuple[Upload, AdapterVersion | None]:
        """The upload and its version, of one moment: a verdict can put another version in a version's place."""
        query = (
            select(Upload, AdapterVersion)
            .outerjoin(AdapterVersion, AdapterVersion.id == Upload.version_id)
            .where(Upload.tenant_id == tenant_id, Upload.id == upload_id)
        )
        row = await self._database.run_read(lambda session: session.execute(query).first())
        if row is None:
            raise NotFound(f"No upload {show('up', upload_id)} in this tenant.", code="upload_not_found")
        return row[0], row[1]

    def _millis(self) -> int:
        return int(self._now() * 1000)


def _wanted_row_type(session: Session, upload: Upload) -> str | None:
    """What the upload asks for, or else its tenant; None: the server's."""
    if upload.row_type == SERVERS:
        return None
    return upload.row_type or session.get_one(Tenant, upload.tenant_id).row_type


def _storage_unavailable(error: OSError | StoreError) -> ServiceUnavailable:
    _log.error("an upload cannot be stored: %s", error)
    return ServiceUnavailable("The server cannot store this upload at the moment.", code="storage_unavailable", retry_after=30)


def _adapter(session: Session, tenant_id: UUID, name: str) -> Adapter | None:
    """The row of that name, deleted or not, locked."""
    return session.scalar(select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.name == name).with_for_update())
