"""The API process put together: services, engine and text become one ASGI application. Knows no command line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from graftwork_platform.admin.routes import admin_router
from graftwork_platform.context import Services, running
from graftwork_platform.errors import install_error_handlers
from graftwork_platform.inference.adapter_texts import AdapterTexts
from graftwork_platform.inference.admission import Admission
from graftwork_platform.inference.engine import Engine
from graftwork_platform.inference.generation import Generator
from graftwork_platform.inference.routes import Inference, inference_router
from graftwork_platform.journal.recovery import OrphanKeeper, Recovery, recovering
from graftwork_platform.keys.ring import KeyRing
from graftwork_platform.observability import Metrics, RequestObserver
from graftwork_platform.text.model_text import ModelText

_SILENT_S = 3.0
"""How long the keys may be out of date before a balancer is told; a moment of it is made good by reading them one by one."""

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServingEngine(Engine, OrphanKeeper, Protocol):
    """Runs requests, and knows how far those of an earlier API process came."""


def create_app(services: Services, engine: ServingEngine, text: ModelText) -> FastAPI:
    """The application. Its lifespan starts and stops ``services`` and ``engine``: streams end before their usage is flushed."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.callback(text.sandbox.close)
            stack.callback(texts.close)
            await stack.enter_async_context(running(services))
            await stack.enter_async_context(engine)
            await stack.enter_async_context(recovering(Recovery(services.usage, engine)))
            yield

    texts = AdapterTexts(text, services.blobs.fetch_text, services.settings.scratch_dir)
    app = FastAPI(title="Graftwork", lifespan=lifespan, openapi_url=None)
    install_error_handlers(app)
    metrics = Metrics(lambda: engine.stats, lambda: services.usage.stats)
    app.include_router(inference_router(_inference(services, engine, texts, metrics)))
    app.include_router(admin_router(services))
    _add_probes(app, services, engine, metrics)
    # Outside everything else, so that the answer to an unexpected error is identified and counted too.
    app.middleware_stack = RequestObserver(app.build_middleware_stack(), metrics)
    return app


def _inference(services: Services, engine: Engine, texts: AdapterTexts, metrics: Metrics) -> Inference:
    settings = services.settings
    return Inference(
        keyring=services.keyring,
        catalog=services.catalog,
        admission=Admission(services.catalog, texts, engine, settings.row_type),
        generator=Generator(
            engine,
            services.usage,
            services.publisher.ensure_packed,
            timeout=settings.request_timeout,
            observe=metrics.observe_usage,
        ),
        engine=engine,
        keep_alive=settings.keep_alive,
    )


def _add_probes(app: FastAPI, services: Services, engine: Engine, metrics: Metrics) -> None:
    @app.get("/livez")
    async def live() -> Response:
        """This process answers."""
        return JSONResponse({"status": "alive"})

    @app.get("/readyz")
    async def ready() -> Response:
        """An engine answers too, usage can be recorded, and keys can be checked."""
        trouble = (
            services.usage.failure or _keys_trouble(services.keyring) or (None if engine.healthy else "the engine is starting")
        )
        if trouble is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": trouble}, status_code=503, headers={"retry-after": "1"})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        """Prometheus' text format."""
        return Response(metrics.render(), media_type=_METRICS_TYPE)


def _keys_trouble(ring: KeyRing) -> str | None:
    return None if ring.silent_for < _SILENT_S else "API keys cannot be checked: the database does not answer"
