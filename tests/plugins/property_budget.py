"""How many examples property tests try: few and always the same ones, or, with `--hypothesis-profile=full`, many new ones."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("quick", derandomize=True, deadline=None, suppress_health_check=_SLOW_MACHINE)
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=_SLOW_MACHINE)
settings.load_profile("quick")


def budget(examples: int, steps: int = 50) -> settings:
    """Settings of a machine that tries so many ``examples`` of ``steps`` in the quick profile, and 20 times as many in full."""
    default = settings()
    return settings(default, max_examples=max(1, examples * default.max_examples // 100), stateful_step_count=steps)
