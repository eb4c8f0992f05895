"""What a load run must have come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from integration.ab.expected import documented_arm
from integration.ab.run import IN_FORCE_S, LoadLog
from integration.ab.traffic import Answered

CONTROL = "control"


@dataclass(frozen=True)
class Summary:
    """Figures of a run; the last five are all 0, or something is wrong."""

    requests: int
    by_arm: Mapping[str, int]
    aborted_streams: int
    switched_off: int
    bad_files: int
    tokens_compared: int
    failed: int
    wrong_arms: int
    wrong_tokens: int
    wrong_prompt_counts: int
    wrong_generation_counts: int

    @property
    def is_good(self) -> bool:
        """True where nothing is wrong."""
        return not any(
            (
                self.failed,
                self.wrong_arms,
                self.wrong_tokens,
                self.wrong_prompt_counts,
                self.wrong_generation_counts,
            )
        )

    def lines(self) -> list[str]:
        """One figure a line."""
        return [f"{name.replace('_', ' '):24} {value}" for name, value in asdict(self).items()]


def summarize(
    log: LoadLog,
    alone: Mapping[tuple[int, str], tuple[int, ...]],
    prompt_tokens: Mapping[str, float],
    generation_tokens: Mapping[str, float],
) -> Summary:
    """Compare a run with what it must have come to.

    Args:
        log: of the run.
        alone: tokens of each prompt by each arm, asked alone.
        prompt_tokens, generation_tokens: per-arm counters of ``/metrics``, grown over the run.
    """
    good = [answer for answer in log.answers if answer.status == 200]
    arms = [answer.arm for answer in good]
    compared = [(answer, policy) for answer in good if (policy := policy_met(answer, log)) is not None]
    wanted_prompts: Counter[str] = Counter()
    wanted_tokens: Counter[str] = Counter()
    for answer in good:
        wanted_prompts[str(answer.arm)] += answer.prompt_tokens
        wanted_tokens[str(answer.arm)] += len(answer.tokens)
    return Summary(
        requests=len(log.answers),
        by_arm=dict(Counter(map(str, arms))),
        aborted_streams=log.aborted,
        switched_off=len(log.off),
        bad_files=log.bad_files,
        tokens_compared=len(compared),
        failed=len(log.answers) - len(good),
        wrong_arms=sum(answer.arm != expected_arm(answer) for answer in good),
        wrong_tokens=sum(answer.tokens != alone[answer.asked.prompt, policy] for answer, policy in compared),
        wrong_prompt_counts=_differing(wanted_prompts, prompt_tokens),
        wrong_generation_counts=_differing(wanted_tokens, generation_tokens),
    )


def expected_arm(answer: Answered) -> str:
    """The arm that the documented hash gives, of the session or of the request's own id."""
    return documented_arm(answer.asked.shares, answer.asked.session or answer.request)


def policy_met(answer: Answered, log: LoadLog) -> str | None:
    """The arm whose policy a request met all its life; None for one that lived across a flip of the switch."""
    for pulled, released, over in log.off:
        if answer.done < pulled or answer.sent > over + IN_FORCE_S:
            continue
        inside = answer.sent > pulled + IN_FORCE_S and answer.done < released
        return CONTROL if inside else None
    return answer.arm


def _differing(wanted: Mapping[str, float], found: Mapping[str, float]) -> int:
    return sum(wanted.get(arm, 0) != found.get(arm, 0) for arm in ("control", "candidate"))
