"""The API process: ``python -m graftwork_platform.serve.api_process`` reads its configuration from standard input and answers HTTP.

It listens on a socket that the supervisor opened, so that a new API process takes over where the last one ended.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import math
import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from graftwork_adapters.base_spec import load_base_spec
from graftwork_adapters.errors import AdapterError, StoreError
from graftwork_adapters.stores import open_store
from graftwork_engine.client import EngineClient
from graftwork_engine.errors import UnsupportedModel
from graftwork_engine.lifeline import die_with_parent
from graftwork_platform.app import create_app
from graftwork_platform.context import build_services
from graftwork_platform.db import DatabaseUnavailable
from graftwork_platform.db_url import UnsupportedDatabase
from graftwork_platform.keys.claim import claim
from graftwork_platform.publishing.owner import ForeignStore, StoreOwner
from graftwork_platform.publishing.quality import Quality
from graftwork_platform.secrets import BadSecret
from graftwork_platform.serve.supervisor import EXIT_CONFIG
from graftwork_platform.settings import Settings
from graftwork_platform.text.model_text import ModelText
from graftwork_platform.text.neutral_texts import neutral_prompts
from graftwork_platform.text.tokenizer import TokenizerError

logger = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
"""How long streams that were ended at a stop may take to say so and to record their usage."""

STORE_ANSWER_S = 5.0
"""How long a start waits for the object store to say whose it is."""

YOUNG_OBJECTS = 10_000
"""New objects after which the collector looks at them; Python's own 700 are one request's worth."""


class ApiConfig(msgspec.Struct, frozen=True):
    """What the supervisor tells an API process: its settings, and where the engine answers."""

    settings: Settings
    engine_endpoint: str


def encode_config(config: ApiConfig) -> bytes:
    """As JSON."""
    return msgspec.json.encode(config, enc_hook=str)


def decode_config(data: bytes) -> ApiConfig:
    """From JSON; raises `msgspec.ValidationError`."""
    return msgspec.json.decode(data, type=ApiConfig, dec_hook=_as_path)


def _as_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise TypeError(f"{kind} is not part of a configuration")


class _Server(uvicorn.Server):
    """Uvicorn, which on its way out gives streams time to end, and then ends those that did not with an error they can read.

    By itself it would cut them off: a client could not tell a stop from a broken network.
    """

    def __init__(self, config: uvicorn.Config, engine: EngineClient, grace: float) -> None:
        super().__init__(config)
        self._engine, self._grace = engine, grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer, with all that there is by then out of the collector's sight."""
        await super().startup(sockets)
        _spare_the_collector()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, wait, end streams, wait for their last words, and leave."""
        ending = asyncio.create_task(self._end_streams())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_streams(self) -> None:
        await asyncio.sleep(self._grace)
        await self._engine.end_streams()


def _spare_the_collector() -> None:
    """Modules, routes and tables stay for good: a full collection that looked at all of them would hold up every stream."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


async def answer(config: ApiConfig, listener: socket.socket) -> None:
    """Answer HTTP on ``listener`` until SIGTERM, then let running streams end within the settings' grace."""
    settings = config.settings
    spec = load_base_spec(settings.model_dir, settings.cache_dir, name=settings.base_name)
    engine, text = EngineClient(config.engine_endpoint), ModelText.from_dir(settings.model_dir)
    quality = Quality(engine, neutral_prompts(text.tokenizer))
    services = build_services(settings, spec, open_store(settings.store), measure=quality.compare)
    try:
        await services.database.run_write(lambda session: claim(session, services.secrets))
    except DatabaseUnavailable:
        logger.warning("the database is away; requests are answered 503 until it is back")
    await _confirm_store(services.store_owner)
    app = create_app(services, engine, text)
    limit = math.ceil(settings.shutdown_grace + LAST_WORDS_S)
    options = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=limit)
    await _Server(options, engine, settings.shutdown_grace).serve(sockets=[listener])


async def _confirm_store(owner: StoreOwner) -> None:
    """Refuses a store of another database; one that cannot be asked is asked again before anything is put into it or deleted."""
    try:
        async with asyncio.timeout(STORE_ANSWER_S):
            await owner.confirm()
    except ForeignStore:
        raise
    except (StoreError, DatabaseUnavailable, TimeoutError) as error:
        logger.warning("whose object store this is cannot be found out yet: %s", error)


def main() -> None:
    """Entry point of the process; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Graftwork API process; its configuration comes as JSON on standard input.")
    parser.add_argument("--fd", type=int, required=True, help="the listening socket, inherited from the supervisor")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor; this process dies with it")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s api %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    try:
        config = decode_config(sys.stdin.buffer.read())
        os.nice(config.settings.api_nice)  # publications, which it starts, follow it
        with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
            runner.run(answer(config, socket.socket(fileno=arguments.fd)))
    except (AdapterError, UnsupportedModel, UnsupportedDatabase, BadSecret, TokenizerError, msgspec.ValidationError) as error:
        logger.error("%s", error)
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
