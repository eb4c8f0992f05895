from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from triton_interpreter import use_interpreter

INTERPRETED = not torch.cuda.is_available()
# Read when a kernel is defined, so before any test module imports one.
if INTERPRETED:
    use_interpreter()

# The same examples in every run: a red build means a changed program, not a lucky draw.
settings.register_profile(
    "deterministic", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
# An interpreted kernel takes a tenth of a second a row, so a failure is shown as it was found.
settings.register_profile(
    "interpreted", settings.get_profile("deterministic"), max_examples=12, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("deterministic")


def pytest_runtest_setup(item: pytest.Item) -> None:
    interpreted = INTERPRETED and "triton_ops" in item.name
    settings.load_profile("interpreted" if interpreted else "deterministic")
