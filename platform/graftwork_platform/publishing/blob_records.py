"""The transactions by which publications and sweeps of different servers keep out of each other's way. Knows no files.

A publication stores blobs of a digest that a sweep may be deleting, and takes for its own what it finds in place. So each first
writes down what it is about to do, commits, and only then, in a new transaction, looks for the other: a publication claims the
digest on its version's row and then looks for a sweep; a sweep marks the digest and then looks for a version that needs it.
Whichever commits last sees the other, on any database whose committed rows can be read. The sweep that sees a claim
goes without deleting; the publication that sees a mark waits until it is gone.
"""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from sqlalchemy import ColumnElement, and_, delete, exists, or_, select, update
from sqlalchemy.orm import Session

from graftwork_adapters.keys import AdapterDigest
from graftwork_platform.models import AdapterVersion, BlobSweep, VersionState


def orphans(session: Session, before: int) -> dict[AdapterDigest, list[UUID]]:
    """Versions that have needed no blobs since ``before`` (Unix milliseconds), by digest; another version may need the same."""
    gone = (
        AdapterVersion.state.in_((VersionState.DELETING, VersionState.FAILED)),
        AdapterVersion.deleted_at <= before,
        AdapterVersion.digest.is_not(None),
    )
    found: dict[AdapterDigest, list[UUID]] = {}
    for version_id, digest in session.execute(select(AdapterVersion.id, AdapterVersion.digest).where(*gone)):
        found.setdefault(AdapterDigest(digest or ""), []).append(version_id)
    return found


def is_needed(session: Session, digest: AdapterDigest, before: int) -> bool:
    """True if a version with this digest is served, is being published, or was deleted after ``before``."""
    recent = and_(AdapterVersion.state == VersionState.DELETING, AdapterVersion.deleted_at > before)
    live: ColumnElement[bool] = AdapterVersion.state.in_((VersionState.READY, VersionState.VALIDATING))
    return bool(session.scalar(select(exists().where(AdapterVersion.digest == digest, or_(live, recent)))))


def is_row_type_needed(session: Session, digest: AdapterDigest, row_types: Collection[str | None]) -> bool:
    """True if a version with this digest and one of these row types is served or being published; None is the server's own."""
    live = AdapterVersion.state.in_((VersionState.READY, VersionState.VALIDATING))
    matches: ColumnElement[bool] = AdapterVersion.row_type.in_([row_type for row_type in row_types if row_type is not None])
    if None in row_types:
        matches = or_(matches, AdapterVersion.row_type.is_(None))
    return bool(session.scalar(select(exists().where(AdapterVersion.digest == digest, live, matches))))


def sweeps(session: Session) -> dict[AdapterDigest, UUID]:
    """All digests that are being swept, with the sweep's token."""
    return {AdapterDigest(row.digest): row.token for row in session.scalars(select(BlobSweep))}


def sweep_of(session: Session, digest: AdapterDigest) -> UUID | None:
    """The token of the sweep that may be deleting this digest's blobs."""
    return session.scalar(select(BlobSweep.token).where(BlobSweep.digest == digest))


def begin_sweep(session: Session, digest: AdapterDigest, token: UUID, dead: UUID | None) -> bool:
    """Mark the digest; false if another sweep has, unless that is the one known to be ``dead``."""
    if dead is not None:
        succeeded = update(BlobSweep).where(BlobSweep.digest == digest, BlobSweep.token == dead).values(token=token)
        return session.scalar(succeeded.returning(BlobSweep.digest)) is not None
    if sweep_of(session, digest) is not None:
        return False
    session.add(BlobSweep(digest=digest, token=token))  # if another sweep does so at the same time, this is done again and sees it
    return True


def end_sweep(session: Session, digest: AdapterDigest, token: UUID, closed: Collection[UUID]) -> None:
    """Take the mark away and close these versions, which need nothing more; neither if the mark is another sweep's by now."""
    ended = delete(BlobSweep).where(BlobSweep.digest == digest, BlobSweep.token == token).returning(BlobSweep.digest)
    if session.scalar(ended) is None:
        return
    closing = update(AdapterVersion).where(AdapterVersion.id.in_(closed))
    session.execute(closing.where(AdapterVersion.state == VersionState.DELETING).values(state=VersionState.DELETED))
    session.execute(closing.where(AdapterVersion.state == VersionState.FAILED).values(digest=None))
