"""One store, one database: a sweep deletes what its own database needs no more, so no other may count on the same blobs."""

from __future__ import annotations

import json
import secrets
import tempfile
from pathlib import Path

from sqlalchemy.orm import Session

from graftwork_adapters.errors import BlobNotFound, StoreError
from graftwork_adapters.store import ObjectStore
from graftwork_platform.db import Database
from graftwork_platform.db_postgresql import Turn, take_turn
from graftwork_platform.models import SecretFingerprint
from graftwork_platform.publishing.store_threads import StoreThreads

OWNER_KEY = "graftwork-owner.json"
"""Where the store names its database's deployment."""

_DEPLOYMENT = "deployment"
_ID_BYTES = 16


class ForeignStore(StoreError):
    """The store belongs to another database's deployment."""

    def __init__(self) -> None:
        super().__init__(
            "the object store belongs to another database, whose adapters this server's sweeps would delete: "
            "use another prefix or folder, or the database that this store belongs to"
        )


def deployment_id(session: Session) -> str:
    """The id by which stores know this database, in hex; made at the first call."""
    take_turn(session, Turn.CLAIM_SECRETS)
    row = session.get(SecretFingerprint, _DEPLOYMENT)
    if row is None:
        row = SecretFingerprint(name=_DEPLOYMENT, fingerprint=secrets.token_bytes(_ID_BYTES))
        session.add(row)
    return row.fingerprint.hex()


def claim_store(store: ObjectStore, deployment: str) -> None:
    """Leave ``deployment`` in a store that names none yet. Raises `ForeignStore` if it names another. Blocks on it."""
    with tempfile.TemporaryDirectory(prefix="graftwork-") as folder:
        ours, found = Path(folder, "ours"), Path(folder, "found")
        ours.write_text(json.dumps({"deployment": deployment}))
        try:
            store.fetch(OWNER_KEY, found)
        except BlobNotFound:
            if store.put_if_absent(OWNER_KEY, ours):
                return
            store.fetch(OWNER_KEY, found)  # another server was faster
        if found.read_bytes() != ours.read_bytes():
            raise ForeignStore


class StoreOwner:
    """Whether this server's store is its database's. Looked up until it is; then it stays so."""

    def __init__(self, database: Database, store: ObjectStore, threads: StoreThreads) -> None:
        self._database = database
        self._store = store
        self._threads = threads
        self._confirmed = False

    async def confirm(self) -> None:
        """Returns once the store is known to be this database's. Raises `ForeignStore`, `StoreError`, `DatabaseUnavailable`."""
        if self._confirmed:
            return
        deployment = await self._database.run_write(deployment_id)
        await self._threads.run(claim_store, self._store, deployment)
        self._confirmed = True
