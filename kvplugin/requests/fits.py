"""What an engine can follow of a rollout: the checks that need its top-k width."""

from __future__ import annotations

from collections.abc import Iterator

from kvplugin.config import Mode, Placement, PolicyConfig, Witness, before_topk_conflicts
from kvplugin.errors import ArgumentError, ConfigProblem
from kvplugin.requests.rollout import ROOT, Rollout
from kvplugin.topology import lower
from kvplugin.topology.table import witnesses_to_list


def engine_conflicts(
    rollout: Rollout, *, placement: Placement, width: int, longest_list: int | None = None
) -> Iterator[ConfigProblem]:
    """Yield what stands against a rollout in one engine.

    Args:
        rollout: valid in itself.
        placement: of the engine.
        width: K of its top-k buffer.
        longest_list: longest list of witnesses its policy table was made for; None = no table yet.
    """
    if placement is Placement.BEFORE_TOPK:
        yield from _limit_conflicts(rollout)
    for name, policy in rollout.arms.items():
        key = f"{ROOT}.arms.{name}"
        if policy.witness is Witness.DRIFT:
            found = "'drift' needs block scores, which the engine does not have"
            yield ConfigProblem(f"{key}.witness", found, "use uniform or coverage")
            continue
        if placement is Placement.BEFORE_TOPK and policy.mode.selects:
            for where, found, cure in before_topk_conflicts(policy):
                yield ConfigProblem(f"{key}.{where}", found, cure)
        yield from _size_conflicts(key, policy, width, longest_list)


def _limit_conflicts(rollout: Rollout) -> Iterator[ConfigProblem]:
    """A lift is sampled call by call: a call is beyond the limits of all arms, or of none."""
    acting = {name: policy for name, policy in rollout.arms.items() if policy.mode is not Mode.DISABLED}
    for name, policy in acting.items():
        first = next(iter(acting))
        if policy.limits != acting[first].limits:
            found = f"others than those of {first}, with placement = before_topk"
            yield ConfigProblem(f"{ROOT}.arms.{name}.limits", found, "give all arms the same limits")


def most_listed(rollout: Rollout, width: int) -> int:
    """Longest list of witnesses that an arm needs, of a rollout without conflicts."""
    return max(witnesses_to_list(lower(policy, width)) for policy in rollout.arms.values())


def _size_conflicts(key: str, policy: PolicyConfig, width: int, longest_list: int | None) -> Iterator[ConfigProblem]:
    try:
        params = lower(policy, width)
    except ArgumentError as error:
        yield ConfigProblem(key, f"{error.where}: {error.found}", error.allowed)
        return
    if longest_list is not None and witnesses_to_list(params) > longest_list:
        found = f"{policy.coverage_segments} in an engine that was started for {longest_list}"
        yield ConfigProblem(f"{key}.coverage_segments", found, "use fewer, or restart with this rollout")
