from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.parity.source_in_use import is_in_use

# `make compat` runs these tests, with another vLLM than the installed one.
collect_ignore_glob = [] if is_in_use() else ["test_*.py"]
if is_in_use():
    from standins import install

    install()


@pytest.fixture(scope="session")
def gpu() -> Iterator[None]:
    """vLLM's own Python with stand-ins for what computes and waits on a GPU."""
    from rig import gpu_stand_ins

    with gpu_stand_ins():
        yield
