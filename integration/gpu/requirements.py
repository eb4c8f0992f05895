"""What the check needs of a Python, and what to say where something is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec

OLDEST_PYTHON = (3, 11)

NEEDED: Mapping[str, str] = {
    "torch": "torch>=2.8",
    "triton": "triton>=3.4",
    "numpy": "numpy>=1.26",
    "pydantic": "pydantic>=2.10,<3",
    "hypothesis": "hypothesis>=6.120,<7",
    "pytest": "pytest>=8.3,<10",
    "pytest_timeout": "pytest-timeout>=2.3,<3",
}
"""Module and distribution; numba and pytest-xdist are used where they are, vLLM never."""


def complaint(find: Callable[[str], object | None] = find_spec) -> str | None:
    """Why the check cannot start with this Python, and the cure; None where it can."""
    if sys.version_info < OLDEST_PYTHON:
        return f"integration.gpu: Python {sys.version.split()[0]}; needs 3.11 or newer; set PYTHON to one"
    missing = [distribution for module, distribution in NEEDED.items() if find(module) is None]
    if not missing:
        return None
    names, quoted = ", ".join(missing), " ".join(f"'{distribution}'" for distribution in missing)
    pip = f"{sys.executable} -m pip install"
    return (
        f"integration.gpu: {sys.executable} has no {names}; the check installs nothing itself; install with\n"
        f"  {pip} {quoted}\n"
        "or, where there is no network, from a folder with the wheels of these and of what they need:\n"
        f"  {pip} --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site"
    )
