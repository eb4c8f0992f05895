"""Which rectangles of the study are run: the whole plan, and a quick one for CI."""

from __future__ import annotations

from integration.quality.damage import CLEAN, damages
from integration.quality.policies import LEARNED, contestants
from integration.quality.suite import Block

FAR_TASKS = ("recall", "needle", "copy")
_EVERY = tuple(each.name for each in contestants(64))
_MAIN = (
    *(LEARNED, "default", "sinks", "local", "witnesses", "coverage", "half structural"),
    *("default, oldest", "default, slot order", "structure only"),
)
_FEW = (LEARNED, "default", "local", "coverage")
_MAIN_DAMAGES = (
    *("weight noise 0.6 σ", "weight noise 1 σ", "keys 1 bit", "keys 2 bit"),
    *("30 % of blocks lost", "first block lost", "newest 3 lost"),
)
_OTHER_DAMAGES = tuple(each.name for each in damages() if each.name not in (CLEAN, *_MAIN_DAMAGES))


def whole_plan() -> tuple[Block, ...]:
    """Everything: all damages at 512 tokens, the telling ones at 1024 for the far tasks, then budgets and lengths."""
    return (
        Block(512, 32, (CLEAN,), _EVERY),
        Block(512, 32, _MAIN_DAMAGES, _MAIN),
        Block(512, 32, _OTHER_DAMAGES, _FEW),
        Block(
            1024,
            32,
            (CLEAN, "weight noise 0.6 σ", "weight noise 1 σ", "keys 2 bit", "30 % of blocks lost"),
            (LEARNED, "sink 1 + local 4", "half structural", "coverage", "default, oldest", "default, slot order"),
            tasks=FAR_TASKS,
        ),
        *(Block(256, budget, (CLEAN, "30 % of blocks lost"), (LEARNED, "default")) for budget in (16, 64)),
        Block(1024, 64, (CLEAN,), (LEARNED, "default", "default, oldest", "structure only"), tasks=FAR_TASKS),
        Block(2048, 32, (CLEAN,), (LEARNED, "default"), tasks=FAR_TASKS),
        Block(4096, 64, (CLEAN,), (LEARNED, "default"), tasks=("needle",)),
    )


def quick_plan() -> tuple[Block, ...]:
    """What CI runs: every rule once at 256 tokens, and the damages that tell rules apart."""
    return (
        Block(256, 32, (CLEAN,), _EVERY),
        Block(256, 32, ("30 % of blocks lost", "first block lost", "newest 3 lost", "10 % NaN rows"), _FEW),
    )
