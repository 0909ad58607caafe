"""Which version a model's name means to a tenant, and what a tenant can name. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from uuid import UUID

import msgspec
from sqlalchemy import Select, and_, func, select, update
from sqlalchemy.orm import Session

from graftwork_adapters.keys import AdapterDigest, RowTypeName
from graftwork_platform.catalog.facts import VersionFacts, facts_from_json
from graftwork_platform.catalog.names import DEFAULT, ModelName, is_adapter_name, parse_model_name, parse_version
from graftwork_platform.db import Database
from graftwork_platform.errors import ModelNotFound, NotFound
from graftwork_platform.ids import parse
from graftwork_platform.models import Adapter, AdapterVersion, VersionState
from graftwork_platform.paging import Page, page_of


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What will run. ``public_name`` is what answers call it; without a ``digest`` it is the base.

    ``row_type``: of its packed form; None: the server's.
    """

    public_name: str
    version: int | None = None
    digest: AdapterDigest | None = None
    version_id: UUID | None = None
    row_type: RowTypeName | None = None
    facts: VersionFacts = field(default_factory=VersionFacts)


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A line of the model list. ``created`` in Unix seconds; the base has no version. ``has_own_tokenizer``: None where that is not
    known yet.
    """

    name: str
    created: int
    version: int | None = None
    has_own_tokenizer: bool | None = False


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """An adapter and its newest ready version, if it has one."""

    adapter: Adapter
    newest: AdapterVersion | None


LearnFacts = Callable[[str, UUID, AdapterDigest, RowTypeName | None], Awaitable[VersionFacts]]
"""Finds out what a version is of which only model name, id, digest and row type are known. Raises `ServiceUnavailable`."""


class Catalog:
    """Names and versions of all tenants; every question is asked inside one."""

    def __init__(
        self, database: Database, base_name: str, learn_facts: LearnFacts, *, now: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._learn_facts = learn_facts
        self.base_name = base_name
        self._now = now
        self._started = int(now())

    async def resolve(self, tenant_id: UUID, model: str, default_adapter_id: UUID | None = None) -> ResolvedModel:
        """The base for its own name; ``adapter`` (its newest ready version), ``adapter@vN``, or ``default``: the key's default
        adapter, without one the base. Raises `ModelNotFound` for all else, alike, and what ``learn_facts`` raises.
        """
        if model == self.base_name or (model == DEFAULT and default_adapter_id is None):
            return ResolvedModel(self.base_name)
        name = parse_model_name(model)
        if name is None:
            raise ModelNotFound(model)
        query = _ready_version(tenant_id, name, default_adapter_id if model == DEFAULT else None)
        row = await self._database.run_read(lambda session: session.execute(query).first())
        if row is None:
            raise ModelNotFound(model)
        adapter_name, version = row
        if version.digest is None:
            raise AssertionError(f"version {version.id} is ready without a digest")
        shown = model if name.version is not None else adapter_name
        digest, row_type = AdapterDigest(version.digest), row_type_of(version.row_type)
        if version.facts is None:  # published by an older server: nobody knows yet how it is to be served
            facts = await self._learn_facts(shown, version.id, digest, row_type)
        else:
            facts = facts_from_json(version.facts)
        return ResolvedModel(shown, version.number, digest, version.id, row_type, facts)

    async def list_models(self, tenant_id: UUID) -> list[ListedModel]:
        """All that the tenant can name: the base first, then its adapters with a ready version, by name."""

        def work(session: Session) -> list[ListedModel]:
            newest = _newest_numbers(tenant_id).subquery()
            rows = session.execute(
                select(Adapter.name, Adapter.created_at, newest.c.number, AdapterVersion.facts)
                .join(newest, newest.c.adapter_id == Adapter.id)
                .join(AdapterVersion, and_(AdapterVersion.adapter_id == Adapter.id, AdapterVersion.number == newest.c.number))
                .where(Adapter.tenant_id == tenant_id, Adapter.deleted_at.is_(None))
                .order_by(Adapter.name)
            )
            return [
                ListedModel(name, created // 1000, number, None if facts is None else facts_from_json(facts).text.tokenizer)
                for name, created, number, facts in rows
            ]

        return [ListedModel(self.base_name, self._started), *await self._database.run_read(work)]

    async def list_adapters(self, tenant_id: UUID, *, after: UUID | None, limit: int) -> Page[AdapterSummary]:
        """A tenant's adapters that are not deleted, oldest first."""

        def work(session: Session) -> Page[AdapterSummary]:
            query = select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.deleted_at.is_(None)).order_by(Adapter.id)
            page = page_of(session, query if after is None else query.where(Adapter.id > after), limit)
            return Page([AdapterSummary(adapter, newest_ready(session, adapter.id)) for adapter in page.rows], page.has_more)

        return await self._database.run_read(work)

    async def get_adapter(self, tenant_id: UUID, name: str) -> AdapterSummary:
        """Raises `NotFound`."""

        def work(session: Session) -> AdapterSummary:
            adapter = live_adapter(session, tenant_id, name)
            return AdapterSummary(adapter, newest_ready(session, adapter.id))

        return await self._database.run_read(work)

    async def delete_adapter(self, tenant_id: UUID, name: str) -> Adapter:
        """Stop serving an adapter and all its versions; its name stays the tenant's own. Raises `NotFound`."""

        def work(session: Session) -> Adapter:
            adapter = live_adapter(session, tenant_id, name, lock=True)  # a version that becomes ready is ready before or never
            adapter.deleted_at = int(self._now() * 1000)
            session.execute(
                update(AdapterVersion)
                .where(AdapterVersion.adapter_id == adapter.id, AdapterVersion.state == VersionState.READY)
                .values(state=VersionState.DELETING, deleted_at=adapter.deleted_at)
            )
            return adapter

        return await self._database.run_write(work)

    async def list_versions(self, tenant_id: UUID, name: str, *, after: UUID | None, limit: int) -> Page[AdapterVersion]:
        """All versions of an adapter in the order they were made, refused ones too. Raises `NotFound`."""

        def work(session: Session) -> Page[AdapterVersion]:
            adapter = live_adapter(session, tenant_id, name)
            query = _visible_versions(adapter).order_by(AdapterVersion.id)
            return page_of(session, query if after is None else query.where(AdapterVersion.id > after), limit)

        return await self._database.run_read(work)

    async def get_version(self, tenant_id: UUID, name: str, version: str) -> AdapterVersion:
        """One version by ``vN`` or id. Raises `NotFound`."""

        def work(session: Session) -> AdapterVersion:
            number, version_id = parse_version(version), parse("av", version)
            wanted = AdapterVersion.number == number if number is not None else AdapterVersion.id == version_id
            row = session.scalar(_visible_versions(live_adapter(session, tenant_id, name)).where(wanted))
            if row is None:
                raise NotFound(f"Adapter `{name}` has no version `{version}`.", code="version_not_found")
            return row

        return await self._database.run_read(work)


def row_type_of(kept: str | None) -> RowTypeName | None:
    """A row type as the database keeps it; None: the server's own."""
    return None if kept is None else msgspec.convert(kept, RowTypeName)


def live_adapter(session: Session, tenant_id: UUID, name: str, *, lock: bool = False) -> Adapter:
    """The tenant's adapter of that name, locked if it is to be changed; raises `NotFound` if there is none or it is deleted."""
    query = select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.name == name, Adapter.deleted_at.is_(None))
    # Text that no adapter can be called is not asked for: databases refuse a NUL.
    adapter = session.scalar(query.with_for_update() if lock else query) if is_adapter_name(name) else None
    if adapter is None:
        raise NotFound(f"No adapter `{name}` in this tenant.", code="adapter_not_found")
    return adapter


def newest_ready(session: Session, adapter_id: UUID) -> AdapterVersion | None:
    """The ready version with the highest number."""
    return session.scalar(
        select(AdapterVersion)
        .where(AdapterVersion.adapter_id == adapter_id, AdapterVersion.state == VersionState.READY)
        .order_by(AdapterVersion.number.desc())
        .limit(1)
    )


def _visible_versions(adapter: Adapter) -> Select[AdapterVersion]:
    gone = (VersionState.DELETING, VersionState.DELETED)
    return select(AdapterVersion).where(AdapterVersion.adapter_id == adapter.id, AdapterVersion.state.not_in(gone))


def _newest_numbers(tenant_id: UUID) -> Select[UUID, int | None]:
    return (
        select(AdapterVersion.adapter_id, func.max(AdapterVersion.number).label("number"))
        .where(AdapterVersion.tenant_id == tenant_id, AdapterVersion.state == VersionState.READY)
        .group_by(AdapterVersion.adapter_id)
    )


def _ready_version(tenant_id: UUID, name: ModelName, default_adapter_id: UUID | None) -> Select[str, AdapterVersion]:
    """The newest ready version of a named adapter, or of the default one, or exactly the version asked for."""
    query = (
        select(Adapter.name, AdapterVersion)
        .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
        .where(Adapter.tenant_id == tenant_id, Adapter.deleted_at.is_(None), AdapterVersion.state == VersionState.READY)
        .where(Adapter.name == name.adapter if default_adapter_id is None else Adapter.id == default_adapter_id)
    )
    if name.version is not None:
        return query.where(AdapterVersion.number == name.version)
    return query.order_by(AdapterVersion.number.desc()).limit(1)
