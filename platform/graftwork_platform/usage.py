"""Usage rows: written once each, many per commit, durable before anyone is told; read behind a cursor. Knows no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from graftwork_platform.db import Database
from graftwork_platform.errors import BadRequest
from graftwork_platform.ids import day_of, parse, show
from graftwork_platform.models import Usage, UsageStatus
from graftwork_platform.paging import Page, page_of

_log = logging.getLogger(__name__)

_MAX_BATCH = 500
_RETRY_DELAYS = (0.1, 0.5, 2.0)  # seconds; a full disk or a held lock often passes


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
    """The database refused a row, or did not take it in time."""


@dataclass(frozen=True, slots=True)
class _Pending:
    row: UsageRow
    done: asyncio.Future[None]


class UsageWriter:
    """Group commit: rows that arrive while one commit runs share the next, so many streams can end on one slow disk.

    Belongs to one event loop. `run` must be running for `record` to return.
    """

    def __init__(self, database: Database, *, retry_delays: Sequence[float] = _RETRY_DELAYS) -> None:
        self._database = database
        self._retry_delays = retry_delays
        self._queue: asyncio.Queue[_Pending] = asyncio.Queue()

    async def record(self, row: UsageRow) -> None:
        """Returns when ``row`` is durable; a row whose id is there already changes nothing. Raises `UsageNotRecorded`.

        The row is written even if the caller is cancelled while it waits.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Pending(row, done))
        await done

    async def run(self) -> None:
        """Write batches until cancelled; rows handed over before that are written first."""
        writing: asyncio.Task[None] | None = None
        try:
            while True:
                writing = asyncio.create_task(self._write(await self._next_batch()))
                await asyncio.shield(writing)
        finally:
            if writing is not None:
                await writing
            while not self._queue.empty():
                await self._write(self._take([]))

    async def _next_batch(self) -> list[_Pending]:
        return self._take([await self._queue.get()])

    def _take(self, batch: list[_Pending]) -> list[_Pending]:
        with contextlib.suppress(asyncio.QueueEmpty):
            while len(batch) < _MAX_BATCH:
                batch.append(self._queue.get_nowait())
        return batch

    async def _write(self, batch: list[_Pending]) -> None:
        try:
            await self._insert([pending.row for pending in batch])
        except IntegrityError as error:
            if len(batch) == 1:
                _fail(batch, error)
                return
            for pending in batch:  # one bad row must not cost the others theirs
                await self._write([pending])
        except SQLAlchemyError as error:
            _fail(batch, error)
        else:
            for pending in batch:
                if not pending.done.done():
                    pending.done.set_result(None)

    async def _insert(self, rows: list[UsageRow]) -> None:
        for delay in self._retry_delays:
            try:
                await self._database.run_write(lambda session: insert_usage(session, rows))
                return
            except IntegrityError:
                raise
            except SQLAlchemyError as error:
                _log.warning("cannot write %d usage rows, trying again in %.1f s: %s", len(rows), delay, error)
                await asyncio.sleep(delay)
        await self._database.run_write(lambda session: insert_usage(session, rows))


def insert_usage(session: Session, rows: Sequence[UsageRow]) -> None:
    """Add the rows that are not there yet, numbered in the order of recording."""
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
    row = session.get(Usage, (day_of(request_id), request_id)) if request_id else None
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


def _fail(batch: list[_Pending], error: Exception) -> None:
    for pending in batch:
        _log.error("usage of %s is not recorded: %s", show("req", pending.row.request_id), error)
        if not pending.done.done():
            pending.done.set_exception(UsageNotRecorded(str(error)))
