"""Usage rows in the database: written once each, many per commit; read behind a cursor. Knows no HTTP and no journal."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import msgspec
from sqlalchemy import func, select
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from graftwork_platform.db import Database
from graftwork_platform.db_postgresql import Turn, take_turn
from graftwork_platform.errors import BadRequest
from graftwork_platform.ids import day_of, parse
from graftwork_platform.models import Usage, UsageStatus
from graftwork_platform.paging import Page, page_of

_log = logging.getLogger(__name__)

_MAX_REFUSALS = 2  # then it is the row, and no other writer's doing
_RETRY_DELAYS = (0.1, 0.5, 2.0, 5.0)  # seconds; a full disk or a held lock often passes


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What one request used. ``request_id`` is the server's own; the client's is kept beside it and unique for nothing."""

    request_id: UUID
    client_request_id: str | None
    tenant_id: UUID
    key_id: UUID
    model: str
    version_id: UUID | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    status: UsageStatus
    created_at: int  # Unix milliseconds


class UsageNotRecorded(Exception):
    """The usage of a request cannot be made durable."""


class UsageWriter:
    """Brings rows from the journal into the database, however long it stays away."""

    def __init__(self, database: Database, *, retry_delays: Sequence[float] = _RETRY_DELAYS) -> None:
        """``retry_delays``: seconds between attempts; the last one is repeated for ever."""
        self._database = database
        self._retry_delays = retry_delays
        self.num_refused = 0

    async def write(self, rows: Sequence[UsageRow]) -> None:
        """Return when ``rows`` are in the database; those whose id is there already change nothing.

        A row that breaks the database's own rules, time and again, is logged in full and given up: it must not hold up the others.
        """
        for attempt in itertools.count():
            try:
                await self._database.run_write(lambda session: insert_usage(session, rows))
                return
            except (IntegrityError, DataError) as error:
                if len(rows) > 1:
                    await self.write(rows[: len(rows) // 2])
                    await self.write(rows[len(rows) // 2 :])
                    return
                if attempt >= min(_MAX_REFUSALS, len(self._retry_delays)):
                    self.num_refused += 1
                    _log.error("the database refuses this usage row: %s: %s", error, msgspec.json.encode(rows[0]).decode())
                    return
                await asyncio.sleep(self._retry_delays[attempt])
            except SQLAlchemyError as error:
                delay = self._retry_delays[min(attempt, len(self._retry_delays) - 1)]
                what = " ".join(str(error).split())
                _log.warning("cannot write %d usage rows, trying again in %.1f s: %s", len(rows), delay, what)
                await asyncio.sleep(delay)


def insert_usage(session: Session, rows: Sequence[UsageRow]) -> None:
    """Add the rows that are not there yet, numbered in the order of recording.

    Commits take turns, in the order of the numbers: a reader behind a cursor can never pass a row that becomes visible late.
    """
    take_turn(session, Turn.RECORD_USAGE)
    ids = [row.request_id for row in rows]
    days = {day_of(request_id) for request_id in ids}
    known = set(session.scalars(select(Usage.request_id).where(Usage.day.in_(days), Usage.request_id.in_(ids))))
    seq = session.scalar(select(func.max(Usage.seq))) or 0
    for row in rows:
        if row.request_id in known:
            continue
        known.add(row.request_id)
        seq += 1
        session.add(_as_model(row, seq))
    session.flush()


async def list_usage(database: Database, *, tenant_id: UUID | None, after: str | None, limit: int) -> Page[Usage]:
    """Rows in the order they were recorded, so that a reader who goes on from its last row misses none and sees none twice.

    ``after`` is the request id of the last row read. Raises `BadRequest` if there is no such row.
    """

    def work(session: Session) -> Page[Usage]:
        query = select(Usage).order_by(Usage.seq)
        if tenant_id is not None:
            query = query.where(Usage.tenant_id == tenant_id)
        if after is not None:
            query = query.where(Usage.seq > _seq_of(session, tenant_id, after))
        return page_of(session, query, limit)

    return await database.run_read(work)


def _seq_of(session: Session, tenant_id: UUID | None, after: str) -> int:
    request_id = parse("req", after)
    try:
        row = session.get(Usage, (day_of(request_id), request_id)) if request_id else None
    except (ValueError, OverflowError):  # no day of any calendar
        row = None
    if row is None or (tenant_id is not None and row.tenant_id != tenant_id):
        raise BadRequest(f"`after` is no request id of this list: {after}", param="after")
    return row.seq


def _as_model(row: UsageRow, seq: int) -> Usage:
    return Usage(
        day=day_of(row.request_id),
        request_id=row.request_id,
        seq=seq,
        client_request_id=row.client_request_id,
        tenant_id=row.tenant_id,
        key_id=row.key_id,
        model=row.model,
        version_id=row.version_id,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        output_tokens=row.output_tokens,
        status=row.status,
        created_at=row.created_at,
    )
