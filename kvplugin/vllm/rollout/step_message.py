"""What the scheduler tells every worker with each step: the rollout in force, the same for all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

ATTRIBUTE = "kvplugin_step"
"""Attribute of vLLM's ``SchedulerOutput``: it travels to every rank, and nothing else can reach it out of step."""


class StepMessage(NamedTuple):
    """The rollout that a step runs under.

    Attributes:
        generation: of the engine's rollout; workers decode ``rollout`` when it has changed.
        rollout: an encoded :class:`kvplugin.requests.slots.StepRollout`.
    """

    generation: int
    rollout: bytes


def attach(scheduler_output: Any, message: StepMessage) -> None:
    """Make a step carry a message."""
    setattr(scheduler_output, ATTRIBUTE, message)


def message_of(scheduler_output: Any) -> StepMessage | None:
    """The message that a step carries; None where the engine has no rollout."""
    message: StepMessage | None = getattr(scheduler_output, ATTRIBUTE, None)
    return message
