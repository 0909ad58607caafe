"""The transactions of publishing, each one function of a session. Knows no files."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from graftwork_adapters.keys import AdapterDigest
from graftwork_adapters.publish_job import PublishResult
from graftwork_adapters.report import Report
from graftwork_platform.catalog.catalog import newest_ready
from graftwork_platform.models import Adapter, AdapterVersion, Upload, UploadState, VersionState


def unfinished(session: Session) -> list[UUID]:
    """Completed uploads whose verdict is open, oldest first."""
    return list(session.scalars(select(Upload.id).where(Upload.state == UploadState.VALIDATING).order_by(Upload.id)))


def begin_attempt(session: Session, upload_id: UUID) -> tuple[UUID, int]:
    """Count one more start of a publication; the version's id and how many starts that makes."""
    version = _version_of(session, upload_id)
    version.attempts += 1
    return version.id, version.attempts


def finish(session: Session, upload_id: UUID, version_id: UUID, result: PublishResult, now: int) -> None:
    """Give a passed version its number and digest and serve it; if the newest version has that digest, it was that one again."""
    upload, version = session.get_one(Upload, upload_id), session.get_one(AdapterVersion, version_id)
    adapter = session.get_one(Adapter, version.adapter_id)
    if adapter.deleted_at is not None:
        report = Report(list(result.report.findings))
        report.fail("adapter", None, "the adapter was deleted while this version was being validated", "push it again")
        fail(session, upload_id, version_id, report)
        return
    newest = newest_ready(session, adapter.id)
    upload.state = UploadState.READY
    if newest is not None and newest.digest == result.digest:
        upload.version_id = newest.id
        session.flush()  # nothing may point at the row that goes
        session.delete(version)
        return
    version.number, adapter.next_version = adapter.next_version, adapter.next_version + 1
    version.digest = result.digest
    version.report = result.report.as_json()
    version.state = VersionState.READY
    version.ready_at = now


def fail(session: Session, upload_id: UUID, version_id: UUID, report: Report) -> None:
    """Refuse a version; its report says why."""
    version = session.get_one(AdapterVersion, version_id)
    version.report = report.as_json()
    version.state = VersionState.FAILED
    session.get_one(Upload, upload_id).state = UploadState.FAILED


def expire_uploads(session: Session, now: int) -> list[UUID]:
    """Close uploads that were not completed in time; the ids of those whose bytes are still needed."""
    late = (Upload.state == UploadState.UPLOADING, Upload.expires_at <= now)
    session.execute(update(Upload).where(*late).values(state=UploadState.EXPIRED))
    live = (UploadState.UPLOADING, UploadState.VALIDATING)
    return list(session.scalars(select(Upload.id).where(Upload.state.in_(live))))


def orphaned_digests(session: Session, before: int) -> list[AdapterDigest]:
    """Digests that only versions deleted before ``before`` still point at."""
    gone = select(AdapterVersion.digest).where(AdapterVersion.state == VersionState.DELETING, AdapterVersion.deleted_at <= before)
    needed = select(AdapterVersion.digest).where(
        (AdapterVersion.state == VersionState.READY)
        | ((AdapterVersion.state == VersionState.DELETING) & (AdapterVersion.deleted_at > before))
    )
    return [AdapterDigest(d) for d in session.scalars(gone.except_(needed).order_by(AdapterVersion.digest)) if d is not None]


def mark_deleted(session: Session, before: int) -> None:
    """Close the versions deleted before ``before``, whose bytes are gone or belong to others."""
    late = (AdapterVersion.state == VersionState.DELETING, AdapterVersion.deleted_at <= before)
    session.execute(update(AdapterVersion).where(*late).values(state=VersionState.DELETED))


def _version_of(session: Session, upload_id: UUID) -> AdapterVersion:
    version_id = session.get_one(Upload, upload_id).version_id
    if version_id is None:
        raise AssertionError(f"upload {upload_id} is validating without a version")
    return session.get_one(AdapterVersion, version_id)
