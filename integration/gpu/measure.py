"""Time contestants side by side: each a captured graph of several steps, replayed by turns.

A graph leaves out what Python and launches cost the host, as an engine's own graphs do. Every step of a graph has rows
of its own, which are restored, untimed, before each replay: what is rewritten in place is new each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import torch

from integration.gpu.capture import replayable

REPEATS = 31


class Contestant(NamedTuple):
    """What is timed.

    Attributes:
        step: runs step number i of a graph.
        restore: makes the buffers of all steps as they were.
    """

    step: Callable[[int], object]
    restore: Callable[[], object] = lambda: None


def medians_us(contestants: Mapping[str, Contestant], steps: int, device: torch.device) -> dict[str, float]:
    """Median time of one step of each contestant, in microseconds."""
    replays = {name: _graph_of(contestant, steps, device) for name, contestant in contestants.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(REPEATS):
        for name, contestant in contestants.items():
            contestant.restore()
            times[name].append(_replay_ms(replays[name]) * 1e3 / steps)
    return {name: round(median(values), 3) for name, values in times.items()}


def _graph_of(contestant: Contestant, steps: int, device: torch.device) -> Callable[[], object]:
    contestant.restore()

    def run_steps() -> None:
        for i in range(steps):
            contestant.step(i)

    return replayable(run_steps, device)


def _replay_ms(replay: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
