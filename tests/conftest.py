from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples in every run: a red build means a changed program, not a lucky draw.
settings.register_profile(
    "deterministic", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("deterministic")
