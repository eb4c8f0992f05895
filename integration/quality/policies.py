"""What is compared: policies by name, and null models that spend the same budget without the indexer's wisdom."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvplugin.config import PolicyConfig


class Null(StrEnum):
    """A selection that a useful one has to beat at the same budget."""

    RANDOM = "random"
    RECENT = "recent"
    LEARNED_TAIL = "learned tail"


@dataclass(frozen=True)
class Contestant:
    """One way to select.

    Attributes:
        name: as tables show it.
        config: the policy; ``None`` = what the indexer selected.
        null: takes the place of the indexer's selection.
        note: one line that says what it is.
    """

    name: str
    note: str
    config: PolicyConfig | None = None
    null: Null | None = None


LEARNED = "learned"


def contestants(budget: int) -> tuple[Contestant, ...]:
    """All of them, for a top-k of ``budget`` slots."""
    quarter, half = budget // 4, budget // 2
    segments = budget // 4
    return (
        Contestant(LEARNED, "the indexer's own top-k, no policy"),
        _merge("default", "the defaults: 4 sink tokens, local window to a quarter of the budget"),
        _merge("sinks", "4 sink tokens only", local_tokens=0),
        _merge("local", "local window only, 4 tokens", sink_tokens=0, local_tokens=4),
        _merge("sink 1 + local 4", "1 sink token, 4 local tokens", sink_tokens=1, local_tokens=4),
        _merge(
            "witnesses",
            f"{quarter // 2} uniform witness blocks of 2 tokens",
            sink_tokens=0,
            local_tokens=0,
            witness_blocks=quarter // 2,
            block_size=2,
        ),
        _merge(
            "coverage",
            f"a token in each of {segments // 2} segments, 1 sink token, 2 local",
            witness="coverage",
            coverage_segments=segments // 2,
            sink_tokens=1,
            local_tokens=2,
        ),
        _merge(
            "half structural",
            f"half of the budget: 4 sinks, {half - 8} local, a witness block of 4",
            sink_tokens=4,
            local_tokens=half - 8,
            witness_blocks=1,
            block_size=4,
            max_structural_fraction=0.5,
        ),
        _merge("default, oldest", "the defaults, lowest ids leave", eviction="oldest"),
        _merge("default, slot order", "the defaults, later slots of an arbitrary order leave", eviction="input_order"),
        _merge("default, none", "the defaults, nothing learned leaves", eviction="none"),
        Contestant(
            "structure only",
            "topology_only: 4 sinks, the rest local window",
            PolicyConfig.model_validate({"mode": "topology_only"}),
        ),
        Contestant("null: random", "random visible tokens", null=Null.RANDOM),
        Contestant("null: recent", "the newest tokens", null=Null.RECENT),
        Contestant("null: learned tail", "the indexer's ranks K + 1 to 2 K", null=Null.LEARNED_TAIL),
    )


def _merge(name: str, note: str, **settings: Any) -> Contestant:
    return Contestant(name, note, PolicyConfig.model_validate({"mode": "topology_sparse_merge"} | settings))
