"""The transactions of publishing, each one function of a session. Knows no files.

Rows are locked in one order, upload, adapter, version, so that no two transactions wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from graftwork_adapters.keys import AdapterDigest, RowTypeName
from graftwork_adapters.report import Report
from graftwork_platform.catalog.catalog import newest_ready, row_type_of
from graftwork_platform.catalog.facts import VersionFacts, facts_from_json, facts_to_json
from graftwork_platform.models import Adapter, AdapterVersion, Upload, UploadState, VersionState
from graftwork_platform.publishing.manifest import FileEntry, from_json


class LeaseLost(Exception):
    """Another server publishes this upload now, or has done so: nothing that this one found may count."""

    def __init__(self, upload_id: UUID) -> None:
        super().__init__(f"the lease of upload {upload_id} was lost")


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to publish an upload, and what is needed for it. ``attempt`` counts from 1; ``token`` is this taking's own."""

    upload_id: UUID
    version_id: UUID
    token: UUID
    attempt: int
    files: Sequence[FileEntry]
    part_bytes: int
    row_type: RowTypeName | None  # of the packed form; None: the server's
    last_fault: str | None  # what went wrong in an attempt before, if that could still be written down


def unleased(session: Session, now: int) -> list[UUID]:
    """Completed uploads without a verdict that nobody publishes, oldest first."""
    free = (Upload.state == UploadState.VALIDATING, Upload.lease_until <= now)
    return list(session.scalars(select(Upload.id).where(*free).order_by(Upload.id)))


def take_lease(session: Session, upload_id: UUID, token: UUID, now: int, until: int) -> Lease | None:
    """Make ``token`` the holder if there is none whose lease lasts, and count the attempt."""
    free = (Upload.id == upload_id, Upload.state == UploadState.VALIDATING, Upload.lease_until <= now)
    taken = update(Upload).where(*free).values(lease_holder=token, lease_until=until).returning(Upload)
    upload = session.scalar(taken)
    if upload is None:
        return None
    if upload.version_id is None:
        raise AssertionError(f"upload {upload_id} is validating without a version")
    version = session.get_one(AdapterVersion, upload.version_id, with_for_update=True)
    version.attempts += 1
    last_fault = version.report[-1]["message"] if version.report else None
    files, row_type = from_json(upload.files), row_type_of(version.row_type)
    return Lease(upload_id, version.id, token, version.attempts, files, upload.part_bytes, row_type, last_fault)


def renew_lease(session: Session, lease: Lease, until: int) -> bool:
    """True if the lease was still the holder's, be it late."""
    held = (Upload.id == lease.upload_id, Upload.state == UploadState.VALIDATING, Upload.lease_holder == lease.token)
    return session.scalar(update(Upload).where(*held).values(lease_until=until).returning(Upload.id)) is not None


def release_leases(session: Session, tokens: Collection[UUID]) -> None:
    """End these leases at once."""
    session.execute(update(Upload).where(Upload.lease_holder.in_(tokens)).values(lease_holder=None, lease_until=0))


def put_off(session: Session, lease: Lease, report: Report, until: int, *, counts: bool) -> None:
    """Give the lease back; nobody takes it before ``until``. The report is kept for the next attempt, and unless this one
    ``counts``, it was none. Raises `LeaseLost`.
    """
    upload = _held(session, lease)
    upload.lease_holder, upload.lease_until = None, until
    version = session.get_one(AdapterVersion, lease.version_id, with_for_update=True)
    version.report = report.as_json()
    if not counts:
        version.attempts -= 1


def claim(session: Session, lease: Lease, digest: AdapterDigest) -> None:
    """Note that blobs of ``digest`` are going to be stored for this version. Raises `LeaseLost`."""
    _held(session, lease)
    session.get_one(AdapterVersion, lease.version_id, with_for_update=True).digest = digest


@dataclass(frozen=True, slots=True)
class Passed:
    """What there is to say of a version that is to be served."""

    digest: AdapterDigest
    report: Report
    facts: VersionFacts


def finish(session: Session, lease: Lease, passed: Passed, now: int) -> None:
    """Give a passed version its number and digest and serve it; if the newest version is the same, it was that one again.

    Raises `LeaseLost`.
    """
    upload = _held(session, lease)
    adapter_id = session.get_one(AdapterVersion, lease.version_id).adapter_id
    adapter = session.get_one(Adapter, adapter_id, with_for_update=True)  # its number and its deletion are dealt with one by one
    version = session.get_one(AdapterVersion, lease.version_id, with_for_update=True)
    if adapter.deleted_at is not None:
        report = passed.report.copy()
        report.fail("adapter", None, "the adapter was deleted while this version was being validated", "push it again")
        fail(session, lease, report, now)
        return
    newest = newest_ready(session, adapter.id)
    upload.state, upload.lease_holder = UploadState.READY, None
    if newest is not None and _is_same(newest, passed, version.row_type):
        upload.version_id, newest.facts = newest.id, facts_to_json(passed.facts)
        session.flush()  # nothing may point at the row that goes
        session.delete(version)
        return
    version.number, adapter.next_version = adapter.next_version, adapter.next_version + 1
    version.digest = passed.digest
    version.report = passed.report.as_json()
    version.facts = facts_to_json(passed.facts)
    version.state = VersionState.READY
    version.ready_at = now


def keep_facts(session: Session, version_id: UUID, facts: VersionFacts) -> None:
    """Note what a version is of which that was not known."""
    unknown = (AdapterVersion.id == version_id, AdapterVersion.facts.is_(None))
    session.execute(update(AdapterVersion).where(*unknown).values(facts=facts_to_json(facts)))


def fail(session: Session, lease: Lease, report: Report, now: int) -> None:
    """Refuse a version; its report says why. Raises `LeaseLost`."""
    upload = _held(session, lease)
    upload.state, upload.lease_holder = UploadState.FAILED, None
    version = session.get_one(AdapterVersion, lease.version_id, with_for_update=True)
    version.report = report.as_json()
    version.state = VersionState.FAILED
    version.deleted_at = None if version.digest is None else now


def expire_uploads(session: Session, now: int) -> list[UUID]:
    """Close uploads that were not completed in time; the ids of those whose bytes are still needed."""
    late = (Upload.state == UploadState.UPLOADING, Upload.expires_at <= now)
    session.execute(update(Upload).where(*late).values(state=UploadState.EXPIRED))
    live = (UploadState.UPLOADING, UploadState.VALIDATING)
    return list(session.scalars(select(Upload.id).where(Upload.state.in_(live))))


def _is_same(newest: AdapterVersion, passed: Passed, row_type: str | None) -> bool:
    """True if the newest version answers as this one would. One of an older server is not served before its facts are known, which
    the same bytes tell.
    """
    same_bytes = newest.digest == passed.digest and newest.row_type == row_type
    return same_bytes and (newest.facts is None or facts_from_json(newest.facts) == passed.facts)


def _held(session: Session, lease: Lease) -> Upload:
    upload = session.get_one(Upload, lease.upload_id, with_for_update=True)
    if upload.state != UploadState.VALIDATING or upload.lease_holder != lease.token:
        raise LeaseLost(lease.upload_id)
    return upload
