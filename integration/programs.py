"""Programs that tests need beside Python's packages."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str) -> str:
    """Path of a program. Without it the test is skipped on a developer's machine, and fails in CI."""
    path = shutil.which(name)
    if path is None:
        what = f"{name} is not installed; Debian has a package of that name"
        if os.environ.get("CI"):
            pytest.fail(what)
        pytest.skip(what)
    return path
