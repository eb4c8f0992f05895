from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from devices import NUMBA_MISSING
from hypothesis import HealthCheck, Phase, settings
from triton_interpreter import use_interpreter

COMPILED = torch.cuda.is_available()
# Read when a kernel is defined, so before any test module imports one.
if not COMPILED:
    use_interpreter()

# The same examples in every run: a red build means a changed program, not a lucky draw.
settings.register_profile(
    "deterministic", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
# Nearly every example is a specialisation of its own, which takes seconds to compile: few, and a failure as found.
settings.register_profile(
    "gpu", settings.get_profile("deterministic"), max_examples=20, phases=(Phase.explicit, Phase.generate)
)
# An interpreted kernel takes a tenth of a second a row. Tests that ask for a number of examples of their own get it.
settings.register_profile("interpreted", settings.get_profile("gpu"), max_examples=5)
settings.load_profile("deterministic")

# What only concerns the numba forms imports them at once; the other tests skip theirs.
collect_ignore = ["topology/test_numba_ops.py", "remap/test_remap_numba_ops.py"] if NUMBA_MISSING else []

_SETTINGS = "_hypothesis_internal_use_settings"
"""Where Hypothesis keeps what a test was given when it was defined; it offers no way to change that from outside."""


def pytest_report_header() -> list[str]:
    return ["numba is not installed: the numba forms are left out"] if NUMBA_MISSING else []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Compiled kernels get the ``gpu`` profile, whatever the test asks for; interpreted ones that of their own."""
    test = getattr(item, "obj", None)
    if "triton_ops" not in item.name or not hasattr(test, _SETTINGS):
        return (yield)
    asked_for, profile = getattr(test, _SETTINGS), settings.get_profile("gpu")
    if not COMPILED:
        usual = asked_for.max_examples == settings.get_profile("deterministic").max_examples
        profile = settings.get_profile("interpreted") if usual else asked_for
    with mock.patch.object(test, _SETTINGS, profile):
        return (yield)
