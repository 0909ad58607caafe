"""The parts of an API process, made once and passed down. Knows no routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.publisher import run_publish
from graftwork_adapters.store import ObjectStore
from graftwork_platform.catalog.catalog import Catalog
from graftwork_platform.db import Database, DatabaseUnavailable
from graftwork_platform.journal.ledger import UsageLedger
from graftwork_platform.keys.channel import KeyChannel, reread_from
from graftwork_platform.keys.ring import KeyRing
from graftwork_platform.keys.service import Keys
from graftwork_platform.publishing.blobs import Blobs
from graftwork_platform.publishing.facts_reader import FactsReader
from graftwork_platform.publishing.incoming import Incoming
from graftwork_platform.publishing.leases import PublishTiming
from graftwork_platform.publishing.owner import StoreOwner
from graftwork_platform.publishing.publisher import Publisher, RunPublish
from graftwork_platform.publishing.quality import Measure
from graftwork_platform.publishing.store_threads import StoreThreads
from graftwork_platform.publishing.text_check import CheckText, check_text
from graftwork_platform.publishing.uploads import Uploads
from graftwork_platform.secrets import Secrets, load_or_create
from graftwork_platform.settings import Settings, given_secrets
from graftwork_platform.tenants import Tenants
from graftwork_platform.usage import UsageWriter

_log = logging.getLogger(__name__)

_OPEN_WITHIN_S = 5.0
"""How long a start waits for the database before it answers without it."""

_OPEN_PAUSE_S = 0.5
_LAST_WORK_S = 4.0
"""In which a database that does not answer is given up at a stop, so that the supervisor need not end it."""


@dataclass(frozen=True, slots=True)
class Services:
    """What routes are given. Everything in it lives as long as the process."""

    settings: Settings
    spec: BaseSpec
    secrets: Secrets
    database: Database
    store: ObjectStore
    store_owner: StoreOwner
    store_threads: StoreThreads
    keyring: KeyRing
    keys: Keys
    tenants: Tenants
    catalog: Catalog
    uploads: Uploads
    publisher: Publisher
    facts: FactsReader
    blobs: Blobs
    usage: UsageLedger


def build_services(
    settings: Settings,
    spec: BaseSpec,
    store: ObjectStore,
    *,
    now: Callable[[], float] = time.time,
    run: RunPublish = run_publish,
    check: CheckText = check_text,
    measure: Measure | None = None,
    timing: PublishTiming = PublishTiming(),
) -> Services:
    """All parts, none of them running; call inside the event loop that will use them. ``measure`` asks the engine, if there is one.

    Raises `OSError` or `BadSecret` if the data directory cannot be used, `UnsupportedDatabase` for the database's URL.
    """
    secrets = load_or_create(settings.secrets_dir, given_secrets())
    database = Database(settings.database)
    ring = KeyRing(secrets, now=now, reread=reread_from(database) if database.is_shared else None)
    threads = StoreThreads()
    owner = StoreOwner(database, store, threads)
    incoming = Incoming(store, settings.uploads_dir, threads)
    blobs = Blobs(
        database,
        store,
        spec.base_id,
        settings.row_type,
        scratch=settings.scratch_dir,
        threads=threads,
        delete_grace=2 * settings.request_timeout,
        now=now,
    )
    publisher = Publisher(
        database,
        blobs,
        incoming,
        owner,
        spec,
        threads=threads,
        row_type=settings.row_type,
        base_dir=settings.model_dir,
        scratch=settings.scratch_dir,
        run_publish=run,
        check_text=check,
        measure=measure,
        reference_type=settings.dtype,
        limits=settings.publish,
        upload_limits=settings.upload,
        timing=timing,
        now=now,
    )
    facts = FactsReader(database, publisher.look_again)
    return Services(
        settings=settings,
        spec=spec,
        secrets=secrets,
        database=database,
        store=store,
        store_owner=owner,
        store_threads=threads,
        keyring=ring,
        keys=Keys(database, ring, secrets, now=now),
        tenants=Tenants(database, ring, now=now),
        catalog=Catalog(database, settings.base_name, facts.learn, now=now),
        uploads=Uploads(database, incoming, blobs, publisher, threads, settings.upload, base_name=settings.base_name, now=now),
        publisher=publisher,
        facts=facts,
        blobs=blobs,
        usage=UsageLedger(settings.data_dir / "journal", UsageWriter(database).write),
    )


@asynccontextmanager
async def running(services: Services) -> AsyncIterator[Services]:
    """Start what runs in the background; on the way out stop it; usage the database does not take by then stays in the journal.

    The first start leaves the admin key in `Settings.admin_key_file`. Expects the database at the newest revision.
    """
    opening = asyncio.create_task(_open_keys(services), name="open keys")
    beside = [opening]
    if services.database.is_shared:
        channel = KeyChannel(services.database, services.keyring)
        beside.append(asyncio.create_task(channel.run(), name="hear of changed keys"))
    for task in beside:
        task.add_done_callback(_tell_failure)
    await asyncio.wait([opening], timeout=_OPEN_WITHIN_S if services.database.is_shared else None)
    if opening.done():
        opening.result()
    await services.publisher.start()
    await services.usage.start()
    try:
        yield services
    finally:
        services.database.hurry(_LAST_WORK_S)
        await services.facts.close()
        await services.publisher.close()
        await services.usage.close()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await services.store_threads.close()
        services.database.close()


async def _open_keys(services: Services) -> None:
    """A database that is away is waited for: until it is back, requests are told that their keys cannot be checked."""
    while True:
        try:
            await services.keys.open(services.settings.admin_key_file)
        except DatabaseUnavailable:
            await asyncio.sleep(_OPEN_PAUSE_S)
        else:
            return


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("the task to %s ended", task.get_name(), exc_info=error)
