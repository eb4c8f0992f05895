"""What an engine's answers have in common with the torch model's."""

from __future__ import annotations

from dataclasses import dataclass

from integration.quality.policies import LEARNED

LOG_PROB = 0.02
"""Largest log-probability difference: a near-tie at the cut, decided by rounding, changes a token of no weight."""


@dataclass(frozen=True)
class Agreement:
    """What one engine showed.

    Attributes:
        form, contestant: which checkpoint and policy.
        tokens: greedy tokens compared.
        same: of them, those that the torch model finds most likely as well.
        right: of them, the right answers.
        torch_right: right answers among the torch model's own greedy tokens, given the same text.
        log_prob: largest difference of a token's log-probability.
        rewritten: rows that the engine's policy rewrote; without one, equal answers would prove nothing.
    """

    form: str
    contestant: str
    tokens: int
    same: int
    right: int
    torch_right: int
    log_prob: float
    rewritten: int

    @property
    def agrees(self) -> bool:
        """Every token the same, log-probabilities within ``LOG_PROB``, and the policy at work where there is one."""
        worked = self.rewritten > 0 or self.contestant == LEARNED
        return worked and self.same == self.tokens and self.log_prob <= LOG_PROB
