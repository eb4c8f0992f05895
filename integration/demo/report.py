"""What the demo found, as a table, as JSON, and as a verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from rich import box
from rich.table import Table

from integration.demo.arms import MERGE, OBSERVE
from integration.demo.client import Answer
from integration.demo.metrics_view import PolicyCounts
from integration.demo.questions import Question

BAR = 0.9
"""Share of the questions that the model must answer without help, or its answers show nothing."""

_NARROW: Final[dict[str, Any]] = {
    "box": box.SIMPLE_HEAD,
    "show_edge": False,
    "pad_edge": False,
    "padding": (0, 0, 0, 1),
}
"""Five arms with counts in the millions fit 80 columns."""


class Score(NamedTuple):
    """Right answers out of all questions."""

    right: int
    total: int

    @property
    def share(self) -> float:
        return self.right / self.total


@dataclass(frozen=True)
class ArmRun:
    """One arm's part of the demo.

    Attributes:
        arm: its name.
        answers: in the order of the questions.
        counts: what ``/metrics`` counted meanwhile.
    """

    arm: str
    answers: tuple[Answer, ...]
    counts: PolicyCounts


@dataclass(frozen=True)
class DemoReport:
    """All arms.

    Attributes:
        questions: what each of them was asked.
        runs: by arm, ``observe`` and ``merge`` among them.
        repeated: the answers of ``observe`` to the same questions once more.
        top_k: tokens that a row attends to.
        versions: installed version of kvplugin, vLLM and torch, from ``kvplugin_build_info``.
    """

    questions: tuple[Question, ...]
    runs: dict[str, ArmRun]
    repeated: tuple[Answer, ...]
    top_k: int
    versions: dict[str, str]

    @property
    def tasks(self) -> tuple[str, ...]:
        """In the order of the questions."""
        return tuple(dict.fromkeys(question.task for question in self.questions))

    @property
    def texts_that_vary(self) -> int:
        """Questions that one and the same arm answered differently: the noise in every difference between arms."""
        once = self.runs[OBSERVE].answers
        return sum(one.text != other.text for one, other in zip(once, self.repeated, strict=True))

    def score(self, arm: str, task: str | None = None) -> Score:
        """An arm's right answers, to the questions of one task or to all of them."""
        pairs = zip(self.questions, self.runs[arm].answers, strict=True)
        found = [_is_right(question, answer) for question, answer in pairs if task in (None, question.task)]
        return Score(sum(found), len(found))

    def problems(self) -> Iterator[str]:
        """What keeps the demo from being a success, one sentence each."""
        for run in self.runs.values():
            yield from _failures(run.arm, run.answers)
            if run.counts.requests != len(run.answers):
                yield f"{run.arm}: /metrics counts {run.counts.requests} of {len(run.answers)} requests"
            if run.counts.rows_seen == 0:
                yield f"{run.arm}: the policy saw no row"
        yield from _failures(f"{OBSERVE}, asked again", self.repeated)
        if self.runs[MERGE].counts.rows_rewritten == 0:
            yield f"{MERGE}: the policy rewrote no row"
        score = self.score(OBSERVE)
        if score.share < BAR:
            yield (
                f"{OBSERVE}: {_words(score)} questions right; at least {BAR:.0%} are needed; "
                "is the checkpoint in integration/tiny_dsa/trained whole?"
            )

    def to_json(self) -> str:
        """The report as a JSON object."""
        facts = {
            "arms": {arm: self._facts(arm) for arm in self.runs},
            "texts_that_vary": self.texts_that_vary,
            "top_k": self.top_k,
            "versions": self.versions,
            "problems": list(self.problems()),
        }
        return json.dumps(facts, indent=2)

    def table(self) -> Table:
        """The report as a table with a column per arm."""
        table = Table(
            title="What the policy does to answers",
            caption=self._caption(),
            caption_justify="left",
            **_NARROW,
        )
        table.add_column("arm")
        for arm in self.runs:
            table.add_column(arm.replace("_", "_\n"), justify="right")
        table.add_row("questions right", *(_words(self.score(arm)) for arm in self.runs))
        table.add_row("share right", *(f"{self.score(arm).share:.0%}" for arm in self.runs))
        for task in self.tasks:
            table.add_row(f"  {task}", *(_words(self.score(arm, task)) for arm in self.runs))
        table.add_section()
        for label, value in _ROWS.items():
            table.add_row(label, *(value(run.counts) for run in self.runs.values()))
        return table

    def _caption(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        varied = f"{self.texts_that_vary} of {len(self.repeated)}"
        return (
            f"\nA row attends to {self.top_k} tokens. Asked again, observe answered {varied} differently.\n"
            "input_order costs nothing here: this CPU engine's top-k comes best first, GPU\n"
            "kernels return any order; oldest shows what evicting blindly costs.\n"
            f"{versions}"
        )

    def _facts(self, arm: str) -> dict[str, object]:
        counts = self.runs[arm].counts
        score = self.score(arm)
        return {
            "right": score.right,
            "questions": score.total,
            "by_task": {task: self.score(arm, task)._asdict() for task in self.tasks},
            **asdict(counts),
            "sink_hit_rate": counts.sink_hit_rate,
            "local_hit_rate": counts.local_hit_rate,
        }


def _is_right(question: Question, answer: Answer) -> bool:
    return answer.text is not None and tuple(answer.text.split()) == question.right


def _failures(who: str, answers: Sequence[Answer]) -> Iterator[str]:
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        yield f"{who}: {len(errors)} of {len(answers)} requests failed; the first: {errors[0]}"


def _words(score: Score) -> str:
    return f"{score.right} of {score.total}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


_ROWS: dict[str, Callable[[PolicyCounts], str]] = {
    "rows seen": lambda counts: f"{counts.rows_seen:,}",
    "rows rewritten": lambda counts: f"{counts.rows_rewritten:,}",
    "learned kept": lambda counts: f"{counts.learned_kept:,}",
    "learned evicted": lambda counts: f"{counts.learned_evicted:,}",
    "structural injected": lambda counts: f"{counts.structural_injected:,}",
    "pre-merge sink hit rate": lambda counts: _rate(counts.sink_hit_rate),
    "pre-merge local hit rate": lambda counts: _rate(counts.local_hit_rate),
}
