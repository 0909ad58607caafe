"""The parts of an API process, made once and passed down. Knows no routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.publisher import run_publish
from graftwork_adapters.store import ObjectStore
from graftwork_platform.catalog.catalog import Catalog
from graftwork_platform.db import Database
from graftwork_platform.keys.ring import KeyRing
from graftwork_platform.keys.service import Keys
from graftwork_platform.publishing.incoming import Incoming
from graftwork_platform.publishing.publisher import Publisher, RunPublish
from graftwork_platform.publishing.uploads import Uploads
from graftwork_platform.secrets import Secrets, load_or_create, write_private
from graftwork_platform.settings import Settings
from graftwork_platform.tenants import Tenants
from graftwork_platform.usage import UsageWriter


@dataclass(frozen=True, slots=True)
class Services:
    """What routes are given. Everything in it lives as long as the process."""

    settings: Settings
    spec: BaseSpec
    secrets: Secrets
    database: Database
    store: ObjectStore
    keyring: KeyRing
    keys: Keys
    tenants: Tenants
    catalog: Catalog
    uploads: Uploads
    publisher: Publisher
    usage: UsageWriter


def build_services(
    settings: Settings,
    spec: BaseSpec,
    store: ObjectStore,
    *,
    now: Callable[[], float] = time.time,
    run: RunPublish = run_publish,
) -> Services:
    """All parts, none of them running; call inside the event loop that will use them.

    Raises `OSError` or `BadSecret` if the data directory cannot be used, `UnsupportedDatabase` for the database's URL.
    """
    secrets = load_or_create(settings.secrets_dir)
    database = Database(settings.database)
    ring = KeyRing(secrets, now=now)
    incoming = Incoming(settings.uploads_dir)
    publisher = Publisher(
        database,
        store,
        incoming,
        spec,
        row_type=settings.row_type,
        scratch=settings.scratch_dir,
        run_publish=run,
        limits=settings.publish,
        upload_limits=settings.upload,
        delete_grace=2 * settings.request_timeout,
        now=now,
    )
    return Services(
        settings=settings,
        spec=spec,
        secrets=secrets,
        database=database,
        store=store,
        keyring=ring,
        keys=Keys(database, ring, secrets, now=now),
        tenants=Tenants(database, now=now),
        catalog=Catalog(database, settings.base_name, now=now),
        uploads=Uploads(database, incoming, publisher, settings.upload, base_name=settings.base_name, now=now),
        publisher=publisher,
        usage=UsageWriter(database),
    )


@asynccontextmanager
async def running(services: Services) -> AsyncIterator[Services]:
    """Start what runs in the background; on the way out stop it, with every usage row that was handed over written.

    The first start leaves the admin key in `Settings.admin_key_file`. Expects the database at the newest revision.
    """
    await services.keys.ensure_admin(lambda text: write_private(services.settings.admin_key_file, text + "\n"))
    await services.keys.load()
    services.keys.settle_admin_file(services.settings.admin_key_file)
    await services.publisher.start()
    usage = asyncio.create_task(services.usage.run(), name="write usage")
    try:
        yield services
    finally:
        await services.publisher.close()
        usage.cancel()
        with suppress(asyncio.CancelledError):
            await usage
        services.database.close()
