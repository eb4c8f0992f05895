"""Where each implementation is tested: GPU kernels on a GPU where there is one, in Triton's interpreter where not.

The numba forms run where numba is installed, as it is with kvplugin; a GPU machine's own Python may lack it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

GPU_FORMS = ("torch_ops", "triton_ops")
NUMBA_MISSING = find_spec("numba") is None


def device_of(implementation: ModuleType) -> torch.device:
    """Device for the tensors of an implementation's calls."""
    on_gpu = torch.cuda.is_available() and implementation.__name__.rpartition(".")[2] in GPU_FORMS
    return torch.device("cuda" if on_gpu else "cpu")


def numba_form(package: str) -> ModuleType | None:
    """The ``numba_ops`` of a package; None where numba is not installed."""
    return None if NUMBA_MISSING else import_module(f"{package}.numba_ops")


def each_of(forms: Mapping[str, ModuleType | None]) -> pytest.MarkDecorator:
    """A test once for each implementation, under its name; skipped for those that are not here."""
    missing = pytest.mark.skip(reason="numba is not installed")
    cases = [pytest.param(form, id=name, marks=() if form else missing) for name, form in forms.items()]
    return pytest.mark.parametrize("implementation", cases)
