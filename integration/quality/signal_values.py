"""The online signals of decode steps, value by value, from a trained model under a damage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from integration.quality.damage import Damage
from integration.quality.policies import contestants
from integration.quality.selection import Selector
from integration.tiny_dsa.training.model import TinyModel, groups
from integration.tiny_dsa.training.tasks import training_batch
from kvplugin.config import MOST_ARMS, PolicyConfig
from kvplugin.topology import PolicyTable, lower
from kvplugin.topology.signals import UNIT, Signal, SignalMemory, columns_of, new_signal_counters, observe_signals

LENGTH, BUDGET, STEPS = 512, 32, 128
"""Of each text; its last ``STEPS`` rows are taken for decode steps, one after the other."""
CONTESTANT = "default"

Run = dict[Signal, list[float]]
"""Values of one request, in the order in which a server would count them."""


def runs_under(model: TinyModel, damage: Damage, runs: int, first_seed: int) -> Iterator[Run]:
    """Values of ``runs`` requests with texts of their own, ``MOST_ARMS`` at a time."""
    damaged = damage.weights(model)
    for batch in range(-(-runs // MOST_ARMS)):
        count = min(MOST_ARMS, runs - batch * MOST_ARMS)
        tokens = training_batch(np.random.default_rng([first_seed, batch]), MOST_ARMS, LENGTH, absent=0.1).tokens
        yield from _runs(damaged, damage, tokens[:count])


@torch.no_grad()
def _runs(model: TinyModel, damage: Damage, tokens: Tensor) -> list[Run]:
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    (contestant,) = (each for each in contestants(BUDGET) if each.name == CONTESTANT)
    selector = Selector(contestant, damage, BUDGET)
    selector.watch = lambda layer, scores, selection: seen.update({layer: (scores, selection.clone())})
    model(tokens, select=selector, change=damage.state)
    assert isinstance(contestant.config, PolicyConfig)
    requests = len(tokens)
    # An arm for each request, so that its values can be told apart.
    table = PolicyTable([lower(contestant.config, BUDGET)] * requests)
    memory = SignalMemory(len(groups()), MOST_ARMS, BUDGET, "cpu")
    counters, own = new_signal_counters(arms=requests), torch.arange(requests, dtype=torch.int32)
    found: list[Run] = [{signal: [] for signal in Signal} for _ in range(requests)]
    for row in range(LENGTH - STEPS, LENGTH):
        for leader, (scores, learned) in enumerate(seen[layer] for layer in sorted(seen)):
            observe_signals(
                learned[:, row].contiguous(),
                torch.full((requests,), row + 1, dtype=torch.int32),
                config=table,
                counters=counters,
                every=1,
                scores=scores[:, row].contiguous(),
                row_arm=own,
                row_request=own,
                memory=memory,
                leader=leader,
            )
            for run, cells in zip(found, counters[:, 1].tolist(), strict=True):
                for signal, values in run.items():
                    *buckets, total = columns_of(signal)
                    if sum(cells[bucket] for bucket in buckets):
                        values.append(cells[total] / UNIT)
            counters.zero_()
    return found
