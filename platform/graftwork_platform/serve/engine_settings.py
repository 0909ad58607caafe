"""The engine's configuration from the server's settings and flags, and what it means for publishing. Starts nothing."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from graftwork_adapters.publish_job import ServingMemory
from graftwork_engine.config import MAX_ADAPTER_RANK, EngineConfig
from graftwork_platform.settings import Settings


def engine_config(settings: Settings, chosen: dict[str, object], *, prefix_caching: bool) -> EngineConfig:
    """What the engine is told: where things are, and whatever was ``chosen`` of its settings (None: its default).

    Raises `graftwork_engine.errors.ConfigError`.
    """
    fixed = {
        "model_dir": str(settings.model_dir),
        "dtype": settings.dtype,
        "store": settings.store,
        "cache_dir": str(settings.cache_dir),
        "enable_prefix_caching": prefix_caching,
        # What may be uploaded can be loaded; a lower limit for uploads leaves those in service that were published before.
        "max_adapter_rank": max(settings.publish.max_rank, MAX_ADAPTER_RANK),
    }
    config = msgspec.convert({**fixed, **{k: v for k, v in chosen.items() if v is not None}}, EngineConfig)
    config.validate()
    return config


def publishing_for(engine: EngineConfig, settings: Settings) -> Settings:
    """Publishing refuses what the engine's adapter memory could never hold."""
    memory = ServingMemory(
        engine.adapter_memory_bytes,
        engine.adapter_page_bytes,
        engine.adapter_host_bytes,
        engine.adapter_whole_bytes,
        engine.dtype,
    )
    return replace(settings, publish=replace(settings.publish, memory=memory))
