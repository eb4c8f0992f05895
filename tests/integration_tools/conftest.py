from __future__ import annotations

from pathlib import Path

import pytest
from stand_in import StandIn

from integration import processes


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    # The stand-in's children never end by themselves, so each test would wait that long for it.
    monkeypatch.setattr(processes, "ORPHANS_S", 0.2)
    return StandIn(tmp_path)
